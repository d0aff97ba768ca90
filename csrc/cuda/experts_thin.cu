#include "cuda/experts_thin.h"

#include <algorithm>

#include "cuda/launch.cuh"
#include "cuda/tensor_map.h"
#include "cuda/thin_product.cuh"

namespace flint::cuda {
namespace {

using Sixteen = ThinPlan<2, 1, 2, 5>;
using ThirtyTwo = ThinPlan<4, 2, 1, 4>;

template <typename Plan, bool kGated>
__global__ void __launch_bounds__(kThinThreads, Plan::kCtas)
    experts_thin_rows(const __grid_constant__ ThinJob job) {
  run_thin_product<Plan, kGated>(job);
}

int unit_rows(int row_tiles, int width) {
  return kThinWarps * row_tiles * 2 * kHalf / (width / kThinChunk);
}

bool width_fits(int64_t width) {
  return width == 256 || width == 512 || width == 1024 || width == 2048;
}

template <typename Plan, bool kGated>
cudaError_t launch_thin(ThinJob job, const WeightMatrix& weight, const Routing& routing, int width,
                        const Launch& launch) {
  const int rows = unit_rows(Plan::kRowTiles, width);
  const int64_t all_rows = int64_t{routing.experts} * job.weight_rows;
  const RowsInMemory codes{weight.elements, all_rows, width / 2, rows / 2};
  if (const auto error = describe(codes, &job.codes); error != cudaSuccess) return error;
  job.scales = static_cast<const uint8_t*>(weight.scales);
  while (kThinChunk << job.chunk_bits < width) ++job.chunk_bits;
  job.units = job.weight_rows / rows;
  const int64_t entries = int64_t{routing.tokens} * routing.top_k;
  const int64_t units = most_tiles(entries, routing.experts, Plan::kTokens) * job.units;
  const int64_t room = int64_t{multiprocessors()} * Plan::kCtas;
  Shape shape;
  shape.grid = static_cast<unsigned>(std::min(units, room));
  shape.block = kThinThreads;
  shape.shared_bytes = Plan::kSharedBytes;
  return launch_kernel(launch, shape, experts_thin_rows<Plan, kGated>, job);
}

ThinJob job_of(const ExpertOrder& order) {
  ThinJob job{};
  job.entry = order.entry;
  job.tiles = order.tiles;
  job.tile_count = order.tile_count;
  return job;
}

}  // namespace

Thin thin_of(const Routing& routing) {
  const int64_t entries = int64_t{routing.tokens} * routing.top_k;
  if (entries <= int64_t{10} * routing.experts) return Thin::kSixteen;
  if (entries <= int64_t{28} * routing.experts) return Thin::kThirtyTwo;
  return Thin::kNo;
}

int thin_tile(Thin thin) {
  return thin == Thin::kSixteen ? Sixteen::kTokens : ThirtyTwo::kTokens;
}

bool thin_fits(const RoutedExperts& in) {
  // Of the plan whose units are larger.
  const auto rows = [](int width) { return unit_rows(ThirtyTwo::kRowTiles, width); };
  return width_fits(in.hidden) && width_fits(in.routed_size) &&
         2 * in.routed_size % rows(in.hidden) == 0 && in.hidden % rows(in.routed_size) == 0;
}

cudaError_t thin_gate_up(Thin thin, const RoutedExperts& in, const ExpertOrder& order,
                         const Launch& launch) {
  ThinJob job = job_of(order);
  job.scale_2 = in.gate_up_scale_2;
  job.x = static_cast<const uint16_t*>(in.x);
  job.x_stride = in.x_stride;
  job.share = in.routing.top_k;
  job.out = static_cast<uint16_t*>(in.act);
  job.features = in.routed_size;
  job.weight_rows = 2 * in.routed_size;
  const auto launch_plan =
      thin == Thin::kSixteen ? launch_thin<Sixteen, true> : launch_thin<ThirtyTwo, true>;
  return launch_plan(job, in.gate_up, in.routing, in.hidden, launch);
}

cudaError_t thin_down(Thin thin, const RoutedExperts& in, const ExpertOrder& order,
                      const Launch& launch) {
  ThinJob job = job_of(order);
  job.scale_2 = in.down_scale_2;
  job.x = static_cast<const uint16_t*>(in.entry_act != nullptr ? in.entry_act : in.act);
  job.x_stride = in.routed_size;
  job.share = 1;
  job.out = static_cast<uint16_t*>(in.rows);
  job.features = in.hidden;
  job.weight_rows = in.hidden;
  const auto launch_plan =
      thin == Thin::kSixteen ? launch_thin<Sixteen, false> : launch_thin<ThirtyTwo, false>;
  return launch_plan(job, in.down, in.routing, in.routed_size, launch);
}

}  // namespace flint::cuda
