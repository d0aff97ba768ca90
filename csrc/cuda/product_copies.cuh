// The copies of a product: weights and x into the stages of shared memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/product_gather.cuh"
#include "cuda/product_plan.cuh"

namespace flint::cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Keeps copies of weights and of x in flight, in the order in which they are read.
template <typename Plan, ProductOutput kOutput>
struct Copier {
  const ProductJob& job;
  uint32_t shared;
  Barriers<Plan> barriers;
  Ring<Plan::kXStages> x;
  Ring<Plan::kWeightStages> weights;

  __device__ __forceinline__ Copier(const ProductJob& job, uint32_t shared,
                                    const Barriers<Plan>& barriers)
      : job(job), shared(shared), barriers(barriers) {}

  // By one thread.
  __device__ __forceinline__ void run() {
    GatheredRows gathered;
    for (Tiles<Plan> tiles(job); !tiles.done(); tiles.advance()) {
      const TokenTile tokens = tiles.tokens();
      const int rows = (tokens.count + Plan::kBox - 1) / Plan::kBox * Plan::kBox;
      const int row = tiles.template row<kOutput>();
      if constexpr (kGathers<Plan, kOutput>) {
        if (job.gathered != nullptr) gathered.begin(job, tiles, barriers);
      }
      for (int step = tiles.begin; step < tiles.end; ++step) {
        copy_weights(tokens.expert, row, step);
        for (int part = 0; part < Plan::kXSteps; part += Plan::kXParts) {
          copy_x(tokens.first, rows, step * Plan::kXSteps + part);
        }
      }
    }
  }

  __device__ __forceinline__ void copy_weights(int expert, int row, int step) {
    const uint32_t barrier = barriers.weights_full(weights.stage);
    await_phase(barriers.weights_empty(weights.stage), weights.parity ^ 1);
    expect_bytes(barrier, Plan::kWeightBytes);
    const uint32_t to = shared + Plan::kWeights + weights.stage * Plan::kWeightBytes;
    const int low = expert * job.weight_rows + row;
    if constexpr (Plan::kBf16) {
      const int at[] = {step * Plan::kColumns, 0, 0, low / 8};
      copy_box(to, job.weights, at, barrier);
    } else {
      const int high = low + (kOutput == ProductOutput::kRounded ? kHalfRows : job.features);
      const int codes = step * (kWeightColumns / 2), scales = step * (kWeightColumns / 16);
      copy_box(to, job.weights, low, codes, barrier);
      copy_box(to + kCodesBytes / 2, job.weights, high, codes, barrier);
      copy_box(to + kCodesBytes, job.scales, low, scales, barrier);
      copy_box(to + kCodesBytes + kScalesBytes / 2, job.scales, high, scales, barrier);
    }
    weights.advance();
  }

  // `rows` tokens from 64 * `part` columns on: every other box, to both CTAs; or, where columns are
  // shared, all boxes to this one.
  __device__ __forceinline__ void copy_x(int first, int rows, int part) {
    const uint32_t barrier = barriers.x_full(x.stage);
    await_phase(barriers.x_empty(x.stage), x.parity ^ 1);
    expect_bytes(barrier, static_cast<uint32_t>(rows * Plan::kXParts) * kXRowBytes);
    uint32_t to = shared + Plan::kX + x.stage * Plan::kXBytes;
    const int rank = static_cast<int>(cluster_rank());
    for (int i = 0; i < Plan::kXParts; ++i, ++part, to += Plan::kPartBytes) {
      if constexpr (Plan::kSplit) {
        for (int row = 0; row < rows; row += Plan::kBox) {
          copy_box(to + row * kXRowBytes, job.x, first + row, part * kXColumns, barrier);
        }
      } else {
        for (int row = rank * Plan::kBox; row < rows; row += kCluster * Plan::kBox) {
          copy_box_to((1 << kCluster) - 1, to + row * kXRowBytes, job.x, first + row,
                      part * kXColumns, barrier);
        }
      }
    }
    x.advance();
  }
};

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace flint::cuda
