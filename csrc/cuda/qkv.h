// The projection to q, k and v of a few tokens, with q/k norm, RoPE and the cache write behind it.
// No torch here.
#pragma once

#include <cstdint>

#include "cuda/kv_write.h"
#include "cuda/linear.h"

namespace flint::cuda {

// What `linear` and qk_norm_rope_kv_write compute one after the other. `rest.qkv` and `rest.k` are
// not used; q's, k's and v's rows may have a global scale each (`shards` 1 or 3).
//
// With PDL, positions and slots are read ahead of the wait: they must be complete when the kernel
// in front of this starts, that is, written by one that the kernel in front has itself waited for.
struct QkvLinear {
  WeightMatrix weight;   // [(heads + 2 * kv_heads) * 128, width]
  const float* scale_2;  // [shards]; null for BF16
  int shards;
  const void* x;  // [tokens, width] BF16, x_stride elements apart
  int64_t x_stride;
  int width;
  QkNormRope rest;
};

bool qkv_linear_fits(const QkvLinear& in);

cudaError_t qkv_linear(const QkvLinear& in, const Launch& launch);

// Its way for one token with NVFP4 weights of Flint's width.
bool qkv_one_fits(const QkvLinear& in);
cudaError_t qkv_one(const QkvLinear& in, const Launch& launch);

}  // namespace flint::cuda
