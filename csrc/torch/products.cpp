#include "torch/products.h"

#include <numeric>
#include <utility>

#include "cpu/norm.h"
#include "nvfp4_layout.h"

namespace flint {

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

// One scale for each of the runs of rows of each expert.
static cpu::GlobalScales scales_of(const std::optional<Tensor>& scale_2, int64_t experts, int64_t n,
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

cpu::GlobalScales shard_scales(const std::optional<Tensor>& scale_2, int64_t n,
                               std::vector<int64_t> sizes) {
  const bool one = scale_2.has_value() && scale_2->numel() == 1;
  return scales_of(scale_2, 1, n, one ? std::vector{n} : std::move(sizes));
}

cpu::GlobalScales expert_scales(const std::optional<Tensor>& scale_2, const cpu::Weight& weight) {
  const int64_t n = weight.n;
  const bool halves = scale_2.has_value() && scale_2->dim() == 2;
  STD_TORCH_CHECK(!halves || n % 2 == 0, "weight: got ", n,
                  " rows, want gate and up of equal size");
  return scales_of(scale_2, weight.experts, n, halves ? std::vector{n / 2, n / 2} : std::vector{n});
}

Matrix::Matrix(const Tensor& given) : weight(dense(given)), view(weight_of(weight, scale)) {}

Matrix::Matrix(const Tensor& given, const Tensor& given_scale, const Tensor& given_scale_2)
    : weight(dense(given)),
      scale(dense(given_scale)),
      scale_2(dense(given_scale_2)),
      view(weight_of(weight, scale)) {}

void multiply(const cpu::Activations& x, const Matrix& matrix, std::vector<int64_t> shards,
              const cpu::Output& out) {
  const cpu::GlobalScales scales = shard_scales(matrix.scale_2, matrix.view.n, std::move(shards));
  cpu::matmul(x, matrix.view, scales, {x.rows, nullptr}, out, threads());
}

void multiply_silu(const cpu::Activations& x, const Matrix& matrix, uint16_t* act) {
  const int64_t width = matrix.view.n / 2;
  const auto gate_up = scratch<uint16_t>(x.rows * 2 * width);
  multiply(x, matrix, {width, width}, {nullptr, gate_up.get()});
  cpu::silu_and_mul(gate_up.get(), x.rows, width, act, threads());
}

}  // namespace flint
