// Where a row of a paged KV cache lies, for the host and for the device: 64-bit offsets throughout.
#pragma once

#include <cstdint>

#include "nvfp4_layout.h"  // FLINT_HD

namespace flint {

// A cache [blocks, page_size, kv_heads, head_dim] of any strides (in elements) but the last, 1.
struct PageStrides {
  int64_t block, row, head;
};

// The offset of the head_dim elements that `slot` (block * page_size + offset) has for `head`.
FLINT_HD constexpr int64_t slot_offset(const PageStrides& strides, int64_t page_size, int64_t slot,
                                       int64_t head) {
  return slot / page_size * strides.block + slot % page_size * strides.row + head * strides.head;
}

// The same for head 0 where slots are below 2^32, by a 32-bit division: on the device a 64-bit one
// is a subroutine of a hundred instructions.
FLINT_HD constexpr int64_t slot_offset_32(const PageStrides& strides, uint32_t page_size,
                                          uint32_t slot) {
  const uint32_t page = slot / page_size, offset = slot - page * page_size;
  return int64_t{page} * strides.block + int64_t{offset} * strides.row;
}

static_assert(slot_offset_32({1 << 20, 512, 128}, 16, 0xffffffffu) ==
              slot_offset({1 << 20, 512, 128}, 16, 0xffffffffu, 0));

// Of a row to be cached: `slot` -1 asks for nothing, any other is to lie in the cache. `inside`:
// its position is one of the table's, or there is no table.
enum class RowOutcome : uint8_t {
  kCompute,  // q and k, and the cache where there is a slot
  kZeros,    // padding: zeros, no write
  kNaN,      // a slot or a position that does not exist: NaN, no write
};

FLINT_HD constexpr RowOutcome row_outcome(int64_t slot, int64_t slots, bool inside) {
  if (slot < -1 || slot >= slots) return RowOutcome::kNaN;
  if (inside) return RowOutcome::kCompute;
  return slot < 0 ? RowOutcome::kZeros : RowOutcome::kNaN;
}

static_assert(row_outcome(-1, 64, true) == RowOutcome::kCompute);
static_assert(row_outcome(-1, 64, false) == RowOutcome::kZeros);
static_assert(row_outcome(63, 64, true) == RowOutcome::kCompute);
static_assert(row_outcome(63, 64, false) == RowOutcome::kNaN);
static_assert(row_outcome(64, 64, true) == RowOutcome::kNaN);
static_assert(row_outcome(-2, 64, true) == RowOutcome::kNaN);

// The slot of `position` in a request whose pages `table` names.
FLINT_HD constexpr int64_t position_slot(const int32_t* table, int64_t page_size,
                                         int64_t position) {
  return int64_t{table[position / page_size]} * page_size + position % page_size;
}

static_assert(slot_offset({1 << 20, 512, 128}, 16, int64_t{16} * 5000 + 3, 2) ==
              int64_t{5000} * (1 << 20) + 3 * 512 + 2 * 128);

}  // namespace flint
