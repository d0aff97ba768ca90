// The order in which every product on the CPU is summed: 16 lanes over k, then one fixed tree.
#pragma once

#include <cstring>

namespace flint::cpu {

inline constexpr int kLanes = 16;

using Lanes = float __attribute__((vector_size(sizeof(float) * kLanes)));

struct alignas(64) Block {
  Lanes values;
};

// Inlined always: its callers are compiled for several kinds of vectors.
__attribute__((always_inline)) inline float add_lanes(const Lanes& lanes) {
  using Quad = float __attribute__((vector_size(sizeof(float) * 4)));
  Quad quarters[4];
  std::memcpy(quarters, &lanes, sizeof(quarters));
  const Quad sum = (quarters[0] + quarters[2]) + (quarters[1] + quarters[3]);
  return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

}  // namespace flint::cpu
