// NVFP4 weights of many experts times the few tokens of each, on Hopper: bound by the weights'
// bytes.
//
// A unit is 16 * kRowTiles rows of weights for each of the CTA's groups of warps, over their whole
// width: a low half and a high half of rows, each one piece of memory, which one copy brings. A CTA
// has a ring of units on their way, and goes through its share of all units of all experts, in
// their order. A warp has one chunk of 256 columns. The chunk's part of x stays in its registers as
// long as the tile of tokens does, so that x passes through no shared memory and is read where it
// lies; what the warps of a row have summed over their chunks meets in shared memory.
//
// A token's sums are taken in the same order whatever the plan and the tile are: its bits depend on
// it alone.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/bulk_copy.cuh"
#include "cuda/device.cuh"
#include "cuda/mma.cuh"
#include "cuda/moe_act.cuh"
#include "cuda/nvfp4_decode.cuh"
#include "cuda/nvfp4_product.h"
#include "cuda/shared_loads.cuh"

namespace flint::cuda {

inline constexpr int kThinWarps = 8;
inline constexpr int kThinThreads = kThinWarps * kWarp;
inline constexpr int kThinChunk = 256;     // columns of a warp
inline constexpr int kThinChunkBytes = kThinChunk / 2;
inline constexpr int kThinLaneColumns = kThinChunk / 4;
inline constexpr int kLaneWords = kThinLaneColumns / 8;  // of codes, in a row
inline constexpr int kTokenColumns = 8;    // of the tensor core's tile
inline constexpr int kHalf = 8;            // rows, of the tensor core's 16

// For tiles of at most 8 * kTokenTiles_ tokens. kCtas_ of the CTAs fit a multiprocessor.
template <int kTokenTiles_, int kRowTiles_, int kCtas_, int kStages_>
struct ThinPlan {
  static constexpr int kTokenTiles = kTokenTiles_, kRowTiles = kRowTiles_, kCtas = kCtas_;
  static constexpr int kStages = kStages_;
  static constexpr int kTokens = kTokenTiles * kTokenColumns;
  // Of half a unit; whatever the width is, the eight warps' chunks are as many bytes.
  static constexpr uint32_t kCodes = kThinWarps * kRowTiles * kHalf * kThinChunkBytes;
  static constexpr uint32_t kScales = kCodes / 8;
  static constexpr uint32_t kUnitBytes = 2 * (kCodes + kScales);
  // Sums of a tile of 16 rows and 8 tokens: of the low rows, then, so that other banks have them,
  // of the high ones.
  static constexpr int kHighSums = kHalf * kTokenColumns + 8;
  static constexpr int kTileSums = 2 * kHighSums;
  static constexpr int kSums = kThinWarps * kRowTiles * kTokenTiles * kTileSums;

  static constexpr uint32_t kSharedBytes =
      1024 + kStages * kUnitBytes + 2 * kSums * sizeof(float);
  static_assert(kUnitBytes % 1024 == 0);
  static_assert(kCtas * (kSharedBytes + 2048) <= 228 * 1024);
};

struct ThinJob {
  CUtensorMap codes;        // boxes of 128 bytes x half a unit's rows x all chunks
  const uint8_t* scales;    // [rows of all experts, width / 16]
  const float* scale_2;     // [experts, gated ? 2 : 1]
  const uint16_t* x;        // rows of `width`, x_stride elements apart
  int64_t x_stride;
  uint16_t* out;            // [entries, features]
  const int32_t* entry;     // of each place
  const TokenTile* tiles;
  const int32_t* tile_count;
  int share;                // entries that have a row of x: row = entry / share
  int chunk_bits;           // a row has 1 << chunk_bits chunks, at most 8
  int features;             // of the output
  int weight_rows;          // of an expert
  int units;                // of an expert
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Which unit comes next, and whose expert's it is.
struct ThinWalk {
  const ThinJob& job;
  int tile, unit, left;  // unit: of its expert; left: of this CTA, with this one

  __device__ __forceinline__ explicit ThinWalk(const ThinJob& job) : job(job) {
    const int all = *static_cast<const volatile int32_t*>(job.tile_count) * job.units;
    const int ctas = static_cast<int>(gridDim.x), cta = static_cast<int>(blockIdx.x);
    const int each = all / ctas, more = all - each * ctas;  // the first ones have one more
    const int begin = each * cta + min(cta, more);
    tile = begin / job.units;
    unit = begin - tile * job.units;
    left = each + (cta < more ? 1 : 0);
  }

  __device__ __forceinline__ bool done() const { return left <= 0; }

  // Whether the next one is of another tile.
  __device__ __forceinline__ bool advance() {
    --left;
    if (++unit < job.units) return false;
    unit = 0;
    ++tile;
    return true;
  }

  __device__ __forceinline__ TokenTile tokens() const {
    const int4 found = __ldcg(reinterpret_cast<const int4*>(job.tiles + tile));
    return {found.x, found.y, found.z, 0};
  }
};

// Keeps copies of units in flight. By one thread.
template <typename Plan, bool kGated>
struct ThinCopier {
  ThinWalk walk;
  uint8_t* stages;
  Barrier* full;
  int expert;

  __device__ __forceinline__ ThinCopier(const ThinJob& job, uint8_t* stages, Barrier* full)
      : walk(job), stages(stages), full(full), expert(walk.done() ? 0 : walk.tokens().expert) {}

  __device__ __forceinline__ void copy(int stage) {
    if (walk.done()) return;
    const ThinJob& job = walk.job;
    const int rows = kThinWarps * Plan::kRowTiles * kHalf >> job.chunk_bits;  // of half a unit
    const int low = expert * job.weight_rows + walk.unit * (kGated ? rows : 2 * rows);
    const int high = low + (kGated ? job.features : rows);
    uint8_t* to = stages + stage * Plan::kUnitBytes;
    const Barrier& barrier = full[stage];
    full[stage].arrive_expecting(Plan::kUnitBytes);
    copy_box(shared_address(to), job.codes, 0, low, 0, barrier);
    copy_box(shared_address(to + Plan::kCodes), job.codes, 0, high, 0, barrier);
    to += 2 * Plan::kCodes;
    const int64_t row_scales = kThinChunk / 16 << job.chunk_bits;
    copy_bytes(shared_address(to), job.scales + low * row_scales, Plan::kScales, barrier);
    copy_bytes(shared_address(to + Plan::kScales), job.scales + high * row_scales, Plan::kScales,
               barrier);
    if (walk.advance() && !walk.done()) expert = walk.tokens().expert;
  }

};

// A warp's part of x and of the sums.
template <typename Plan>
struct ThinMultiplier {
  uint32_t x[Plan::kTokenTiles][kLaneWords][4];
  int used;  // tiles of tokens

  // The rows of `entry`, of which there are `count`; the last one again where there are no more,
  // since nobody reads those columns.
  __device__ __forceinline__ void load(const ThinJob& job, const int32_t* entry, int count,
                                       int chunk, int lane) {
    used = (count + kTokenColumns - 1) / kTokenColumns;
    const uint16_t* from[Plan::kTokenTiles];
#pragma unroll
    for (int n = 0; n < Plan::kTokenTiles; ++n) {
      const int token = min(n * kTokenColumns + lane / 4, count - 1);
      const int row = __ldcg(entry + token) / job.share;
      from[n] = job.x + row * job.x_stride + chunk * kThinChunk + lane % 4 * kThinLaneColumns;
    }
#pragma unroll
    for (int n = 0; n < Plan::kTokenTiles; ++n) {
      if (n > 0 && n >= used) break;
#pragma unroll
      for (int word = 0; word < kLaneWords; ++word) {
        const uint4 eight = load_activation(reinterpret_cast<const uint4*>(from[n]) + word);
        x[n][word][0] = eight.x;
        x[n][word][1] = eight.y;
        x[n][word][2] = eight.z;
        x[n][word][3] = eight.w;
      }
    }
    // As the pairs that the codes of a word make.
#pragma unroll
    for (int n = 0; n < Plan::kTokenTiles; ++n) {
#pragma unroll
      for (int word = 0; word < kLaneWords; ++word) {
        uint32_t(&w)[4] = x[n][word];
        const uint32_t pairs[4] = {__byte_perm(w[0], w[2], 0x5410), __byte_perm(w[0], w[2], 0x7632),
                                   __byte_perm(w[1], w[3], 0x5410), __byte_perm(w[1], w[3], 0x7632)};
#pragma unroll
        for (int i = 0; i < 4; ++i) w[i] = pairs[i];
      }
    }
  }

  // Of 16 rows: `low` and `high` are the lane's row of codes in the chunk (its 16 bytes i at ^ 16i),
  // the scales those of its 64 columns.
  __device__ __forceinline__ void multiply(float* to, uint32_t low, uint32_t high,
                                           uint32_t low_scales, uint32_t high_scales,
                                           int lane) const {
    float sums[Plan::kTokenTiles][2][4] = {};
#pragma unroll
    for (int vector = 0; vector < kLaneWords / 4; ++vector) {
      const uint4 l4 = load_shared(low ^ static_cast<uint32_t>(vector * 16));
      const uint4 h4 = load_shared(high ^ static_cast<uint32_t>(vector * 16));
      const uint32_t l[4] = {l4.x, l4.y, l4.z, l4.w}, h[4] = {h4.x, h4.y, h4.z, h4.w};
      const ScalePairs ls = decode_scales(static_cast<uint16_t>(low_scales >> 16 * vector));
      const ScalePairs hs = decode_scales(static_cast<uint16_t>(high_scales >> 16 * vector));
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
#pragma unroll
        for (int n = 0; n < Plan::kTokenTiles; ++n) {
          if (n > 0 && n >= used) break;  // without a branch for the first
          const uint32_t(&w)[4] = x[n][4 * vector + i];
          multiply_add(sums[n][0], a.pair[0], b.pair[0], a.pair[1], b.pair[1], w[0], w[1]);
          multiply_add(sums[n][1], a.pair[2], b.pair[2], a.pair[3], b.pair[3], w[2], w[3]);
        }
      }
    }
    to += lane / 4 * kTokenColumns + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < Plan::kTokenTiles; ++n) {
      if (n > 0 && n >= used) break;
      const auto(&s)[2][4] = sums[n];
      auto* at = reinterpret_cast<float2*>(to + n * Plan::kTileSums);
      at[0] = make_float2(s[0][0] + s[1][0], s[0][1] + s[1][1]);
      at[Plan::kHighSums / 2] = make_float2(s[0][2] + s[1][2], s[0][3] + s[1][3]);
    }
  }
};

// What the warps have summed of a unit, over their chunks in order, to the output.
template <typename Plan, bool kGated>
struct ThinWriter {
  const ThinJob& job;
  const float* sums;
  const int32_t* entry;  // of the tile's tokens, in shared memory
  int count;             // of them
  float low_scale, high_scale;
  int feature;           // the unit's first

  // The sum of a low row's element of tile `tile` (of 16 rows) and `n` (of tokens).
  __device__ __forceinline__ float total(int tile, int n, int element) const {
    const int warps = tile / Plan::kRowTiles << job.chunk_bits;
    const float* at = sums + ((warps * Plan::kRowTiles + tile % Plan::kRowTiles) *
                                  Plan::kTokenTiles + n) * Plan::kTileSums + element;
    float sum = 0.0f;
#pragma unroll
    for (int chunk = 0; chunk < kThinWarps; ++chunk) {
      if (chunk >> job.chunk_bits == 0) {
        sum += at[chunk * Plan::kRowTiles * Plan::kTokenTiles * Plan::kTileSums];
      }
    }
    return sum;
  }

  __device__ __forceinline__ void write() const {
    const int used = (count + kTokenColumns - 1) / kTokenColumns;
    constexpr int kTileBits = 3 + (Plan::kRowTiles == 2);  // of the row tiles with one chunk
    static_assert(1 << kTileBits == kThinWarps * Plan::kRowTiles);
    const int tile_bits = kTileBits - job.chunk_bits;
    if constexpr (kGated) {
      // A feature of a token a thread.
      constexpr int kElements = kHalf * kTokenColumns;
      for (int i = static_cast<int>(threadIdx.x); i < used * kElements << tile_bits;
           i += kThinThreads) {
        const int element = i % kElements, at = i / kElements;
        const int tile = at & ((1 << tile_bits) - 1), n = at >> tile_bits;
        const int token = n * kTokenColumns + i % kTokenColumns;
        if (token >= count) continue;
        const float gate = total(tile, n, element) * low_scale;
        const float up = total(tile, n, element + Plan::kHighSums) * high_scale;
        store_rounded(job.out + int64_t{entry[token]} * job.features + feature + tile * kHalf +
                          element / kTokenColumns,
                      routed_act(gate, up));
      }
    } else {
      // Two neighbouring features.
      constexpr int kElements = kHalf / 2 * kTokenColumns;
      for (int i = static_cast<int>(threadIdx.x); i < used * 2 * kElements << tile_bits;
           i += kThinThreads) {
        const int row = i / kTokenColumns % (kHalf / 2) * 2, at = i / kElements;
        const int tile = at & ((1 << tile_bits) - 1), half = at >> tile_bits & 1;
        const int n = at >> tile_bits >> 1, token = n * kTokenColumns + i % kTokenColumns;
        if (token >= count) continue;
        const int element = half * Plan::kHighSums + row * kTokenColumns + i % kTokenColumns;
        const uint32_t pair = pack_bf16(total(tile, n, element) * low_scale,
                                        total(tile, n, element + kTokenColumns) * low_scale);
        const int column = feature + ((half << tile_bits) + tile) * kHalf + row;
        *reinterpret_cast<uint32_t*>(job.out + int64_t{entry[token]} * job.features + column) =
            pair;
      }
    }
  }
};

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <typename Plan, bool kGated>
__device__ __forceinline__ void run_thin_product(const ThinJob& job) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ uint8_t dynamic[];
  __shared__ Barrier full[Plan::kStages];
  __shared__ int32_t entries[2][Plan::kTokens];  // of this tile and of the one before
  uint8_t* stages = dynamic + (-shared_address(dynamic) & 1023u);
  auto* sums = reinterpret_cast<float*>(stages + Plan::kStages * Plan::kUnitBytes);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp;
  const int chunk = warp & ((1 << job.chunk_bits) - 1), group = warp >> job.chunk_bits;
  const int half_rows = kThinWarps * Plan::kRowTiles * kHalf >> job.chunk_bits;

  // The tiles are known when the kernel in front of this starts: it has waited for what made them.
  ThinCopier<Plan, kGated> copier(job, stages, full);
  if (thread == 0) {
    for (Barrier& barrier : full) barrier.init(1);
    order_before_copies();
#pragma unroll 1
    for (int stage = 0; stage < Plan::kStages; ++stage) copier.copy(stage);
  }
  wait_for_previous_kernel();
  let_next_kernel_start();
  __syncthreads();

  // Of the lane in a tile of 16 rows: of the codes and of the scales.
  const uint32_t row_codes = static_cast<uint32_t>(chunk * half_rows * kThinChunkBytes +
                                                   lane / 4 * kThinChunkBytes +
                                                   ((lane % 4 * 2) ^ (lane / 4)) * 16);
  const int row_scales = kThinChunk / 16 << job.chunk_bits;
  const uint32_t scales_at = static_cast<uint32_t>(lane / 4 * row_scales +
                                                   chunk * (kThinChunk / 16) + lane % 4 * 4);

  ThinMultiplier<Plan> multiplier;
  int stage = 0, buffer = 0, tile = 0;
  uint32_t parity = 0;
  bool begins = true;  // a tile of tokens
  int count = 0;
  float low_scale = 0, high_scale = 0;
  for (ThinWalk walk(job); !walk.done(); buffer ^= 1) {
    if (begins) {
      const TokenTile tokens = walk.tokens();
      tile ^= 1;
      count = tokens.count;
      if (thread < count) entries[tile][thread] = __ldcg(job.entry + tokens.first + thread);
      const float* scale = job.scale_2 + tokens.expert * (kGated ? 2 : 1);
      low_scale = load_weight(scale) * kNvfp4SumScale;
      high_scale = kGated ? load_weight(scale + 1) * kNvfp4SumScale : low_scale;
      multiplier.load(job, job.entry + tokens.first, count, chunk, lane);
    }
    full[stage].wait(parity);
    const uint32_t unit = shared_address(stages + stage * Plan::kUnitBytes);
    float* unit_sums = sums + buffer * Plan::kSums;
#pragma unroll 1
    for (int i = 0; i < Plan::kRowTiles; ++i) {
      const int row = (group * Plan::kRowTiles + i) * kHalf;
      const uint32_t low = unit + row_codes + row * kThinChunkBytes;
      const uint32_t low_scales = unit + 2 * Plan::kCodes + scales_at + row * row_scales;
      multiplier.multiply(
          unit_sums + (warp * Plan::kRowTiles + i) * Plan::kTokenTiles * Plan::kTileSums, low,
          low + Plan::kCodes, load_shared_word(low_scales), load_shared_word(low_scales + Plan::kScales),
          lane);
    }
    __syncthreads();
    if (thread == 0) copier.copy(stage);  // all have read the stage
    ThinWriter<Plan, kGated>{
        job,       unit_sums,  entries[tile], count,
        low_scale, high_scale, walk.unit * (kGated ? half_rows : 2 * half_rows)}
        .write();
    begins = walk.advance();
    if (++stage == Plan::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
#endif
}

}  // namespace flint::cuda
