// Binds the CPU's matrix products to torch as ops of the private namespace `flint_native`.
//
// The public ops multiply by themselves (linear.cpp, experts.cpp). These are the same products with
// the number of threads for an argument, and any output type for any weight.
#include "torch/products.h"

namespace flint {
namespace {

void matmul_out(const Tensor& x, const Tensor& weight, std::optional<Tensor> scale,
                std::optional<Tensor> scale_2, std::vector<int64_t> shard_sizes, Tensor out,
                int64_t threads) {
  const cpu::Weight matrix = weight_of(weight, scale);
  STD_TORCH_CHECK(matrix.experts == 1, "weight: got ", matrix.experts, " experts, want one matrix");
  const cpu::GlobalScales scales = shard_scales(scale_2, matrix.n, std::move(shard_sizes));
  const cpu::Activations rows = activations_of(x, matrix.k);
  cpu::matmul(rows, matrix, scales, {rows.rows, nullptr}, output_of(out, rows.rows * matrix.n),
              static_cast<int>(threads));
}

void expert_matmul_out(const Tensor& x, const Tensor& topk_ids, const Tensor& weight,
                       std::optional<Tensor> scale, std::optional<Tensor> scale_2, Tensor out,
                       int64_t threads) {
  const cpu::Weight matrices = weight_of(weight, scale);
  const cpu::GlobalScales scales = expert_scales(scale_2, matrices);
  const cpu::Activations rows = activations_of(x, matrices.k);
  const int64_t count = topk_ids.numel();
  STD_TORCH_CHECK(rows.rows == 0 ? count == 0 : count % rows.rows == 0, "topk_ids: got ", count,
                  " ids, want a multiple of the ", rows.rows, " rows of x");
  check(topk_ids, "topk_ids", ScalarType::Int, count);
  cpu::matmul(rows, matrices, scales, {count, data<int32_t>(topk_ids)},
              output_of(out, count * matrices.n), static_cast<int>(threads));
}

}  // namespace
}  // namespace flint

STABLE_TORCH_LIBRARY_FRAGMENT(flint_native, m) {
  m.def(
      "matmul_out(Tensor x, Tensor weight, Tensor? weight_scale, Tensor? weight_scale_2, "
      "int[] shard_sizes, Tensor(a!) out, int num_threads) -> ()");
  m.def(
      "expert_matmul_out(Tensor x, Tensor topk_ids, Tensor weight, Tensor? weight_scale, "
      "Tensor? weight_scale_2, Tensor(a!) out, int num_threads) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(flint_native, CPU, m) {
  m.impl("matmul_out", TORCH_BOX(&flint::matmul_out));
  m.impl("expert_matmul_out", TORCH_BOX(&flint::expert_matmul_out));
}
