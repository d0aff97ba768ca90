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

// The same by the hardware's exponential, in which the argument is rounded: within 2^-17 of the
// value where that is not flushed, far less than the BF16 it is rounded to can show.
__device__ __forceinline__ float fast_silu(float gate) {
  float quarter, reciprocal;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(quarter) : "f"(fmaf(gate, -1.44269504f, -2.0f)));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(quarter + 0.25f));
  return gate * 0.25f * reciprocal;
}

}  // namespace flint::cuda
