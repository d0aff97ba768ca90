// The router's choice of experts; for a few tokens also the norm in front of it and the router. No
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

// The same choice from given logits, of any number of tokens. Without `renormalize` the sigmoids
// are not divided.
struct RouterTopk {
  const void* logits;  // [tokens, experts] BF16, `stride` elements apart
  int64_t stride, tokens;
  float* weights;  // [tokens, top_k]
  int32_t* ids;    // [tokens, top_k]
  int experts, top_k;
  bool renormalize;
};

bool router_topk_fits(const RouterTopk& in);

cudaError_t router_topk(const RouterTopk& in, const Launch& launch);

}  // namespace flint::cuda
