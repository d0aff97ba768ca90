// Several tokens times many tiles of NVFP4 weights of Flint's hidden size: a CTA takes its part of
// the tiles in turn. A tile, 8 low rows and 8 high ones, comes by copies of whole rows.
//
// The warps of a CTA have one thing to do each, and wait for what they need alone. One thread
// starts the copies of tiles into a ring. Teams of eight warps multiply, each team the next tile: a
// warp has an eighth of the width, and keeps in registers what its lanes multiply of all tokens'
// activations, for all tiles. Two warps finish: they add the eight sums of an element, of a low row
// and of the high one that belongs to it.
//
// A token's sums are taken in the same order whatever the other tokens are, and however many.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/bulk_copy.cuh"
#include "cuda/device.cuh"
#include "cuda/matrices.cuh"
#include "cuda/mma.cuh"
#include "cuda/nvfp4_decode.cuh"
#include "cuda/pipeline.cuh"
#include "cuda/shared_loads.cuh"
#include "cuda/weight_tiles.cuh"

namespace flint::cuda {

inline constexpr int kSeveralWidth = 2048;
inline constexpr int kTeams = 3, kTeamWarps = 8;
inline constexpr int kProductWarps = kTeams * kTeamWarps;
inline constexpr int kFinishThreads = kHalfTile * kMostTokens;
inline constexpr int kFinishWarps = kFinishThreads / kWarp;
inline constexpr int kCopyWarp = kProductWarps + kFinishWarps;
inline constexpr int kSeveralThreads = (kCopyWarp + 1) * kWarp;

inline constexpr int kPartColumns = kSeveralWidth / kTeamWarps;  // of a warp
inline constexpr int kLaneColumns = kPartColumns / 4;
inline constexpr int kRowWords = kLaneColumns / 8;  // of codes, that a lane has of a row

// A CTA's dynamic shared memory, by its addresses: the ring of tiles, the warps' sums, the
// activations, barriers. Tile number i of the CTA is team i % kTeams's, in stage i % kStages.
struct SeveralShared {
  static constexpr int kStages = 8;
  static constexpr int kBuffers = 2 * kTeams;                        // of sums
  static constexpr uint32_t kCodes = kHalfTile * kSeveralWidth / 2;  // bytes of half a tile
  static constexpr uint32_t kScales = kHalfTile * kSeveralWidth / 16;
  static constexpr uint32_t kStageBytes = 2 * (kCodes + kScales);
  static constexpr uint32_t kSumBytes = kTeamWarps * kTileSums * sizeof(float);
  static constexpr uint32_t kAlignment = 1024;  // that the exchange of chunks wants
  static_assert(kStageBytes % kAlignment == 0);
  static constexpr uint32_t kSums = kStages * kStageBytes;
  static constexpr uint32_t kActivations = kSums + kBuffers * kSumBytes;
  static constexpr uint32_t kBarriers = kActivations + kSeveralWidth * kMostTokens * 2;
  static constexpr size_t kBytes =
      kAlignment + kBarriers + 2 * (kStages + kBuffers) * sizeof(uint64_t);

  uint32_t base;

  __device__ __forceinline__ explicit SeveralShared(const uint8_t* dynamic)
      : base((shared_address(dynamic) + kAlignment - 1) / kAlignment * kAlignment) {}

  // A stage is full; all warps have read it. So with a buffer of sums.
  __device__ __forceinline__ uint32_t full(int stage) const { return base + kBarriers + 8 * stage; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(kStages + stage); }
  __device__ __forceinline__ uint32_t summed(int buffer) const {
    return full(2 * kStages + buffer);
  }
  __device__ __forceinline__ uint32_t taken(int buffer) const {
    return full(2 * kStages + kBuffers + buffer);
  }

  // By one thread; the CTA's barrier follows.
  __device__ __forceinline__ void init() const {
#pragma unroll 1
    for (int i = 0; i < kStages; ++i) {
      init_barrier(full(i), 1);
      init_barrier(empty(i), kTeamWarps);
    }
#pragma unroll 1
    for (int i = 0; i < kBuffers; ++i) {
      init_barrier(summed(i), kTeamWarps);
      init_barrier(taken(i), kFinishWarps);
    }
    publish_barriers();
    order_before_copies();
  }
};

// A place in a ring that is gone round in steps.
template <int kPlaces>
struct Steps {
  int place;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance(int step) {
    place += step;
    if (place >= kPlaces) {
      place -= kPlaces;
      parity ^= 1;
    }
  }
};

// By one thread.
struct TileCopier {
  using Shared = SeveralShared;
  const Shared& shared;
  Steps<Shared::kStages> at{0};

  // The rows of weights from `low` and from `high` on; `codes` describes whole rows of them, eight
  // to a box. Waits where the stage is not empty.
  __device__ __forceinline__ void copy(const CUtensorMap& codes, const uint8_t* scales, int low,
                                       int high) {
    constexpr int kRowScales = kSeveralWidth / 16;
    const uint32_t full = shared.full(at.place);
    await_phase(shared.empty(at.place), at.parity ^ 1);
    expect_bytes(full, Shared::kStageBytes);
    const uint32_t to = shared.base + at.place * Shared::kStageBytes;
    copy_rows(to, codes, low, full);
    copy_rows(to + Shared::kCodes, codes, high, full);
    const uint32_t to_scales = to + 2 * Shared::kCodes;
    copy_bytes(to_scales, scales + int64_t{low} * kRowScales, Shared::kScales, full);
    copy_bytes(to_scales + Shared::kScales, scales + int64_t{high} * kRowScales, Shared::kScales,
               full);
    at.advance(1);
  }
};

// By a warp of a team.
struct TileMultiplier {
  using Shared = SeveralShared;
  const Shared& shared;
  int warp, lane;

  // A part of a row of activations is 32 vectors, each of which one lane will want: vector 8t + i
  // is lane 4 * row + t's word i. They stand so that neither storing nor loading meets itself.
  __device__ __forceinline__ uint32_t place(int part, int word, int of_lane) const {
    return shared.base + Shared::kActivations +
           ((part * kRowWords + word) * kWarp + (of_lane ^ word)) * kVectorBytes;
  }

  // By all teams together; the CTA's barrier follows.
  __device__ __forceinline__ void stage(const uint16_t* x, int64_t stride, int tokens) const {
    constexpr int kMost = (kTeamWarps * kMostTokens + kProductWarps - 1) / kProductWarps;
    uint4 value[kMost];
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const int unit = warp + i * kProductWarps, token = unit / kTeamWarps;
      if (token >= tokens) break;
      value[i] = load_activation(
          reinterpret_cast<const uint4*>(x + token * stride + unit % kTeamWarps * kPartColumns) +
          lane);
    }
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const int unit = warp + i * kProductWarps, token = unit / kTeamWarps;
      if (token >= tokens) break;
      store_shared(place(unit % kTeamWarps, lane % kRowWords, token * 4 + lane / kRowWords),
                   Nvfp4::arrange(value[i]));
    }
  }

  // Columns of the product are tokens, and the last one again where there are fewer: nobody reads
  // those.
  __device__ __forceinline__ void load(uint4 (&x)[kRowWords], int tokens) const {
    const int of_lane = min(lane / 4, tokens - 1) * 4 + lane % 4;
#pragma unroll
    for (int word = 0; word < kRowWords; ++word) {
      x[word] = load_shared(place(warp % kTeamWarps, word, of_lane));
    }
  }

  // The team's tiles of the CTA's `count`.
  __device__ __forceinline__ void multiply_all(int count, int tokens) const {
    uint4 x[kRowWords];
    load(x, tokens);
    const int team = warp / kTeamWarps, part = warp % kTeamWarps;
    // A lane's row of a warp's columns is 128 bytes, of which the lane has two chunks of 16.
    const uint32_t codes = shared.base + part * (kHalfTile * kPartColumns / 2) +
                           lane / 4 * (kPartColumns / 2) + ((lane % 4 * 2) ^ (lane / 4)) * 16;
    const uint32_t scales = shared.base + 2 * Shared::kCodes + lane / 4 * (kSeveralWidth / 16) +
                            part * (kPartColumns / 16) + lane % 4 * (kLaneColumns / 16);
    const uint32_t sums = shared.base + Shared::kSums + part * (kTileSums * sizeof(float)) +
                          (lane / 4 * kMostTokens + lane % 4 * 2) * sizeof(float);
    Steps<Shared::kStages> from{team};
    Steps<Shared::kBuffers> to{team};
#pragma unroll 1
    for (int tile = team; tile < count; tile += kTeams) {
      const uint32_t stage = from.place * Shared::kStageBytes;
      await_phase(shared.full(from.place), from.parity);
      float sum[2][4] = {};
      multiply(sum, x, codes + stage, scales + stage);
      __syncwarp();
      if (lane == 0) arrive(shared.empty(from.place));
      await_phase(shared.taken(to.place), to.parity ^ 1);
      const uint32_t at = sums + to.place * Shared::kSumBytes;
      store_shared(at, sum[0][0] + sum[1][0], sum[0][1] + sum[1][1]);
      store_shared(at + kTileSums / 2 * sizeof(float), sum[0][2] + sum[1][2],
                   sum[0][3] + sum[1][3]);
      __syncwarp();
      if (lane == 0) arrive(shared.summed(to.place));
      from.advance(kTeams);
      to.advance(kTeams);
    }
  }

 private:
  // In turns to two sums: a product does not wait for the one before it.
  static __device__ __forceinline__ void multiply(float (&sum)[2][4], const uint4 (&x)[kRowWords],
                                                  uint32_t codes, uint32_t scales) {
    const ScaleWords low_scales(load_shared_word(scales));
    const ScaleWords high_scales(load_shared_word(scales + Shared::kScales));
#pragma unroll
    for (int half = 0; half < kRowWords / 4; ++half) {
      const uint32_t from = codes ^ static_cast<uint32_t>(half * 16);
      const uint4 l4 = load_shared(from), h4 = load_shared(from + Shared::kCodes);
      const uint32_t l[4] = {l4.x, l4.y, l4.z, l4.w}, h[4] = {h4.x, h4.y, h4.z, h4.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const CodePairs a = low_scales.scaled(decode_codes(l[i]), half * 2 + i / 2);
        const CodePairs b = high_scales.scaled(decode_codes(h[i]), half * 2 + i / 2);
        const uint4& w = x[4 * half + i];
        multiply_add(sum[0], a.pair[0], b.pair[0], a.pair[1], b.pair[1], w.x, w.y);
        multiply_add(sum[1], a.pair[2], b.pair[2], a.pair[3], b.pair[3], w.z, w.w);
      }
    }
  }
};

// By the finishing warps: thread `element` of theirs has low row element / 8 and the high one, of
// token element % 8.
struct TileFinisher {
  using Shared = SeveralShared;
  const Shared& shared;
  int element;
  Steps<Shared::kBuffers> from{0};

  // The sums of the next tile, of the low and of the high row.
  __device__ __forceinline__ float2 take() {
    await_phase(shared.summed(from.place), from.parity);
    const uint32_t sums = shared.base + Shared::kSums + from.place * Shared::kSumBytes +
                          element * static_cast<uint32_t>(sizeof(float));
    float low[kTeamWarps], high[kTeamWarps];
#pragma unroll
    for (int i = 0; i < kTeamWarps; ++i) {
      const uint32_t at = sums + i * kTileSums * static_cast<uint32_t>(sizeof(float));
      low[i] = __uint_as_float(load_shared_word(at));
      high[i] = __uint_as_float(load_shared_word(at + kTileSums / 2 * sizeof(float)));
    }
    __syncwarp();
    if (element % kWarp == 0) arrive(shared.taken(from.place));
    from.advance(1);
#pragma unroll
    for (int i = 1; i < kTeamWarps; ++i) {
      low[0] += low[i];
      high[0] += high[i];
    }
    return make_float2(low[0] * kNvfp4SumScale, high[0] * kNvfp4SumScale);
  }
};

}  // namespace flint::cuda
