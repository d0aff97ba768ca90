// Binds attention on the GPU to torch as ops of the private namespace `flint_native`. Each returns
// whether it has launched: false, with nothing done, where the kernels do not take these sizes or
// addresses, and a general body has to.
#include <algorithm>

#include "cuda/attention.h"
#include "cuda/attention_prefill.h"
#include "torch/cuda_binding.h"
#include "torch/cuda_cache.h"

namespace flint {
namespace {

// q [requests, heads, 128]; `workspace` as flint_kernels/ops/workspace.py describes it.
bool attention_decode_cuda_out(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                               const Tensor& block_table, const Tensor& seq_lens,
                               std::optional<Tensor> sinks, int64_t window, double scale,
                               Tensor workspace, Tensor out, bool enable_pdl) {
  const CudaCall call(q, enable_pdl);
  cuda::AttentionDecode in{};
  in.cache = checked_cache(call, k_cache, v_cache, true);
  const int64_t requests = q.size(0), heads = q.size(1);
  if (!is_bf16(q) || q.stride(2) != 1 || requests > cuda::kMostAttentionRequests ||
      heads != int64_t{in.cache.kv_heads} * cuda::kAttentionGroup ||
      q.size(2) != cuda::kAttentionHeadDim) {
    return false;
  }
  in.q = data<void>(q);
  in.q_row_stride = requests > 1 ? q.stride(0) : 0;
  in.q_head_stride = q.stride(1);
  call.check_dense(block_table, "block_table", ScalarType::Int, block_table.numel());
  call.check_dense(seq_lens, "seq_lens", ScalarType::Int, requests);
  call.check_dense(out, "out", true, q.numel());
  call.check_dense(workspace, "workspace", ScalarType::Byte, workspace.numel());
  STD_TORCH_CHECK(workspace.numel() >= cuda::kMostAttentionPairs * int64_t{sizeof(uint32_t)},
                  "workspace: got ", workspace.numel(), " bytes, want at least ",
                  cuda::kMostAttentionPairs * sizeof(uint32_t));
  if (sinks.has_value()) {
    call.check_dense(*sinks, "sinks", ScalarType::Float, heads);
    in.sinks = data<float>(*sinks);
  }
  in.block_table = data<int32_t>(block_table);
  in.lengths = data<int32_t>(seq_lens);
  in.width = block_table.size(1);
  in.requests = static_cast<int>(requests);
  in.window = static_cast<int>(std::min<int64_t>(window, 0x7fffffff));
  in.scale = static_cast<float>(scale);
  in.out = mutable_data<void>(out);
  in.counters = static_cast<uint32_t*>(mutable_data<void>(workspace));
  if (!cuda::attention_decode_fits(in)) return false;
  const Tensor partials =
      torch::stable::new_empty(q, {cuda::attention_partials(in)}, ScalarType::Float);
  in.partials = mutable_data<float>(partials);
  const cudaError_t error = cuda::attention_decode(in, call.launch());
  if (error == cudaErrorNotSupported) return false;
  CudaCall::check_launch(error, "attention_decode");
  return true;
}

cuda::HeadRows head_rows(const CudaCall& call, const Tensor& rows, const char* name) {
  call.check_rows(rows, name, true);
  return {data<void>(rows), row_stride(rows), rows.stride(1)};
}

// q [rows, heads, 128], k and v [rows, heads / 8, 128]; all four of the past, or none.
bool attention_prefill_cuda_out(const Tensor& q, const Tensor& k, const Tensor& v,
                                const Tensor& cu_seqlens, std::optional<Tensor> k_cache,
                                std::optional<Tensor> v_cache, std::optional<Tensor> block_table,
                                std::optional<Tensor> context_lens, std::optional<Tensor> sinks,
                                int64_t window, double scale, Tensor workspace, Tensor out,
                                bool enable_pdl) {
  const CudaCall call(q, enable_pdl);
  const int64_t rows = q.size(0), heads = q.size(1), kv_heads = k.size(1);
  const int64_t requests = cu_seqlens.numel() - 1;
  if (!is_bf16(q) || heads != kv_heads * cuda::kPrefillGroup ||
      q.size(2) != cuda::kPrefillHeadDim || rows > 0x7fffffff || kv_heads > 0x7fff ||
      requests > cuda::kMostPrefillRequests) {
    return false;
  }
  STD_TORCH_CHECK(k.size(0) == rows && v.size(0) == rows && v.size(1) == kv_heads &&
                      k.size(2) == q.size(2) && v.size(2) == q.size(2),
                  "k, v: want [rows, heads / 8, 128]");
  cuda::AttentionPrefill in{};
  in.q = head_rows(call, q, "q");
  in.k = head_rows(call, k, "k");
  in.v = head_rows(call, v, "v");
  in.rows = static_cast<int>(rows);
  in.requests = static_cast<int>(requests);
  in.kv_heads = static_cast<int>(kv_heads);
  call.check_dense(cu_seqlens, "cu_seqlens", ScalarType::Int, requests + 1);
  in.cu_seqlens = data<int32_t>(cu_seqlens);
  in.has_past = k_cache.has_value();
  if (in.has_past) {
    STD_TORCH_CHECK(v_cache.has_value() && block_table.has_value() && context_lens.has_value(),
                    "v_cache, block_table, context_lens: want them with k_cache");
    in.cache = checked_cache(call, *k_cache, *v_cache, true);
    STD_TORCH_CHECK(in.cache.kv_heads == kv_heads && in.cache.head_dim == q.size(2),
                    "k_cache: want the heads of k");
    call.check_dense(*block_table, "block_table", ScalarType::Int, block_table->numel());
    call.check_dense(*context_lens, "context_lens", ScalarType::Int, requests);
    in.block_table = data<int32_t>(*block_table);
    in.context_lens = data<int32_t>(*context_lens);
    in.width = block_table->size(1);
  }
  if (sinks.has_value()) {
    call.check_dense(*sinks, "sinks", ScalarType::Float, heads);
    in.sinks = data<float>(*sinks);
  }
  call.check_dense(out, "out", true, q.numel());
  in.window = static_cast<int>(std::min<int64_t>(window, 0x7fffffff));
  in.scale = static_cast<float>(scale);
  in.out = mutable_data<void>(out);
  call.check_dense(workspace, "workspace", ScalarType::Byte, workspace.numel());
  STD_TORCH_CHECK(workspace.numel() >= int64_t{sizeof(uint32_t)}, "workspace: want 4 bytes");
  in.counter = static_cast<uint32_t*>(mutable_data<void>(workspace));
  if (!cuda::attention_prefill_fits(in)) return false;
  const cudaError_t error = cuda::attention_prefill(in, call.launch());
  if (error == cudaErrorNotSupported) return false;
  CudaCall::check_launch(error, "attention_prefill");
  return true;
}

}  // namespace
}  // namespace flint

STABLE_TORCH_LIBRARY_FRAGMENT(flint_native, m) {
  m.def(
      "attention_decode_cuda_out(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, "
      "Tensor seq_lens, Tensor? sinks, int window, float scale, Tensor workspace, Tensor(a!) out, "
      "bool enable_pdl) -> bool");
  m.def(
      "attention_prefill_cuda_out(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, "
      "Tensor? k_cache, Tensor? v_cache, Tensor? block_table, Tensor? context_lens, "
      "Tensor? sinks, int window, float scale, Tensor workspace, Tensor(a!) out, "
      "bool enable_pdl) -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(flint_native, CUDA, m) {
  m.impl("attention_decode_cuda_out", TORCH_BOX(&flint::attention_decode_cuda_out));
  m.impl("attention_prefill_cuda_out", TORCH_BOX(&flint::attention_prefill_cuda_out));
}
