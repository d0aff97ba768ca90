// NVFP4 between its two layouts on the GPU; nvfp4_layout.h describes them. No torch here.
#pragma once

#include <cstdint>

#include "cuda/launch.h"

namespace flint::cuda {

// blocks [superblocks, 36], weight [superblocks, 32], scale [superblocks, 4]: dense bytes, any
// alignment. `first_bad` receives the smaller of what it holds and the index (among all scales) of
// the first scale that the other layout does not have; such a scale is written as its low seven
// bits, 0xff as 0. To be filled with INT64_MAX beforehand.
struct Nvfp4Repack {
  const uint8_t* from_codes;   // blocks, or weight
  const uint8_t* from_scales;  // null, or scale
  uint8_t* to_codes;
  uint8_t* to_scales;
  int64_t superblocks;
  unsigned long long* first_bad;
};

// from_codes are blocks, to_codes and to_scales ModelOpt's tensors.
cudaError_t gguf_to_modelopt(const Nvfp4Repack& in, const Launch& launch);

// from_codes and from_scales are ModelOpt's tensors, to_codes blocks.
cudaError_t modelopt_to_gguf(const Nvfp4Repack& in, const Launch& launch);

}  // namespace flint::cuda
