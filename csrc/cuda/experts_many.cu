// The routed experts of many tokens: entries in the order of their experts, then each expert's
// products with its own.
#include <cstdlib>

#include "cuda/expert_order.h"
#include "cuda/experts_thin.h"
#include "cuda/nvfp4_launch.cuh"
#include "cuda/nvfp4_product.cuh"

namespace flint::cuda {
namespace {

// For experts of few tokens each, where weights are what takes the time; and of many.
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

template <typename Plan>
cudaError_t launch_steps(const RoutedExperts& in, Launch launch) {
  const int64_t entries = entries_of(in.routing);
  const ExpertOrder order = order_in(in.order, entries, in.routing.experts, Plan::kTokens);
  cudaError_t error = cudaSuccess;
  const auto step = [&](unsigned which, auto&& run) {
    if ((in.steps & which) == 0 || error != cudaSuccess) return;
    error = run();
    launch.pdl = true;  // each kernel waits for the one before it, whichever this was
  };
  step(kOrderEntries, [&] { return order_entries(in.routing, Plan::kTokens, kRowGroup, order, launch); });
  step(kGatherTokens, [&] {
    return gather_rows({in.x, in.x_stride, in.rows, in.hidden, in.routing.top_k, Plan::kArranged},
                       in.routing, order, launch);
  });
  step(kGateUp, [&] { return launch_gate_up<Plan>(in, order, launch); });
  step(kGatherActs, [&] {
    return gather_rows({in.entry_act, in.routed_size, in.act, in.routed_size, 1, Plan::kArranged},
                       in.routing, order, launch);
  });
  step(kDown, [&] { return launch_down<Plan>(in, order, launch); });
  step(kCombine, [&] {
    return combine_experts({in.routing, in.weights, in.rows, in.shared, in.out, in.hidden}, launch);
  });
  return error;
}

cudaError_t launch_thin_steps(Thin thin, const RoutedExperts& in, Launch launch) {
  const int64_t entries = entries_of(in.routing);
  const ExpertOrder order = order_in(in.order, entries, in.routing.experts, thin_tile(thin));
  cudaError_t error = cudaSuccess;
  const auto step = [&](unsigned which, auto&& run) {
    if ((in.steps & which) == 0 || error != cudaSuccess) return;
    error = run();
    launch.pdl = true;
  };
  step(kOrderEntries, [&] { return order_entries(in.routing, thin_tile(thin), 8, order, launch); });
  step(kGateUp, [&] { return thin_gate_up(thin, in, order, launch); });
  step(kDown, [&] { return thin_down(thin, in, order, launch); });
  step(kCombine, [&] {
    return combine_experts({in.routing, in.weights, in.rows, in.shared, in.out, in.hidden}, launch);
  });
  return error;
}

Thin chosen(const RoutedExperts& in) {
  const char* v = std::getenv("FLINT_THIN");
  if (!thin_fits(in)) return Thin::kNo;
  if (v == nullptr || *v == 0) return thin_of(in.routing);
  return v[0] == '1' ? Thin::kSixteen : v[0] == '3' ? Thin::kThirtyTwo : Thin::kNo;
}

}  // namespace

int64_t routed_experts_many_words(const Routing& routing) {
  return words_of_order(entries_of(routing), routing.experts, 16);
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
  if (const Thin thin = chosen(in); thin != Thin::kNo) return launch_thin_steps(thin, in, launch);
  return is_narrow(in.routing) ? launch_steps<Narrow>(in, launch) : launch_steps<Wide>(in, launch);
}

}  // namespace flint::cuda
