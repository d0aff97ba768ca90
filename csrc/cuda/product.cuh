// Weights times many tokens on Hopper: out^T = W x^T, dense or for each expert's own tokens, with
// NVFP4 or BF16 weights.
//
// The weights are the left operand of the tensor cores' asynchronous products. NVFP4 codes are
// decoded straight into registers, where that operand may lie, and the decoded weights never pass
// through shared memory; BF16 weights are multiplied where the copies put them. A CTA has 128 rows
// of weights and up to 256 tokens, in two warpgroups of 64 rows each; while one product runs, a
// warpgroup decodes the operand of the next. A warp or a warpgroup more keeps copies in flight, of
// weights in steps of 256 columns (BF16: 64) and of x in steps of 64.
//
// Two CTAs with neighbouring rows are a cluster; each copies half of x to both. CTAs are
// persistent: the copies of a tile begin while the results of the one before it are written. Where
// there are few tiles, the CTAs of a cluster have one tile instead and each a share of the columns
// (kSplit); their sums are added in the order of the columns.
//
// A token's sums are taken in the same order whatever the tile is; with arranged columns
// (arranged.h), and for each number of shares, it is another order.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/bulk_copy.cuh"
#include "cuda/product_copies.cuh"
#include "cuda/product_output.cuh"
#include "cuda/product_plan.cuh"
#include "cuda/weight_operand.cuh"
#include "cuda/wgmma.cuh"

namespace flint::cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// A warpgroup that multiplies.
template <typename Plan, ProductOutput kOutput>
struct Multiplier {
  using Sums = float[Plan::kTokens / 2];

  const ProductJob& job;
  uint32_t shared;
  Barriers<Plan> barriers;
  Output<Plan, kOutput> output;
  Ring<Plan::kXStages> x;
  Ring<Plan::kWeightStages> weights;

  __device__ __forceinline__ Multiplier(const ProductJob& job, uint32_t shared,
                                        const Barriers<Plan>& barriers)
      : job(job), shared(shared), barriers(barriers), output(job, shared) {}

  __device__ __forceinline__ void run() {
    Tiles<Plan> tiles(job);
    if (tiles.done()) return;
    for (TokenTile tokens = tiles.tokens();;) {
      const int row = tiles.template row<kOutput>();
      // What is needed at the end is fetched while there is time.
      const float low_scale = output.low_scale(tokens.expert, row);
      const float high_scale = output.high_scale(tokens.expert, row);
      output.fetch_rows(tokens);
      Sums sums;
      multiply(sums, tokens.count, tiles.begin, tiles.end);
      tiles.advance();
      const TokenTile next = tiles.done() ? TokenTile{} : tiles.tokens();
      output.write(sums, tokens, row, low_scale, high_scale);
      if (tiles.done()) return;
      tokens = next;
    }
  }

  // The cluster has one tile. All threads of it come to its barriers.
  __device__ __forceinline__ void run_share() {
    const Tiles<Plan> tiles(job);
    const TokenTile tokens = tiles.tokens();
    const int row = tiles.template row<kOutput>();
    const float low_scale = output.low_scale(tokens.expert, row);
    const float high_scale = output.high_scale(tokens.expert, row);
    Sums sums;
    multiply(sums, tokens.count, tiles.begin, tiles.end);
    sync_threads<kProducts * kWarpgroup>(3);  // the other warpgroup's products have been, too
    output.leave(sums, tokens.count);
    arrive_cluster();
    await_cluster();
    output.add_and_write(tokens, row, low_scale, high_scale);
  }

  __device__ __forceinline__ void multiply(Sums& sums, int count, int begin, int end) {
    if constexpr (Plan::kBf16) {
      multiply_bf16(sums, count, begin, end);
    } else {
      multiply_nvfp4(sums, count, begin, end);
    }
  }

  __device__ __forceinline__ void multiply_bf16(Sums& sums, int count, int begin, int end) {
    int previous_x = -1, previous_weights = -1;  // the stages that the products under way read
    for (int step = begin; step < end; ++step) {
      await_phase(barriers.weights_full(weights.stage), weights.parity);
      await_phase(barriers.x_full(x.stage), x.parity);
      const uint64_t a =
          right_operand(shared + Plan::kWeights + weights.stage * Plan::kWeightBytes +
                        output.group * (Plan::kWeightBytes / kProducts));
      const uint64_t b = right_operand(shared + Plan::kX + x.stage * Plan::kXBytes);
      multiply_both<Plan::kSmallest>(sums, a, b, count, step > begin);
      await_products<1>();
      release_weights(previous_weights);
      release_x(previous_x);
      previous_weights = weights.stage;
      previous_x = x.stage;
      weights.advance();
      x.advance();
    }
    await_products<0>();
    release_weights(previous_weights);
    release_x(previous_x);
  }

  __device__ __forceinline__ void multiply_nvfp4(Sums& sums, int count, int begin, int end) {
    int previous = -1;  // the stage of x that the products under way read
    for (int step = begin; step < end; ++step) {
      await_phase(barriers.weights_full(weights.stage), weights.parity);
      const uint32_t codes = shared + Plan::kWeights + weights.stage * Plan::kWeightBytes;
      // Chunk c of row r is at chunk c ^ (r % 8), and r % 8 is lane / 4 here.
      const int low = output.low, lane = output.lane;
      WeightOperand<Plan::kBlocks, Output<Plan, kOutput>::kApart, Plan::kArranged> operand(
          codes + low * (kWeightColumns / 2) + lane / 4 * 16,
          codes + kCodesBytes + low * (kWeightColumns / 16), lane % 4);
#pragma unroll
      for (int part = 0; part < Plan::kXSteps; ++part) {
        const bool begins = part % Plan::kXParts == 0, ends = (part + 1) % Plan::kXParts == 0;
        const uint64_t b = right_operand(shared + Plan::kX + x.stage * Plan::kXBytes +
                                         part % Plan::kXParts * Plan::kPartBytes);
#pragma unroll
        for (int first = 0; first < 4; first += Plan::kBlocks) {
          uint32_t a[Plan::kBlocks][4];
          operand.decode(a, part, first);
          if (part == Plan::kXSteps - 1 && first + Plan::kBlocks == 4) {
            __syncwarp();
            release_weights(weights.stage);
          }
          if (first == 0 && begins) await_phase(barriers.x_full(x.stage), x.parity);
          multiply_blocks<Plan::kSmallest>(sums, a, b + first * kNextColumns, count,
                                           step > begin || part > 0 || first > 0);
          await_products<1>();
          if (first == 0 && begins) release_x(previous);
        }
        if (ends) {
          previous = x.stage;
          x.advance();
        }
      }
      weights.advance();
    }
    await_products<0>();
    release_x(previous);
  }

  // With as many columns of the products as `count` tokens need.
  template <int kColumns>
  __device__ __forceinline__ void multiply_blocks(Sums& sums, const uint32_t (&a)[Plan::kBlocks][4],
                                                  uint64_t b, int count, bool add) const {
    if constexpr (kColumns < Plan::kTokens) {
      if (count > kColumns) {
        return multiply_blocks<kColumns + kRowGroup>(sums, a, b, count, add);
      }
    }
    begin_products();
    auto& used = reinterpret_cast<float (&)[kColumns / 2]>(sums);
#pragma unroll
    for (int block = 0; block < Plan::kBlocks; ++block) {
      multiply_rows<kColumns>(used, a[block], b + block * kNextColumns, add || block > 0);
    }
    close_products();
  }

  // The same with weights in shared memory, of 64 columns.
  template <int kColumns>
  __device__ __forceinline__ void multiply_both(Sums& sums, uint64_t a, uint64_t b, int count,
                                                bool add) const {
    if constexpr (kColumns < Plan::kTokens) {
      if (count > kColumns) return multiply_both<kColumns + kRowGroup>(sums, a, b, count, add);
    }
    begin_products();
    auto& used = reinterpret_cast<float (&)[kColumns / 2]>(sums);
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      multiply_rows_shared<kColumns>(used, a + block * kNextColumns, b + block * kNextColumns,
                                     add || block > 0);
    }
    close_products();
  }

  __device__ __forceinline__ void release_weights(int stage) const {
    if (stage >= 0 && output.lane == 0) arrive(barriers.weights_empty(stage));
  }

  // Both CTAs write into the stage, so both have to know.
  __device__ __forceinline__ void release_x(int stage) const {
    if (stage < 0) return;
    if constexpr (Plan::kSplit) {
      if (output.lane == 0) arrive(barriers.x_empty(stage));
    } else {
      if (output.lane < kCluster) arrive_at(output.lane, barriers.x_empty(stage));
    }
  }
};

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <typename Plan, ProductOutput kOutput>
__device__ __forceinline__ void run_product(const ProductJob& job) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ uint8_t dynamic[];
  const uint32_t shared = (shared_address(dynamic) + 1023) & ~1023u;
  const Barriers<Plan> barriers{shared + Plan::kBarriers};
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == kProducts * kWarpgroup) {
    prefetch_map(job.weights);
    if constexpr (!Plan::kBf16) prefetch_map(job.scales);
    prefetch_map(job.x);
  }
  if (thread == 0) {
    for (int i = 0; i < Plan::kXStages; ++i) {
      init_barrier(barriers.x_full(i), 1);
      init_barrier(barriers.x_empty(i), (Plan::kSplit ? 1 : kCluster) * kProducts * 4);
    }
    for (int i = 0; i < Plan::kWeightStages; ++i) {
      init_barrier(barriers.weights_full(i), 1);
      init_barrier(barriers.weights_empty(i), kProducts * 4);
    }
    init_barrier(barriers.begun(), 1);
    init_barrier(barriers.claimed(), 1);
    publish_barriers();
  }
  arrive_cluster();
  await_cluster();
  wait_for_previous_kernel();
  constexpr int kFirstCopying = kProducts * kWarpgroup;
  if constexpr (kGathers<Plan, kOutput>) {
    if (job.gathered != nullptr) gather_first<Plan>(job);
  }
  if (thread >= kFirstCopying) {
    if constexpr (Plan::kCtas == 1) give_registers<Plan::kCopying>();
    if (thread == kFirstCopying) Copier<Plan, kOutput>(job, shared, barriers).run();
    if constexpr (kGathers<Plan, kOutput>) {
      if (thread >= kFirstCopying + kWarp && job.gathered != nullptr) {
        gather_ahead<Plan>(job, barriers);
      }
    }
    __syncwarp();
    if constexpr (Plan::kSplit) {
      arrive_cluster();
      await_cluster();
    }
  } else {
    if constexpr (Plan::kCtas == 1) take_registers<Plan::kMultiplying>();
    Multiplier<Plan, kOutput> multiplier(job, shared, barriers);
    if constexpr (Plan::kSplit) {
      multiplier.run_share();
    } else {
      multiplier.run();
    }
  }
  // The CTAs of a cluster copy into each other's memory, arrive at barriers there, or read it.
  arrive_cluster();
  await_cluster();
#endif
}

}  // namespace flint::cuda
