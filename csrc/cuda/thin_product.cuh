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
#include "cuda/product.h"
#include "cuda/shared_loads.cuh"

namespace flint::cuda {

inline constexpr int kThinWarps = 8;
inline constexpr int kThinThreads = kThinWarps * kWarp;
// The thread that starts copies: of the last warp, since the first ones write.
inline constexpr int kThinCopies = kThinThreads - kWarp;
inline constexpr int kThinChunk = 256;                  // columns of a warp
inline constexpr int kThinChunkBytes = kThinChunk / 2;  // of a row's codes
inline constexpr int kThinLaneColumns = kThinChunk / 4;
inline constexpr int kLaneWords = kThinLaneColumns / 8;  // of codes, in a row
inline constexpr int kTokenColumns = 8;                  // of the tensor core's tile
inline constexpr int kHalf = 8;                          // rows, of its 16
inline constexpr int kHalfSums = kHalf * kTokenColumns;

// For rows of kChunks_ chunks and tiles of at most 8 * kTokenTiles_ tokens; a warp has kRowTiles_
// times 16 rows. kCtas_ of the CTAs fit a multiprocessor.
template <int kChunks_, int kTokenTiles_, int kRowTiles_, int kCtas_, int kStages_>
struct ThinPlan {
  static constexpr int kChunks = kChunks_, kTokenTiles = kTokenTiles_, kRowTiles = kRowTiles_;
  static constexpr int kCtas = kCtas_, kStages = kStages_;
  static constexpr int kTokens = kTokenTiles * kTokenColumns;
  static_assert(kThinWarps % kChunks == 0);
  static constexpr int kTiles = kThinWarps / kChunks * kRowTiles;  // of 16 rows, in a unit
  static constexpr int kHalfRows = kTiles * kHalf;                 // of half a unit
  // Of half a unit: of any width as many.
  static constexpr uint32_t kCodes = kThinWarps * kRowTiles * kHalf * kThinChunkBytes;
  static constexpr uint32_t kScales = kCodes / 8;
  static constexpr uint32_t kUnitBytes = 2 * (kCodes + kScales);
  static constexpr int kRowScales = kChunks * kThinChunk / 16;
  // A warp's of a tile of 16 rows.
  static constexpr int kTileSums = kTokenTiles * 2 * kHalfSums;
  static constexpr int kSums = kThinWarps * kRowTiles * kTileSums;

  static constexpr uint32_t kSharedBytes = 1024 + kStages * kUnitBytes + 2 * kSums * sizeof(float);
  static_assert(kUnitBytes % 1024 == 0);
  static_assert(kCtas * (kSharedBytes + 2048) <= 228 * 1024);
};

struct ThinJob {
  CUtensorMap codes;      // boxes of 128 bytes x half a unit's rows x all chunks
  const uint8_t* scales;  // [rows of all experts, width / 16]
  const float* scale_2;   // [experts, gated ? 2 : 1]
  const uint16_t* x;      // rows of `width`, x_stride elements apart
  int64_t x_stride;
  uint16_t* out;         // [entries, features]
  const int32_t* entry;  // of each place
  const TokenTile* tiles;
  const int32_t* tile_count;
  int share;        // entries that have a row of x: row = entry / share
  int features;     // of the output
  int weight_rows;  // of an expert
  int units;        // of an expert
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Which unit comes next.
struct ThinWalk {
  int tile, unit, left;  // unit: of its tile; left: of this CTA, with this one

  __device__ __forceinline__ void begin(const ThinJob& job) {
    const int all = *static_cast<const volatile int32_t*>(job.tile_count) * job.units;
    const int ctas = static_cast<int>(gridDim.x), cta = static_cast<int>(blockIdx.x);
    const int each = all / ctas, more = all - each * ctas;  // the first ones have one more
    const int first = each * cta + min(cta, more);
    tile = first / job.units;
    unit = first - tile * job.units;
    left = each + (cta < more ? 1 : 0);
  }

  __device__ __forceinline__ bool done() const { return left <= 0; }

  // Whether the next one is of another tile.
  __device__ __forceinline__ bool advance(const ThinJob& job) {
    --left;
    if (++unit < job.units) return false;
    unit = 0;
    ++tile;
    return true;
  }

  __device__ __forceinline__ TokenTile tokens(const ThinJob& job) const {
    const int4 found = __ldcg(reinterpret_cast<const int4*>(job.tiles + tile));
    return {found.x, found.y, found.z, 0};
  }
};

// Keeps copies of units in flight. By one thread; in shared memory, where it takes no registers of
// the others.
template <typename Plan, bool kGated>
struct ThinCopier {
  ThinWalk walk;
  int expert;

  __device__ __forceinline__ void begin(const ThinJob& job) {
    walk.begin(job);
    if (!walk.done()) expert = walk.tokens(job).expert;
  }

  __device__ __forceinline__ void copy(const ThinJob& job, uint8_t* to, Barrier& full) {
    if (walk.done()) return;
    const int low =
        expert * job.weight_rows + walk.unit * (kGated ? Plan::kHalfRows : 2 * Plan::kHalfRows);
    const int high = low + (kGated ? job.features : Plan::kHalfRows);
    full.arrive_expecting(Plan::kUnitBytes);
    copy_box(shared_address(to), job.codes, 0, low, 0, full);
    copy_box(shared_address(to + Plan::kCodes), job.codes, 0, high, 0, full);
    to += 2 * Plan::kCodes;
    const uint8_t* scales = job.scales + int64_t{low} * Plan::kRowScales;
    copy_bytes(shared_address(to), scales, Plan::kScales, full);
    copy_bytes(shared_address(to + Plan::kScales), scales + int64_t{high - low} * Plan::kRowScales,
               Plan::kScales, full);
    if (walk.advance(job) && !walk.done()) expert = walk.tokens(job).expert;
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
        uint32_t (&w)[4] = x[n][word];
        const uint32_t pairs[4] = {__byte_perm(w[0], w[2], 0x5410), __byte_perm(w[0], w[2], 0x7632),
                                   __byte_perm(w[1], w[3], 0x5410),
                                   __byte_perm(w[1], w[3], 0x7632)};
#pragma unroll
        for (int i = 0; i < 4; ++i) w[i] = pairs[i];
      }
    }
  }

  // Of 16 rows: `low` and `high` are the lane's row of codes in the chunk (its 16 bytes i at ^
  // 16i), the scales those of its 64 columns.
  __device__ __forceinline__ void multiply(float* to, uint32_t low, uint32_t high,
                                           uint32_t low_scales, uint32_t high_scales,
                                           int lane) const {
    multiply_used<1>(to, low, high, low_scales, high_scales, lane);
  }

 private:
  // The products of tiles that are not used would cost their places among the instructions.
  template <int kUsed>
  __device__ __forceinline__ void multiply_used(float* to, uint32_t low, uint32_t high,
                                                uint32_t low_scales, uint32_t high_scales,
                                                int lane) const {
    if constexpr (kUsed < Plan::kTokenTiles) {
      if (used > kUsed) {
        return multiply_used<kUsed + 1>(to, low, high, low_scales, high_scales, lane);
      }
    }
    // Sums in turns: a product does not wait for the one before it.
    float sums[kUsed][2][4] = {};
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
        for (int n = 0; n < kUsed; ++n) {
          const uint32_t (&w)[4] = x[n][4 * vector + i];
          multiply_add(sums[n][0], a.pair[0], b.pair[0], a.pair[1], b.pair[1], w[0], w[1]);
          multiply_add(sums[n][1], a.pair[2], b.pair[2], a.pair[3], b.pair[3], w[2], w[3]);
        }
      }
    }
    to += lane / 4 * kTokenColumns + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < kUsed; ++n) {
      const auto(&s)[2][4] = sums[n];
      auto* at = reinterpret_cast<float2*>(to + n * 2 * kHalfSums);
      at[0] = make_float2(s[0][0] + s[1][0], s[0][1] + s[1][1]);
      at[kHalfSums / 2] = make_float2(s[0][2] + s[1][2], s[0][3] + s[1][3]);
    }
  }
};

// What the warps have summed of a unit, over their chunks in order, to the output. Two tokens a
// thread, and no thread for two that are not there.
template <typename Plan, bool kGated>
struct ThinWriter {
  const ThinJob& job;
  const float* sums;
  const int32_t* entry;  // of the tile's tokens, in shared memory
  int count;             // of them
  float low_scale, high_scale;
  int feature;  // the unit's first

  __device__ __forceinline__ void write() const {
    // A feature of a gate and its partner; or two neighbouring features.
    constexpr int kRows = kGated ? kHalf : kHalf / 2, kHalves = kGated ? 1 : 2;
    const int pairs = (count + 1) / 2;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < kRows * Plan::kTiles * kHalves * pairs;
         i += kThinThreads) {
      const int row = i % kRows * (kGated ? 1 : 2), tile = i / kRows % Plan::kTiles;
      const int half = i / (kRows * Plan::kTiles) % kHalves;
      const int token = i / (kRows * Plan::kTiles * kHalves) * 2;
      const float* at = first_of(tile) + token / kTokenColumns * 2 * kHalfSums + half * kHalfSums +
                        row * kTokenColumns + token % kTokenColumns;
      const float2 one = total(at), two = total(at + (kGated ? kHalfSums : kTokenColumns));
      const int column = feature + half * Plan::kHalfRows + tile * kHalf + row;
      write_token(token, column, one.x, two.x);
      if (token + 1 < count) write_token(token + 1, column, one.y, two.y);
    }
  }

 private:
  // The sums of the first warp that has the tile of 16 rows.
  __device__ __forceinline__ const float* first_of(int tile) const {
    const int warp = tile / Plan::kRowTiles * Plan::kChunks;
    return sums + (warp * Plan::kRowTiles + tile % Plan::kRowTiles) * Plan::kTileSums;
  }

  __device__ __forceinline__ float2 total(const float* at) const {
    float2 part[Plan::kChunks];
#pragma unroll
    for (int chunk = 0; chunk < Plan::kChunks; ++chunk) {
      part[chunk] =
          *reinterpret_cast<const float2*>(at + chunk * Plan::kRowTiles * Plan::kTileSums);
    }
    float2 sum = part[0];
#pragma unroll
    for (int chunk = 1; chunk < Plan::kChunks; ++chunk) {
      sum.x += part[chunk].x;
      sum.y += part[chunk].y;
    }
    return sum;
  }

  __device__ __forceinline__ void write_token(int token, int column, float one, float two) const {
    uint16_t* to = job.out + int64_t{entry[token]} * job.features + column;
    if constexpr (kGated) {
      store_rounded(to, routed_act(one * low_scale, two * high_scale));
    } else {
      *reinterpret_cast<uint32_t*>(to) = pack_bf16(one * low_scale, two * low_scale);
    }
  }
};

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <typename Plan, bool kGated>
__device__ __forceinline__ void run_thin_product(const ThinJob& job) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ uint8_t dynamic[];
  __shared__ Barrier full[Plan::kStages];
  __shared__ ThinCopier<Plan, kGated> copier;
  __shared__ int32_t entries[2][Plan::kTokens];  // of this tile and of the one before
  uint8_t* stages = dynamic + (-shared_address(dynamic) & 1023u);
  auto* sums = reinterpret_cast<float*>(stages + Plan::kStages * Plan::kUnitBytes);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp;
  const int chunk = warp % Plan::kChunks, group = warp / Plan::kChunks;

  // The tiles are known when the kernel in front of this starts: it has waited for what made them.
  if (thread == kThinCopies) {
    for (Barrier& barrier : full) barrier.init(1);
    order_before_copies();
    copier.begin(job);
#pragma unroll 1
    for (int stage = 0; stage < Plan::kStages; ++stage) {
      copier.copy(job, stages + stage * Plan::kUnitBytes, full[stage]);
    }
  }
  wait_for_previous_kernel();
  let_next_kernel_start();
  __syncthreads();

  // Of the lane in a tile of 16 rows: of the codes and of the scales.
  const uint32_t row_codes =
      static_cast<uint32_t>(chunk * Plan::kHalfRows * kThinChunkBytes + lane / 4 * kThinChunkBytes +
                            ((lane % 4 * 2) ^ (lane / 4)) * 16);
  const uint32_t scales_at =
      static_cast<uint32_t>(lane / 4 * Plan::kRowScales + chunk * (kThinChunk / 16) + lane % 4 * 4);

  ThinMultiplier<Plan> multiplier;
  int stage = 0, buffer = 0, tile = 0;
  uint32_t parity = 0;
  bool begins = true;  // a tile of tokens
  int count = 0;
  float low_scale = 0, high_scale = 0;
  ThinWalk walk;
  for (walk.begin(job); !walk.done(); buffer ^= 1) {
    if (begins) {
      const TokenTile tokens = walk.tokens(job);
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
      const uint32_t low_scales = unit + 2 * Plan::kCodes + scales_at + row * Plan::kRowScales;
      multiplier.multiply(unit_sums + (warp * Plan::kRowTiles + i) * Plan::kTileSums, low,
                          low + Plan::kCodes, load_shared_word(low_scales),
                          load_shared_word(low_scales + Plan::kScales), lane);
    }
    __syncthreads();
    if (thread == kThinCopies) {  // all have read the stage
      copier.copy(job, stages + stage * Plan::kUnitBytes, full[stage]);
    }
    ThinWriter<Plan, kGated>{job,
                             unit_sums,
                             entries[tile],
                             count,
                             low_scale,
                             high_scale,
                             walk.unit * (kGated ? 1 : 2) * Plan::kHalfRows}
        .write();
    begins = walk.advance(job);
    if (++stage == Plan::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
#endif
}

}  // namespace flint::cuda
