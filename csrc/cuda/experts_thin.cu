#include <algorithm>

#include "cuda/experts_thin.h"
#include "cuda/launch.cuh"
#include "cuda/tensor_map.h"
#include "cuda/thin_product.cuh"

namespace flint::cuda {
namespace {

template <int kChunks>
using Eight = ThinPlan<kChunks, 1, 2, 2, 2>;
template <int kChunks>
using Sixteen = ThinPlan<kChunks, 2, 2, 2, 2>;

// Entries of an expert, on average, up to which each is the fastest, as measured on an H200.
constexpr int kEightEntries = 4, kSixteenEntries = 10;

template <typename Plan, bool kGated>
__global__ void __launch_bounds__(kThinThreads, Plan::kCtas)
    experts_thin_rows(const __grid_constant__ ThinJob job) {
  run_thin_product<Plan, kGated>(job);
}

template <typename Plan, bool kGated>
cudaError_t launch_plan(ThinJob job, const WeightMatrix& weight, const Routing& routing,
                        const Launch& launch) {
  constexpr int kWidth = Plan::kChunks * kThinChunk;
  const int64_t rows = int64_t{routing.experts} * job.weight_rows;
  const RowsInMemory codes{weight.elements, rows, kWidth / 2, Plan::kHalfRows};
  if (const auto error = describe(codes, &job.codes); error != cudaSuccess) return error;
  job.scales = static_cast<const uint8_t*>(weight.scales);
  job.units = job.weight_rows / (2 * Plan::kHalfRows);
  const int64_t entries = int64_t{routing.tokens} * routing.top_k;
  const int64_t units = most_tiles(entries, routing.experts, Plan::kTokens) * job.units;
  Shape shape;
  shape.grid = static_cast<unsigned>(std::min(units, int64_t{multiprocessors()} * Plan::kCtas));
  shape.block = kThinThreads;
  shape.shared_bytes = Plan::kSharedBytes;
  return launch_kernel(launch, shape, experts_thin_rows<Plan, kGated>, job);
}

template <template <int> typename Plan, bool kGated>
cudaError_t launch_width(int width, const ThinJob& job, const WeightMatrix& weight,
                         const Routing& routing, const Launch& launch) {
  switch (width / kThinChunk) {
    case 1:
      return launch_plan<Plan<1>, kGated>(job, weight, routing, launch);
    case 2:
      return launch_plan<Plan<2>, kGated>(job, weight, routing, launch);
    case 4:
      return launch_plan<Plan<4>, kGated>(job, weight, routing, launch);
    default:
      return launch_plan<Plan<8>, kGated>(job, weight, routing, launch);
  }
}

template <bool kGated>
cudaError_t launch_tile(int tile, int width, const ThinJob& job, const WeightMatrix& weight,
                        const Routing& routing, const Launch& launch) {
  return tile == Eight<1>::kTokens
             ? launch_width<Eight, kGated>(width, job, weight, routing, launch)
             : launch_width<Sixteen, kGated>(width, job, weight, routing, launch);
}

bool width_fits(int width) {
  return width == kThinChunk || width == 2 * kThinChunk || width == 4 * kThinChunk ||
         width == 8 * kThinChunk;
}

// Of both plans.
int unit_rows(int width) {
  static_assert(Eight<1>::kHalfRows == Sixteen<1>::kHalfRows);
  return 2 * Eight<1>::kHalfRows / (width / kThinChunk);
}

ThinJob job_of(const ExpertOrder& order) {
  ThinJob job{};
  job.entry = order.entry;
  job.tiles = order.tiles;
  job.tile_count = order.tile_count;
  return job;
}

}  // namespace

int thin_tile(const Routing& routing) {
  const int64_t entries = int64_t{routing.tokens} * routing.top_k;
  if (entries <= int64_t{kEightEntries} * routing.experts) return Eight<1>::kTokens;
  if (entries <= int64_t{kSixteenEntries} * routing.experts) return Sixteen<1>::kTokens;
  return 0;
}

bool thin_fits(const RoutedExperts& in) {
  return width_fits(in.hidden) && width_fits(in.routed_size) &&
         2 * in.routed_size % unit_rows(in.hidden) == 0 &&
         in.hidden % unit_rows(in.routed_size) == 0;
}

cudaError_t thin_gate_up(int tile, const RoutedExperts& in, const ExpertOrder& order,
                         const Launch& launch) {
  ThinJob job = job_of(order);
  job.scale_2 = in.gate_up_scale_2;
  job.x = static_cast<const uint16_t*>(in.x);
  job.x_stride = in.x_stride;
  job.share = in.routing.top_k;
  job.out = static_cast<uint16_t*>(in.act);
  job.features = in.routed_size;
  job.weight_rows = 2 * in.routed_size;
  return launch_tile<true>(tile, in.hidden, job, in.gate_up, in.routing, launch);
}

cudaError_t thin_down(int tile, const RoutedExperts& in, const ExpertOrder& order,
                      const Launch& launch) {
  ThinJob job = job_of(order);
  job.scale_2 = in.down_scale_2;
  job.x = static_cast<const uint16_t*>(in.entry_act != nullptr ? in.entry_act : in.act);
  job.x_stride = in.routed_size;
  job.share = 1;
  job.out = static_cast<uint16_t*>(in.rows);
  job.features = in.hidden;
  job.weight_rows = in.hidden;
  return launch_tile<false>(tile, in.routed_size, job, in.down, in.routing, launch);
}

}  // namespace flint::cuda
