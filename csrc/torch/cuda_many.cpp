// Binds the GPU's kernels for many tokens to torch as ops of the private namespace `flint_native`.
// Each returns whether it has launched: false, with nothing done, where the kernel does not take
// these sizes or addresses, and a general body has to.
#include <algorithm>

#include "cuda/experts.h"
#include "cuda/linear.h"
#include "torch/cuda_binding.h"
#include "torch/cuda_weights.h"

namespace flint {
namespace {

bool many_rows(const Tensor& x) {
  return is_bf16(x) && x.dim() == 2 && x.size(0) > 0 && x.size(0) < 1 << 30 && x.size(1) > 0 &&
         x.stride(1) == 1;
}

// x [rows, width]; `output` as in cuda::LinearOutput; shard_sizes of the first three shards.
bool linear_many_cuda_out(const Tensor& x, const Tensor& weight, const Tensor& scale,
                          const Tensor& scale_2, int64_t first, int64_t second, int64_t third,
                          int64_t output, Tensor out, bool enable_pdl) {
  const CudaCall call(x, enable_pdl);
  const Weights weights(call, weight, scale, scale_2);
  if (!many_rows(x) || !weights.readable || weights.scales > cuda::kMostShards) return false;
  cuda::Linear in{};
  in.weight = weights.matrix;
  in.scale_2 = weights.scale_2;
  in.shards = static_cast<int>(weights.scales);
  const int64_t sizes[cuda::kMostShards] = {first, second, third, 0};
  for (int i = 0; i < cuda::kMostShards; ++i) {
    in.shard_end[i] = sizes[i] + (i > 0 ? in.shard_end[i - 1] : 0);
  }
  in.x = data<void>(x);
  in.x_stride = row_stride(x);
  in.rows = weight.size(0);
  in.tokens = static_cast<int>(x.size(0));
  in.width = static_cast<int>(std::min<int64_t>(x.size(1), 1 << 30));
  in.output = static_cast<cuda::LinearOutput>(output);
  const bool halves = in.output == cuda::LinearOutput::kSiluAndMul;
  call.check_dense(out, "out", true, int64_t{in.tokens} * (halves ? in.rows / 2 : in.rows));
  in.out = mutable_data<void>(out);
  if (!cuda::linear_many_fits(in)) return false;
  CudaCall::check_launch(cuda::linear_many(in, call.launch()), "linear");
  return true;
}

// Experts whose products take the kernels' scratch: order int32, rows [entries, hidden] and act
// [entries, routed] BF16.
bool routed_experts_many_cuda_out(const Tensor& x, const Tensor& topk_weights, const Tensor& ids,
                                  const Tensor& w13, const Tensor& scale, const Tensor& scale_2,
                                  const Tensor& w2, const Tensor& w2_scale,
                                  const Tensor& w2_scale_2, std::optional<Tensor> shared,
                                  Tensor order, Tensor rows, Tensor act, Tensor out,
                                  bool enable_pdl) {
  const CudaCall call(x, enable_pdl);
  const Weights gate_up(call, w13, scale, scale_2), down(call, w2, w2_scale, w2_scale_2);
  if (!many_rows(x) || !gate_up.readable || !down.readable || ids.numel() == 0) return false;
  if (w13.size(0) > 1 << 16 || w13.size(1) > 1 << 16 || w2.size(1) > 1 << 16) return false;
  cuda::RoutedExperts in{};
  in.routing = routing_of(call, ids, w13.size(0));
  call.check_dense(topk_weights, "topk_weights", ScalarType::Float, ids.numel());
  in.weights = data<float>(topk_weights);
  in.x = data<void>(x);
  in.x_stride = row_stride(x);
  in.hidden = static_cast<int>(x.size(1));
  in.routed_size = static_cast<int>(w13.size(1) / 2);
  in.gate_up = gate_up.matrix;
  in.gate_up_scale_2 = gate_up.scale_2;
  in.down = down.matrix;
  in.down_scale_2 = down.scale_2;
  if (shared.has_value()) {
    call.check_on(*shared, "shared_output");
    if (!dense(*shared, ScalarType::BFloat16)) return false;
    in.shared = data<void>(*shared);
  }
  call.check_dense(out, "out", true, x.numel());
  call.check_dense(rows, "rows", true, ids.numel() * in.hidden);
  call.check_dense(act, "act", true, ids.numel() * in.routed_size);
  call.check_dense(order, "order", ScalarType::Int, cuda::routed_experts_many_words(in.routing));
  in.out = mutable_data<void>(out);
  in.rows = mutable_data<void>(rows);
  in.act = mutable_data<void>(act);
  in.order = mutable_data<int32_t>(order);
  if (!cuda::routed_experts_many_fits(in)) return false;
  CudaCall::check_launch(cuda::routed_experts_many(in, call.launch()), "routed_experts");
  return true;
}

// How many words of scratch the order of so many entries takes.
int64_t routed_experts_many_words(int64_t tokens, int64_t top_k, int64_t experts) {
  return cuda::routed_experts_many_words(
      {nullptr, static_cast<int>(tokens), static_cast<int>(top_k), static_cast<int>(experts)});
}

}  // namespace
}  // namespace flint

STABLE_TORCH_LIBRARY_FRAGMENT(flint_native, m) {
  m.def(
      "linear_many_cuda_out(Tensor x, Tensor weight, Tensor scale, Tensor scale_2, int first, "
      "int second, int third, int output, Tensor(a!) out, bool enable_pdl) -> bool");
  m.def(
      "routed_experts_many_cuda_out(Tensor x, Tensor topk_weights, Tensor ids, Tensor w13, "
      "Tensor scale, Tensor scale_2, Tensor w2, Tensor w2_scale, Tensor w2_scale_2, "
      "Tensor? shared, Tensor(a!) order, Tensor(b!) rows, Tensor(c!) act, Tensor(d!) out, "
      "bool enable_pdl) -> bool");
  m.def("routed_experts_many_words(int tokens, int top_k, int experts) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(flint_native, CUDA, m) {
  m.impl("linear_many_cuda_out", TORCH_BOX(&flint::linear_many_cuda_out));
  m.impl("routed_experts_many_cuda_out", TORCH_BOX(&flint::routed_experts_many_cuda_out));
}

STABLE_TORCH_LIBRARY_IMPL(flint_native, CompositeExplicitAutograd, m) {
  m.impl("routed_experts_many_words", TORCH_BOX(&flint::routed_experts_many_words));
}
