// Tensors as the matrix products of csrc/cpu/matmul.h take them, checked; and the products as the
// public ops use them.
#pragma once

#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "cpu/matmul.h"
#include "nvfp4_layout.h"
#include "torch/call.h"

namespace flint {

// weight is [n, k] or [experts, n, k]; with NVFP4's scales its last dimension is k / 2.
inline cpu::Weight weight_of(const Tensor& weight, const std::optional<Tensor>& scale) {
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

inline cpu::GlobalScales scales_of(const std::optional<Tensor>& scale_2, int64_t experts, int64_t n,
                                   std::vector<int64_t> sizes) {
  if (!scale_2.has_value()) return {nullptr, {}};
  const int64_t total = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  STD_TORCH_CHECK(total == n, "shard_sizes: got ", total, " rows in all, want ", n);
  for (const int64_t size : sizes) STD_TORCH_CHECK(size >= 0, "shard_sizes: got ", size);
  check(*scale_2, "weight_scale_2", ScalarType::Float,
        experts * static_cast<int64_t>(sizes.size()));
  return {data<float>(*scale_2), std::move(sizes)};
}

inline cpu::Activations activations_of(const Tensor& x, int64_t k) {
  STD_TORCH_CHECK(x.dim() > 0 && x.size(x.dim() - 1) == k, "x: want rows of ", k, " values");
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < x.dim(); ++i) rows *= x.size(i);
  check(x, "x", ScalarType::BFloat16, rows * k);
  return {data<uint16_t>(x), rows};
}

inline cpu::Output output_of(Tensor& out, int64_t count) {
  if (out.scalar_type() == ScalarType::BFloat16) {
    check(out, "out", ScalarType::BFloat16, count);
    return {nullptr, mutable_data<uint16_t>(out)};
  }
  check(out, "out", ScalarType::Float, count);
  return {mutable_data<float>(out), nullptr};
}

// One scale is that of every row, whatever the shards are.
inline cpu::GlobalScales shard_scales(const std::optional<Tensor>& scale_2, int64_t n,
                                      std::vector<int64_t> sizes) {
  const bool one = scale_2.has_value() && scale_2->numel() == 1;
  return scales_of(scale_2, 1, n, one ? std::vector{n} : std::move(sizes));
}

// One scale an expert, or one for the gate's half of its rows and one for the up projection's.
inline cpu::GlobalScales expert_scales(const std::optional<Tensor>& scale_2,
                                       const cpu::Weight& weight) {
  const int64_t n = weight.n;
  const bool halves = scale_2.has_value() && scale_2->dim() == 2;
  STD_TORCH_CHECK(!halves || n % 2 == 0, "weight: got ", n,
                  " rows, want gate and up of equal size");
  return scales_of(scale_2, weight.experts, n, halves ? std::vector{n / 2, n / 2} : std::vector{n});
}

// A weight and its scales, dense, and their view.
struct Matrix {
  Tensor weight;
  std::optional<Tensor> scale, scale_2;
  cpu::Weight view;

  explicit Matrix(const Tensor& given) : weight(dense(given)), view(weight_of(weight, scale)) {}

  Matrix(const Tensor& given, const Tensor& given_scale, const Tensor& given_scale_2)
      : weight(dense(given)),
        scale(dense(given_scale)),
        scale_2(dense(given_scale_2)),
        view(weight_of(weight, scale)) {}
};

// out [rows, n] = x [rows, k] times a matrix, whose rows may be of several shards.
inline void multiply(const cpu::Activations& x, const Matrix& matrix, std::vector<int64_t> shards,
                     const cpu::Output& out) {
  const cpu::GlobalScales scales = shard_scales(matrix.scale_2, matrix.view.n, std::move(shards));
  cpu::matmul(x, matrix.view, scales, {x.rows, nullptr}, out, threads());
}

// act [rows, n / 2] = the SiLU gate of x times a matrix of gate rows, then up rows.
void multiply_silu(const cpu::Activations& x, const Matrix& matrix, uint16_t* act);

}  // namespace flint
