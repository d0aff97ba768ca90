// SiLU and product of an expert's gate and up, rounded as docs/numerics.md says for the two kinds
// of experts.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device.cuh"

namespace flint::cuda {

// Of a routed expert: gate and up stay in fp32, the sigmoid is the fast one.
__device__ __forceinline__ float routed_act(float gate, float up) {
  return gate * __fdividef(1.0f, 1.0f + __expf(-gate)) * up;
}

// Of the shared expert: gate and up are rounded, exp and division exact.
__device__ __forceinline__ float shared_act(float gate, float up) {
  const float g = rounded(uint16_t{}, gate), u = rounded(uint16_t{}, up);
  return g / (1.0f + expf(-g)) * u;
}

}  // namespace flint::cuda
