// See simt.h.
#pragma once

#include <cuda_runtime.h>

#include "bf16.h"

namespace flint::cuda {

struct EmulatedOperands {
  uint32_t a[4], b[2];
};

inline void multiply_add(float (&sums)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                         uint32_t b0, uint32_t b1) {
  const auto all = simt::gather(EmulatedOperands{{a0, a1, a2, a3}, {b0, b1}});
  const auto half = [](uint32_t pair, int i) {
    return bf16_to_float(static_cast<uint16_t>(pair >> 16 * i));
  };
  const int g = simt::current->lane() / 4, t = simt::current->lane() % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = g + i / 2 * 8, column = 2 * t + i % 2;
    float sum = sums[i];
    for (int k = 0; k < 16; ++k) {
      const auto& left = all[static_cast<size_t>(row % 8 * 4 + k % 8 / 2)];
      const auto& right = all[static_cast<size_t>(column * 4 + k % 8 / 2)];
      sum += half(left.a[row / 8 + k / 8 * 2], k % 2) * half(right.b[k / 8], k % 2);
    }
    sums[i] = sum;
  }
}

inline uint32_t multiply_bf16_pairs(uint32_t left, uint32_t right) {
  const auto half = [](uint32_t pair, int i) {
    return bf16_to_float(static_cast<uint16_t>(pair >> 16 * i));
  };
  const auto product = [&](int i) {
    return static_cast<uint32_t>(float_to_bf16(half(left, i) * half(right, i)));
  };
  return product(0) | product(1) << 16;
}

}  // namespace flint::cuda
