// Down of two to eight tokens with NVFP4 weights of Flint's sizes: a CTA has 16 rows of the output,
// a warp in turn the same rows of a chosen expert, or of half of the shared one's width. All ways
// of an expert's output stay in its warp until it is weighted; at the end a token's are added.
#include "cuda/expert_groups.cuh"
#include "cuda/launch.cuh"
#include "cuda/tile_stream.cuh"

namespace flint::cuda {
namespace {

constexpr int kRoutedSize = 512, kSharedSize = 1024;
constexpr int kChunks = kRoutedSize / Nvfp4::kChunk, kParts = kSharedSize / kRoutedSize;
constexpr int kMostChoices = 48;  // whose activations shared memory holds
// 48 experts and the shared one's parts are three for each warp.
constexpr int kWarps = 17, kThreads = kWarps * kWarp, kStages = 2;
using Stream = TileStream<Nvfp4, 1, kChunks, kStages, true>;
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

// Dynamic shared memory: the stages, the activations.
__global__ void __launch_bounds__(kThreads, 1)
    moe_down_several_tokens(const __grid_constant__ MoeDown in,
                            const __grid_constant__ Nvfp4::Matrix routed,
                            const __grid_constant__ Nvfp4::Matrix common) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ ExpertGroups groups;
  __shared__ float weights[kMostChoices];
  __shared__ float adds[kMostChoices][kTileRows];  // of an entry: its output, weighted
  __shared__ __align__(16) float common_sums[kParts][kTileSums];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
  const int tokens = in.routing.tokens, entries = tokens * in.routing.top_k;
  const int first = static_cast<int>(blockIdx.x) * kTileRows;
  const TileRows rows{first, first + kHalfTile, in.hidden, in.hidden};
  uint8_t* staged = shared + kWarps * Stream::kBytes;

  // Ahead of the wait: the kernel in front of this has passed its own, so ids and weights are
  // there.
  const float shared_scale = load_weight(in.shared_scale_2);
  Stream stream(shared + warp * Stream::kBytes, 0);
  int ahead = warp;  // units: the shared expert's parts, then the groups
  const auto fetch_next = [&](int units) {
    if (ahead >= units) return stream.skip();
    if (ahead < kParts) {
      stream.fetch(common, rows, kSharedSize, ahead);
    } else {
      const int64_t expert = groups.expert[ahead - kParts];
      stream.fetch(Nvfp4::from_row(routed, expert * in.hidden, kRoutedSize), rows, kRoutedSize, 0);
    }
    ahead += kWarps;
  };
  groups.find(in.routing, groups.load(in.routing));
  if (thread < entries) weights[thread] = load_weight(in.weights + thread);
  __syncthreads();
  const int units = kParts + groups.count;
#pragma unroll
  for (int i = 0; i < kStages; ++i) fetch_next(units);
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
    float scale = 0.0f;
    if (group >= 0) {
      scale = load_weight(in.routed_scale_2 + groups.expert[group]) * Nvfp4::kSumScale;
      // Who did not choose the expert multiplies what nobody reads: the row of one who did.
      const int place = groups.place[group][token];
      const int entry = token * in.routing.top_k + place;
      const unsigned chose = __ballot_sync(0xffffffffu, place >= 0);
      const int other = __shfl_sync(0xffffffffu, entry, __ffs(static_cast<int>(chose)) - 1);
      row = place >= 0 ? entry : other;
    }
    TileSums sums;
    sums.clear();
    multiply_piece<Nvfp4, kChunks>(sums, stream, staged + row * kRowBytes + lane % 4 * kVectorBytes,
                                   staged_step(1));
    fetch_next(units);
    if (group < 0) {
      sums.store(common_sums[unit]);
      continue;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int place = groups.place[group][first_token + i];
      if (place < 0) continue;
      const int entry = (first_token + i) * in.routing.top_k + place;
      // Rounded before it is weighted, as the reference does.
      const float weight = weights[entry];
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
  shape.shared_bytes = size_t{kWarps} * Stream::kBytes +
                       size_t(tokens * in.routing.top_k + tokens * kParts) * kRowBytes;
  return launch_kernel(launch, shape, moe_down_several_tokens, in,
                       Nvfp4::matrix(in.routed.elements, in.routed.scales),
                       Nvfp4::matrix(in.shared.elements, in.shared.scales));
}

}  // namespace flint::cuda
