// Down of two to eight tokens with NVFP4 weights of Flint's sizes: a CTA has 16 rows of the output,
// a warp in turn the same rows of a chosen expert, or of half of the shared one's width. All ways
// of an expert's output stay in its warp until it is weighted; at the end a token's are added.
#include "cuda/expert_groups.cuh"
#include "cuda/launch.cuh"
#include "cuda/one_tile.cuh"

namespace flint::cuda {
namespace {

constexpr int kRoutedSize = 512, kSharedSize = 1024;
constexpr int kParts = kSharedSize / kRoutedSize;
constexpr int kMostChoices = 48;  // whose activations shared memory holds
// 48 experts and the shared one's parts are two for each warp. Measured on an H200 with eight
// tokens: 13.7 us; 14.2 where half of the next one is fetched while a half is multiplied, 15.1 by
// 17 warps with two stages each.
constexpr int kWarps = 25, kThreads = kWarps * kWarp;
constexpr int kChunks = kRoutedSize / Nvfp4::kChunk;
using Part = TilePart<kChunks>;
constexpr int kRowBytes = kRoutedSize * 2, kRowVectors = kRowBytes / kVectorBytes;

// Activations in rows of kRoutedSize: of all entries, then the shared expert's, in parts.
template <int kLoads>
__device__ __forceinline__ void stage_all(uint8_t* staged, const MoeDown& in, int entries) {
  const int routed = entries * kRowVectors;
  const int vectors = routed + in.routing.tokens * kParts * kRowVectors;
  const auto* routed_act = static_cast<const uint4*>(in.routed_act);
  const auto* shared_act = static_cast<const uint4*>(in.shared_act) - routed;
  uint4 value[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int v = static_cast<int>(threadIdx.x) + i * kThreads;
    if (v < vectors) value[i] = load_activation((v < routed ? routed_act : shared_act) + v);
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int v = static_cast<int>(threadIdx.x) + i * kThreads;
    if (v >= vectors) break;
    auto* row = reinterpret_cast<uint4*>(staged + v / kRowVectors * kRowBytes);
    row[Nvfp4::place(v % kRowVectors, 0, 1)] = Nvfp4::arrange(value[i]);
  }
}

// A warp's sums, in turns to two: a product does not wait for the one before it.
struct UnitSums {
  float part[2][4] = {};

  // Adds the products of a chunk; x as in Nvfp4::multiply_chunk.
  __device__ __forceinline__ void add(const Nvfp4::Chunk& chunk, const uint8_t* x) {
    const ScalePairs low_scales = decode_scales(chunk.low_scales);
    const ScalePairs high_scales = decode_scales(chunk.high_scales);
#pragma unroll
    for (int i = 0; i < Nvfp4::kVectors; ++i) {
      const uint4 b = load_shared(x + i * 4 * kVectorBytes);
      const uint32_t low_scale = i < 2 ? low_scales.first : low_scales.second;
      const uint32_t high_scale = i < 2 ? high_scales.first : high_scales.second;
      CodePairs l = decode_codes(chunk.low[i]), h = decode_codes(chunk.high[i]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        l.pair[j] = multiply_bf16_pairs(l.pair[j], low_scale);
        h.pair[j] = multiply_bf16_pairs(h.pair[j], high_scale);
      }
      multiply_add(part[0], l.pair[0], h.pair[0], l.pair[1], h.pair[1], b.x, b.y);
      multiply_add(part[1], l.pair[2], h.pair[2], l.pair[3], h.pair[3], b.z, b.w);
    }
  }

  __device__ __forceinline__ float total(int i) const { return part[0][i] + part[1][i]; }
};

// Dynamic shared memory: the stages, the activations.
__global__ void __launch_bounds__(kThreads, 1)
    moe_down_several_tokens(const __grid_constant__ MoeDown in,
                            const __grid_constant__ Nvfp4::Matrix routed,
                            const __grid_constant__ Nvfp4::Matrix common) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ ExpertGroups groups;
  __shared__ float scales[kMostChoices], weights[kMostChoices], shared_scale;
  __shared__ float adds[kMostChoices][kTileRows];  // of an entry: its output, weighted
  __shared__ __align__(16) float common_sums[kParts][kTileSums];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
  const int tokens = in.routing.tokens, entries = tokens * in.routing.top_k;
  const int first = static_cast<int>(blockIdx.x) * kTileRows;
  uint8_t* staged = shared + kWarps * Part::kBytes;

  // Ahead of the wait: the kernel in front of this has passed its own, so ids and weights are
  // there.
  const Part part(shared, warp);
  // Units are the shared expert's parts, then the groups.
  const auto fetch = [&](int unit) {
    if (unit < kParts) {
      part.fetch(tile_lane<kSharedSize>(common, first, kHalfTile, unit * kChunks));
    } else {
      const int64_t row = int64_t{groups.expert[unit - kParts]} * in.hidden + first;
      part.fetch(tile_lane<kRoutedSize>(routed, row, kHalfTile, 0));
    }
  };
  if (thread < kMostEntries) {
    groups.find(in.routing, thread, groups.load(in.routing, thread));
  }
  if (thread < entries) weights[thread] = load_weight(in.weights + thread);
  if (thread == kMostEntries) shared_scale = load_weight(in.shared_scale_2);
  __syncthreads();
  const int units = kParts + groups.count;
  if (warp < units) fetch(warp);
  if (thread < groups.count) {
    scales[thread] = load_weight(in.routed_scale_2 + groups.expert[thread]) * kNvfp4SumScale;
  }
  wait_for_previous_kernel();
  let_next_kernel_start();
  constexpr int kMostVectors = (kMostChoices + kMostTokens * kParts) * kRowVectors;
  stage_all<(kMostVectors + kThreads - 1) / kThreads>(staged, in, entries);
  __syncthreads();

  const int token = min(lane / 4, tokens - 1), first_token = lane % 4 * 2;
#pragma unroll 1
  for (int unit = warp; unit < units; unit += kWarps) {
    const int group = unit - kParts;
    int row = entries + token * kParts + unit;
    if (group >= 0) {
      // Who did not choose the expert multiplies what nobody reads: the row of one who did.
      const int place = groups.place[group][token];
      const int entry = token * in.routing.top_k + place;
      const unsigned chose = __ballot_sync(0xffffffffu, place >= 0);
      const int other = __shfl_sync(0xffffffffu, entry, __ffs(static_cast<int>(chose)) - 1);
      row = place >= 0 ? entry : other;
    }
    UnitSums sums;
    const uint8_t* x = staged + row * kRowBytes + lane % 4 * kVectorBytes;
    part.await();
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      sums.add(part.load(c), x);
      x += Nvfp4::kVectors * 4 * kVectorBytes;
    }
    __syncwarp();
    if (unit + kWarps < units) fetch(unit + kWarps);
    if (group < 0) {
      auto* to =
          reinterpret_cast<float2*>(&common_sums[unit][lane / 4 * kMostTokens + first_token]);
      to[0] = make_float2(sums.total(0), sums.total(1));
      to[kTileSums / 4] = make_float2(sums.total(2), sums.total(3));
      continue;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int place = groups.place[group][first_token + i];
      if (place < 0) continue;
      const int entry = (first_token + i) * in.routing.top_k + place;
      // Rounded before it is weighted, as the reference does.
      const float scale = scales[group], weight = weights[entry];
      adds[entry][lane / 4] = __fmul_rn(rounded(uint16_t{}, sums.total(i) * scale), weight);
      adds[entry][lane / 4 + kHalfTile] =
          __fmul_rn(rounded(uint16_t{}, sums.total(2 + i) * scale), weight);
    }
  }
  __syncthreads();

  const int of_row = thread % kTileRows, of_token = thread / kTileRows;
  if (of_token >= tokens) return;
  float sum = 0.0f;
#pragma unroll 6
  for (int place = 0; place < in.routing.top_k; ++place) {
    const int entry = of_token * in.routing.top_k + place;
    sum = __fadd_rn(sum, groups.group_of[entry] >= 0 ? adds[entry][of_row] : 0.0f);
  }
  float common_sum = common_sums[0][of_row * kMostTokens + of_token];
#pragma unroll
  for (int i = 1; i < kParts; ++i) common_sum += common_sums[i][of_row * kMostTokens + of_token];
  store_rounded(static_cast<uint16_t*>(in.out) + of_token * in.hidden + first + of_row,
                rounded(uint16_t{}, sum) +
                    rounded(uint16_t{}, common_sum * (Nvfp4::kSumScale * shared_scale)));
}

}  // namespace

bool moe_down_several_fits(const MoeDown& in) {
  return in.routing.tokens > 1 && in.routing.tokens * in.routing.top_k <= kMostChoices &&
         in.routed.scales != nullptr && in.routed_size == kRoutedSize &&
         in.shared_size == kSharedSize && in.hidden % kTileRows == 0;
}

cudaError_t moe_down_several(const MoeDown& in, const Launch& launch) {
  Shape shape;
  shape.grid = static_cast<unsigned>(in.hidden / kTileRows);
  shape.block = kThreads;
  const int tokens = in.routing.tokens;
  shape.shared_bytes = size_t{kWarps} * Part::kBytes +
                       size_t(tokens * in.routing.top_k + tokens * kParts) * kRowBytes;
  return launch_kernel(launch, shape, moe_down_several_tokens, in,
                       Nvfp4::matrix(in.routed.elements, in.routed.scales),
                       Nvfp4::matrix(in.shared.elements, in.shared.scales));
}

}  // namespace flint::cuda
