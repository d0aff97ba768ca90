// CTAs of a grid that count each other, so that the last one goes on with what all have written.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace flint::cuda {

// How many arrived before this thread, whose CTA's writes are seen by who arrives later. With
// number `last` the counter is back to zero.
__device__ __forceinline__ uint32_t arrive_at(uint32_t* counter, uint32_t last) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(last)
               : "memory");
  return before;
}

// A counter of several CTAs. By itself an addition orders nothing.
__device__ __forceinline__ int add_to(int32_t* counter, int value) {
  return atomicAdd(counter, value);
}

// Adds, and what this thread wrote before, and those that it met, is seen by who sees the sum.
__device__ __forceinline__ void add_released(int32_t* counter, int value) {
  asm volatile("fence.acq_rel.gpu; red.release.gpu.global.add.s32 [%0], %1;" ::"l"(counter),
               "r"(value)
               : "memory");
}

__device__ __forceinline__ int load_acquired(const int32_t* counter) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}

}  // namespace flint::cuda
