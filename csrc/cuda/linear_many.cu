#include <atomic>

#include "cuda/linear_costs.h"
#include "cuda/product.cuh"
#include "cuda/product_launch.cuh"

namespace flint::cuda {
namespace {

// A CTA with tiles of its own, or a share of the columns of one.
template <bool kShare>
using Narrow = ProductPlan<WeightForm::kNvfp4, 64, 32, 1, 8, 6, kShare>;
template <bool kShare>
using Middle = ProductPlan<WeightForm::kNvfp4, 128, 64, 1, 8, 4, kShare>;
template <bool kShare>
using Wide = ProductPlan<WeightForm::kNvfp4, 256, 128, 1, 5, 2, kShare>;

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

bool is_gated(const Linear& in) { return in.output == LinearOutput::kSiluAndMul; }

template <typename Plan>
int64_t tiles_of(const Linear& in) {
  const int features = static_cast<int>(is_gated(in) ? in.rows / 2 : in.rows);
  return ceil_div(in.tokens, Plan::kTokens) * row_tiles<Plan>(features, is_gated(in));
}

template <typename Plan, ProductOutput kOutput>
cudaError_t launch_tiles(const Linear& in, int shares, const Launch& launch) {
  ProductJob job = job_of<Plan>(in, kOutput != ProductOutput::kRounded);
  return launch_product<Plan, kOutput>(linear_many_rows<Plan, kOutput>, operands_of(in), &job,
                                       tiles_of<Plan>(in), launch, shares);
}

template <template <bool> typename Plan, ProductOutput kOutput>
cudaError_t launch_shares(const Linear& in, int shares, const Launch& launch) {
  return shares > 1 ? launch_tiles<Plan<true>, kOutput>(in, shares, launch)
                    : launch_tiles<Plan<false>, kOutput>(in, 1, launch);
}

template <ProductOutput kOutput>
cudaError_t launch_output(const Linear& in, const LinearPlan& plan, const Launch& launch) {
  switch (plan.tokens) {
    case 64:
      return launch_shares<Narrow, kOutput>(in, plan.shares, launch);
    case 128:
      return launch_shares<Middle, kOutput>(in, plan.shares, launch);
    default:
      return launch_shares<Wide, kOutput>(in, plan.shares, launch);
  }
}

// How many clusters of `shares` CTAs run at the same time: what a GPU's processors are grouped in
// decides that. One kernel of a plan stands for all.
template <typename Plan>
int clusters_at_once(int shares) {
  static std::atomic<int> known[kMostShares + 1];  // by shares, one more than there are
  int found = known[shares].load(std::memory_order_relaxed);
  if (found == 0) {
    const Shape shape{dim3(static_cast<unsigned>(shares)), dim3(Plan::kThreads), Plan::kSharedBytes,
                      static_cast<unsigned>(shares)};
    found = 1 + most_clusters(shape, linear_many_rows<Plan, ProductOutput::kRounded>);
    known[shares].store(found, std::memory_order_relaxed);
  }
  return found - 1;
}

struct Choice {
  LinearPlan plan;
  int64_t cost;

  void consider(const LinearPlan& other, int64_t at) {
    if (at < cost) *this = {other, at};
  }
};

template <template <bool> typename Plan>
void consider(const Linear& in, Choice* choice) {
  LinearCosts cost{};
  for (const auto& one : kLinearCosts) {
    if (one.tokens == Plan<false>::kTokens) cost = one;
  }
  const int steps = in.width / kWeightColumns;
  const int64_t rounds = ceil_div(tiles_of<Plan<false>>(in), multiprocessors() / kCluster);
  choice->consider({cost.tokens, 1},
                   cost.start + rounds * steps * cost.step + (rounds - 1) * cost.tile);
  const int64_t tiles = tiles_of<Plan<true>>(in);
  for (int shares = 2; shares <= kMostShares && shares <= steps; ++shares) {
    // One round: a cluster has one tile.
    if (tiles * shares > multiprocessors() || tiles > clusters_at_once<Plan<true>>(shares))
      continue;
    choice->consider({cost.tokens, shares}, cost.start + ceil_div(steps, shares) * cost.step +
                                                cost.shared + shares * cost.share);
  }
}

}  // namespace

bool linear_many_fits(const Linear& in) {
  return in.output != LinearOutput::kLogits && 1 <= in.shards && in.shards <= kMostShards &&
         in.weight.scales != nullptr &&
         product_fits(operands_of(in), in.out, is_gated(in) ? in.rows / 2 : in.rows);
}

bool linear_many_has(const Linear& in, const LinearPlan& plan) {
  return (plan.tokens == 64 || plan.tokens == 128 || plan.tokens == 256) && 1 <= plan.shares &&
         plan.shares <= kMostShares && plan.shares <= in.width / kWeightColumns;
}

LinearPlan linear_many_plan(const Linear& in) {
  Choice choice{{}, INT64_MAX};
  consider<Narrow>(in, &choice);
  consider<Middle>(in, &choice);
  consider<Wide>(in, &choice);
  return choice.plan;
}

cudaError_t linear_many(const Linear& in, const LinearPlan& plan, const Launch& launch) {
  return is_gated(in) ? launch_output<ProductOutput::kSiluOfRounded>(in, plan, launch)
                      : launch_output<ProductOutput::kRounded>(in, plan, launch);
}

}  // namespace flint::cuda
