#include "cuda/product_launch.cuh"
#include "cuda/product.cuh"
#include <cstdlib>

namespace flint::cuda {
namespace {

// Where there are enough tiles, and where there are few: CTAs then share the columns of one.
using Wide = ProductPlan<WeightForm::kNvfp4, 256, 128, 1, 5, 2>;
using Middle = ProductPlan<WeightForm::kNvfp4, 128, 64, 1, 8, 4>;
using Narrow = ProductPlan<WeightForm::kNvfp4, 64, 32, 1, 8, 6>;
using WideShare = ProductPlan<WeightForm::kNvfp4, 256, 128, 1, 5, 2, true>;
using MiddleShare = ProductPlan<WeightForm::kNvfp4, 128, 64, 1, 8, 4, true>;
using NarrowShare = ProductPlan<WeightForm::kNvfp4, 64, 32, 1, 8, 6, true>;
using PairShare = ProductPlan<WeightForm::kNvfp4, 64, 32, 2, 4, 3, true>;  // two CTAs an SM

template <typename Plan, ProductOutput kOutput>
__global__ void __launch_bounds__(Plan::kThreads, Plan::kCtas)
    linear_many_rows(const __grid_constant__ ProductJob job) {
  run_product<Plan, kOutput>(job);
}

template <typename Plan>
ProductJob job_of(const Linear& in, bool gated) {
  ProductJob job{};
  job.scale_2 = in.scale_2;
  job.out = static_cast<uint16_t*>(in.out);
  job.tokens = in.tokens;
  job.features = static_cast<int>(gated ? in.rows / 2 : in.rows);
  job.weight_rows = static_cast<int>(in.rows);
  job.row_tiles = row_tiles<Plan>(job.features, gated);
  job.steps = in.width / kWeightColumns;
  job.shards = in.shards;
  for (int i = 0; i < kMostShards; ++i) {
    job.shard_end[i] = i + 1 < in.shards ? static_cast<int>(in.shard_end[i]) : 0x7fffffff;
  }
  return job;
}

ProductOperands operands_of(const Linear& in) {
  return {in.weight, in.rows, in.x, in.tokens, in.x_stride, in.width};
}

template <typename Plan, ProductOutput kOutput>
cudaError_t launch_tiles(const Linear& in, const Launch& launch, int shares = 1) {
  ProductJob job = job_of<Plan>(in, kOutput != ProductOutput::kRounded);
  const int64_t tiles = ceil_div(in.tokens, Plan::kTokens) * job.row_tiles;
  return launch_product<Plan, kOutput>(linear_many_rows<Plan, kOutput>, operands_of(in), &job,
                                       tiles, launch, shares);
}

// What a multiprocessor takes for its share of tiles of `tokens`, where one costs it `cost`.
int64_t time_of(int64_t tokens, int64_t tile, int64_t cost, int64_t row_tiles) {
  return ceil_div(ceil_div(tokens, tile) * row_tiles, multiprocessors()) * cost;
}

// The costs are the cycles of 64 columns of a tile, as measured on an H200.
template <ProductOutput kOutput>
cudaError_t launch_output(const Linear& in, const Launch& launch) {
  if (const char* plan = getenv("FLINT_PLAN"); plan != nullptr && plan[0] != 0) {
    const int shares = plan[1] - '0';
    if (plan[0] == 'w' && shares == 0) return launch_tiles<Wide, kOutput>(in, launch);
    if (plan[0] == 'm' && shares == 0) return launch_tiles<Middle, kOutput>(in, launch);
    if (plan[0] == 'n' && shares == 0) return launch_tiles<Narrow, kOutput>(in, launch);
    if (plan[0] == 'w') return launch_tiles<WideShare, kOutput>(in, launch, shares);
    if (plan[0] == 'm') return launch_tiles<MiddleShare, kOutput>(in, launch, shares);
    if (plan[0] == 'n') return launch_tiles<NarrowShare, kOutput>(in, launch, shares);
    if (plan[0] == 'p') return launch_tiles<PairShare, kOutput>(in, launch, shares);
  }
  const int64_t row_tiles = ceil_div(in.rows, kRowTile);
  const int64_t wide = time_of(in.tokens, Wide::kTokens, 1040, row_tiles);
  const int64_t middle = time_of(in.tokens, Middle::kTokens, 880, row_tiles);
  const int64_t narrow = time_of(in.tokens, Narrow::kTokens, 710, row_tiles);
  if (narrow < middle && narrow < wide) return launch_tiles<Narrow, kOutput>(in, launch);
  if (middle < wide) return launch_tiles<Middle, kOutput>(in, launch);
  return launch_tiles<Wide, kOutput>(in, launch);
}

}  // namespace

bool linear_many_fits(const Linear& in) {
  const bool gated = in.output == LinearOutput::kSiluAndMul;
  return in.output != LinearOutput::kLogits && 1 <= in.shards && in.shards <= kMostShards &&
         product_fits(operands_of(in), in.out, gated ? in.rows / 2 : in.rows);
}

cudaError_t linear_many(const Linear& in, const Launch& launch) {
  return in.output == LinearOutput::kSiluAndMul
             ? launch_output<ProductOutput::kSiluOfRounded>(in, launch)
             : launch_output<ProductOutput::kRounded>(in, launch);
}

}  // namespace flint::cuda
