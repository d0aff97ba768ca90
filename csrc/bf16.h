// BF16 as 16 bits, for the host and for the device: the upper half of an fp32.
#pragma once

#include <bit>
#include <cstdint>

#include "nvfp4_layout.h"  // FLINT_HD

namespace flint {

FLINT_HD constexpr float bf16_to_float(uint16_t bits) {
  return std::bit_cast<float>(uint32_t{bits} << 16);
}

// To nearest even; NaN stays NaN.
FLINT_HD constexpr uint16_t float_to_bf16(float value) {
  if (value != value) return 0x7fc0;
  const auto bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// The value that is left of `value` in BF16.
FLINT_HD constexpr float round_to_bf16(float value) { return bf16_to_float(float_to_bf16(value)); }

static_assert(float_to_bf16(1.0f) == 0x3f80 && float_to_bf16(-0.0f) == 0x8000);
static_assert(float_to_bf16(1.00390625f) == 0x3f80);  // a tie, to even
static_assert(float_to_bf16(1.01171875f) == 0x3f82);  // a tie, to even
static_assert(float_to_bf16(3.4e38f) == 0x7f80);      // rounds to infinity

}  // namespace flint
