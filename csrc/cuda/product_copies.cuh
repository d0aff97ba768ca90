// The copies of a product: weights and x into the stages of shared memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/bulk_copy.cuh"
#include "cuda/device.cuh"
#include "cuda/product_plan.cuh"
#include "cuda/shared_loads.cuh"

namespace flint::cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Keeps copies of weights and of x in flight, in the order in which they are read.
template <typename Plan, ProductOutput kOutput>
struct Copier {
  const ProductJob& job;
  uint32_t shared;
  Barriers<Plan> barriers;
  int thread;  // of the copying ones
  Ring<Plan::kXStages> x;
  Ring<Plan::kWeightStages> weights;

  __device__ __forceinline__ Copier(const ProductJob& job, uint32_t shared,
                                    const Barriers<Plan>& barriers)
      : job(job),
        shared(shared),
        barriers(barriers),
        thread(static_cast<int>(threadIdx.x) - kProducts * kWarpgroup) {}

  // By all copying warps; rows of x that lie apart take them all, boxes one thread.
  __device__ __forceinline__ void run() {
    if constexpr (Plan::kCtas == 1 && kOutput == ProductOutput::kSilu) {
      if (job.from != nullptr) return job.variant == 2 ? gather_boxes() : gather();
    }
    if (thread == 0) copy_boxes();
  }

  __device__ __forceinline__ void copy_boxes() {
    for (Tiles<Plan> tiles(job); !tiles.done(); tiles.advance()) {
      const TokenTile tokens = tiles.tokens();
      const int rows = (tokens.count + Plan::kBox - 1) / Plan::kBox * Plan::kBox;
      const int row = tiles.template row<kOutput>();
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

  // ------------------------------------------------------------------ rows that lie apart

  static constexpr int kBehind = 2;  // steps under way when one is announced
  Ring<Plan::kXStages> announced;
  uint32_t bytes[kBehind + 1];  // of the half that this CTA has copied, of the steps under way
  int open = 0;

  __device__ __forceinline__ void meet() const { sync_threads<kWarpgroup>(3); }

  __device__ __forceinline__ uint32_t from_place(int token) const {
    return shared + Plan::kFrom + token * 4;
  }

  static constexpr int kAhead = (Plan::kTokens + kWarpgroup - 1) / kWarpgroup;

  __device__ __forceinline__ void fetch_entries(int (&entries)[kAhead],
                                                const TokenTile& tokens) const {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int token = min(thread + i * kWarpgroup, tokens.count - 1);
      entries[i] = __ldcg(job.from_entry + tokens.first + token);
    }
  }

  __device__ __forceinline__ void gather() {
    Tiles<Plan> tiles(job);
    if (tiles.done()) return;
    TokenTile tokens = tiles.tokens();
    int entries[kAhead];
    fetch_entries(entries, tokens);
    for (;;) {
      meet();  // the places of the tile before have been read
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int token = thread + i * kWarpgroup;
        if (token < Plan::kTokens) {
          const uint32_t at = static_cast<uint32_t>(entries[i] / job.from_share) * job.from_stride;
          asm volatile("st.shared.u32 [%0], %1;" ::"r"(from_place(token)), "r"(at) : "memory");
        }
      }
      meet();
      const int row = tiles.template row<kOutput>();
      const int rows = (tokens.count + kRowGroup - 1) / kRowGroup * kRowGroup;
      const int expert = tokens.expert;
      tiles.advance();
      const bool last = tiles.done();
      if (!last) {
        tokens = tiles.tokens();
        fetch_entries(entries, tokens);
      }
      for (int step = tiles.begin; step < tiles.end; ++step) {
        if (thread == 0) copy_weights(expert, row, step);
        for (int part = 0; part < Plan::kXSteps; ++part) {
          gather_x(rows, step * Plan::kXSteps + part);
        }
      }
      if (last) break;
    }
    if (open > 1) {
      await_copies<1>();
      announce(bytes[1]);
    }
    await_copies<0>();
    announce(bytes[2]);
  }

  __device__ __forceinline__ void gather_x(int rows, int part) {
    await_phase(barriers.x_empty(x.stage), x.parity ^ 1);
    const int half = job.variant == 1 ? rows / 2 : rows;
    const int first = job.variant == 1 ? static_cast<int>(cluster_rank()) * half : 0;
    const int chunk = thread % 8, down = thread / 8;
    const uint16_t* from = job.from + part * kXColumns + chunk * 8;
    const uint32_t to = shared + Plan::kX + x.stage * Plan::kXBytes + first * kXRowBytes +
                        static_cast<uint32_t>((chunk ^ (down % 8)) * 16);
    for (int row = down; row < half; row += kWarpgroup / 8) {
      const uint32_t at = load_shared_word(from_place(first + row));
      copy_16_async(to + row * kXRowBytes, from + uint64_t{at} * 8);
    }
    close_copies();
#pragma unroll
    for (int i = 0; i < kBehind; ++i) bytes[i] = bytes[i + 1];
    bytes[kBehind] = static_cast<uint32_t>(half) * kXRowBytes;
    x.advance();
    if (++open > kBehind) {
      await_copies<kBehind>();
      announce(bytes[0]);
    }
  }

  // The oldest step under way is there.
  __device__ __forceinline__ void announce(uint32_t bytes) {
    order_before_copies();
    meet();
    if (thread == 0) {
      const uint32_t barrier = barriers.x_full(announced.stage);
      if (job.variant == 1) {
        expect_bytes(barrier, bytes);
        const uint32_t rank = cluster_rank(), other = rank ^ 1;
        const uint32_t from =
            shared + Plan::kX + announced.stage * Plan::kXBytes + rank * bytes;
        asm volatile(
            "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], "
            "%2, [%3];" ::"r"(shared_of(other, from)),
            "r"(from), "r"(bytes), "r"(shared_of(other, barrier))
            : "memory");
      } else {
        arrive(barrier);
      }
    }
    announced.advance();
    --open;
  }

  // By boxes of one row, to both CTAs: each warp has every fourth row of this CTA's half.
  __device__ __forceinline__ void gather_boxes() {
    const int warp = thread / kWarp, lane = thread % kWarp, rank = static_cast<int>(cluster_rank());
    for (Tiles<Plan> tiles(job); !tiles.done(); tiles.advance()) {
      const TokenTile tokens = tiles.tokens();
      const int rows = (tokens.count + kRowGroup - 1) / kRowGroup * kRowGroup, half = rows / 2;
      const int row = tiles.template row<kOutput>();
      const int mine = min(rank * half + warp + 4 * lane, tokens.count - 1);
      const int source = __ldcg(job.from_entry + tokens.first + mine) / job.from_share;
      for (int step = tiles.begin; step < tiles.end; ++step) {
        if (thread == 0) copy_weights(tokens.expert, row, step);
        for (int part = 0; part < Plan::kXSteps; ++part) {
          const uint32_t barrier = barriers.x_full(x.stage);
          await_phase(barriers.x_empty(x.stage), x.parity ^ 1);
          if (thread == 0) expect_bytes(barrier, static_cast<uint32_t>(rows) * kXRowBytes);
          const uint32_t to =
              shared + Plan::kX + x.stage * Plan::kXBytes + rank * half * kXRowBytes;
          __syncwarp();
          for (int i = 0; warp + 4 * i < half; ++i) {
            const int from = __shfl_sync(0xffffffffu, source, i);
            if (lane == 0) {
              copy_box_to((1 << kCluster) - 1, to + (warp + 4 * i) * kXRowBytes, job.x, from,
                          (step * Plan::kXSteps + part) * kXColumns, barrier);
            }
          }
          x.advance();
        }
      }
    }
  }
};

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace flint::cuda
