// The experts: of a few tokens, gate and up with SiLU, and down with the weighted combine, routed
// and shared in one launch each; of many, the routed ones. No torch here.
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
// With PDL, ids and weights are read ahead of the wait: they must be complete when the kernel in
// front of this starts, that is, written by one that the kernel in front has itself waited for.
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

// Its way for one token with NVFP4 weights of Flint's sizes.
bool moe_down_one_fits(const MoeDown& in);
cudaError_t moe_down_one(const MoeDown& in, const Launch& launch);

// The routed experts of any number of tokens on a GPU of compute capability 9.0: gate and up in
// fp32 after their scales, act = round(g * sigmoid(g) * u); y = round(scale * sum(act * w)); out =
// round(round(sum(weight * y)) + shared), summed in the order of selection.
//
// What is done, in this order; bits. A product takes what the steps before it have left, or, where
// an expert's tokens are few, x and entry_act themselves: they are given with the products too.
enum ExpertSteps : unsigned {
  kOrderEntries = 1,  // by the experts that they name: into `order`
  kGatherTokens = 2,  // x into `rows`, in that order
  kGateUp = 4,        // `rows`, or x, into `act`
  kActByEntry = 8,    // with kGateUp: `act` is in the order of entries
  kGatherActs = 16,   // `entry_act` into `act`
  kDown = 32,         // `act`, or entry_act where it is given, into `rows`, in the order of entries
  kCombine = 64,      // `rows` into `out`
};

struct RoutedExperts {
  unsigned steps;
  Routing routing;
  bool bf16;                // the weights, which have no scales then
  bool gathers;             // gate and up bring x together themselves, where they have a way to
  int hidden, routed_size;  // multiples of 256; of 64 for BF16
  const void* x;            // [tokens, hidden] BF16, x_stride elements apart
  int64_t x_stride;
  WeightMatrix gate_up;          // [experts, 2 * routed_size, hidden]: gate rows, then up rows
  const float* gate_up_scale_2;  // [experts, 2]; null for BF16
  const void* entry_act;         // [tokens, top_k, routed_size] BF16, or null
  WeightMatrix down;             // [experts, hidden, routed_size]
  const float* down_scale_2;     // [experts]; null for BF16
  const float* weights;          // [tokens, top_k]
  const void* shared;            // [tokens, hidden] BF16, or null
  void* out;                     // [tokens, hidden]
  int32_t* order;                // routed_experts_many_words
  void* rows;                    // [tokens * top_k, hidden] BF16
  void* act;                     // [tokens * top_k, routed_size] BF16
};

int64_t routed_experts_many_words(const Routing& routing);
bool routed_experts_many_fits(const RoutedExperts& in);
cudaError_t routed_experts_many(const RoutedExperts& in, const Launch& launch);

}  // namespace flint::cuda
