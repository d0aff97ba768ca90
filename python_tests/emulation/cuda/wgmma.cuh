// Products of a warpgroup. They are done when they are handed in, or where copies are late, only
// when they are waited for. See simt.h.
#pragma once

#include <cuda_runtime.h>

#include <map>

#include "bf16.h"

namespace flint::cuda {

using EmulatedProduct = std::function<void()>;
struct EmulatedProducts {
  std::vector<std::vector<EmulatedProduct>> groups;  // the last one is open
};
inline thread_local std::map<const simt::Thread*, EmulatedProducts> emulated_products;

inline void hand_in(EmulatedProduct product) {
  if (!simt::options.late_copies) return product();
  auto& groups = emulated_products[simt::current].groups;
  if (groups.empty()) simt::fail("a product without a beginning");
  groups.back().push_back(std::move(product));
}

inline void begin_products() {
  auto& groups = emulated_products[simt::current].groups;
  if (groups.empty()) groups.emplace_back();
}
inline void close_products() { emulated_products[simt::current].groups.emplace_back(); }

template <int kOpen>
void await_products() {
  auto& groups = emulated_products[simt::current].groups;
  while (static_cast<int>(groups.size()) - 1 > kOpen) {
    for (const auto& product : groups.front()) product();
    groups.erase(groups.begin());
  }
}

template <int kCount>
void settle(float (&)[kCount]) {}

// An operand is its address in units of 16 bytes, and in the upper half how far apart its halves
// are.
inline constexpr uint64_t kNextColumns = 32 >> 4, kNextRows = 2048 >> 4;

inline uint64_t right_operand(uint32_t address) {
  if (address % 1024 != 0) simt::fail("an operand that is not aligned");
  return address >> 4;
}
inline uint64_t upright_operand(uint32_t address, uint32_t apart) {
  return right_operand(address) | uint64_t{apart >> 4} << 32;
}

inline float operand_element(uint64_t operand, int row, int column) {
  uint32_t address = static_cast<uint32_t>(operand) << 4;
  address += static_cast<uint32_t>(column / 64) * (static_cast<uint32_t>(operand >> 32) << 4);
  address += static_cast<uint32_t>(row * 128 + column % 64 * 2);
  address ^= (address >> 7 & 7) << 4;
  uint16_t bits;
  std::memcpy(&bits, simt::shared_pointer(address, 2), 2);
  return bf16_to_float(bits);
}

// sums[64][kColumns] (+)= left * right, each of 16 summands, by `left(row of 16, k)` of the warp.
template <int kColumns, typename Left, typename Right>
void emulated_multiply(float* sums, const Left& left, const Right& right, bool add) {
  const int g = simt::current->lane() / 4, t = simt::current->lane() % 4;
  for (int i = 0; i < kColumns / 2; ++i) {
    const int row = g + i / 2 % 2 * 8, column = i / 4 * 8 + 2 * t + i % 2;
    float sum = add ? sums[i] : 0.0f;
    for (int k = 0; k < 16; ++k) sum += left(row, k) * right(k, column);
    sums[i] = sum;
  }
}

template <int kCount>
void multiply_shared(float (&sums)[kCount], uint64_t a, uint64_t b, bool add) {
  float* to = sums;
  const int first = static_cast<int>(simt::current->index.x) / simt::kLanes % 4 * 16;
  hand_in([=] {
    float rows[2][16], columns[16];
    const int g = simt::current->lane() / 4, t = simt::current->lane() % 4;
    for (int k = 0; k < 16; ++k) {
      for (int i = 0; i < 2; ++i) rows[i][k] = operand_element(a, first + g + 8 * i, k);
    }
    for (int column = 0; column < kCount / 2; ++column) {
      const int key = column / 2 * 8 + 2 * t + column % 2;
      for (int k = 0; k < 16; ++k) columns[k] = operand_element(b, key, k);
      for (int i = 0; i < 2; ++i) {
        float& sum = to[column / 2 * 4 + 2 * i + column % 2];
        float total = add ? sum : 0.0f;
        for (int k = 0; k < 16; ++k) total += rows[i][k] * columns[k];
        sum = total;
      }
    }
  });
}

inline void multiply_upright(float (&sums)[64], const uint32_t (&a)[4], uint64_t b, bool add) {
  float* to = sums;
  const uint32_t* own = a;  // read when the product is done, as on a GPU
  hand_in([=] {
    struct Left {
      uint32_t words[4];
    };
    const auto all = simt::gather(Left{{own[0], own[1], own[2], own[3]}});
    emulated_multiply<128>(
        to,
        [&all](int row, int k) {
          const auto& lane = all[static_cast<size_t>(row % 8 * 4 + k % 8 / 2)];
          const uint32_t pair = lane.words[row / 8 + k / 8 * 2];
          return bf16_to_float(static_cast<uint16_t>(pair >> 16 * (k % 2)));
        },
        [b](int k, int column) { return operand_element(b, k, column); }, add);
  });
}

}  // namespace flint::cuda
