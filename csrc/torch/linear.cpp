// Projections on the CPU, BF16 activations: the ops of flint_kernels/ops/linear.py.
#include "torch/products.h"

namespace flint {

namespace {

using Shards = std::vector<int64_t>;

Results linear(const Tensor& x, const Matrix& matrix, Shards shards, ScalarType type,
               const std::optional<Tensor>& given) {
  const Tensor rows = dense(x);
  Tensor out = given_or_new(given, with_last(x, matrix.view.n), type);
  const cpu::Activations activations = activations_of(rows, matrix.view.k);
  multiply(activations, matrix, std::move(shards),
           output_of(out, activations.rows * matrix.view.n));
  return {out};
}

Results linear_silu(const Tensor& x, const Matrix& matrix, const std::optional<Tensor>& given) {
  const Tensor rows = dense(x);
  const int64_t width = matrix.view.n / 2;
  const Tensor out = given_or_new(given, with_last(x, width), ScalarType::BFloat16);
  const cpu::Activations activations = activations_of(rows, matrix.view.k);
  check(out, "out", ScalarType::BFloat16, activations.rows * width);
  multiply_silu(activations, matrix, mutable_data<uint16_t>(out));
  return {out};
}

Results nvfp4_linear(const Tensor& x, const Tensor& weight, const Tensor& scale,
                     const Tensor& scale_2, std::optional<Shards> shard_sizes, bool enable_pdl,
                     std::optional<Tensor> out, bool checked) {
  static thread_local Admitted admitted;
  if (!admitted(checked, x, weight, scale, scale_2, shard_sizes, enable_pdl)) return {};
  return linear(x, Matrix(weight, scale, scale_2), shard_sizes.value_or(Shards{}),
                ScalarType::BFloat16, out);
}

Results bf16_linear(const Tensor& x, const Tensor& weight, bool enable_pdl,
                    std::optional<Tensor> out, bool checked) {
  static thread_local Admitted admitted;
  if (!admitted(checked, x, weight, enable_pdl)) return {};
  return linear(x, Matrix(weight), {}, ScalarType::BFloat16, out);
}

Results nvfp4_linear_silu_and_mul(const Tensor& x, const Tensor& weight, const Tensor& scale,
                                  const Tensor& scale_2, bool enable_pdl, std::optional<Tensor> out,
                                  bool checked) {
  static thread_local Admitted admitted;
  if (!admitted(checked, x, weight, scale, scale_2, enable_pdl)) return {};
  return linear_silu(x, Matrix(weight, scale, scale_2), out);
}

Results bf16_linear_silu_and_mul(const Tensor& x, const Tensor& weight, bool enable_pdl,
                                 std::optional<Tensor> out, bool checked) {
  static thread_local Admitted admitted;
  if (!admitted(checked, x, weight, enable_pdl)) return {};
  return linear_silu(x, Matrix(weight), out);
}

Results nvfp4_lm_head(const Tensor& x, const Tensor& weight, const Tensor& scale,
                      const Tensor& scale_2, bool enable_pdl, std::optional<Tensor> logits_out,
                      bool checked) {
  static thread_local Admitted admitted;
  if (!admitted(checked, x, weight, scale, scale_2, enable_pdl)) return {};
  return linear(x, Matrix(weight, scale, scale_2), {}, ScalarType::Float, logits_out);
}

Results bf16_lm_head(const Tensor& x, const Tensor& weight, bool enable_pdl,
                     std::optional<Tensor> logits_out, bool checked) {
  static thread_local Admitted admitted;
  if (!admitted(checked, x, weight, enable_pdl)) return {};
  return linear(x, Matrix(weight), {}, ScalarType::Float, logits_out);
}

}  // namespace
}  // namespace flint

STABLE_TORCH_LIBRARY_FRAGMENT(flint_native, m) {
  m.def(
      "nvfp4_linear(Tensor x, Tensor weight, Tensor weight_scale, Tensor weight_scale_2, "
      "int[]? shard_sizes=None, *, bool enable_pdl=False, Tensor(p!)? out=None, "
      "bool checked=False) -> Tensor[]");
  m.def(
      "bf16_linear(Tensor x, Tensor weight, *, bool enable_pdl=False, Tensor(p!)? out=None, "
      "bool checked=False) -> Tensor[]");
  m.def(
      "nvfp4_linear_silu_and_mul(Tensor x, Tensor weight, Tensor weight_scale, "
      "Tensor weight_scale_2, *, bool enable_pdl=False, Tensor(p!)? out=None, "
      "bool checked=False) -> Tensor[]");
  m.def(
      "bf16_linear_silu_and_mul(Tensor x, Tensor weight, *, bool enable_pdl=False, "
      "Tensor(p!)? out=None, bool checked=False) -> Tensor[]");
  m.def(
      "nvfp4_lm_head(Tensor x, Tensor weight, Tensor weight_scale, Tensor weight_scale_2, *, "
      "bool enable_pdl=False, Tensor(p!)? logits_out=None, bool checked=False) -> Tensor[]");
  m.def(
      "bf16_lm_head(Tensor x, Tensor weight, *, bool enable_pdl=False, "
      "Tensor(p!)? logits_out=None, bool checked=False) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(flint_native, CPU, m) {
  m.impl("nvfp4_linear", TORCH_BOX(&flint::nvfp4_linear));
  m.impl("bf16_linear", TORCH_BOX(&flint::bf16_linear));
  m.impl("nvfp4_linear_silu_and_mul", TORCH_BOX(&flint::nvfp4_linear_silu_and_mul));
  m.impl("bf16_linear_silu_and_mul", TORCH_BOX(&flint::bf16_linear_silu_and_mul));
  m.impl("nvfp4_lm_head", TORCH_BOX(&flint::nvfp4_lm_head));
  m.impl("bf16_lm_head", TORCH_BOX(&flint::bf16_lm_head));
}
