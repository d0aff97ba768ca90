// Several tokens times many tiles of NVFP4 weights of Flint's hidden size, a CTA a part of the
// tiles, in turn. A tile, 8 low rows and 8 high ones, comes by copies of whole rows.
//
// The warps of a CTA have one thing to do each, and wait for what they need alone. One thread
// starts the copies of tiles into a ring. Eight warps multiply: each has an eighth of the width,
// and of its part of all tokens' activations keeps in registers what its lanes multiply, for all
// tiles. Two warps finish: they add the eight sums of an element, of a low row and of the high one
// that belongs to it.
//
// A token's sums are taken in the same order whatever the other tokens are, and however many.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/bulk_copy.cuh"
#include "cuda/device.cuh"
#include "cuda/mma.cuh"
#include "cuda/nvfp4_decode.cuh"
#include "cuda/pipeline.cuh"
#include "cuda/shared_loads.cuh"
#include "cuda/weight_tiles.cuh"

namespace flint::cuda {

inline constexpr int kSeveralWidth = 2048;
inline constexpr int kProductWarps = 8;
inline constexpr int kFinishWarps = kHalfTile * kMostTokens / kWarp;
inline constexpr int kCopyWarp = kProductWarps + kFinishWarps;
inline constexpr int kSeveralThreads = (kCopyWarp + 1) * kWarp;

inline constexpr int kPartColumns = kSeveralWidth / kProductWarps;  // of a warp
inline constexpr int kLaneColumns = kPartColumns / 4;
inline constexpr int kRowWords = kLaneColumns / 8;  // of codes, that a lane has of a row

// The tiles of a CTA on their way and there, and the sums of the warps.
template <int kStages>
struct TileRing {
  static constexpr uint32_t kCodes = kHalfTile * kSeveralWidth / 2;  // bytes of half a tile
  static constexpr uint32_t kScales = kHalfTile * kSeveralWidth / 16;
  static constexpr uint32_t kStageBytes = 2 * (kCodes + kScales);
  static constexpr int kBuffers = 2;  // of sums
  static constexpr int kSums = kProductWarps * kTileSums;
  static constexpr uint32_t kAlignment = 1024;  // that the exchange of chunks wants
  static_assert(kStageBytes % kAlignment == 0);
  // Dynamic shared memory: room to align, the stages, the sums.
  static constexpr size_t kBytes =
      kAlignment + kStages * kStageBytes + kBuffers * kSums * sizeof(float);

  // Barriers: a stage is full, all warps have read it; so with a buffer of sums.
  struct Barriers {
    uint64_t full[kStages], empty[kStages], summed[kBuffers], taken[kBuffers];
  };

  uint32_t stages;
  float* sums;
  const Barriers* barriers;

  __device__ __forceinline__ TileRing(uint8_t* dynamic, const Barriers& of_cta)
      : barriers(&of_cta) {
    const uint32_t skipped = -shared_address(dynamic) & (kAlignment - 1);
    stages = shared_address(dynamic) + skipped;
    sums = reinterpret_cast<float*>(dynamic + skipped + kStages * kStageBytes);
  }

  // By one thread; the CTA's barrier follows.
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < kStages; ++i) {
      init_barrier(shared_address(&barriers->full[i]), 1);
      init_barrier(shared_address(&barriers->empty[i]), kProductWarps);
    }
    for (int i = 0; i < kBuffers; ++i) {
      init_barrier(shared_address(&barriers->summed[i]), kProductWarps);
      init_barrier(shared_address(&barriers->taken[i]), kFinishWarps);
    }
    publish_barriers();
  }
};

// By one thread.
template <int kStages>
struct TileCopier {
  using Tiles = TileRing<kStages>;
  const Tiles& tiles;
  Ring<kStages> at;

  // The rows of weights from `low` and `high` on; `codes` describes whole rows of them, eight to a
  // box.
  __device__ __forceinline__ void copy(const CUtensorMap& codes, const uint8_t* scales, int low,
                                       int high) {
    const uint32_t full = shared_address(&tiles.barriers->full[at.stage]);
    await_phase(shared_address(&tiles.barriers->empty[at.stage]), at.parity ^ 1);
    expect_bytes(full, Tiles::kStageBytes);
    const uint32_t to = tiles.stages + at.stage * Tiles::kStageBytes;
    copy_rows(to, codes, low, full);
    copy_rows(to + Tiles::kCodes, codes, high, full);
    copy_bytes(to + 2 * Tiles::kCodes, scales + int64_t{low} * (kSeveralWidth / 16), Tiles::kScales,
               full);
    copy_bytes(to + 2 * Tiles::kCodes + Tiles::kScales,
               scales + int64_t{high} * (kSeveralWidth / 16), Tiles::kScales, full);
    at.advance();
  }
};

// By a warp: what its lanes have of the activations, and their products.
template <int kStages>
struct TileMultiplier {
  using Tiles = TileRing<kStages>;
  const Tiles& tiles;
  uint32_t x[kRowWords][4];
  Ring<kStages> at;
  Ring<Tiles::kBuffers> to;

  // Columns of the product are tokens, and the last one again where there are fewer: nobody reads
  // those. On its way until `arrange`.
  __device__ __forceinline__ void load(const uint16_t* activations, int64_t stride, int tokens) {
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const uint16_t* from = activations + min(lane / 4, tokens - 1) * stride + warp * kPartColumns +
                           lane % 4 * kLaneColumns;
#pragma unroll
    for (int word = 0; word < kRowWords; ++word) {
      const uint4 eight = load_activation(reinterpret_cast<const uint4*>(from) + word);
      x[word][0] = eight.x;
      x[word][1] = eight.y;
      x[word][2] = eight.z;
      x[word][3] = eight.w;
    }
  }

  // As the pairs that the codes of a word make.
  __device__ __forceinline__ void arrange() {
#pragma unroll
    for (auto& w : x) {
      const uint4 pairs = Nvfp4::arrange(make_uint4(w[0], w[1], w[2], w[3]));
      w[0] = pairs.x;
      w[1] = pairs.y;
      w[2] = pairs.z;
      w[3] = pairs.w;
    }
  }

  // The next tile.
  __device__ __forceinline__ void multiply() {
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const uint32_t stage = tiles.stages + at.stage * Tiles::kStageBytes;
    // A lane's row of a warp's columns is 128 bytes, of which the lane has two chunks of 16.
    const uint32_t low = stage + warp * (kHalfTile * kPartColumns / 2) +
                         lane / 4 * (kPartColumns / 2) + ((lane % 4 * 2) ^ (lane / 4)) * 16;
    const uint32_t scales = stage + 2 * Tiles::kCodes + lane / 4 * (kSeveralWidth / 16) +
                            warp * (kPartColumns / 16) + lane % 4 * (kLaneColumns / 16);
    await_phase(shared_address(&tiles.barriers->full[at.stage]), at.parity);
    const uint32_t low_scales = load_shared_word(scales);
    const uint32_t high_scales = load_shared_word(scales + Tiles::kScales);
    float sum[2][4] = {};  // in turns: a product does not wait for the one before it
#pragma unroll
    for (int half = 0; half < kRowWords / 4; ++half) {
      const uint32_t from = low ^ static_cast<uint32_t>(half * 16);
      const uint4 l4 = load_shared(from), h4 = load_shared(from + Tiles::kCodes);
      const uint32_t l[4] = {l4.x, l4.y, l4.z, l4.w}, h[4] = {h4.x, h4.y, h4.z, h4.w};
      const ScalePairs ls = decode_scales(static_cast<uint16_t>(low_scales >> 16 * half));
      const ScalePairs hs = decode_scales(static_cast<uint16_t>(high_scales >> 16 * half));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t low_scale = i < 2 ? ls.first : ls.second;
        const uint32_t high_scale = i < 2 ? hs.first : hs.second;
        CodePairs a = decode_codes(l[i]), b = decode_codes(h[i]);
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
          a.pair[pair] = multiply_bf16_pairs(a.pair[pair], low_scale);
          b.pair[pair] = multiply_bf16_pairs(b.pair[pair], high_scale);
        }
        const uint32_t (&w)[4] = x[4 * half + i];
        multiply_add(sum[0], a.pair[0], b.pair[0], a.pair[1], b.pair[1], w[0], w[1]);
        multiply_add(sum[1], a.pair[2], b.pair[2], a.pair[3], b.pair[3], w[2], w[3]);
      }
    }
    __syncwarp();
    if (lane == 0) arrive(shared_address(&tiles.barriers->empty[at.stage]));
    await_phase(shared_address(&tiles.barriers->taken[to.stage]), to.parity ^ 1);
    auto* sums = reinterpret_cast<float2*>(tiles.sums + to.stage * Tiles::kSums + warp * kTileSums +
                                           lane / 4 * kMostTokens + lane % 4 * 2);
    sums[0] = make_float2(sum[0][0] + sum[1][0], sum[0][1] + sum[1][1]);
    sums[kTileSums / 4] = make_float2(sum[0][2] + sum[1][2], sum[0][3] + sum[1][3]);
    __syncwarp();
    if (lane == 0) arrive(shared_address(&tiles.barriers->summed[to.stage]));
    at.advance();
    to.advance();
  }
};

// By the finishing warps: their thread i has low row i / 8 and the high one, of token i % 8.
template <int kStages>
struct TileFinisher {
  using Tiles = TileRing<kStages>;
  const Tiles& tiles;
  Ring<Tiles::kBuffers> from;

  // The sums of the next tile, of the low and of the high row.
  __device__ __forceinline__ float2 take(int element) {
    await_phase(shared_address(&tiles.barriers->summed[from.stage]), from.parity);
    const float* sums = tiles.sums + from.stage * Tiles::kSums + element;
    float low[kProductWarps], high[kProductWarps];
#pragma unroll
    for (int i = 0; i < kProductWarps; ++i) {
      low[i] = sums[i * kTileSums];
      high[i] = sums[i * kTileSums + kTileSums / 2];
    }
    __syncwarp();
    if (element % kWarp == 0) arrive(shared_address(&tiles.barriers->taken[from.stage]));
    from.advance();
#pragma unroll
    for (int i = 1; i < kProductWarps; ++i) {
      low[0] += low[i];
      high[0] += high[i];
    }
    return make_float2(low[0] * kNvfp4SumScale, high[0] * kNvfp4SumScale);
  }
};

}  // namespace flint::cuda
