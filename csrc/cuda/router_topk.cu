// A token's experts out of its logits, by one warp.
#include "cuda/device.cuh"
#include "cuda/launch.cuh"
#include "cuda/router.h"
#include "cuda/tiles.h"
#include "topk_key.h"

namespace flint::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMostLaneExperts = 32;

// Up to kLaneExperts experts in each lane.
template <int kLaneExperts>
__global__ void __launch_bounds__(kThreads)
    router_topk_rows(const __grid_constant__ RouterTopk in) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t token = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kWarp;
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (token >= in.tokens) return;
  const auto* logits = static_cast<const volatile uint16_t*>(in.logits) + token * in.stride;
  uint32_t keys[kLaneExperts];
#pragma unroll
  for (int i = 0; i < kLaneExperts; ++i) {
    const int expert = i * kWarp + lane;
    const bool is_one = expert < in.experts;
    keys[i] = is_one ? topk_key_bf16(logits[expert], static_cast<uint16_t>(expert)) : 0;
  }
  uint32_t chosen = 0;             // lane r keeps the r-th
  uint32_t highest = 0xffffffffu;  // what is left; NaN of expert 0 has this very key
  for (int round = 0; round < in.top_k; ++round) {
    // Keys are distinct: the next one is the largest that is smaller. An expert's is never 0.
    uint32_t best = 0;
#pragma unroll
    for (int i = 0; i < kLaneExperts; ++i) best = keys[i] <= highest ? max(best, keys[i]) : best;
    best = __reduce_max_sync(0xffffffffu, best);
    if (round == lane) chosen = best;
    highest = best - 1;
  }
  float score = 1.0f / (1.0f + expf(-topk_logit_bf16(chosen)));
  if (in.renormalize) {
    float total = __shfl_sync(0xffffffffu, score, 0);
    for (int round = 1; round < in.top_k; ++round) {
      total += __shfl_sync(0xffffffffu, score, round);
    }
    score = score / (total + 1e-20f);
  }
  if (lane < in.top_k) {
    in.ids[token * in.top_k + lane] = static_cast<int32_t>(topk_index_bf16(chosen));
    in.weights[token * in.top_k + lane] = rounded(uint16_t{}, score);
  }
}

}  // namespace

bool router_topk_fits(const RouterTopk& in) {
  return 0 < in.experts && in.experts <= kMostLaneExperts * kWarp && 0 < in.top_k &&
         in.top_k <= kWarp && in.top_k <= in.experts && 0 < in.tokens &&
         in.tokens <= kMostCtas * (kThreads / kWarp);
}

cudaError_t router_topk(const RouterTopk& in, const Launch& launch) {
  const dim3 grid(static_cast<unsigned>(ceil_div(in.tokens, kThreads / kWarp)));
  const auto kernel =
      in.experts <= 8 * kWarp ? router_topk_rows<8> : router_topk_rows<kMostLaneExperts>;
  return launch_kernel(launch, grid, dim3(kThreads), kernel, in);
}

}  // namespace flint::cuda
