// What the CPU kernels of single rows share: sums in one fixed order.
#pragma once

#include <cmath>
#include <cstdint>

#include "bf16.h"

namespace flint::cpu {

inline constexpr int kRowLanes = 16;

// The sum of term(0) ... term(count - 1): 16 lanes in order, then a fixed tree. Its bits depend on
// the terms alone, and the lanes become vector instructions.
template <typename Term>
inline float lane_sum(int64_t count, const Term& term) {
  float lanes[kRowLanes] = {};
  int64_t i = 0;
  for (; i + kRowLanes <= count; i += kRowLanes) {
    for (int lane = 0; lane < kRowLanes; ++lane) lanes[lane] += term(i + lane);
  }
  for (int lane = 0; i + lane < count; ++lane) lanes[lane] += term(i + lane);
  for (int width = kRowLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

// rsqrt(mean(x^2) + eps).
inline float inverse_rms(const float* x, int64_t count, float eps) {
  const float squares = lane_sum(count, [x](int64_t i) { return x[i] * x[i]; });
  return 1.0f / std::sqrt(squares / static_cast<float>(count) + eps);
}

inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

}  // namespace flint::cpu
