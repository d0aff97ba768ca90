// Prefill attention with sinks: chunks of new tokens over a paged BF16 past and themselves. Hopper
// alone. No torch here.
#pragma once

#include <cstdint>

#include "cuda/kv_write.h"
#include "cuda/launch.h"

namespace flint::cuda {

inline constexpr int kPrefillHeadDim = 128;
inline constexpr int kPrefillGroup = 8;  // query heads of a KV head
inline constexpr int kMostPrefillRequests = 1024;

// Rows of [rows, heads, 128], of any strides (in elements) but the last.
struct HeadRows {
  const void* elements;
  int64_t row_stride, head_stride;
};

// Request b has the rows cu_seqlens[b] ... cu_seqlens[b + 1] - 1, and context_lens[b] keys before
// them. A request whose past its table cannot name, or that reads a page which is not in the cache,
// gets NaN; offsets that do not rise from 0 to `rows` make everything NaN.
struct AttentionPrefill {
  HeadRows q, k, v;
  const int32_t* cu_seqlens;    // [requests + 1]
  bool has_past;                // else there are no cache, table and context_lens
  KvCache cache;                // [blocks, page_size, kv_heads, 128]
  const int32_t* block_table;   // [requests, width]
  const int32_t* context_lens;  // [requests]
  const float* sinks;           // [8 * kv_heads], or null
  void* out;                    // [rows, 8 * kv_heads, 128]
  int64_t width;
  int rows, requests, kv_heads;
  int window;  // 0: all keys
  float scale;
  uint32_t* counter;  // zero before and after
};

bool attention_prefill_fits(const AttentionPrefill& in);

// cudaErrorNotSupported, with nothing launched, where the driver lacks what it takes.
cudaError_t attention_prefill(const AttentionPrefill& in, const Launch& launch);

}  // namespace flint::cuda
