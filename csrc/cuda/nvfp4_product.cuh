// NVFP4 weights times many tokens on Hopper: out^T = W x^T, dense or for each expert's own tokens.
//
// The weights are the left operand of the tensor cores' asynchronous products, and that one may lie
// in registers: codes are decoded straight into it, and the decoded weights never pass through
// shared memory. A CTA has 128 rows of weights and up to 256 tokens, in two warpgroups of 64 rows
// each; while one product runs, a warpgroup decodes the operand of the next. One more thread keeps
// copies in flight, of weights in steps of 256 columns and of x in steps of 64. Two CTAs with
// neighbouring rows are a cluster; each copies half of x to both. CTAs are persistent: the copies
// of a tile begin while the results of the one before it are written.
//
// A token's sums are taken in the same order whatever the tile is, so its bits depend on it alone;
// with arranged columns (arranged.h) it is another order.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/arranged.h"
#include "cuda/device.cuh"
#include "cuda/launch.cuh"
#include "cuda/linear.h"
#include "cuda/nvfp4_product.h"
#include "cuda/pipeline.cuh"
#include "cuda/silu.cuh"
#include "cuda/tensor_map.h"
#include "cuda/warpgroup.cuh"
#include "cuda/weight_operand.cuh"
#include "cuda/wgmma.cuh"

namespace flint::cuda {

inline constexpr int kRowTile = 128;
inline constexpr int kHalfRows = kRowTile / 2;  // of a warpgroup; with a gate, of gate and of up
inline constexpr int kXColumns = 64;            // of a step of x
inline constexpr int kXSteps = kWeightColumns / kXColumns;  // of x in one of weights
inline constexpr int kRowGroup = 32;                        // tokens that go out together
inline constexpr int kCluster = 2;

inline constexpr int kProducts = 2;  // warpgroups that multiply

inline constexpr uint32_t kCodesBytes = kRowTile * kWeightColumns / 2;
inline constexpr uint32_t kScalesBytes = kRowTile * kWeightColumns / 16;
inline constexpr uint32_t kWeightBytes = kCodesBytes + kScalesBytes;
inline constexpr uint32_t kXRowBytes = kXColumns * 2;
inline constexpr uint32_t kOutBytes = kRowGroup * kHalfRows * 2;  // of a warpgroup

// How a CTA is laid out for tiles of at most `kTokens_`, copied in boxes of `kBox_`, `kCtas_` CTAs
// on a multiprocessor. kArranged_: the columns of x are in the order of arranged.h.
template <int kTokens_, int kBox_, int kCtas_, int kXStages_, int kWeightStages_,
          bool kArranged_ = false>
struct ProductPlan {
  static constexpr int kTokens = kTokens_, kBox = kBox_, kCtas = kCtas_;
  static constexpr int kXStages = kXStages_, kWeightStages = kWeightStages_;
  static constexpr bool kArranged = kArranged_;
  // A stage of x has this many times 64 columns, one behind the other.
  static constexpr int kXParts = kArranged ? kXSteps : 1;
  static constexpr uint32_t kPartBytes = kTokens * kXRowBytes;
  static constexpr uint32_t kXBytes = kXParts * kPartBytes;
  static constexpr uint32_t kX = 0;
  static constexpr uint32_t kWeights = kX + kXStages * kXBytes;
  static constexpr uint32_t kOut = kWeights + kWeightStages * kWeightBytes;
  static constexpr uint32_t kBarriers = kOut + kProducts * kOutBytes;
  static constexpr uint32_t kRows = kBarriers + 16 * (kXStages + kWeightStages);
  static constexpr uint32_t kEnd = kRows + kProducts * kTokens * 4;
  static constexpr uint32_t kSharedBytes = kEnd + 1024;  // the start is moved to 1024 bytes
  static_assert(kPartBytes % 1024 == 0 && kTokens % kBox == 0 && kBox * kXRowBytes % 1024 == 0);
  static_assert(kCtas * (kSharedBytes + 1024) <= 228 * 1024);

  // The smallest product, where small tiles get small ones.
  static constexpr int kSmallest = kBox == kRowGroup ? kRowGroup : kTokens;
  // Of 16 columns: how many are decoded and multiplied together.
  static constexpr int kBlocks = kCtas == 1 || kArranged ? 4 : 2;
  // One CTA alone: a warpgroup copies, for the registers that it can give to those that multiply.
  static constexpr int kThreads = kProducts * kWarpgroup + (kCtas == 1 ? kWarpgroup : kWarp);
  static constexpr int kMultiplying = 232, kCopying = 40;
};

struct ProductJob {
  CUtensorMap codes, scales, x;
  const float* scale_2;  // [experts, shards]
  uint16_t* out;
  const int32_t* out_row;      // of each row of x; null: the same
  bool arranged_out;           // columns of the output in the order of arranged.h
  const TokenTile* tiles;      // null: one expert, `tokens` rows
  const int32_t* tile_count;   // how many tiles there are
  int tokens;                  // of the one expert
  int features;                // of the output
  int weight_rows;             // of an expert
  int row_pairs;               // of row tiles
  int steps;                   // of kWeightColumns
  int shards;                  // of an expert's rows
  int shard_end[kMostShards];  // the last one's is above every row
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Four 8 x 8 matrices of BF16, each stored with its columns as rows of 16 bytes; lanes 8m ... 8m +
// 7 name where those of matrix m go.
__device__ __forceinline__ void store_transposed(uint32_t to, const uint32_t (&matrix)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
               "r"(matrix[0]), "r"(matrix[1]), "r"(matrix[2]), "r"(matrix[3])
               : "memory");
}

// What is left of gate and up. Dense layers round both first.
template <ProductOutput kOutput>
__device__ __forceinline__ float gated(float gate, float up) {
  if constexpr (kOutput == ProductOutput::kSiluOfRounded) {
    return fast_silu(rounded(uint16_t{}, gate)) * rounded(uint16_t{}, up);
  } else {
    return gate * __fdividef(1.0f, 1.0f + __expf(-gate)) * up;
  }
}

template <typename Plan>
struct Barriers {
  uint32_t base;

  __device__ __forceinline__ uint32_t x_full(int stage) const { return base + 8 * stage; }
  __device__ __forceinline__ uint32_t x_empty(int stage) const {
    return x_full(Plan::kXStages + stage);
  }
  __device__ __forceinline__ uint32_t weights_full(int stage) const {
    return x_full(2 * Plan::kXStages + stage);
  }
  __device__ __forceinline__ uint32_t weights_empty(int stage) const {
    return x_full(2 * Plan::kXStages + Plan::kWeightStages + stage);
  }
};

// The tiles of this cluster, one after the other.
template <typename Plan>
struct Tiles {
  const ProductJob& job;
  int index, step, count;

  __device__ __forceinline__ explicit Tiles(const ProductJob& job)
      : job(job),
        index(static_cast<int>(blockIdx.x) / kCluster),
        step(static_cast<int>(gridDim.x) / kCluster) {
    const int token_tiles = job.tiles != nullptr
                                ? *static_cast<const volatile int32_t*>(job.tile_count)
                                : (job.tokens + Plan::kTokens - 1) / Plan::kTokens;
    count = token_tiles * job.row_pairs;
  }

  __device__ __forceinline__ bool done() const { return index >= count; }
  __device__ __forceinline__ void advance() { index += step; }

  __device__ __forceinline__ TokenTile tokens() const {
    const int at = index / job.row_pairs;
    if (job.tiles != nullptr) {
      const int4 tile = __ldcg(reinterpret_cast<const int4*>(job.tiles + at));
      return {tile.x, tile.y, tile.z, 0};
    }
    const int first = at * Plan::kTokens;
    return {0, first, min(job.tokens - first, Plan::kTokens), 0};
  }

  // The first row of this CTA in the output.
  template <ProductOutput kOutput>
  __device__ __forceinline__ int row() const {
    constexpr int kRows = kOutput == ProductOutput::kRounded ? kRowTile : kHalfRows;
    return (index % job.row_pairs * kCluster + static_cast<int>(cluster_rank())) * kRows;
  }
};

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
    for (Tiles<Plan> tiles(job); !tiles.done(); tiles.advance()) {
      const TokenTile tokens = tiles.tokens();
      const int rows = (tokens.count + Plan::kBox - 1) / Plan::kBox * Plan::kBox;
      const int low = tokens.expert * job.weight_rows + tiles.template row<kOutput>();
      const int high = low + (kOutput == ProductOutput::kRounded ? kHalfRows : job.features);
      for (int step = 0; step < job.steps; ++step) {
        copy_weights(low, high, step);
        for (int part = 0; part < kXSteps; part += Plan::kXParts) {
          copy_x(tokens.first, rows, step * kXSteps + part);
        }
      }
    }
  }

  __device__ __forceinline__ void copy_weights(int low, int high, int step) {
    const uint32_t barrier = barriers.weights_full(weights.stage);
    await_phase(barriers.weights_empty(weights.stage), weights.parity ^ 1);
    expect_bytes(barrier, kWeightBytes);
    const uint32_t codes = shared + Plan::kWeights + weights.stage * kWeightBytes;
    const uint32_t scales = codes + kCodesBytes;
    copy_box(codes, job.codes, low, step * (kWeightColumns / 2), barrier);
    copy_box(codes + kCodesBytes / 2, job.codes, high, step * (kWeightColumns / 2), barrier);
    copy_box(scales, job.scales, low, step * (kWeightColumns / 16), barrier);
    copy_box(scales + kScalesBytes / 2, job.scales, high, step * (kWeightColumns / 16), barrier);
    weights.advance();
  }

  // Every other box of `rows` tokens, to both CTAs; from 64 * `part` columns on.
  __device__ __forceinline__ void copy_x(int first, int rows, int part) {
    const uint32_t barrier = barriers.x_full(x.stage);
    await_phase(barriers.x_empty(x.stage), x.parity ^ 1);
    expect_bytes(barrier, static_cast<uint32_t>(rows * Plan::kXParts) * kXRowBytes);
    uint32_t to = shared + Plan::kX + x.stage * Plan::kXBytes;
    const int rank = static_cast<int>(cluster_rank());
    for (int i = 0; i < Plan::kXParts; ++i, ++part, to += Plan::kPartBytes) {
      for (int row = rank * Plan::kBox; row < rows; row += kCluster * Plan::kBox) {
        copy_box_to((1 << kCluster) - 1, to + row * kXRowBytes, job.x, first + row,
                    part * kXColumns, barrier);
      }
    }
    x.advance();
  }
};

// A warpgroup that multiplies.
template <typename Plan, ProductOutput kOutput>
struct Multiplier {
  static constexpr bool kGated = kOutput != ProductOutput::kRounded;
  static constexpr int kApart = kGated ? kHalfRows : 8;  // two rows of a thread, in shared memory

  const ProductJob& job;
  uint32_t shared;
  Barriers<Plan> barriers;
  int group, warp, lane;  // of the warpgroups, in it, of the warp
  int low;                // of the thread's two rows in the CTA's tile
  Ring<Plan::kXStages> x;
  Ring<Plan::kWeightStages> weights;

  __device__ __forceinline__ Multiplier(const ProductJob& job, uint32_t shared,
                                        const Barriers<Plan>& barriers)
      : job(job), shared(shared), barriers(barriers) {
    const int thread = static_cast<int>(threadIdx.x);
    group = thread / kWarpgroup;
    warp = thread % kWarpgroup / kWarp;
    lane = thread % kWarp;
    low = (kGated ? group * 32 + warp * 8 : group * 64 + warp * 16) + lane / 4;
  }

  __device__ __forceinline__ void run() {
    Tiles<Plan> tiles(job);
    if (tiles.done()) return;
    for (TokenTile tokens = tiles.tokens();;) {
      const int row = tiles.template row<kOutput>();
      // What is needed at the end is fetched while there is time.
      const float low_scale = scale_of(tokens.expert, row + low);
      const float high_scale =
          scale_of(tokens.expert, row + low + (kGated ? job.features : kApart));
      fetch_rows(tokens);
      float sums[Plan::kTokens / 2];
      multiply(sums, tokens.count);
      tiles.advance();
      const TokenTile next = tiles.done() ? TokenTile{} : tiles.tokens();
      write(sums, tokens, row, low_scale, high_scale);
      if (tiles.done()) return;
      tokens = next;
    }
  }

  __device__ __forceinline__ void multiply(float (&sums)[Plan::kTokens / 2], int count) {
    int previous = -1;  // the stage of x that the products under way read
    for (int step = 0; step < job.steps; ++step) {
      await_phase(barriers.weights_full(weights.stage), weights.parity);
      const uint32_t codes = shared + Plan::kWeights + weights.stage * kWeightBytes;
      // Chunk c of row r is at chunk c ^ (r % 8), and r % 8 is lane / 4 here.
      WeightOperand<Plan::kBlocks, kApart, Plan::kArranged> operand(
          codes + low * (kWeightColumns / 2) + lane / 4 * 16,
          codes + kCodesBytes + low * (kWeightColumns / 16), lane % 4);
#pragma unroll
      for (int part = 0; part < kXSteps; ++part) {
        const bool begins = part % Plan::kXParts == 0, ends = (part + 1) % Plan::kXParts == 0;
        const uint64_t b = right_operand(shared + Plan::kX + x.stage * Plan::kXBytes +
                                         part % Plan::kXParts * Plan::kPartBytes);
#pragma unroll
        for (int first = 0; first < 4; first += Plan::kBlocks) {
          uint32_t a[Plan::kBlocks][4];
          operand.decode(a, part, first);
          if (part == kXSteps - 1 && first + Plan::kBlocks == 4) {
            __syncwarp();
            if (lane == 0) arrive(barriers.weights_empty(weights.stage));
          }
          if (first == 0 && begins) await_phase(barriers.x_full(x.stage), x.parity);
          multiply_blocks<Plan::kSmallest>(sums, a, b + first * kNextColumns, count,
                                           step > 0 || part > 0 || first > 0);
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
  __device__ __forceinline__ void multiply_blocks(float (&sums)[Plan::kTokens / 2],
                                                  const uint32_t (&a)[Plan::kBlocks][4], uint64_t b,
                                                  int count, bool add) const {
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

  // Both CTAs write into the stage, so both have to know.
  __device__ __forceinline__ void release_x(int stage) const {
    if (stage >= 0 && lane < kCluster) arrive_at(lane, barriers.x_empty(stage));
  }

  // Where the rows of a tile go.
  __device__ __forceinline__ void fetch_rows(const TokenTile& tokens) const {
    if (job.out_row == nullptr) return;
    meet();  // those of the tile before have been read
    for (int i = warp * kWarp + lane; i < tokens.count; i += kWarpgroup) {
      copy_4_async(row_place(i), job.out_row + tokens.first + i, true);
    }
  }

  __device__ __forceinline__ uint32_t row_place(int token) const {
    return shared + Plan::kRows + (group * Plan::kTokens + token) * 4;
  }

  __device__ __forceinline__ void write(const float (&sums)[Plan::kTokens / 2],
                                        const TokenTile& tokens, int row, float low_scale,
                                        float high_scale) {
    if (job.out_row != nullptr) {
      close_copies();
      await_copies<0>();  // seen by all of the warpgroup after the next barrier
    }
    const uint32_t buffer = shared + Plan::kOut + group * kOutBytes;
#pragma unroll
    for (int first = 0; first < Plan::kTokens; first += kRowGroup) {
      if (first >= tokens.count) break;
      meet();  // the buffer has been read
      stage_out(buffer, sums + first / 2, low_scale, high_scale);
      meet();
      send_out(buffer, tokens, first, row);
    }
  }

  // The warps of this warpgroup.
  __device__ __forceinline__ void meet() const {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "n"(kWarpgroup) : "memory");
  }

  // 32 tokens; in the buffer a token's rows of the warpgroup stand together, their chunks of 16
  // bytes exchanged so that no two lanes want the same bank.
  __device__ __forceinline__ void stage_out(uint32_t buffer, const float* sums, float low_scale,
                                            float high_scale) const {
    const int matrix = lane / 8, row = lane % 8;
    if constexpr (kGated) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* s = sums + 4 * i;
        pairs[i] = pack_bf16(gated<kOutput>(s[0] * low_scale, s[2] * high_scale),
                             gated<kOutput>(s[1] * low_scale, s[3] * high_scale));
      }
      store_transposed(buffer + place(8 * matrix + row, warp), pairs);
    } else {
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const float *s = sums + 4 * i, *n = s + 4;
        const uint32_t pairs[4] = {pack_bf16(s[0] * low_scale, s[1] * low_scale),
                                   pack_bf16(s[2] * high_scale, s[3] * high_scale),
                                   pack_bf16(n[0] * low_scale, n[1] * low_scale),
                                   pack_bf16(n[2] * high_scale, n[3] * high_scale)};
        store_transposed(buffer + place(8 * (i + matrix / 2) + row, 2 * warp + matrix % 2), pairs);
      }
    }
  }

  static constexpr int kChunks = kGated ? 4 : 8;  // of 8 rows, in a warpgroup's output

  static __device__ __forceinline__ uint32_t place(int token, int chunk) {
    const int exchanged = kGated ? chunk ^ (token / 2 % 4) : chunk ^ (token % 8);
    return static_cast<uint32_t>((token * kChunks + exchanged) * 16);
  }

  __device__ __forceinline__ void send_out(uint32_t buffer, const TokenTile& tokens, int first,
                                           int row) const {
    const int thread = warp * kWarp + lane, chunk = thread % kChunks;
    const int column = row + (group * kChunks + chunk) * 8;
    if (column >= job.features) return;
#pragma unroll
    for (int token = thread / kChunks; token < kRowGroup; token += kWarpgroup / kChunks) {
      if (first + token >= tokens.count) break;
      const uint4 value = load_shared(buffer + place(token, chunk));
      int64_t to = tokens.first + first + token;
      if (job.out_row != nullptr) {
        to = load_shared_word(row_place(first + token));
      }
      uint16_t* out = job.out + to * job.features;
      if (Plan::kArranged && kGated && job.arranged_out) {
        store_arranged(out, column, value);
      } else {
        *reinterpret_cast<uint4*>(out + column) = value;
      }
    }
  }

  __device__ __forceinline__ float scale_of(int expert, int row) const {
    int shard = 0;
#pragma unroll
    for (int i = 0; i < kMostShards - 1; ++i) shard += row >= job.shard_end[i];
    shard = min(shard, job.shards - 1);
    return load_weight(job.scale_2 + int64_t{expert} * job.shards + shard) * kNvfp4SumScale;
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
  if (thread == 0) {
    for (int i = 0; i < Plan::kXStages; ++i) {
      init_barrier(barriers.x_full(i), 1);
      init_barrier(barriers.x_empty(i), kCluster * kProducts * 4);
    }
    for (int i = 0; i < Plan::kWeightStages; ++i) {
      init_barrier(barriers.weights_full(i), 1);
      init_barrier(barriers.weights_empty(i), kProducts * 4);
    }
    publish_barriers();
  }
  arrive_cluster();
  await_cluster();
  wait_for_previous_kernel();
  if (thread >= kProducts * kWarpgroup) {
    if constexpr (Plan::kCtas == 1) give_registers<Plan::kCopying>();
    if (thread == kProducts * kWarpgroup) Copier<Plan, kOutput>(job, shared, barriers).run();
    __syncwarp();
  } else {
    if constexpr (Plan::kCtas == 1) take_registers<Plan::kMultiplying>();
    Multiplier<Plan, kOutput>(job, shared, barriers).run();
  }
  // The other CTA copies into this one's memory and arrives at its barriers.
  arrive_cluster();
  await_cluster();
#endif
}

}  // namespace flint::cuda
