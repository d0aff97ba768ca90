// The routed experts by the products of product.cuh: each expert with its own tokens.
#pragma once

#include "cuda/expert_order.h"
#include "cuda/experts.h"
#include "cuda/product_launch.cuh"

namespace flint::cuda {

template <typename Plan, ProductOutput kOutput>
__global__ void __launch_bounds__(Plan::kThreads, Plan::kCtas)
    experts_many_rows(const __grid_constant__ ProductJob job) {
  run_product<Plan, kOutput>(job);
}

inline int64_t entries_of(const Routing& routing) {
  return int64_t{routing.tokens} * routing.top_k;
}

// `gated`: the features are those of gate and up together.
template <typename Plan>
ProductJob job_of(const Routing& routing, const ExpertOrder& order, int features, int width,
                  bool gated) {
  ProductJob job{};
  job.tiles = order.tiles;
  job.tile_count = order.tile_count;
  job.tokens = static_cast<int>(entries_of(routing));
  job.features = features;
  job.weight_rows = gated ? 2 * features : features;
  job.row_tiles = row_tiles<Plan>(features, gated);
  job.steps = width / Plan::kColumns;
  for (int& end : job.shard_end) end = 0x7fffffff;
  return job;
}

// Whether gate and up bring the rows of x together themselves: product_gather.cuh.
template <typename Plan>
bool gathers(const RoutedExperts& in) {
  return in.gathers && kGathers<Plan, ProductOutput::kSilu> &&
         row_tiles<Plan>(in.routed_size, true) * kCluster <= kMostGathering;
}

inline ProductOperands gate_up_operands(const RoutedExperts& in) {
  return {in.gate_up, int64_t{in.routing.experts} * 2 * in.routed_size,
          in.rows,    entries_of(in.routing),
          in.hidden,  in.hidden};
}

inline ProductOperands down_operands(const RoutedExperts& in) {
  return {in.down,        int64_t{in.routing.experts} * in.hidden,
          in.act,         entries_of(in.routing),
          in.routed_size, in.routed_size};
}

template <typename Plan>
int64_t tiles_of(const ProductJob& job, const Routing& routing) {
  return most_tiles(job.tokens, routing.experts, Plan::kTokens) * job.row_tiles;
}

template <typename Plan>
cudaError_t launch_gate_up(const RoutedExperts& in, const ExpertOrder& order,
                           const Launch& launch) {
  ProductJob job = job_of<Plan>(in.routing, order, in.routed_size, in.hidden, true);
  job.scale_2 = in.gate_up_scale_2;
  job.shards = 2;
  job.shard_end[0] = in.routed_size;
  job.out = static_cast<uint16_t*>(in.act);
  const bool by_entry = (in.steps & kActByEntry) != 0;
  job.out_row = by_entry ? order.entry : nullptr;
  job.arranged_out = Plan::kArranged && !by_entry;
  if (gathers<Plan>(in)) {
    job.gathered = static_cast<uint16_t*>(in.rows);
    job.from = static_cast<const uint16_t*>(in.x);
    job.from_stride = in.x_stride;
    job.from_entry = order.entry;
    job.from_share = in.routing.top_k;
  }
  return launch_product<Plan, ProductOutput::kSilu>(experts_many_rows<Plan, ProductOutput::kSilu>,
                                                    gate_up_operands(in), &job,
                                                    tiles_of<Plan>(job, in.routing), launch);
}

template <typename Plan>
cudaError_t launch_down(const RoutedExperts& in, const ExpertOrder& order, const Launch& launch) {
  ProductJob job = job_of<Plan>(in.routing, order, in.hidden, in.routed_size, false);
  job.scale_2 = in.down_scale_2;
  job.shards = 1;
  job.out = static_cast<uint16_t*>(in.rows);
  job.out_row = order.entry;
  return launch_product<Plan, ProductOutput::kRounded>(
      experts_many_rows<Plan, ProductOutput::kRounded>, down_operands(in), &job,
      tiles_of<Plan>(job, in.routing), launch);
}

// Those of `wanted` steps that are run, one after the other.
struct Steps {
  unsigned wanted;
  Launch launch;
  cudaError_t error = cudaSuccess;

  template <typename Run>
  void run(unsigned which, Run&& step) {
    if ((wanted & which) == 0 || error != cudaSuccess) return;
    error = step(launch);
    launch.pdl = true;  // each kernel waits for the one before it, whichever this was
  }
};

inline CombineExperts combine_of(const RoutedExperts& in) {
  return {in.routing, in.weights, in.rows, in.shared, in.out, in.hidden};
}

template <typename Plan>
cudaError_t launch_steps(const RoutedExperts& in, Launch launch) {
  const int64_t entries = entries_of(in.routing);
  const ExpertOrder order = order_in(in.order, entries, in.routing.experts, Plan::kTokens);
  Steps steps{in.steps, launch};
  steps.run(kOrderEntries, [&](const Launch& here) {
    return order_entries(in.routing, Plan::kTokens, kRowGroup, order, here);
  });
  steps.run(gathers<Plan>(in) ? 0 : kGatherTokens, [&](const Launch& here) {
    return gather_rows({in.x, in.x_stride, in.rows, in.hidden, in.routing.top_k, Plan::kArranged},
                       in.routing, order, here);
  });
  steps.run(kGateUp, [&](const Launch& here) { return launch_gate_up<Plan>(in, order, here); });
  steps.run(kGatherActs, [&](const Launch& here) {
    return gather_rows({in.entry_act, in.routed_size, in.act, in.routed_size, 1, Plan::kArranged},
                       in.routing, order, here);
  });
  steps.run(kDown, [&](const Launch& here) { return launch_down<Plan>(in, order, here); });
  steps.run(kCombine, [&](const Launch& here) { return combine_experts(combine_of(in), here); });
  return steps.error;
}

}  // namespace flint::cuda
