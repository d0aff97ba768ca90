// Binds the GPU's kernels for many tokens to torch as ops of the private namespace `flint_native`.
// Each returns whether it has launched: false, with nothing done, where the kernel does not take
// these sizes or addresses, and a general body has to.
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

// x [rows, width]; `output` as in cuda::LinearOutput; shard_sizes of the first three shards; tokens
// and shares as in cuda::LinearPlan, 0 for the best.
bool linear_many_cuda_out(const Tensor& x, const Tensor& weight, const Tensor& scale,
                          const Tensor& scale_2, int64_t first, int64_t second, int64_t third,
                          int64_t output, int64_t tokens, int64_t shares, Tensor out,
                          bool enable_pdl) {
  const CudaCall call(x, enable_pdl);
  const Weights weights(call, weight, scale, scale_2);
  if (!many_rows(x) || !weights.readable || weights.scales > cuda::kMostShards) return false;
  cuda::Linear in = linear_of(weights, x, weight.size(0), {first, second, third}, output);
  const bool halves = in.output == cuda::LinearOutput::kSiluAndMul;
  call.check_dense(out, "out", true, int64_t{in.tokens} * (halves ? in.rows / 2 : in.rows));
  in.out = mutable_data<void>(out);
  if (!cuda::linear_many_fits(in)) return false;
  cuda::LinearPlan plan{static_cast<int>(tokens), static_cast<int>(shares)};
  if (tokens == 0) plan = cuda::linear_many_plan(in);
  if (!cuda::linear_many_has(in, plan)) return false;
  CudaCall::check_launch(cuda::linear_many(in, plan, call.launch()), "linear");
  return true;
}

// `steps` as cuda::ExpertSteps; what these do not need may be left out. order int32, rows [entries,
// hidden], act and entry_act [entries, routed] BF16.
bool routed_experts_many_cuda_out(const Tensor& ids, int64_t experts, int64_t hidden,
                                  int64_t routed, bool bf16, bool gathers, int64_t steps,
                                  std::optional<Tensor> x, std::optional<Tensor> w13,
                                  std::optional<Tensor> scale, std::optional<Tensor> scale_2,
                                  std::optional<Tensor> w2, std::optional<Tensor> w2_scale,
                                  std::optional<Tensor> w2_scale_2,
                                  std::optional<Tensor> topk_weights, std::optional<Tensor> shared,
                                  std::optional<Tensor> entry_act, Tensor order, Tensor rows,
                                  Tensor act, std::optional<Tensor> out, bool enable_pdl) {
  const CudaCall call(ids, enable_pdl);
  const auto missing = [&](cuda::ExpertSteps step, const std::optional<Tensor>& tensor,
                           const char* name) {
    STD_TORCH_CHECK((steps & step) == 0 || tensor.has_value(), name, ": want one for these steps");
    return (steps & step) == 0;
  };
  if (experts > 1 << 16 || hidden > 1 << 16 || routed > 1 << 16 || ids.numel() == 0) return false;
  const int64_t tokens = ids.size(0), entries = ids.numel();
  cuda::RoutedExperts in{};
  in.steps = static_cast<unsigned>(steps);
  in.routing = routing_of(call, ids, experts);
  in.bf16 = bf16;
  in.gathers = gathers;
  const int64_t packed = bf16 ? 1 : 2;
  in.hidden = static_cast<int>(hidden);
  in.routed_size = static_cast<int>(routed);
  missing(cuda::kGatherTokens, x, "x");
  missing(cuda::kGateUp, x, "x");
  if (x.has_value()) {
    call.check_on(*x, "x");
    if (!many_rows(*x)) return false;
    STD_TORCH_CHECK(x->size(0) == tokens && x->size(1) == hidden, "x: want [tokens, hidden]");
    in.x = data<void>(*x);
    in.x_stride = row_stride(*x);
  }
  if (!missing(cuda::kGateUp, w13, "w13")) {
    const Weights weights(call, *w13, scale, scale_2);
    if (!weights.readable || bf16 == scale.has_value()) return false;
    STD_TORCH_CHECK(w13->numel() * packed == experts * 2 * routed * hidden,
                    "w13: want [E, 2 * I, H], or half of H where it is packed");
    in.gate_up = weights.matrix;
    in.gate_up_scale_2 = weights.scale_2;
  }
  missing(cuda::kGatherActs, entry_act, "entry_act");
  if (entry_act.has_value()) {
    call.check_dense(*entry_act, "entry_act", true, entries * routed);
    in.entry_act = data<void>(*entry_act);
  }
  if (!missing(cuda::kDown, w2, "w2")) {
    const Weights weights(call, *w2, w2_scale, w2_scale_2);
    if (!weights.readable || bf16 == w2_scale.has_value()) return false;
    STD_TORCH_CHECK(w2->numel() * packed == experts * hidden * routed,
                    "w2: want [E, H, I], or half of I where it is packed");
    in.down = weights.matrix;
    in.down_scale_2 = weights.scale_2;
  }
  if (!missing(cuda::kCombine, topk_weights, "topk_weights") &&
      !missing(cuda::kCombine, out, "out")) {
    call.check_dense(*topk_weights, "topk_weights", ScalarType::Float, entries);
    call.check_dense(*out, "out", true, tokens * hidden);
    in.weights = data<float>(*topk_weights);
    in.out = mutable_data<void>(*out);
  }
  if (shared.has_value()) {
    call.check_dense(*shared, "shared", true, tokens * hidden);
    in.shared = data<void>(*shared);
  }
  call.check_dense(order, "order", ScalarType::Int, cuda::routed_experts_many_words(in.routing));
  call.check_dense(rows, "rows", true, entries * hidden);
  call.check_dense(act, "act", true, entries * routed);
  in.order = mutable_data<int32_t>(order);
  in.rows = mutable_data<void>(rows);
  in.act = mutable_data<void>(act);
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
      "int second, int third, int output, int tokens, int shares, Tensor(a!) out, bool enable_pdl) "
      "-> bool");
  m.def(
      "routed_experts_many_cuda_out(Tensor ids, int experts, int hidden, int routed, bool bf16, "
      "bool gathers, int steps, "
      "Tensor? x, Tensor? w13, Tensor? scale, Tensor? scale_2, Tensor? w2, Tensor? w2_scale, "
      "Tensor? w2_scale_2, Tensor? topk_weights, Tensor? shared, Tensor? entry_act, "
      "Tensor(a!) order, Tensor(b!) rows, Tensor(c!) act, Tensor(d!)? out, bool enable_pdl) "
      "-> bool");
  m.def("routed_experts_many_words(int tokens, int top_k, int experts) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(flint_native, CUDA, m) {
  m.impl("linear_many_cuda_out", TORCH_BOX(&flint::linear_many_cuda_out));
  m.impl("routed_experts_many_cuda_out", TORCH_BOX(&flint::routed_experts_many_cuda_out));
}

STABLE_TORCH_LIBRARY_IMPL(flint_native, CompositeExplicitAutograd, m) {
  m.impl("routed_experts_many_words", TORCH_BOX(&flint::routed_experts_many_words));
}
