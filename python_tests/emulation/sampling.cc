// The kernels of sampling, compiled for simt.h, as functions that Python can call.
#include "cuda/sampling.cu"

#include <vector>

#include "cuda/decode_advance.cu"

// Whether the kernels take the call.
extern "C" int emulated_sample(const float* logits, int64_t stride, int64_t rows, int64_t count,
                               const float* temperature, const int32_t* top_k, const float* top_p,
                               const int64_t* seed, const int64_t* offset, int most,
                               int64_t* tokens, unsigned random) {
  const int64_t words = flint::cuda::sample_words(rows, count, most);
  if (words == 0) return 0;
  std::vector<uint64_t> candidates(static_cast<size_t>(words), ~uint64_t{0});
  simt::options = {random, false, {}};
  return flint::cuda::sample({logits, stride, count, temperature, top_k, top_p, seed, offset,
                              candidates.data(), tokens, static_cast<int>(rows), most},
                             {nullptr, true}) == cudaSuccess;
}

extern "C" int emulated_decode_advance(const int64_t* tokens, const int32_t* block_table,
                                       const int32_t* window_block_table, int64_t* input_ids,
                                       int32_t* positions, int32_t* slots, int32_t* window_slots,
                                       int32_t* seq_lens, int64_t* offsets, int64_t* history,
                                       int64_t width, int64_t length, int rows, int page_size) {
  simt::options = {1, false, {}};
  return flint::cuda::decode_advance(
             {tokens, block_table, window_block_table, input_ids, positions, slots, window_slots,
              seq_lens, offsets, history, width, length, rows, page_size},
             {nullptr, true}) == cudaSuccess;
}
