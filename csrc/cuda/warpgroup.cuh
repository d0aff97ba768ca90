// What warpgroups of a CTA do beside products: hand each other registers, and take turns.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device.cuh"

namespace flint::cuda {

inline constexpr int kWarpgroup = 4 * kWarp;

// By all warps of a warpgroup: from here on it has so many registers a thread.
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace flint::cuda
