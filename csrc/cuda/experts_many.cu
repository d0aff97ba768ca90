// The routed experts of many tokens: entries in the order of their experts, then each expert's
// products with its own.
#include "cuda/expert_order.h"
#include "cuda/experts_thin.h"
#include "cuda/nvfp4_launch.cuh"
#include "cuda/nvfp4_product.cuh"

namespace flint::cuda {
namespace {

// For experts of some tokens each, and of many. Those of a few: experts_thin.h.
using Narrow = ProductPlan<32, 8, 2, 2, 3, true>;
using Wide = ProductPlan<256, 32, 1, 5, 2>;

constexpr int kNarrowEntries = 40;  // for an expert, on average

template <typename Plan, ProductOutput kOutput>
__global__ void __launch_bounds__(Plan::kThreads, Plan::kCtas)
    experts_many_rows(const __grid_constant__ ProductJob job) {
  run_product<Plan, kOutput>(job);
}

int64_t entries_of(const Routing& routing) { return int64_t{routing.tokens} * routing.top_k; }

bool is_narrow(const Routing& routing) {
  return entries_of(routing) <= int64_t{kNarrowEntries} * routing.experts;
}

ProductJob job_of(const Routing& routing, const ExpertOrder& order, int features, int width) {
  ProductJob job{};
  job.tiles = order.tiles;
  job.tile_count = order.tile_count;
  job.tokens = static_cast<int>(entries_of(routing));
  job.features = features;
  job.steps = width / kWeightColumns;
  for (int& end : job.shard_end) end = 0x7fffffff;
  return job;
}

ProductOperands gate_up_operands(const RoutedExperts& in) {
  return {in.gate_up, int64_t{in.routing.experts} * 2 * in.routed_size,
          in.rows,    entries_of(in.routing),
          in.hidden,  in.hidden};
}

ProductOperands down_operands(const RoutedExperts& in) {
  return {in.down,        int64_t{in.routing.experts} * in.hidden,
          in.act,         entries_of(in.routing),
          in.routed_size, in.routed_size};
}

template <typename Plan>
cudaError_t launch_gate_up(const RoutedExperts& in, const ExpertOrder& order,
                           const Launch& launch) {
  ProductJob job = job_of(in.routing, order, in.routed_size, in.hidden);
  job.scale_2 = in.gate_up_scale_2;
  job.shards = 2;
  job.shard_end[0] = in.routed_size;
  job.weight_rows = 2 * in.routed_size;
  job.row_pairs = row_pairs(in.routed_size, true);
  job.out = static_cast<uint16_t*>(in.act);
  const bool by_entry = (in.steps & kActByEntry) != 0;
  job.out_row = by_entry ? order.entry : nullptr;
  job.arranged_out = Plan::kArranged && !by_entry;
  const int64_t tiles = most_tiles(job.tokens, in.routing.experts, Plan::kTokens) * job.row_pairs;
  return launch_product<Plan>(experts_many_rows<Plan, ProductOutput::kSilu>, gate_up_operands(in),
                              &job, tiles, launch);
}

template <typename Plan>
cudaError_t launch_down(const RoutedExperts& in, const ExpertOrder& order, const Launch& launch) {
  ProductJob job = job_of(in.routing, order, in.hidden, in.routed_size);
  job.scale_2 = in.down_scale_2;
  job.shards = 1;
  job.weight_rows = in.hidden;
  job.row_pairs = row_pairs(in.hidden, false);
  job.out = static_cast<uint16_t*>(in.rows);
  job.out_row = order.entry;
  const int64_t tiles = most_tiles(job.tokens, in.routing.experts, Plan::kTokens) * job.row_pairs;
  return launch_product<Plan>(experts_many_rows<Plan, ProductOutput::kRounded>, down_operands(in),
                              &job, tiles, launch);
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

CombineExperts combine_of(const RoutedExperts& in) {
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
  steps.run(kGatherTokens, [&](const Launch& here) {
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

// Rows of a token are read where they lie, and acts are in the order of entries throughout: nothing
// is gathered.
cudaError_t launch_thin_steps(int tile, const RoutedExperts& in, Launch launch) {
  const ExpertOrder order = order_in(in.order, entries_of(in.routing), in.routing.experts, tile);
  Steps steps{in.steps, launch};
  steps.run(kOrderEntries, [&](const Launch& here) {
    return order_entries(in.routing, tile, kThinStep, order, here);
  });
  steps.run(kGateUp, [&](const Launch& here) { return thin_gate_up(tile, in, order, here); });
  steps.run(kDown, [&](const Launch& here) { return thin_down(tile, in, order, here); });
  steps.run(kCombine, [&](const Launch& here) { return combine_experts(combine_of(in), here); });
  return steps.error;
}

int thin_tile_of(const RoutedExperts& in) { return thin_fits(in) ? thin_tile(in.routing) : 0; }

}  // namespace

int64_t routed_experts_many_words(const Routing& routing) {
  // The smaller the tiles, the more there are: enough, whatever the widths decide.
  const int thin = thin_tile(routing);
  const int tile = thin > 0 ? thin : is_narrow(routing) ? Narrow::kTokens : Wide::kTokens;
  return words_of_order(entries_of(routing), routing.experts, tile);
}

bool routed_experts_many_fits(const RoutedExperts& in) {
  const auto aligned = [](const void* pointer) {
    return reinterpret_cast<uint64_t>(pointer) % 16 == 0;
  };
  const bool gate_up = (in.steps & kGateUp) != 0, down = (in.steps & kDown) != 0;
  return 0 < in.routing.experts && in.routing.experts <= kMostExperts &&
         entries_of(in.routing) < 1 << 30 && in.hidden % kWeightColumns == 0 &&
         in.routed_size % kWeightColumns == 0 && in.x_stride % 8 == 0 && aligned(in.x) &&
         aligned(in.entry_act) && aligned(in.shared) && aligned(in.out) && aligned(in.order) &&
         aligned(in.rows) && aligned(in.act) &&
         (!gate_up || product_fits(gate_up_operands(in), in.act, in.routed_size)) &&
         (!down || product_fits(down_operands(in), in.rows, in.hidden));
}

cudaError_t routed_experts_many(const RoutedExperts& in, const Launch& launch) {
  if (const int tile = thin_tile_of(in); tile > 0) return launch_thin_steps(tile, in, launch);
  return is_narrow(in.routing) ? launch_steps<Narrow>(in, launch) : launch_steps<Wide>(in, launch);
}

}  // namespace flint::cuda
