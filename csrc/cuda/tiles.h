// How rows are cut into vectors, warps and CTAs, for the host and for the device.
#pragma once

#include <cstdint>

#include "nvfp4_layout.h"  // FLINT_HD

namespace flint {

// A CTA's index is 31 bits; a launch of more rows is several launches.
inline constexpr int64_t kMostCtas = 0x7fffffff;
// And its index in a grid's second dimension less than this; rows beyond are taken in a loop.
inline constexpr int64_t kMostGridRows = 65535;

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

// A CTA that works column by column: `across` threads on a row, `down` rows at once, and the grid
// of such CTAs.
struct ElementTiles {
  int64_t across, down;
  int64_t ctas_across, ctas_down;
};

// Of `threads` (a power of two) a CTA; a warp's threads are on one row. Narrow rows share a CTA.
FLINT_HD constexpr ElementTiles element_tiles(int64_t columns, int64_t rows, int64_t threads) {
  int64_t across = threads;
  while (across > 32 && across / 2 >= columns) across /= 2;
  const int64_t down = threads / across;
  return {across, down, ceil_div(columns, across), least(ceil_div(rows, down), kMostGridRows)};
}

static_assert(element_tiles(768, 8, 256).ctas_across == 3);
static_assert(element_tiles(96, 9, 256).down == 2 && element_tiles(96, 9, 256).ctas_down == 5);
static_assert(element_tiles(1, int64_t{1} << 40, 256).ctas_down == kMostGridRows);
static_assert(ceil_div(1, 8) == 1 && ceil_div(8, 8) == 1 && ceil_div(9, 8) == 2);
static_assert(ceil_div(0, 8) == 0 && round_up(130, 128) == 256);
static_assert(keeps_alignment(0x1000, 2048, 2, 16) && !keeps_alignment(0x1002, 2048, 2, 16));
static_assert(!keeps_alignment(0x1000, 2052, 2, 16) && keeps_alignment(0x1000, 2052, 2, 8));

}  // namespace flint
