// Binds the GPU's sampling to torch as ops of the private namespace `flint_native`.
#include "cuda/sampling.h"
#include "torch/cuda_binding.h"

namespace flint {
namespace {

constexpr int64_t kMostRows = 0x7fffffff;

// logits [rows, count] FP32, rows any stride apart. False, with nothing done, where the kernels do
// not take these sizes.
bool sample_cuda_out(const Tensor& logits, const Tensor& temperature, const Tensor& top_k,
                     const Tensor& top_p, const Tensor& seed, const Tensor& offset,
                     int64_t max_top_k, Tensor tokens, bool enable_pdl) {
  const CudaCall call(logits, enable_pdl);
  call.check_rows(logits, "logits", false);
  STD_TORCH_CHECK(logits.dim() == 2, "logits: want [rows, count]");
  const int64_t rows = logits.size(0), count = logits.size(1);
  call.check_dense(temperature, "temperature", ScalarType::Float, rows);
  call.check_dense(top_k, "top_k", ScalarType::Int, rows);
  call.check_dense(top_p, "top_p", ScalarType::Float, rows);
  call.check_dense(seed, "seed", ScalarType::Long, rows);
  call.check_dense(offset, "offset", ScalarType::Long, rows);
  call.check_dense(tokens, "tokens", ScalarType::Long, rows);
  const int64_t words = cuda::sample_words(rows, count, max_top_k);
  if (words == 0) return false;
  const Tensor candidates = torch::stable::new_empty(logits, {words}, ScalarType::Long);
  const cuda::Sample in{data<float>(logits),
                        row_stride(logits),
                        count,
                        data<float>(temperature),
                        data<int32_t>(top_k),
                        data<float>(top_p),
                        data<int64_t>(seed),
                        data<int64_t>(offset),
                        reinterpret_cast<uint64_t*>(mutable_data<int64_t>(candidates)),
                        mutable_data<int64_t>(tokens),
                        static_cast<int>(rows),
                        static_cast<int>(max_top_k)};
  CudaCall::check_launch(cuda::sample(in, call.launch()), "sample");
  return true;
}

// All dense: tokens, input_ids, positions, slots, window_slots, seq_lens, offsets [rows], tables
// [rows, width], history [rows, length].
void decode_advance_cuda_out(const Tensor& tokens, const Tensor& block_table,
                             const Tensor& window_block_table, int64_t page_size, Tensor input_ids,
                             Tensor positions, Tensor slots, Tensor window_slots, Tensor seq_lens,
                             Tensor offsets, Tensor history, bool enable_pdl) {
  const CudaCall call(tokens, enable_pdl);
  const int64_t rows = tokens.numel();
  STD_TORCH_CHECK(0 < rows && rows <= kMostRows, "tokens: got ", rows, " rows");
  STD_TORCH_CHECK(0 < page_size && page_size <= kMostRows, "page_size: got ", page_size);
  STD_TORCH_CHECK(block_table.dim() == 2 && history.dim() == 2,
                  "block_table, history: want two dimensions");
  const int64_t width = block_table.size(1), length = history.size(1);
  call.check_dense(tokens, "tokens", ScalarType::Long, rows);
  call.check_dense(block_table, "block_table", ScalarType::Int, rows * width);
  call.check_dense(window_block_table, "window_block_table", ScalarType::Int, rows * width);
  call.check_dense(input_ids, "input_ids", ScalarType::Long, rows);
  call.check_dense(positions, "positions", ScalarType::Int, rows);
  call.check_dense(slots, "slots", ScalarType::Int, rows);
  call.check_dense(window_slots, "window_slots", ScalarType::Int, rows);
  call.check_dense(seq_lens, "seq_lens", ScalarType::Int, rows);
  call.check_dense(offsets, "offsets", ScalarType::Long, rows);
  call.check_dense(history, "history", ScalarType::Long, rows * length);
  const cuda::DecodeAdvance in{data<int64_t>(tokens),
                               data<int32_t>(block_table),
                               data<int32_t>(window_block_table),
                               mutable_data<int64_t>(input_ids),
                               mutable_data<int32_t>(positions),
                               mutable_data<int32_t>(slots),
                               mutable_data<int32_t>(window_slots),
                               mutable_data<int32_t>(seq_lens),
                               mutable_data<int64_t>(offsets),
                               mutable_data<int64_t>(history),
                               width,
                               length,
                               static_cast<int>(rows),
                               static_cast<int>(page_size)};
  CudaCall::check_launch(cuda::decode_advance(in, call.launch()), "decode_advance");
}

}  // namespace
}  // namespace flint

STABLE_TORCH_LIBRARY_FRAGMENT(flint_native, m) {
  m.def(
      "sample_cuda_out(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor seed, "
      "Tensor offset, int max_top_k, Tensor(a!) tokens, bool enable_pdl) -> bool");
  m.def(
      "decode_advance_cuda_out(Tensor tokens, Tensor block_table, Tensor window_block_table, "
      "int page_size, Tensor(a!) input_ids, Tensor(b!) positions, Tensor(c!) slots, "
      "Tensor(d!) window_slots, Tensor(e!) seq_lens, Tensor(f!) offsets, Tensor(g!) history, "
      "bool enable_pdl) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(flint_native, CUDA, m) {
  m.impl("sample_cuda_out", TORCH_BOX(&flint::sample_cuda_out));
  m.impl("decode_advance_cuda_out", TORCH_BOX(&flint::decode_advance_cuda_out));
}
