// See simt.h.
#pragma once

#include <cuda_runtime.h>

namespace flint::cuda {

inline void store_shared(uint32_t to, const uint4& value) {
  std::memcpy(simt::shared_pointer(to, 16), &value, 16);
}

inline uint4 emulated_matrices(uint32_t from, bool transpose) {
  const auto rows = simt::gather(from);
  const int g = simt::current->lane() / 4, t = simt::current->lane() % 4;
  uint16_t elements[8];
  for (int i = 0; i < 8; ++i) {
    const int row = transpose ? 2 * t + i % 2 : g, column = transpose ? g : 2 * t + i % 2;
    const char* at = simt::shared_pointer(rows[static_cast<size_t>(i / 2 * 8 + row)], 16);
    std::memcpy(&elements[i], at + 2 * column, 2);
  }
  simt::sync_warp();
  uint4 value;
  std::memcpy(&value, elements, 16);
  return value;
}

inline uint4 load_matrices(uint32_t from) { return emulated_matrices(from, false); }
inline uint4 load_transposed(uint32_t from) { return emulated_matrices(from, true); }

inline uint32_t transposed(uint32_t matrix) {
  const auto all = simt::gather(matrix);
  const int g = simt::current->lane() / 4, t = simt::current->lane() % 4;
  uint32_t result = 0;
  for (int i = 0; i < 2; ++i) {
    const uint32_t pair = all[static_cast<size_t>((2 * t + i) * 4 + g / 2)];
    result |= (pair >> 16 * (g % 2) & 0xffff) << 16 * i;
  }
  return result;
}

}  // namespace flint::cuda
