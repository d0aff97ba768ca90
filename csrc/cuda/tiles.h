// How rows are cut into vectors, warps and CTAs, for the host and for the device.
#pragma once

#include <cstdint>

#include "nvfp4_layout.h"  // FLINT_HD

namespace flint {

// A CTA's index is 31 bits; a launch of more rows is several launches.
inline constexpr int64_t kMostCtas = 0x7fffffff;

FLINT_HD constexpr int64_t ceil_div(int64_t value, int64_t step) {
  return (value + step - 1) / step;
}

FLINT_HD constexpr int64_t least(int64_t left, int64_t right) {
  return left < right ? left : right;
}

FLINT_HD constexpr int64_t round_up(int64_t value, int64_t step) {
  return ceil_div(value, step) * step;
}

// Whether `address` and steps of `stride` elements of `element_bytes` keep `alignment`.
FLINT_HD constexpr bool keeps_alignment(uint64_t address, int64_t stride, int64_t element_bytes,
                                        int64_t alignment) {
  return address % static_cast<uint64_t>(alignment) == 0 && stride * element_bytes % alignment == 0;
}

static_assert(ceil_div(1, 8) == 1 && ceil_div(8, 8) == 1 && ceil_div(9, 8) == 2);
static_assert(ceil_div(0, 8) == 0 && round_up(130, 128) == 256);
static_assert(keeps_alignment(0x1000, 2048, 2, 16) && !keeps_alignment(0x1002, 2048, 2, 16));
static_assert(!keeps_alignment(0x1000, 2052, 2, 16) && keeps_alignment(0x1000, 2052, 2, 8));

}  // namespace flint
