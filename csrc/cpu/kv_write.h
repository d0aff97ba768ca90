// q/k norm, RoPE and the paged cache write on the CPU. BF16. No torch here.
#pragma once

#include <cstdint>

#include "paging.h"

namespace flint::cpu {

struct KvCache {
  uint16_t* k;
  uint16_t* v;
  PageStrides k_strides, v_strides;
  int64_t page_size, kv_heads, head_dim;
};

struct QkNormRope {
  const uint16_t* qkv;  // [rows, query_heads + 2 * kv_heads, head_dim]
  int64_t rows, query_heads;
  const uint16_t* q_weight;  // [head_dim]
  const uint16_t* k_weight;
  const float* cos_sin;  // [table_rows, head_dim], cos then sin; null: no RoPE
  int64_t table_rows;
  const int64_t* positions;  // [rows]
  const int64_t* slots;      // [slot_count], -1: the row is not cached
  int64_t slot_count;
  float eps;
};

// q [rows, query_heads, head_dim], k [rows, kv_heads, head_dim]: normed and turned, zeros where the
// position is outside the table. Rows with a slot are written into the cache.
void qk_norm_rope_kv_write(const QkNormRope& in, const KvCache& cache, uint16_t* q, uint16_t* k);

}  // namespace flint::cpu
