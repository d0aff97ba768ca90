// How a product of product.cuh is laid out: what a CTA has, and which tiles are whose.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/cluster.cuh"
#include "cuda/linear.h"
#include "cuda/pipeline.cuh"
#include "cuda/product.h"
#include "cuda/warpgroup.cuh"

namespace flint::cuda {

inline constexpr int kRowTile = 128;
inline constexpr int kHalfRows = kRowTile / 2;  // of a warpgroup; with a gate, of gate and of up
inline constexpr int kXColumns = 64;            // of a step of x
inline constexpr int kRowGroup = 32;            // tokens that go out together
inline constexpr int kCluster = 2;              // without kSplit

inline constexpr int kProducts = 2;  // warpgroups that multiply

inline constexpr uint32_t kCodesBytes = kRowTile * kWeightColumns / 2;
inline constexpr uint32_t kScalesBytes = kRowTile * kWeightColumns / 16;
inline constexpr uint32_t kXRowBytes = kXColumns * 2;
inline constexpr uint32_t kOutBytes = kRowGroup * kHalfRows * 2;  // of a warpgroup

enum class WeightForm {
  kNvfp4,
  kNvfp4Arranged,  // the columns of x are in the order of arranged.h
  kBf16,
};

// How a CTA is laid out for tiles of at most `kTokens_`, copied in boxes of `kBox_`, `kCtas_` CTAs
// on a multiprocessor.
template <WeightForm kForm_, int kTokens_, int kBox_, int kCtas_, int kXStages_, int kWeightStages_,
          bool kSplit_ = false>
struct ProductPlan {
  static constexpr int kTokens = kTokens_, kBox = kBox_, kCtas = kCtas_;
  static constexpr int kXStages = kXStages_, kWeightStages = kWeightStages_;
  static constexpr bool kBf16 = kForm_ == WeightForm::kBf16;
  static constexpr bool kArranged = kForm_ == WeightForm::kNvfp4Arranged;
  static constexpr bool kSplit = kSplit_;
  // Of a stage of weights, and how many stages of x are one.
  static constexpr int kColumns = kBf16 ? kXColumns : kWeightColumns;
  static constexpr int kXSteps = kColumns / kXColumns;
  static constexpr uint32_t kWeightBytes =
      kBf16 ? kRowTile * kXRowBytes : kCodesBytes + kScalesBytes;
  // A stage of x has this many times 64 columns, one behind the other.
  static constexpr int kXParts = kArranged ? kXSteps : 1;
  static constexpr uint32_t kPartBytes = kTokens * kXRowBytes;
  static constexpr uint32_t kXBytes = kXParts * kPartBytes;
  static constexpr uint32_t kX = 0;
  static constexpr uint32_t kWeights = kX + kXStages * kXBytes;
  static constexpr uint32_t kOut = kWeights + kWeightStages * kWeightBytes;
  static constexpr uint32_t kBarriers = kOut + 2 * kProducts * kOutBytes;
  static constexpr uint32_t kRows = kBarriers + 16 * (kXStages + kWeightStages) + 16;
  static constexpr uint32_t kEnd = kRows + kProducts * kTokens * 4;
  static constexpr uint32_t kSharedBytes = kEnd + 1024;  // the start is moved to 1024 bytes
  static_assert(kPartBytes % 1024 == 0 && kTokens % kBox == 0 && kBox * kXRowBytes % 1024 == 0);
  static_assert(kCtas * (kSharedBytes + 1024) <= 228 * 1024);
  // The sums of a CTA are left to the cluster where x was.
  static_assert(!kSplit || kXStages * kXBytes >= kTokens * kRowTile * sizeof(float));

  // The smallest product, where small tiles get small ones.
  static constexpr int kSmallest = kBox == kRowGroup ? kRowGroup : kTokens;
  // Of 16 columns: how many are decoded and multiplied together.
  static constexpr int kBlocks = kCtas == 1 || kArranged ? 4 : 2;
  // One CTA alone: a warpgroup copies, for the registers that it can give to those that multiply.
  static constexpr int kThreads = kProducts * kWarpgroup + (kCtas == 1 ? kWarpgroup : kWarp);
  static constexpr int kMultiplying = 216, kCopying = 72;
};

struct ProductJob {
  CUtensorMap weights, scales, x;
  const float* scale_2;  // [experts, shards]; null for BF16
  uint16_t* out;
  const int32_t* out_row;     // of each row of x; null: the same
  bool arranged_out;          // columns of the output in the order of arranged.h
  TokenTile* tiles;           // null: one expert, `tokens` rows
  const int32_t* tile_count;  // how many tiles there are
  // Where x does not have the rows of the tiles yet (product_gather.cuh), or null.
  uint16_t* gathered;    // x
  const uint16_t* from;  // rows of these, from_stride elements apart
  int64_t from_stride;
  const int32_t* from_entry;   // of each row of x: the entry
  int from_share;              // entries of a row
  int tokens;                  // of the one expert
  int features;                // of the output
  int weight_rows;             // of an expert
  int row_tiles;               // of a cluster: pairs of them, without kSplit
  int steps;                   // of Plan::kColumns
  int shards;                  // of an expert's rows
  int shard_end[kMostShards];  // the last one's is above every row
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDACC__)

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
  // A tile: by the thread that copies, and by the warps that bring its rows, when all are claimed.
  __device__ __forceinline__ uint32_t begun() const {
    return x_full(2 * Plan::kXStages + 2 * Plan::kWeightStages);
  }
  __device__ __forceinline__ uint32_t claimed() const {
    return x_full(2 * Plan::kXStages + 2 * Plan::kWeightStages + 1);
  }
};

// The tiles of this cluster, one after the other, and this CTA's share of their columns.
template <typename Plan>
struct Tiles {
  const ProductJob& job;
  int index, step, count;
  int begin, end;  // steps of weights

  __device__ __forceinline__ explicit Tiles(const ProductJob& job)
      : job(job), begin(0), end(job.steps) {
    const int cluster = Plan::kSplit ? static_cast<int>(cluster_size()) : kCluster;
    index = static_cast<int>(blockIdx.x) / cluster;
    step = static_cast<int>(gridDim.x) / cluster;
    if constexpr (Plan::kSplit) {
      const int rank = static_cast<int>(cluster_rank());
      begin = rank * job.steps / cluster;
      end = (rank + 1) * job.steps / cluster;
    }
    const int token_tiles = job.tiles != nullptr
                                ? *static_cast<const volatile int32_t*>(job.tile_count)
                                : (job.tokens + Plan::kTokens - 1) / Plan::kTokens;
    count = token_tiles * job.row_tiles;
  }

  __device__ __forceinline__ bool done() const { return index >= count; }
  __device__ __forceinline__ void advance() { index += step; }

  __device__ __forceinline__ TokenTile tokens() const {
    const int at = index / job.row_tiles;
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
    const int tile = index % job.row_tiles;
    return (Plan::kSplit ? tile : tile * kCluster + static_cast<int>(cluster_rank())) * kRows;
  }
};

#endif

}  // namespace flint::cuda
