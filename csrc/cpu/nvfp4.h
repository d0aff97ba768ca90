// NVFP4 on the CPU: both repacks and the decoder. No torch here; csrc/torch binds these.
// Buffers are dense and do not overlap; `threads` is the most that a call may use.
#pragma once

#include <cstdint>

namespace flint::cpu {

// blocks [superblocks, 36], weight [superblocks, 32], scale [superblocks, 4]. Each repack returns
// -1, or the flat index of the first scale byte that has no counterpart in the other layout (the
// outputs are then partly written).
int64_t nvfp4_gguf_to_modelopt(const uint8_t* blocks, uint8_t* weight, uint8_t* scale,
                               int64_t superblocks, int threads);

int64_t nvfp4_modelopt_to_gguf(const uint8_t* weight, const uint8_t* scale, uint8_t* blocks,
                               int64_t superblocks, int threads);

// out [blocks, 16] = e2m1(weight [blocks, 8]) * e4m3(scale [blocks]), exact; then, unless `globals`
// is null, times globals[block / (blocks / global_count)], rounded once. `global_count` divides
// `blocks`.
void nvfp4_dequantize(const uint8_t* weight, const uint8_t* scale, const float* globals,
                      int64_t global_count, float* out, int64_t blocks, int threads);

}  // namespace flint::cpu
