// Binds the GPU's kernels for a few tokens to torch as ops of the private namespace `flint_native`.
// Each returns whether it has launched: false, with nothing done, where the kernel does not take
// these sizes or addresses, and a general body has to.
#include <algorithm>

#include "cuda/experts.h"
#include "cuda/linear.h"
#include "cuda/qkv.h"
#include "cuda/router.h"
#include "torch/cuda_binding.h"
#include "torch/cuda_cache.h"
#include "torch/cuda_weights.h"

namespace flint {
namespace {

// Whether a CTA of this GPU can have the shared memory that the kernels are laid out for.
bool roomy(const CudaCall& call) { return call.shared_bytes_a_cta() >= 227 * 1024; }

bool few_rows(const Tensor& x) {
  return is_bf16(x) && x.dim() == 2 && 0 < x.size(0) && x.size(0) <= 8 && x.size(1) > 0 &&
         x.stride(1) == 1;
}

// x [rows, width]; `output` as in cuda::LinearOutput; shard_sizes of the first three shards.
bool linear_cuda_out(const Tensor& x, const Tensor& weight, std::optional<Tensor> scale,
                     std::optional<Tensor> scale_2, int64_t first, int64_t second, int64_t third,
                     int64_t output, Tensor out, bool enable_pdl) {
  const CudaCall call(x, enable_pdl);
  const Weights weights(call, weight, scale, scale_2);
  if (!roomy(call) || !few_rows(x) || !weights.readable || weights.scales > cuda::kMostShards)
    return false;
  cuda::Linear in = linear_of(weights, x, weight.size(0), {first, second, third}, output);
  if (!cuda::linear_fits(in)) return false;
  const bool halves = in.output == cuda::LinearOutput::kSiluAndMul;
  const auto type =
      in.output == cuda::LinearOutput::kLogits ? ScalarType::Float : ScalarType::BFloat16;
  call.check_dense(out, "out", type, in.tokens * (halves ? in.rows / 2 : in.rows));
  in.out = mutable_data<void>(out);
  CudaCall::check_launch(cuda::linear(in, call.launch()), "linear");
  return true;
}

bool qkv_linear_cuda_out(const Tensor& x, const Tensor& weight, std::optional<Tensor> scale,
                         std::optional<Tensor> scale_2, const Tensor& q_weight,
                         const Tensor& k_weight, std::optional<Tensor> cos_sin,
                         const Tensor& positions, const Tensor& slot_mapping, Tensor k_cache,
                         Tensor v_cache, double eps, Tensor q, bool enable_pdl) {
  const CudaCall call(x, enable_pdl);
  const Weights weights(call, weight, scale, scale_2);
  if (!roomy(call) || !few_rows(x) || !weights.readable || !is_bf16(k_cache)) return false;
  if (weights.scales != 1 && weights.scales != 3) return false;
  cuda::QkvLinear in{};
  in.weight = weights.matrix;
  in.scale_2 = weights.scale_2;
  in.shards = static_cast<int>(weights.scales);
  in.x = data<void>(x);
  in.x_stride = row_stride(x);
  in.width = static_cast<int>(std::min<int64_t>(x.size(1), 1 << 30));
  cuda::QkNormRope& rest = in.rest;
  rest.cache = checked_cache(call, k_cache, v_cache, true);
  const int64_t dim = rest.cache.head_dim;
  rest.heads = static_cast<int>(weight.size(0) / dim) - 2 * rest.cache.kv_heads;
  rest.rows = x.size(0);
  call.check_dense(q_weight, "q_weight", true, dim);
  call.check_dense(k_weight, "k_weight", true, dim);
  call.check_dense(q, "q", true, rest.rows * rest.heads * dim);
  rest.q_weight = data<void>(q_weight);
  rest.k_weight = data<void>(k_weight);
  rest.q = mutable_data<void>(q);
  rest.slots = checked_indices(call, slot_mapping, "slot_mapping");
  rest.eps = static_cast<float>(eps);
  rest.bf16 = true;
  if (cos_sin.has_value()) {
    call.check_dense(*cos_sin, "cos_sin", ScalarType::Float, cos_sin->size(0) * dim);
    rest.positions = checked_indices(call, positions, "positions");
    rest.rope = true;
    rest.cos_sin = data<float>(*cos_sin);
    rest.table_rows = cos_sin->size(0);
  }
  if (!cuda::qkv_linear_fits(in)) return false;
  CudaCall::check_launch(cuda::qkv_linear(in, call.launch()), "qkv_norm_rope_kv_write");
  return true;
}

bool norm_router_cuda_out(const Tensor& x, const Tensor& residual, const Tensor& norm,
                          const Tensor& router, int64_t top_k, double eps, Tensor normed,
                          Tensor residual_out, Tensor topk_weights, Tensor topk_ids,
                          bool enable_pdl) {
  const CudaCall call(x, enable_pdl);
  call.check_on(residual, "residual");
  call.check_on(norm, "weight");
  call.check_on(router, "router_weight");
  if (!roomy(call) || !few_rows(x) || !few_rows(residual) || !dense(norm, ScalarType::BFloat16) ||
      !dense(router, ScalarType::BFloat16)) {
    return false;
  }
  cuda::NormRouter in{};
  in.x = data<void>(x);
  in.residual = data<void>(residual);
  in.norm = data<void>(norm);
  in.router = data<void>(router);
  in.x_stride = row_stride(x);
  in.residual_stride = row_stride(residual);
  in.tokens = static_cast<int>(x.size(0));
  in.width = static_cast<int>(std::min<int64_t>(x.size(1), 1 << 30));
  in.experts = static_cast<int>(std::min<int64_t>(router.size(0), 1 << 30));
  in.top_k = static_cast<int>(top_k);
  in.eps = static_cast<float>(eps);
  call.check_dense(normed, "normed", true, x.numel());
  call.check_dense(residual_out, "residual_out", true, x.numel());
  call.check_dense(topk_weights, "topk_weights", ScalarType::Float, in.tokens * top_k);
  call.check_dense(topk_ids, "topk_ids", ScalarType::Int, in.tokens * top_k);
  in.normed = mutable_data<void>(normed);
  in.residual_out = mutable_data<void>(residual_out);
  in.weights = mutable_data<float>(topk_weights);
  in.ids = mutable_data<int32_t>(topk_ids);
  if (!cuda::norm_router_fits(in)) return false;
  CudaCall::check_launch(cuda::norm_router(in, call.launch()), "norm_router_topk");
  return true;
}

bool moe_gate_up_cuda_out(const Tensor& x, const Tensor& ids, const Tensor& w13,
                          std::optional<Tensor> scale, std::optional<Tensor> scale_2,
                          const Tensor& shared_w13, std::optional<Tensor> shared_scale,
                          std::optional<Tensor> shared_scale_2, Tensor routed_act,
                          Tensor shared_act, bool enable_pdl) {
  const CudaCall call(x, enable_pdl);
  const Weights routed(call, w13, scale, scale_2);
  const Weights shared(call, shared_w13, shared_scale, shared_scale_2);
  if (!roomy(call) || !few_rows(x) || !routed.readable || !shared.readable || ids.numel() == 0)
    return false;
  if (w13.size(0) > 1 << 24 || w13.size(1) > 1 << 21 || shared_w13.size(0) > 1 << 21) return false;
  cuda::MoeGateUp in{};
  in.routing = routing_of(call, ids, w13.size(0));
  in.x = data<void>(x);
  in.x_stride = row_stride(x);
  in.hidden = static_cast<int>(std::min<int64_t>(x.size(1), 1 << 30));
  in.routed_size = static_cast<int>(w13.size(1) / 2);
  in.shared_size = static_cast<int>(shared_w13.size(0) / 2);
  in.routed = routed.matrix;
  in.routed_scale_2 = routed.scale_2;
  in.shared = shared.matrix;
  in.shared_scale_2 = shared.scale_2;
  in.shared_shards = static_cast<int>(shared.scales);
  call.check_dense(routed_act, "routed_act", true, ids.numel() * in.routed_size);
  call.check_dense(shared_act, "shared_act", true, x.size(0) * in.shared_size);
  in.routed_act = mutable_data<void>(routed_act);
  in.shared_act = mutable_data<void>(shared_act);
  if (!cuda::moe_gate_up_fits(in)) return false;
  CudaCall::check_launch(cuda::moe_gate_up(in, call.launch()), "moe_gate_up");
  return true;
}

bool moe_down_cuda_out(const Tensor& routed_act, const Tensor& shared_act,
                       const Tensor& topk_weights, const Tensor& ids, const Tensor& w2,
                       std::optional<Tensor> scale, std::optional<Tensor> scale_2,
                       const Tensor& shared_w2, std::optional<Tensor> shared_scale,
                       std::optional<Tensor> shared_scale_2, Tensor out, bool enable_pdl) {
  const CudaCall call(routed_act, enable_pdl);
  const Weights routed(call, w2, scale, scale_2);
  const Weights shared(call, shared_w2, shared_scale, shared_scale_2);
  call.check_on(shared_act, "shared_act");
  if (!roomy(call) || !routed.readable || !shared.readable || ids.numel() == 0 ||
      shared_act.numel() == 0 || !dense(routed_act, ScalarType::BFloat16) ||
      !dense(shared_act, ScalarType::BFloat16)) {
    return false;
  }
  if (w2.size(0) > 1 << 24 || w2.size(1) > 1 << 20 || routed_act.size(2) > 1 << 20 ||
      shared_act.size(1) > 1 << 20) {
    return false;
  }
  cuda::MoeDown in{};
  in.routing = routing_of(call, ids, w2.size(0));
  call.check_dense(topk_weights, "topk_weights", ScalarType::Float, ids.numel());
  in.weights = data<float>(topk_weights);
  in.routed_act = data<void>(routed_act);
  in.shared_act = data<void>(shared_act);
  in.hidden = static_cast<int>(w2.size(1));
  in.routed_size = static_cast<int>(routed_act.size(2));
  in.shared_size = static_cast<int>(shared_act.size(1));
  in.routed = routed.matrix;
  in.routed_scale_2 = routed.scale_2;
  in.shared = shared.matrix;
  in.shared_scale_2 = shared.scale_2;
  call.check_dense(out, "out", true, ids.size(0) * in.hidden);
  in.out = mutable_data<void>(out);
  if (!cuda::moe_down_fits(in)) return false;
  CudaCall::check_launch(cuda::moe_down(in, call.launch()), "moe_down");
  return true;
}

}  // namespace
}  // namespace flint

STABLE_TORCH_LIBRARY_FRAGMENT(flint_native, m) {
  m.def(
      "linear_cuda_out(Tensor x, Tensor weight, Tensor? scale, Tensor? scale_2, int first, "
      "int second, int third, int output, Tensor(a!) out, bool enable_pdl) -> bool");
  m.def(
      "qkv_linear_cuda_out(Tensor x, Tensor weight, Tensor? scale, Tensor? scale_2, "
      "Tensor q_weight, Tensor k_weight, Tensor? cos_sin, Tensor positions, Tensor slot_mapping, "
      "Tensor(a!) k_cache, Tensor(b!) v_cache, float eps, Tensor(c!) q, bool enable_pdl) -> bool");
  m.def(
      "norm_router_cuda_out(Tensor x, Tensor residual, Tensor norm, Tensor router, int top_k, "
      "float eps, Tensor(a!) normed, Tensor(b!) residual_out, Tensor(c!) topk_weights, "
      "Tensor(d!) topk_ids, bool enable_pdl) -> bool");
  m.def(
      "moe_gate_up_cuda_out(Tensor x, Tensor ids, Tensor w13, Tensor? scale, Tensor? scale_2, "
      "Tensor shared_w13, Tensor? shared_scale, Tensor? shared_scale_2, Tensor(a!) routed_act, "
      "Tensor(b!) shared_act, bool enable_pdl) -> bool");
  m.def(
      "moe_down_cuda_out(Tensor routed_act, Tensor shared_act, Tensor topk_weights, Tensor ids, "
      "Tensor w2, Tensor? scale, Tensor? scale_2, Tensor shared_w2, Tensor? shared_scale, "
      "Tensor? shared_scale_2, Tensor(a!) out, bool enable_pdl) -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(flint_native, CUDA, m) {
  m.impl("linear_cuda_out", TORCH_BOX(&flint::linear_cuda_out));
  m.impl("qkv_linear_cuda_out", TORCH_BOX(&flint::qkv_linear_cuda_out));
  m.impl("norm_router_cuda_out", TORCH_BOX(&flint::norm_router_cuda_out));
  m.impl("moe_gate_up_cuda_out", TORCH_BOX(&flint::moe_gate_up_cuda_out));
  m.impl("moe_down_cuda_out", TORCH_BOX(&flint::moe_down_cuda_out));
}
