// Products of BF16 activations with BF16 or NVFP4 weights on the CPU, summed in fp32. No torch
// here.
//
// An output's bits are a function of its own row of x and its own row of the weight: never of the
// number of rows, of where they lie in memory, of the number of threads, or of what else the call
// computes. Sums run over k in 16 lanes, which one fixed tree then adds. (A CPU with fused
// multiply-adds has other bits than one without.)
#pragma once

#include <cstdint>
#include <vector>

namespace flint::cpu {

// One matrix for each expert, dense; a plain linear has one expert.
struct Weight {
  int64_t experts, n, k;
  const uint16_t* bf16;   // [experts, n, k]; or null, and then NVFP4 in ModelOpt's layout:
  const uint8_t* codes;   // [experts, n, k / 2], k a multiple of 16
  const uint8_t* scales;  // [experts, n, k / 16], E4M3FN
};

// Factors of the finished sums: one for each run of output columns (a shard) of each expert.
struct GlobalScales {
  const float* values;         // [experts, shards]; null: none
  std::vector<int64_t> sizes;  // columns in each shard, n in all
};

struct Activations {
  const uint16_t* bf16;  // [rows, k]
  int64_t rows;
};

// Which product each row of the output is.
struct Entries {
  int64_t count;
  const int32_t* experts;  // [count]; null: expert 0 for all
};

// Exactly one is not null: [entries, n], fp32, or rounded to BF16 (nearest even, NaN to NaN).
struct Output {
  float* fp32;
  uint16_t* bf16;
};

// out[i, j] = scale * sum over k of x[i / (entries / rows), k] * weight[experts[i], j, k], and
// zeros where experts[i] is no expert. `threads` is the most that the call may use.
void matmul(const Activations& x, const Weight& weight, const GlobalScales& scales,
            const Entries& entries, const Output& out, int threads);

}  // namespace flint::cpu
