// The tensor core's 8 x 8 matrices of BF16 between shared memory and registers: a lane 4 g + t has
// of a matrix the elements 2 t and 2 t + 1 of row g.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace flint::cuda {

__device__ __forceinline__ void store_shared(uint32_t to, const uint4& value) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(value.x), "r"(value.y),
               "r"(value.z), "r"(value.w)
               : "memory");
}

// Four of them; lanes 8 i ... give the addresses of matrix i's rows.
__device__ __forceinline__ uint4 load_matrices(uint32_t from) {
  uint4 value;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(from)
               : "memory");
  return value;
}

// The same, each transposed.
__device__ __forceinline__ uint4 load_transposed(uint32_t from) {
  uint4 value;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(from)
               : "memory");
  return value;
}

__device__ __forceinline__ uint32_t transposed(uint32_t matrix) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(matrix));
  return result;
}

}  // namespace flint::cuda
