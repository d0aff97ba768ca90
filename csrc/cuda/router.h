// The norm in front of the experts, the router and its choice of experts, for a few tokens. No
// torch here.
#pragma once

#include <cstdint>

#include "cuda/launch.h"

namespace flint::cuda {

// s = x + residual; residual_out = round(s); normed = round(s * rsqrt(mean(s^2) + eps) * norm);
// logits = round(normed * router); the top_k logits of a token, NaN first, ties to the lower
// expert; their sigmoids, divided by their sum + 1e-20, rounded.
struct NormRouter {
  const void* x;         // [tokens, width] BF16, x_stride elements apart
  const void* residual;  // [tokens, width]
  const void* norm;      // [width]
  const void* router;    // [experts, width] BF16
  void* normed;          // [tokens, width]
  void* residual_out;    // [tokens, width]
  float* weights;        // [tokens, top_k]
  int32_t* ids;          // [tokens, top_k]
  int64_t x_stride, residual_stride;
  int tokens, width, experts, top_k;
  float eps;
};

bool norm_router_fits(const NormRouter& in);

cudaError_t norm_router(const NormRouter& in, const Launch& launch);

}  // namespace flint::cuda
