// Tensors as the matrix products of csrc/cpu/matmul.h take them, checked; and the products as the
// public ops use them.
#pragma once

#include <optional>
#include <vector>

#include "cpu/matmul.h"
#include "torch/call.h"

namespace flint {

// weight is [n, k] or [experts, n, k]; with NVFP4's scales its last dimension is k / 2.
cpu::Weight weight_of(const Tensor& weight, const std::optional<Tensor>& scale);

// x is [..., k].
cpu::Activations activations_of(const Tensor& x, int64_t k);

// `count` elements of BF16, or of fp32.
cpu::Output output_of(Tensor& out, int64_t count);

// One scale a shard. One alone is that of every row, whatever the shards are.
cpu::GlobalScales shard_scales(const std::optional<Tensor>& scale_2, int64_t n,
                               std::vector<int64_t> sizes);

// One scale an expert, or one for the gate's half of its rows and one for the up projection's.
cpu::GlobalScales expert_scales(const std::optional<Tensor>& scale_2, const cpu::Weight& weight);

// A weight and its scales, dense, and their view.
struct Matrix {
  Tensor weight;
  std::optional<Tensor> scale, scale_2;
  cpu::Weight view;

  explicit Matrix(const Tensor& given);
  Matrix(const Tensor& given, const Tensor& given_scale, const Tensor& given_scale_2);
};

// out [rows, n] = x [rows, k] times a matrix, whose rows may be of several shards.
void multiply(const cpu::Activations& x, const Matrix& matrix, std::vector<int64_t> shards,
              const cpu::Output& out);

// act [rows, n / 2] = the SiLU gate of x times a matrix of gate rows, then up rows.
void multiply_silu(const cpu::Activations& x, const Matrix& matrix, uint16_t* act);

}  // namespace flint
