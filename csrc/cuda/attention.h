// Decode attention with sinks over a paged BF16 cache. No torch here.
#pragma once

#include <cstdint>

#include "cuda/kv_write.h"
#include "cuda/launch.h"

namespace flint::cuda {

inline constexpr int kAttentionHeadDim = 128;
inline constexpr int kAttentionGroup = 8;  // query heads of a KV head
inline constexpr int kMostAttentionRequests = 256;
inline constexpr int kMostAttentionPairs = 4096;  // of a request and a KV head

// One query a request over its paged keys. A request whose length its table cannot name, or one of
// whose pages is not in the cache, gets NaN.
//
// With PDL, lengths, table and every cached row but that of a request's newest key are read ahead
// of the wait: the kernel in front of this may write that row and q, and nothing else of them.
struct AttentionDecode {
  const void* q;  // [requests, heads, 128], rows and heads any stride (in elements) apart
  int64_t q_row_stride, q_head_stride;
  KvCache cache;               // [blocks, page_size, heads / 8, 128]
  const int32_t* block_table;  // [requests, width]
  const int32_t* lengths;      // [requests]: keys, the query's own among them
  const float* sinks;          // [heads], or null
  void* out;                   // [requests, heads, 128]
  int64_t width;
  int requests;
  int window;  // 0: all keys
  float scale;
  uint32_t* counters;  // [requests * heads / 8], zero before and after; unused by short windows
  float* partials;     // attention_partials(...) floats; the same
};

bool attention_decode_fits(const AttentionDecode& in);

// How many floats of partial results a call needs on this device.
int64_t attention_partials(const AttentionDecode& in);

// cudaErrorNotSupported, with nothing launched, where the driver lacks what it takes.
cudaError_t attention_decode(const AttentionDecode& in, const Launch& launch);

}  // namespace flint::cuda
