// Binds decode attention on the GPU to torch as an op of the private namespace `flint_native`. It
// returns whether it has launched: false, with nothing done, where the kernels do not take these
// sizes or addresses, and a general body has to.
#include <algorithm>

#include "cuda/attention.h"
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

}  // namespace
}  // namespace flint

STABLE_TORCH_LIBRARY_FRAGMENT(flint_native, m) {
  m.def(
      "attention_decode_cuda_out(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, "
      "Tensor seq_lens, Tensor? sinks, int window, float scale, Tensor workspace, Tensor(a!) out, "
      "bool enable_pdl) -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(flint_native, CUDA, m) {
  m.impl("attention_decode_cuda_out", TORCH_BOX(&flint::attention_decode_cuda_out));
}
