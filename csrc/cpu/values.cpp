#include "cpu/values.h"

#include <algorithm>

namespace flint::cpu {

bool are_experts(const int32_t* ids, int64_t count, int64_t experts) {
  return std::all_of(ids, ids + count, [=](int32_t id) { return id >= -1 && id < experts; });
}

bool are_slots(const std::vector<int64_t>& slots, int64_t total,
               const std::vector<int64_t>& positions, bool with_table, int64_t table_rows) {
  std::vector<int64_t> used;
  used.reserve(slots.size());
  for (size_t row = 0; row < slots.size(); ++row) {
    if (slots[row] == -1) continue;
    if (slots[row] < 0 || slots[row] >= total) return false;
    if (with_table && (positions[row] < 0 || positions[row] >= table_rows)) return false;
    used.push_back(slots[row]);
  }
  std::sort(used.begin(), used.end());
  return std::adjacent_find(used.begin(), used.end()) == used.end();
}

bool are_pages(const Tables& tables, int64_t seen) {
  for (int64_t request = 0; request < tables.requests; ++request) {
    const int64_t length = tables.lengths[request];
    if (length < 0 || length > tables.width * tables.page_size) return false;
    if (length == 0 || seen == 0) continue;
    const int64_t first = seen < 0 ? 0 : std::max<int64_t>(0, length - seen);
    const int32_t* row = tables.pages + request * tables.width;
    const bool inside =
        std::all_of(row + first / tables.page_size, row + (length - 1) / tables.page_size + 1,
                    [&](int32_t page) { return page >= 0 && page < tables.blocks; });
    if (!inside) return false;
  }
  return true;
}

bool are_offsets(const int32_t* offsets, int64_t count, int64_t rows, int64_t longest) {
  if (count < 1 || offsets[0] != 0 || offsets[count - 1] != rows) return false;
  for (int64_t i = 1; i < count; ++i) {
    const int64_t length = int64_t{offsets[i]} - offsets[i - 1];
    if (length < 0 || length > longest) return false;
  }
  return true;
}

}  // namespace flint::cpu
