// Sampling of tokens from a row's best logits. No torch here.
#pragma once

#include <cstdint>

#include "cuda/launch.h"

namespace flint::cuda {

// The most candidates that a row may have: a warp has one in each lane.
inline constexpr int kMostCandidates = 32;

// The `sample` of flint_kernels/ops/sampling.py for rows that are greedy or keep 1 to `most`
// candidates; another row gives -1.
struct Sample {
  const float* logits;  // [rows, count], `stride` elements apart
  int64_t stride, count;
  const float* temperature;  // [rows], and so all below
  const int32_t* top_k;
  const float* top_p;
  const int64_t* seed;
  const int64_t* offset;
  uint64_t* candidates;  // [sample_words()]
  int64_t* tokens;
  int rows, most;
};

// Of `candidates`; 0 where the kernels do not take the call.
int64_t sample_words(int64_t rows, int64_t count, int64_t most);

cudaError_t sample(const Sample& in, const Launch& launch);

// The tensors of a decode batch for the step after the one that drew `tokens`; what happens to them
// is in flint_kernels/ops/sampling.py.
struct DecodeAdvance {
  const int64_t* tokens;
  const int32_t* block_table;  // [rows, width], and so the window layers'
  const int32_t* window_block_table;
  int64_t* input_ids;
  int32_t* positions;
  int32_t* slots;
  int32_t* window_slots;
  int32_t* seq_lens;
  int64_t* offsets;
  int64_t* history;  // [rows, length]
  int64_t width, length;
  int rows, page_size;
};

cudaError_t decode_advance(const DecodeAdvance& in, const Launch& launch);

}  // namespace flint::cuda
