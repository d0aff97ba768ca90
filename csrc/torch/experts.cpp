// Router and experts on the CPU, BF16 activations: the ops of flint_kernels/ops/experts.py, and
// those of low_latency.py that fuse them.
#include "cpu/norm.h"
#include "cpu/routing.h"
#include "cpu/values.h"
#include "torch/products.h"

namespace flint {
namespace {

constexpr auto kBf16 = ScalarType::BFloat16;

// What the router has chosen: `count` experts a row, with weights where they matter.
struct Chosen {
  Tensor ids;                     // [rows, count]
  std::optional<Tensor> weights;  // the same
  int64_t rows, count;

  explicit Chosen(const Tensor& given, const std::optional<Tensor>& given_weights = std::nullopt)
      : ids(dense(given)),
        weights(dense(given_weights)),
        rows(given.size(0)),
        count(given.size(1)) {
    check(ids, "topk_ids", ScalarType::Int, rows * count);
    if (weights.has_value()) check(*weights, "topk_weights", ScalarType::Float, rows * count);
  }

  int64_t entries() const { return rows * count; }

  bool are_experts(int64_t experts) const {
    return cpu::are_experts(data<int32_t>(ids), entries(), experts);
  }
};

// Each entry times its row of x: a row has all its entries, or one of its own.
void multiply_entries(const cpu::Activations& x, const Chosen& chosen, const Matrix& matrix,
                      const cpu::Output& out) {
  cpu::matmul(x, matrix.view, expert_scales(matrix.scale_2, matrix.view),
              {chosen.entries(), data<int32_t>(chosen.ids)}, out, threads());
}

// act [entries, I]: gate and up stay in fp32 until their product is rounded.
void routed_act(const cpu::Activations& x, const Chosen& chosen, const Matrix& w13, uint16_t* act) {
  const int64_t width = w13.view.n / 2;
  const auto gate_up = scratch<float>(chosen.entries() * 2 * width);
  multiply_entries(x, chosen, w13, {gate_up.get(), nullptr});
  cpu::routed_act(gate_up.get(), chosen.entries(), width, act);
}

// out [rows, H] of act [entries, I], plus `shared` [rows, H] where there is one.
void routed_down(const uint16_t* act, const Chosen& chosen, const Matrix& w2,
                 const uint16_t* shared, uint16_t* out) {
  const auto outputs = scratch<uint16_t>(chosen.entries() * w2.view.n);
  multiply_entries({act, chosen.entries()}, chosen, w2, {nullptr, outputs.get()});
  cpu::combine(outputs.get(), data_or_null<float>(chosen.weights), data<int32_t>(chosen.ids),
               shared, chosen.rows, chosen.count, w2.view.experts, w2.view.n, out);
}

Results router_topk(const Tensor& logits, int64_t top_k, bool renormalize, bool enable_pdl,
                    std::optional<Tensor> topk_weights_out, std::optional<Tensor> topk_ids_out,
                    bool checked) {
  static thread_local Admitted admitted;
  if (!admitted(checked, logits, top_k, renormalize, enable_pdl)) return {};
  const Tensor x = dense(logits);
  const int64_t rows = x.size(0), experts = x.size(1);
  const Tensor weights = given_or_new(topk_weights_out, {rows, top_k}, ScalarType::Float);
  const Tensor ids = given_or_new(topk_ids_out, {rows, top_k}, ScalarType::Int);
  check(x, "logits", kBf16, rows * experts);
  check(weights, "topk_weights_out", ScalarType::Float, rows * top_k);
  check(ids, "topk_ids_out", ScalarType::Int, rows * top_k);
  STD_TORCH_CHECK(top_k <= experts, "top_k: got ", top_k, ", want at most ", experts);
  cpu::router_topk(data<uint16_t>(x), rows, experts, top_k, renormalize,
                   mutable_data<float>(weights), mutable_data<int32_t>(ids));
  return {weights, ids};
}

Results fused_add_rms_norm_router_topk(const Tensor& x, const Tensor& residual,
                                       const Tensor& weight, const Tensor& router_weight,
                                       int64_t top_k, double eps, std::optional<Tensor> workspace,
                                       bool enable_pdl, std::optional<Tensor> normed_out,
                                       std::optional<Tensor> residual_out,
                                       std::optional<Tensor> topk_weights_out,
                                       std::optional<Tensor> topk_ids_out, bool checked) {
  static thread_local Admitted admitted;
  if (!admitted(checked, x, residual, weight, router_weight, top_k, eps, workspace, enable_pdl)) {
    return {};
  }
  const Tensor rows_of_x = dense(x), added = dense(residual), norm = dense(weight);
  const Matrix router(router_weight);
  const int64_t rows = x.size(0), width = x.size(1), experts = router.view.n;
  const Tensor normed = given_or_new(normed_out, {rows, width}, kBf16);
  const Tensor sum = given_or_new(residual_out, {rows, width}, kBf16);
  const Tensor weights = given_or_new(topk_weights_out, {rows, top_k}, ScalarType::Float);
  const Tensor ids = given_or_new(topk_ids_out, {rows, top_k}, ScalarType::Int);
  check(rows_of_x, "x", kBf16, rows * width);
  check(added, "residual", kBf16, rows * width);
  check(norm, "weight", kBf16, width);
  check(normed, "normed_out", kBf16, rows * width);
  check(sum, "residual_out", kBf16, rows * width);
  check(weights, "topk_weights_out", ScalarType::Float, rows * top_k);
  check(ids, "topk_ids_out", ScalarType::Int, rows * top_k);
  STD_TORCH_CHECK(top_k <= experts, "top_k: got ", top_k, ", want at most ", experts);
  cpu::rms_norm(data<uint16_t>(rows_of_x), data<uint16_t>(added), data<uint16_t>(norm),
                static_cast<float>(eps), rows, width, mutable_data<uint16_t>(normed),
                mutable_data<uint16_t>(sum), threads());
  const auto logits = scratch<uint16_t>(rows * experts);
  multiply(activations_of(normed, router.view.k), router, {}, {nullptr, logits.get()});
  cpu::router_topk(logits.get(), rows, experts, top_k, true, mutable_data<float>(weights),
                   mutable_data<int32_t>(ids));
  return {normed, sum, weights, ids};
}

Results moe_gate_up(const Tensor& x, const Chosen& chosen, const Matrix& w13,
                    const Matrix& shared_w13, const std::optional<Tensor>& routed_act_out,
                    const std::optional<Tensor>& shared_act_out) {
  const Tensor rows_of_x = dense(x);
  const cpu::Activations rows = activations_of(rows_of_x, w13.view.k);
  const int64_t width = w13.view.n / 2, shared_width = shared_w13.view.n / 2;
  const Tensor routed = given_or_new(routed_act_out, {chosen.rows, chosen.count, width}, kBf16);
  const Tensor shared = given_or_new(shared_act_out, {chosen.rows, shared_width}, kBf16);
  STD_TORCH_CHECK(rows.rows == chosen.rows && shared_w13.view.k == w13.view.k,
                  "x, topk_ids, w13 and shared_w13: sizes that do not fit");
  check(routed, "routed_act_out", kBf16, chosen.entries() * width);
  check(shared, "shared_act_out", kBf16, chosen.rows * shared_width);
  multiply_silu(rows, shared_w13, mutable_data<uint16_t>(shared));
  routed_act(rows, chosen, w13, mutable_data<uint16_t>(routed));
  return {routed, shared};
}

Results nvfp4_moe_gate_up(const Tensor& x, const Tensor& topk_ids, const Tensor& w13,
                          const Tensor& w13_scale, const Tensor& w13_scale_2,
                          const Tensor& shared_w13, const Tensor& shared_w13_scale,
                          const Tensor& shared_w13_scale_2, std::optional<Tensor> workspace,
                          bool enable_pdl, std::optional<Tensor> routed_act_out,
                          std::optional<Tensor> shared_act_out, bool checked) {
  static thread_local Admitted admitted;
  if (!admitted(checked, x, topk_ids, w13, w13_scale, w13_scale_2, shared_w13, shared_w13_scale,
                shared_w13_scale_2, workspace, enable_pdl)) {
    return {};
  }
  const Chosen chosen(topk_ids);
  if (!checked && !chosen.are_experts(w13.size(0))) return {};
  return moe_gate_up(x, chosen, Matrix(w13, w13_scale, w13_scale_2),
                     Matrix(shared_w13, shared_w13_scale, shared_w13_scale_2), routed_act_out,
                     shared_act_out);
}

Results bf16_moe_gate_up(const Tensor& x, const Tensor& topk_ids, const Tensor& w13,
                         const Tensor& shared_w13, std::optional<Tensor> workspace, bool enable_pdl,
                         std::optional<Tensor> routed_act_out, std::optional<Tensor> shared_act_out,
                         bool checked) {
  static thread_local Admitted admitted;
  if (!admitted(checked, x, topk_ids, w13, shared_w13, workspace, enable_pdl)) return {};
  const Chosen chosen(topk_ids);
  if (!checked && !chosen.are_experts(w13.size(0))) return {};
  return moe_gate_up(x, chosen, Matrix(w13), Matrix(shared_w13), routed_act_out, shared_act_out);
}

Results moe_down(const Tensor& routed_act, const Tensor& shared_act, const Chosen& chosen,
                 const Matrix& w2, const Matrix& shared_w2, const std::optional<Tensor>& given) {
  const Tensor routed = dense(routed_act), shared = dense(shared_act);
  const int64_t hidden = w2.view.n;
  const Tensor out = given_or_new(given, {chosen.rows, hidden}, kBf16);
  STD_TORCH_CHECK(shared_w2.view.n == hidden, "shared_w2: got ", shared_w2.view.n, " rows, want ",
                  hidden);
  check(routed, "routed_act", kBf16, chosen.entries() * w2.view.k);
  check(shared, "shared_act", kBf16, chosen.rows * shared_w2.view.k);
  check(out, "out", kBf16, chosen.rows * hidden);
  const auto added = scratch<uint16_t>(chosen.rows * hidden);
  multiply({data<uint16_t>(shared), chosen.rows}, shared_w2, {hidden}, {nullptr, added.get()});
  routed_down(data<uint16_t>(routed), chosen, w2, added.get(), mutable_data<uint16_t>(out));
  return {out};
}

Results nvfp4_moe_down(const Tensor& routed_act, const Tensor& shared_act,
                       const Tensor& topk_weights, const Tensor& topk_ids, const Tensor& w2,
                       const Tensor& w2_scale, const Tensor& w2_scale_2, const Tensor& shared_w2,
                       const Tensor& shared_w2_scale, const Tensor& shared_w2_scale_2,
                       std::optional<Tensor> workspace, bool enable_pdl, std::optional<Tensor> out,
                       bool checked) {
  static thread_local Admitted admitted;
  if (!admitted(checked, routed_act, shared_act, topk_weights, topk_ids, w2, w2_scale, w2_scale_2,
                shared_w2, shared_w2_scale, shared_w2_scale_2, workspace, enable_pdl)) {
    return {};
  }
  const Chosen chosen(topk_ids, topk_weights);
  if (!checked && !chosen.are_experts(w2.size(0))) return {};
  return moe_down(routed_act, shared_act, chosen, Matrix(w2, w2_scale, w2_scale_2),
                  Matrix(shared_w2, shared_w2_scale, shared_w2_scale_2), out);
}

Results bf16_moe_down(const Tensor& routed_act, const Tensor& shared_act,
                      const Tensor& topk_weights, const Tensor& topk_ids, const Tensor& w2,
                      const Tensor& shared_w2, std::optional<Tensor> workspace, bool enable_pdl,
                      std::optional<Tensor> out, bool checked) {
  static thread_local Admitted admitted;
  if (!admitted(checked, routed_act, shared_act, topk_weights, topk_ids, w2, shared_w2, workspace,
                enable_pdl)) {
    return {};
  }
  const Chosen chosen(topk_ids, topk_weights);
  if (!checked && !chosen.are_experts(w2.size(0))) return {};
  return moe_down(routed_act, shared_act, chosen, Matrix(w2), Matrix(shared_w2), out);
}

Results routed_experts(const Tensor& x, const Chosen& chosen, const Matrix& w13, const Matrix& w2,
                       const std::optional<Tensor>& shared_output,
                       const std::optional<Tensor>& given) {
  const Tensor rows_of_x = dense(x);
  const std::optional<Tensor> shared = dense(shared_output);
  const cpu::Activations rows = activations_of(rows_of_x, w13.view.k);
  const int64_t count = chosen.rows * w2.view.n;
  const Tensor out = given_or_new(given, {chosen.rows, w2.view.n}, kBf16);
  STD_TORCH_CHECK(rows.rows == chosen.rows && w2.view.k == w13.view.n / 2,
                  "x, topk_ids, w13 and w2: sizes that do not fit");
  if (shared.has_value()) check(*shared, "shared_output", kBf16, count);
  check(out, "out", kBf16, count);
  const auto act = scratch<uint16_t>(chosen.entries() * w2.view.k);
  routed_act(rows, chosen, w13, act.get());
  routed_down(act.get(), chosen, w2, data_or_null<uint16_t>(shared), mutable_data<uint16_t>(out));
  return {out};
}

Results nvfp4_routed_experts(const Tensor& x, const Tensor& topk_weights, const Tensor& topk_ids,
                             const Tensor& w13, const Tensor& w13_scale, const Tensor& w13_scale_2,
                             const Tensor& w2, const Tensor& w2_scale, const Tensor& w2_scale_2,
                             std::optional<Tensor> shared_output, std::optional<Tensor> workspace,
                             bool enable_pdl, std::optional<Tensor> out, bool checked) {
  static thread_local Admitted admitted;
  if (!admitted(checked, x, topk_weights, topk_ids, w13, w13_scale, w13_scale_2, w2, w2_scale,
                w2_scale_2, shared_output, workspace, enable_pdl)) {
    return {};
  }
  const Chosen chosen(topk_ids, topk_weights);
  if (!checked && !chosen.are_experts(w13.size(0))) return {};
  return routed_experts(x, chosen, Matrix(w13, w13_scale, w13_scale_2),
                        Matrix(w2, w2_scale, w2_scale_2), shared_output, out);
}

Results bf16_routed_experts(const Tensor& x, const Tensor& topk_weights, const Tensor& topk_ids,
                            const Tensor& w13, const Tensor& w2,
                            std::optional<Tensor> shared_output, std::optional<Tensor> workspace,
                            bool enable_pdl, std::optional<Tensor> out, bool checked) {
  static thread_local Admitted admitted;
  if (!admitted(checked, x, topk_weights, topk_ids, w13, w2, shared_output, workspace,
                enable_pdl)) {
    return {};
  }
  const Chosen chosen(topk_ids, topk_weights);
  if (!checked && !chosen.are_experts(w13.size(0))) return {};
  return routed_experts(x, chosen, Matrix(w13), Matrix(w2), shared_output, out);
}

}  // namespace
}  // namespace flint

STABLE_TORCH_LIBRARY_FRAGMENT(flint_native, m) {
  m.def(
      "router_topk(Tensor logits, int top_k, bool renormalize=True, *, bool enable_pdl=False, "
      "Tensor(p!)? topk_weights_out=None, Tensor(q!)? topk_ids_out=None, bool checked=False) "
      "-> Tensor[]");
  m.def(
      "fused_add_rms_norm_router_topk(Tensor x, Tensor residual, Tensor weight, "
      "Tensor router_weight, int top_k, float eps=1e-6, *, Tensor? workspace=None, "
      "bool enable_pdl=False, Tensor(p!)? normed_out=None, Tensor(q!)? residual_out=None, "
      "Tensor(r!)? topk_weights_out=None, Tensor(s!)? topk_ids_out=None, bool checked=False) "
      "-> Tensor[]");
  m.def(
      "nvfp4_moe_gate_up(Tensor x, Tensor topk_ids, Tensor w13, Tensor w13_scale, "
      "Tensor w13_scale_2, Tensor shared_w13, Tensor shared_w13_scale, Tensor shared_w13_scale_2, "
      "*, Tensor? workspace=None, bool enable_pdl=False, Tensor(p!)? routed_act_out=None, "
      "Tensor(q!)? shared_act_out=None, bool checked=False) -> Tensor[]");
  m.def(
      "bf16_moe_gate_up(Tensor x, Tensor topk_ids, Tensor w13, Tensor shared_w13, *, "
      "Tensor? workspace=None, bool enable_pdl=False, Tensor(p!)? routed_act_out=None, "
      "Tensor(q!)? shared_act_out=None, bool checked=False) -> Tensor[]");
  m.def(
      "nvfp4_moe_down(Tensor routed_act, Tensor shared_act, Tensor topk_weights, Tensor topk_ids, "
      "Tensor w2, Tensor w2_scale, Tensor w2_scale_2, Tensor shared_w2, Tensor shared_w2_scale, "
      "Tensor shared_w2_scale_2, *, Tensor? workspace=None, bool enable_pdl=False, "
      "Tensor(p!)? out=None, bool checked=False) -> Tensor[]");
  m.def(
      "bf16_moe_down(Tensor routed_act, Tensor shared_act, Tensor topk_weights, Tensor topk_ids, "
      "Tensor w2, Tensor shared_w2, *, Tensor? workspace=None, bool enable_pdl=False, "
      "Tensor(p!)? out=None, bool checked=False) -> Tensor[]");
  m.def(
      "nvfp4_routed_experts(Tensor x, Tensor topk_weights, Tensor topk_ids, Tensor w13, "
      "Tensor w13_scale, Tensor w13_scale_2, Tensor w2, Tensor w2_scale, Tensor w2_scale_2, "
      "Tensor? shared_output=None, *, Tensor? workspace=None, bool enable_pdl=False, "
      "Tensor(p!)? out=None, bool checked=False) -> Tensor[]");
  m.def(
      "bf16_routed_experts(Tensor x, Tensor topk_weights, Tensor topk_ids, Tensor w13, Tensor w2, "
      "Tensor? shared_output=None, *, Tensor? workspace=None, bool enable_pdl=False, "
      "Tensor(p!)? out=None, bool checked=False) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(flint_native, CPU, m) {
  m.impl("router_topk", TORCH_BOX(&flint::router_topk));
  m.impl("fused_add_rms_norm_router_topk", TORCH_BOX(&flint::fused_add_rms_norm_router_topk));
  m.impl("nvfp4_moe_gate_up", TORCH_BOX(&flint::nvfp4_moe_gate_up));
  m.impl("bf16_moe_gate_up", TORCH_BOX(&flint::bf16_moe_gate_up));
  m.impl("nvfp4_moe_down", TORCH_BOX(&flint::nvfp4_moe_down));
  m.impl("bf16_moe_down", TORCH_BOX(&flint::bf16_moe_down));
  m.impl("nvfp4_routed_experts", TORCH_BOX(&flint::nvfp4_routed_experts));
  m.impl("bf16_routed_experts", TORCH_BOX(&flint::bf16_routed_experts));
}
