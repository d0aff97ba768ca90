// Attention with sinks on the CPU, one query row at a time. BF16. No torch here.
//
// A row's sums run over its keys in order, so its bits depend on its query and its keys alone:
// decode, prefill, chunked prefill and any batch agree to the bit.
#pragma once

#include <cstdint>

#include "paging.h"

namespace flint::cpu {

// Keys or values of one request: the first `context` positions in pages, the others in a chunk.
struct Rows {
  const uint16_t* pages;
  PageStrides strides;
  const int32_t* table;
  int64_t page_size, context;
  const uint16_t* chunk;  // row r of the chunk is position context + r
  int64_t chunk_row_stride, chunk_head_stride;

  const uint16_t* at(int64_t position, int64_t head) const {
    if (position < context) {
      return pages +
             slot_offset(strides, page_size, position_slot(table, page_size, position), head);
    }
    return chunk + (position - context) * chunk_row_stride + head * chunk_head_stride;
  }
};

struct Query {
  const uint16_t* q;    // [heads, head_dim]
  const float* sinks;   // [heads], or null
  int64_t first, last;  // the keys it sees: positions first ... last - 1
  int64_t heads, kv_heads, head_dim;
  float scale;
};

// out [heads, head_dim]; zeros where it sees no key.
void attend(const Query& query, const Rows& k, const Rows& v, uint16_t* out);

}  // namespace flint::cpu
