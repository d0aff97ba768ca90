// Binds the CPU's matrix products to torch as ops of the private namespace `flint_native`.
#include "cpu/matmul.h"

#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "nvfp4_layout.h"
#include "torch/binding.h"

namespace flint {
namespace {

// weight is [n, k] or [experts, n, k]; with NVFP4's scales its last dimension is k / 2.
cpu::Weight weight_of(const Tensor& weight, const std::optional<Tensor>& scale) {
  const int64_t dims = weight.dim();
  STD_TORCH_CHECK(dims == 2 || dims == 3, "weight: got ", dims, " dimensions, want 2 or 3");
  cpu::Weight out{};
  out.experts = dims == 3 ? weight.size(0) : 1;
  out.n = weight.size(dims - 2);
  const int64_t rows = out.experts * out.n;
  if (!scale.has_value()) {
    out.k = weight.size(dims - 1);
    check(weight, "weight", ScalarType::BFloat16, rows * out.k);
    out.bf16 = data<uint16_t>(weight);
    return out;
  }
  out.k = 2 * weight.size(dims - 1);
  STD_TORCH_CHECK(out.k % nvfp4::kBlockValues == 0, "weight: got k = ", out.k,
                  ", want a multiple of 16");
  check(weight, "weight", ScalarType::Byte, rows * out.k / 2);
  check(*scale, "weight_scale", ScalarType::Float8_e4m3fn, rows * out.k / nvfp4::kBlockValues);
  out.codes = data<uint8_t>(weight);
  out.scales = data<uint8_t>(*scale);
  return out;
}

cpu::GlobalScales scales_of(const std::optional<Tensor>& scale_2, int64_t experts, int64_t n,
                            std::vector<int64_t> sizes) {
  if (!scale_2.has_value()) return {nullptr, {}};
  const int64_t total = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  STD_TORCH_CHECK(total == n, "shard_sizes: got ", total, " rows in all, want ", n);
  for (const int64_t size : sizes) STD_TORCH_CHECK(size >= 0, "shard_sizes: got ", size);
  check(*scale_2, "weight_scale_2", ScalarType::Float,
        experts * static_cast<int64_t>(sizes.size()));
  return {data<float>(*scale_2), std::move(sizes)};
}

cpu::Activations activations_of(const Tensor& x, int64_t k) {
  STD_TORCH_CHECK(x.dim() > 0 && x.size(x.dim() - 1) == k, "x: want rows of ", k, " values");
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < x.dim(); ++i) rows *= x.size(i);
  check(x, "x", ScalarType::BFloat16, rows * k);
  return {data<uint16_t>(x), rows};
}

cpu::Output output_of(Tensor& out, int64_t count) {
  if (out.scalar_type() == ScalarType::BFloat16) {
    check(out, "out", ScalarType::BFloat16, count);
    return {nullptr, mutable_data<uint16_t>(out)};
  }
  check(out, "out", ScalarType::Float, count);
  return {mutable_data<float>(out), nullptr};
}

void matmul_out(const Tensor& x, const Tensor& weight, std::optional<Tensor> scale,
                std::optional<Tensor> scale_2, std::vector<int64_t> shard_sizes, Tensor out,
                int64_t threads) {
  const cpu::Weight matrix = weight_of(weight, scale);
  STD_TORCH_CHECK(matrix.experts == 1, "weight: got ", matrix.experts, " experts, want one matrix");
  // One scale is that of every row, whatever the shards are.
  const bool one = scale_2.has_value() && scale_2->numel() == 1;
  const cpu::GlobalScales scales =
      scales_of(scale_2, 1, matrix.n, one ? std::vector{matrix.n} : std::move(shard_sizes));
  const cpu::Activations rows = activations_of(x, matrix.k);
  cpu::matmul(rows, matrix, scales, {rows.rows, nullptr}, output_of(out, rows.rows * matrix.n),
              static_cast<int>(threads));
}

void expert_matmul_out(const Tensor& x, const Tensor& topk_ids, const Tensor& weight,
                       std::optional<Tensor> scale, std::optional<Tensor> scale_2, Tensor out,
                       int64_t threads) {
  const cpu::Weight matrices = weight_of(weight, scale);
  const int64_t n = matrices.n;
  // One scale an expert, or one for the gate's half of its rows and one for the up projection's.
  const bool halves = scale_2.has_value() && scale_2->dim() == 2;
  STD_TORCH_CHECK(!halves || n % 2 == 0, "weight: got ", n,
                  " rows, want gate and up of equal size");
  const cpu::GlobalScales scales =
      scales_of(scale_2, matrices.experts, n, halves ? std::vector{n / 2, n / 2} : std::vector{n});
  const cpu::Activations rows = activations_of(x, matrices.k);
  const int64_t count = topk_ids.numel();
  STD_TORCH_CHECK(rows.rows == 0 ? count == 0 : count % rows.rows == 0, "topk_ids: got ", count,
                  " ids, want a multiple of the ", rows.rows, " rows of x");
  check(topk_ids, "topk_ids", ScalarType::Int, count);
  cpu::matmul(rows, matrices, scales, {count, data<int32_t>(topk_ids)}, output_of(out, count * n),
              static_cast<int>(threads));
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
