// Products of tokens with a matrix of weights, NVFP4 or BF16. No torch here.
#pragma once

#include <cstdint>

#include "cuda/launch.h"

namespace flint::cuda {

inline constexpr int kMostShards = 4;

// Weights as ModelOpt has them: codes [rows, width / 2], scales [rows, width / 16]; or BF16
// [rows, width] with `scales` null.
struct WeightMatrix {
  const void* elements;
  const void* scales;
};

enum class LinearOutput : int {
  kRounded,     // [tokens, rows] BF16
  kSiluAndMul,  // [tokens, rows / 2] BF16: gate rows, then up rows, each rounded before the gate
  kLogits,      // [tokens, rows] fp32, not rounded
};

// out = scale_2 * sum(x * weight). Row r has the global scale of its shard, the first whose end is
// above r. A token's bits are the same among any 2 to 8; alone it may be summed in another order.
struct Linear {
  WeightMatrix weight;
  const float* scale_2;  // [shards], on the device; null for BF16
  int shards;
  int64_t shard_end[kMostShards];
  const void* x;  // [tokens, width] BF16, x_stride elements apart
  int64_t x_stride;
  void* out;     // dense
  int64_t rows;  // of the weight
  int tokens, width;
  LinearOutput output;
};

// One to eight tokens. Whether the kernels take these sizes and addresses; others are for a general
// body.
bool linear_fits(const Linear& linear);

cudaError_t linear(const Linear& linear, const Launch& launch);

// Its way for one token with NVFP4 weights of Flint's widths, rounded.
bool linear_one_fits(const Linear& linear);

cudaError_t linear_one(const Linear& linear, const Launch& launch);

// The same for any number of tokens, with NVFP4 weights, on a GPU of compute capability 9.0; no
// logits. How it is cut: tiles of at most 64, 128 or 256 tokens, and so many CTAs that share the
// columns of one. A token's bits are the same among any others with the same number of shares.
struct LinearPlan {
  int tokens, shares;
};

inline constexpr int kMostShares = 8;  // a portable cluster

bool linear_many_fits(const Linear& linear);

// Whether there is such a plan for these sizes; and the one that takes the least time.
bool linear_many_has(const Linear& linear, const LinearPlan& plan);
LinearPlan linear_many_plan(const Linear& linear);

cudaError_t linear_many(const Linear& linear, const LinearPlan& plan, const Launch& launch);

}  // namespace flint::cuda
