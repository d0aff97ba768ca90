// Seeded sampling on the CPU, one row at a time. No torch here.
#pragma once

#include <cstdint>

namespace flint::cpu {

// How the tokens of rows are drawn; one value of each a row.
struct Draws {
  const float* temperature;  // 0: the first of the largest
  const int32_t* top_k;      // 0: all
  const float* top_p;
  const int64_t* seed;
  const int64_t* offset;
  int64_t max_top_k;  // a promise that no row that is not greedy keeps more; 0: none
};

// Whether every setting is in range and every row of logits has a candidate.
bool can_sample(const float* logits, int64_t rows, int64_t count, const Draws& draws);

// tokens [rows] of logits [rows, count]; the arithmetic of flint_kernels/ops/sampling.py.
void sample(const float* logits, int64_t rows, int64_t count, const Draws& draws, int64_t* tokens);

}  // namespace flint::cpu
