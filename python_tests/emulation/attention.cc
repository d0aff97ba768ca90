// The decode attention's kernels, compiled for simt.h, as a function that Python can call.
#include "cuda/attention.cu"

namespace flint::cuda {
namespace {

thread_local uint8_t dynamic[232448];  // what a CTA has of dynamic shared memory

}  // namespace
}  // namespace flint::cuda

// -1: the kernels do not take the call; else what the launch returned. Fills `counters` and
// `partials`, which the caller need not have.
extern "C" int emulated_attention_decode(const void* q, const void* k, const void* v,
                                         const int64_t* strides, int64_t blocks, int64_t page_size,
                                         int kv_heads, const int32_t* table, int64_t width,
                                         const int32_t* lengths, int requests, const float* sinks,
                                         int window, float scale, void* out, uint32_t* counters,
                                         int multiprocessors, int late_copies, unsigned seed,
                                         uint16_t** places, const uint16_t* values, int64_t count) {
  flint::cuda::AttentionDecode in{};
  in.q = q;
  in.q_row_stride = int64_t{kv_heads} * flint::cuda::kAttentionGroup * 128;
  in.q_head_stride = 128;
  in.cache = {const_cast<void*>(k),
              const_cast<void*>(v),
              {strides[0], strides[1], strides[2]},
              {strides[3], strides[4], strides[5]},
              blocks * page_size,
              page_size,
              kv_heads,
              128};
  in.block_table = table;
  in.width = width;
  in.lengths = lengths;
  in.requests = requests;
  in.sinks = sinks;
  in.window = window;
  in.scale = scale;
  in.out = out;
  in.counters = counters;
  flint::cuda::emulated_multiprocessors = multiprocessors;
  if (!flint::cuda::attention_decode_fits(in)) return -1;
  std::vector<float> partials(static_cast<size_t>(flint::cuda::attention_partials(in)) + 4,
                              std::nanf(""));
  auto place = reinterpret_cast<uintptr_t>(partials.data());
  in.partials = reinterpret_cast<float*>((place + 15) & ~uintptr_t{15});
  simt::options = {seed, late_copies != 0, [=] {
                     for (int64_t i = 0; i < count; ++i) *places[i] = values[i];
                   }};
  return flint::cuda::attention_decode(in, {nullptr, true});
}
