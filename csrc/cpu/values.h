// What the ops ask of the values in their index tensors: the conditions of flint_kernels/ops, which
// words the errors. No torch here.
#pragma once

#include <cstdint>
#include <vector>

namespace flint::cpu {

// Each names an expert, or is -1.
bool are_experts(const int32_t* ids, int64_t count, int64_t experts);

// Each slot is -1, or in [0, total) and named once; a row with one has a position in
// [0, table_rows). Without a table (`with_table` false) any position will do.
bool are_slots(const std::vector<int64_t>& slots, int64_t total,
               const std::vector<int64_t>& positions, bool with_table, int64_t table_rows);

// A page table [requests, width] and the lengths of its requests.
struct Tables {
  const int32_t* pages;
  const int32_t* lengths;
  int64_t requests, width, page_size, blocks;
};

// Each length fits its table's row, and the pages of its last `seen` tokens (all where it is
// negative) are in [0, blocks).
bool are_pages(const Tables& tables, int64_t seen);

// Offsets that rise from 0 to `rows`, by at most `longest`.
bool are_offsets(const int32_t* offsets, int64_t count, int64_t rows, int64_t longest);

}  // namespace flint::cpu
