// The experts of a few tokens: gate and up with SiLU, and down with the weighted combine; routed
// and shared in one launch each. No torch here.
#pragma once

#include <cstdint>

#include "cuda/linear.h"

namespace flint::cuda {

inline constexpr int kMostEntries = 64;  // tokens * top_k

// Entries that name no expert (-1, or outside) are skipped. Weights of experts that no token chose
// are not read, and an expert that several chose is read once.
struct Routing {
  const int32_t* ids;  // [tokens, top_k]
  int tokens, top_k, experts;
};

// Routed: gate and up in fp32 after their scales, round(g * sigmoid(g) * u); zeros for a skipped
// entry. Shared: gate and up rounded, round((g / (1 + exp(-g))) * u).
struct MoeGateUp {
  Routing routing;
  const void* x;  // [tokens, hidden] BF16, x_stride elements apart
  int64_t x_stride;
  int hidden, routed_size, shared_size;
  WeightMatrix routed;          // [experts, 2 * routed_size, hidden]: gate rows, then up rows
  const float* routed_scale_2;  // [experts, 2]; null for BF16
  WeightMatrix shared;          // [2 * shared_size, hidden]
  const float* shared_scale_2;  // [shared_shards], 1 or 2
  int shared_shards;
  void* routed_act;  // [tokens, top_k, routed_size]
  void* shared_act;  // [tokens, shared_size]
};

bool moe_gate_up_fits(const MoeGateUp& in);
cudaError_t moe_gate_up(const MoeGateUp& in, const Launch& launch);

// Its ways for one token and for several, of NVFP4 weights.
bool moe_gate_up_one_fits(const MoeGateUp& in);
cudaError_t moe_gate_up_one(const MoeGateUp& in, const Launch& launch);
bool moe_gate_up_several_fits(const MoeGateUp& in);
cudaError_t moe_gate_up_several(const MoeGateUp& in, const Launch& launch);

// y_e = round(scale_e * sum(act * w_e)); routed = round(sum(weight * y_e)) in the order of
// selection; out = round(routed + round(scale * sum(act * w_shared))).
//
// With PDL, ids are read ahead of the wait: they must be complete when the kernel in front of this
// starts, that is, written by one that the kernel in front has itself waited for.
struct MoeDown {
  Routing routing;
  const float* weights;    // [tokens, top_k]
  const void* routed_act;  // [tokens, top_k, routed_size] BF16, dense
  const void* shared_act;  // [tokens, shared_size], dense
  int hidden, routed_size, shared_size;
  WeightMatrix routed;          // [experts, hidden, routed_size]
  const float* routed_scale_2;  // [experts]; null for BF16
  WeightMatrix shared;          // [hidden, shared_size]
  const float* shared_scale_2;  // [1]
  void* out;                    // [tokens, hidden]
};

bool moe_down_fits(const MoeDown& in);
cudaError_t moe_down(const MoeDown& in, const Launch& launch);

}  // namespace flint::cuda
