// Loads from shared memory by its own addresses, of 32 bits, as shared_address gives them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace flint::cuda {

__device__ __forceinline__ uint4 load_shared(uint32_t from) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(from)
               : "memory");
  return value;
}

__device__ __forceinline__ uint2 load_shared_words(uint32_t from) {
  uint2 value;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
               : "=r"(value.x), "=r"(value.y)
               : "r"(from)
               : "memory");
  return value;
}

__device__ __forceinline__ uint32_t load_shared_word(uint32_t from) {
  uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
  return value;
}

}  // namespace flint::cuda
