// The routed experts of many tokens: entries in the order of their experts, then each expert's
// products with its own.
#include <algorithm>

#include "cuda/expert_order.h"
#include "cuda/experts_bf16.h"
#include "cuda/experts_product.cuh"
#include "cuda/experts_thin.h"

namespace flint::cuda {
namespace {

// For experts of some tokens each, and of many. Those of a few: experts_thin.h.
using Narrow = ProductPlan<WeightForm::kNvfp4Arranged, 32, 8, 2, 2, 3>;
using Wide = ProductPlan<WeightForm::kNvfp4, 256, 32, 1, 5, 2>;

constexpr int kNarrowEntries = 40;  // for an expert, on average

bool is_narrow(const Routing& routing) {
  return entries_of(routing) <= int64_t{kNarrowEntries} * routing.experts;
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
  // The smaller the tiles, the more there are: enough, whatever weights and widths decide.
  const int thin = thin_tile(routing);
  const int tile = thin > 0 ? thin : is_narrow(routing) ? Narrow::kTokens : Wide::kTokens;
  return words_of_order(entries_of(routing), routing.experts, std::min(tile, bf16_tile(routing)));
}

bool routed_experts_many_fits(const RoutedExperts& in) {
  const auto aligned = [](const void* pointer) {
    return reinterpret_cast<uint64_t>(pointer) % 16 == 0;
  };
  const bool gate_up = (in.steps & kGateUp) != 0, down = (in.steps & kDown) != 0;
  const int columns = in.bf16 ? kXColumns : kWeightColumns;
  return 0 < in.routing.experts && in.routing.experts <= kMostExperts &&
         entries_of(in.routing) < 1 << 30 && in.hidden % columns == 0 &&
         in.routed_size % columns == 0 && in.x_stride % 8 == 0 && aligned(in.x) &&
         aligned(in.entry_act) && aligned(in.shared) && aligned(in.out) && aligned(in.order) &&
         aligned(in.rows) && aligned(in.act) &&
         (!gate_up || product_fits(gate_up_operands(in), in.act, in.routed_size)) &&
         (!down || product_fits(down_operands(in), in.rows, in.hidden));
}

cudaError_t routed_experts_many(const RoutedExperts& in, const Launch& launch) {
  if (in.bf16) return routed_experts_bf16(in, launch);
  if (const int tile = thin_tile_of(in); tile > 0) return launch_thin_steps(tile, in, launch);
  return is_narrow(in.routing) ? launch_steps<Narrow>(in, launch) : launch_steps<Wide>(in, launch);
}

}  // namespace flint::cuda
