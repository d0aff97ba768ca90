// q/k norm, RoPE and the paged cache write on the GPU. No torch here.
//
// BF16, or FP32 with FP32 weights (then nothing is rounded). What lies outside the cache or the
// table faults nothing: flint::row_outcome says what such a row gives.
#pragma once

#include <cstdint>

#include "cuda/launch.h"
#include "paging.h"

namespace flint::cuda {

// A tensor of int32 or int64.
struct Indices {
  const void* data;
  int64_t count;
  bool wide;  // int64
};

struct KvCache {
  void* k;
  void* v;
  PageStrides k_strides, v_strides;
  int64_t slots, page_size;  // slots below 2^32: 8 GB of the smallest rows there can be
  int kv_heads, head_dim;
};

// Per head n = round((x * rsqrt(mean(x^2) + eps)) * weight), then, with a table, the NeoX halves
// round(n1 * cos - n2 * sin), round(n2 * cos + n1 * sin), each product and sum rounded by itself.
struct QkNormRope {
  const void* qkv;       // [rows, (heads + 2 * kv_heads) * head_dim], qkv_stride elements apart
  const void* q_weight;  // [head_dim]
  const void* k_weight;
  const float* cos_sin;  // [table_rows, head_dim], cos then sin; read where `rope`
  void* q;               // [rows, heads, head_dim]
  void* k;               // [rows, kv_heads, head_dim]
  int64_t qkv_stride, rows, table_rows;
  Indices positions;  // [rows]; read only where there is a table
  Indices slots;      // [at most rows]; -1, or no entry: the row is not cached
  KvCache cache;
  int heads;
  float eps;
  bool rope;
  bool bf16;              // else FP32
  int64_t first_row = 0;  // of one launch; qk_norm_rope_kv_write sets it
};

cudaError_t qk_norm_rope_kv_write(const QkNormRope& in, const Launch& launch);

// Rows of k and v into the cache; a row without a slot, or with one outside the cache, is skipped.
struct KvCacheWrite {
  const void* k;  // [rows, kv_heads, head_dim], the last dimension contiguous
  const void* v;
  int64_t k_row_stride, k_head_stride, v_row_stride, v_head_stride;
  Indices slots;  // one a row that is written
  KvCache cache;
  int element_bytes;      // 2 or 4
  int64_t first_row = 0;  // of one launch; kv_cache_write sets it
};

cudaError_t kv_cache_write(const KvCacheWrite& in, const Launch& launch);

}  // namespace flint::cuda
