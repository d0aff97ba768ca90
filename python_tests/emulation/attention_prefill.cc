// The prefill attention's kernel, compiled for simt.h, as a function that Python can call.
#include "cuda/attention_prefill.cu"

namespace flint::cuda {
namespace {

thread_local uint8_t dynamic[232448];  // what a CTA has of dynamic shared memory

HeadRows rows_of(const void* elements, int heads) {
  return {elements, int64_t{heads} * kPrefillHeadDim, kPrefillHeadDim};
}

}  // namespace
}  // namespace flint::cuda

// -1: the kernel does not take the call; else what the launch returned. Without `table` there is no
// past.
extern "C" int emulated_attention_prefill(const void* q, const void* k, const void* v,
                                          const int32_t* cu_seqlens, int rows, int requests,
                                          const void* k_cache, const void* v_cache,
                                          const int64_t* strides, int64_t blocks, int64_t page_size,
                                          int kv_heads, const int32_t* table, int64_t width,
                                          const int32_t* context_lens, const float* sinks,
                                          int window, float scale, void* out, int multiprocessors,
                                          int late_copies, unsigned seed) {
  using namespace flint::cuda;
  AttentionPrefill in{};
  in.q = rows_of(q, kv_heads * kPrefillGroup);
  in.k = rows_of(k, kv_heads);
  in.v = rows_of(v, kv_heads);
  in.cu_seqlens = cu_seqlens;
  in.has_past = table != nullptr;
  if (in.has_past) {
    in.cache = {const_cast<void*>(k_cache),
                const_cast<void*>(v_cache),
                {strides[0], strides[1], strides[2]},
                {strides[3], strides[4], strides[5]},
                blocks * page_size,
                page_size,
                kv_heads,
                kPrefillHeadDim};
  }
  in.block_table = table;
  in.width = width;
  in.context_lens = context_lens;
  in.sinks = sinks;
  in.out = out;
  in.rows = rows;
  in.requests = requests;
  in.kv_heads = kv_heads;
  in.window = window;
  in.scale = scale;
  uint32_t counter = 0;
  in.counter = &counter;
  emulated_multiprocessors = multiprocessors;
  if (!attention_prefill_fits(in)) return -1;
  simt::options = {seed, late_copies != 0, nullptr};
  const int error = attention_prefill(in, {nullptr, true});
  return counter == 0 ? error : -2;
}
