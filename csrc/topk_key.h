// Logits as integers that rank them, for the host and for the device: the larger unsigned key is
// the better logit. NaN is above +inf, then by value, -0 equal to +0; ties go to the lower index.
// So a top-k is a maximum of integers, the same in whatever order they are compared, and no key is
// 0: that can stand for "nothing" or "taken".
#pragma once

#include <bit>
#include <cstdint>

#include "nvfp4_layout.h"  // FLINT_HD

namespace flint {

// The logit alone. All NaNs are equal.
FLINT_HD constexpr uint32_t topk_rank(float logit) {
  if (logit != logit) return 0xffffffffu;
  const auto bits = std::bit_cast<uint32_t>(logit);
  if (bits == 0x80000000u) return 0x80000000u;  // -0 as +0
  // Negative values fall with their magnitude; positive ones go above them.
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}

FLINT_HD constexpr uint64_t topk_key(float logit, uint32_t index) {
  return uint64_t{topk_rank(logit)} << 32 | static_cast<uint32_t>(~index);
}

FLINT_HD constexpr uint32_t topk_index(uint64_t key) { return ~static_cast<uint32_t>(key); }

// The same of a BF16 logit in 32 bits, for at most 2^16 indices: the upper half of a BF16 value's
// rank tells it from every other.
FLINT_HD constexpr uint32_t topk_key_bf16(uint16_t logit, uint16_t index) {
  const uint32_t rank = topk_rank(std::bit_cast<float>(uint32_t{logit} << 16));
  return (rank & 0xffff0000u) | static_cast<uint16_t>(~index);
}

FLINT_HD constexpr uint32_t topk_index_bf16(uint32_t key) { return ~key & 0xffffu; }

// The logit of such a key; of a NaN, a NaN.
FLINT_HD constexpr float topk_logit_bf16(uint32_t key) {
  const uint32_t rank = key & 0xffff0000u;
  return std::bit_cast<float>((rank >> 31) != 0 ? rank & 0x7fffffffu : ~rank & 0xffff0000u);
}

static_assert(topk_key(1.0f, 3) > topk_key(1.0f, 4) && topk_key(1.0f, 4) > topk_key(0.5f, 0));
static_assert(topk_key(-0.0f, 0) > topk_key(0.0f, 1) && topk_key(0.0f, 1) > topk_key(-0.0f, 2));
static_assert(topk_key(-0.5f, 9) > topk_key(-1.0f, 0) && topk_key(0x1p-149f, 9) > topk_key(0, 0));
static_assert(topk_rank(std::bit_cast<float>(0xffc00001u)) ==
              topk_rank(std::bit_cast<float>(0x7fc00000u)));
static_assert(topk_rank(std::bit_cast<float>(0x7fc00000u)) >
              topk_rank(std::bit_cast<float>(0x7f800000u)));
static_assert(topk_rank(std::bit_cast<float>(0xff800000u)) > 0);
static_assert(topk_index(topk_key(2.0f, 255)) == 255 && topk_index(topk_key(2.0f, 0)) == 0);
static_assert(topk_key_bf16(0x7fc0, 255) > topk_key_bf16(0x7f80, 0));
static_assert(topk_key_bf16(0x8000, 7) == topk_key_bf16(0x0000, 7));
static_assert(topk_index_bf16(topk_key_bf16(0xbf80, 255)) == 255);

}  // namespace flint
