// Norms and the SiLU gate on the CPU, BF16: the ops of flint_kernels/ops/norm.py.
#include "cpu/norm.h"

#include "torch/call.h"

namespace flint {
namespace {

constexpr auto kBf16 = ScalarType::BFloat16;

struct Norm {
  Tensor x, weight;
  int64_t rows, width;
};

Norm norm_of(const Tensor& x, const Tensor& weight) {
  Norm norm{dense(x), dense(weight), 0, weight.numel()};
  norm.rows = norm.width == 0 ? 0 : x.numel() / norm.width;
  check(norm.x, "x", kBf16, norm.rows * norm.width);
  check(norm.weight, "weight", kBf16, norm.width);
  return norm;
}

Tensor output(const Norm& norm, const Tensor& x, const std::optional<Tensor>& given) {
  Tensor out = given_or_new(given, with_last(x, norm.width), kBf16);
  check(out, "out", kBf16, norm.rows * norm.width);
  return out;
}

Results rms_norm(const Tensor& x, const Tensor& weight, double eps, bool enable_pdl,
                 std::optional<Tensor> out, bool checked) {
  static thread_local Admitted admitted;
  if (!admitted(checked, x, weight, eps, enable_pdl)) return {};
  const Norm norm = norm_of(x, weight);
  const Tensor normed = output(norm, x, out);
  cpu::rms_norm(data<uint16_t>(norm.x), nullptr, data<uint16_t>(norm.weight),
                static_cast<float>(eps), norm.rows, norm.width, mutable_data<uint16_t>(normed),
                nullptr, threads());
  return {normed};
}

Results fused_add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight,
                           double eps, bool enable_pdl, std::optional<Tensor> normed_out,
                           std::optional<Tensor> residual_out, bool checked) {
  static thread_local Admitted admitted;
  if (!admitted(checked, x, residual, weight, eps, enable_pdl)) return {};
  const Norm norm = norm_of(x, weight);
  const Tensor added = dense(residual);
  check(added, "residual", kBf16, norm.rows * norm.width);
  const Tensor normed = output(norm, x, normed_out), sum = output(norm, x, residual_out);
  cpu::rms_norm(data<uint16_t>(norm.x), data<uint16_t>(added), data<uint16_t>(norm.weight),
                static_cast<float>(eps), norm.rows, norm.width, mutable_data<uint16_t>(normed),
                mutable_data<uint16_t>(sum), threads());
  return {normed, sum};
}

Results silu_and_mul(const Tensor& x, bool enable_pdl, std::optional<Tensor> out, bool checked) {
  static thread_local Admitted admitted;
  if (!admitted(checked, x, enable_pdl)) return {};
  const Tensor gate_up = dense(x);
  const int64_t width = x.size(x.dim() - 1) / 2;
  const int64_t rows = width == 0 ? 0 : x.numel() / (2 * width);
  const Tensor act = given_or_new(out, with_last(x, width), kBf16);
  check(gate_up, "x", kBf16, rows * 2 * width);
  check(act, "out", kBf16, rows * width);
  cpu::silu_and_mul(data<uint16_t>(gate_up), rows, width, mutable_data<uint16_t>(act), threads());
  return {act};
}

}  // namespace
}  // namespace flint

STABLE_TORCH_LIBRARY_FRAGMENT(flint_native, m) {
  m.def(
      "rms_norm(Tensor x, Tensor weight, float eps=1e-6, *, bool enable_pdl=False, "
      "Tensor(p!)? out=None, bool checked=False) -> Tensor[]");
  m.def(
      "fused_add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps=1e-6, *, "
      "bool enable_pdl=False, Tensor(p!)? normed_out=None, Tensor(q!)? residual_out=None, "
      "bool checked=False) -> Tensor[]");
  m.def(
      "silu_and_mul(Tensor x, *, bool enable_pdl=False, Tensor(p!)? out=None, bool checked=False) "
      "-> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(flint_native, CPU, m) {
  m.impl("rms_norm", TORCH_BOX(&flint::rms_norm));
  m.impl("fused_add_rms_norm", TORCH_BOX(&flint::fused_add_rms_norm));
  m.impl("silu_and_mul", TORCH_BOX(&flint::silu_and_mul));
}
