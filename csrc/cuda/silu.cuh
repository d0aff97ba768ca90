// The gate of dense layers and of the shared expert.
#pragma once

#include <cuda_runtime.h>

namespace flint::cuda {

// g / (1 + exp(-g)) by the accurate exponential and one reciprocal, within 3 units in the last
// place of fp32. The factor 1/4 on both sides is exact and keeps the denominator's reciprocal a
// normal number: nothing is flushed to zero. exp overflows below -88.7: then -0, and NaN for -inf,
// as the exact quotient gives.
__device__ __forceinline__ float silu(float gate) {
  const float quarter = fmaf(expf(-gate), 0.25f, 0.25f);
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(quarter));
  return gate * 0.25f * reciprocal;
}

}  // namespace flint::cuda
