// The tensor core's product of a tile of weights with up to eight tokens.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace flint::cuda {

// sums[16 rows][8 columns] += a[16][16] * b[16][8], BF16 products summed in fp32. With g = lane / 4
// and t = lane % 4, a lane holds: of `a` rows g (a0, a2) and g + 8 (a1, a3), of `b` column g, of
// the sums columns 2t and 2t + 1 of row g (0, 1) and of row g + 8 (2, 3). Which four of the 16
// summands a lane's registers stand for does not matter as long as `a` and `b` agree.
__device__ __forceinline__ void multiply_add(float (&sums)[4], uint32_t a0, uint32_t a1,
                                             uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t multiply_bf16_pairs(uint32_t left, uint32_t right) {
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(left), "r"(right));
  return product;
}

}  // namespace flint::cuda
