// Down of one token with NVFP4 weights of Flint's sizes: a CTA has 16 rows of the output, a warp
// the same rows of one chosen expert, or half of the shared one's. A warp finds its expert itself,
// and leaves what its rows add.
#include "cuda/experts.h"
#include "cuda/launch.cuh"
#include "cuda/one_tile.cuh"

namespace flint::cuda {
namespace {

constexpr int kTopK = 6, kRoutedSize = 512, kSharedSize = 1024;
constexpr int kChunks = kRoutedSize / Nvfp4::kChunk;
constexpr int kSharedWarps = kSharedSize / kRoutedSize, kWarps = kTopK + kSharedWarps;
using Tile = OneTile<kWarps, kChunks>;

// Dynamic shared memory: the weights.
__global__ void __launch_bounds__(kWarps* kWarp, 2)
    moe_down_one_token(const __grid_constant__ MoeDown in,
                       const __grid_constant__ Nvfp4::Matrix routed,
                       const __grid_constant__ Nvfp4::Matrix common) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ Tile tile;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp;
  const int first = static_cast<int>(blockIdx.x) * kTileRows;
  const bool is_shared = warp >= kTopK;
  const TilePart<kChunks> part(shared, warp);

  // Ahead of the wait: the kernel in front of this has passed its own, so ids and weights are
  // there. What names no expert adds zeros, and its weights are not read.
  bool named = true;
  float weight = 1.0f, scale = 1.0f;
  const float shared_scale = load_weight(in.shared_scale_2);
  const uint16_t* x;
  if (is_shared) {
    const int half = warp - kTopK;
    part.fetch(tile_lane<kSharedSize>(common, first, kHalfTile, half * kChunks));
    x = static_cast<const uint16_t*>(in.shared_act) + half * kRoutedSize;
  } else {
    // Read here and once: the kernel two ahead has written it.
    const int expert = *static_cast<const volatile int32_t*>(in.routing.ids + warp);
    weight = load_weight(in.weights + warp);
    named = expert >= 0 && expert < in.routing.experts;
    if (named) {
      part.fetch(tile_lane<kRoutedSize>(routed, int64_t{expert} * in.hidden + first, kHalfTile, 0));
      scale = load_weight(in.routed_scale_2 + expert);
    }
    x = static_cast<const uint16_t*>(in.routed_act) + warp * kRoutedSize;
  }
  make_zeros<kChunks>(tile.zeros);
  auto* out = static_cast<uint16_t*>(in.out) + first + thread;
  keep(x);
  keep(out);
  __syncthreads();
  DecodedChunk decoded;
  part.await();
  if (named) {
    decoded = DecodedChunk(part.load(0));
    decoded.pin();
  }
  wait_for_previous_kernel();
  let_next_kernel_start();

  OneTokenSums sums;
  if (named) {
    sums = tile.multiply<true>(part, decoded, x, warp);
    if (!is_shared) {  // rounded before it is weighted, as the reference does
      sums.low = __fmul_rn(rounded(uint16_t{}, sums.low * scale), weight);
      sums.high = __fmul_rn(rounded(uint16_t{}, sums.high * scale), weight);
    }
  }
  tile.store(sums, warp);
  __syncthreads();
  if (thread >= kTileRows) return;
  const float* adds = tile.sums[thread];
  float sum = 0.0f, common_sum = adds[kTopK];
#pragma unroll
  for (int i = 0; i < kTopK; ++i) sum = __fadd_rn(sum, adds[i]);
#pragma unroll
  for (int i = 1; i < kSharedWarps; ++i) common_sum += adds[kTopK + i];
  store_rounded(out, rounded(uint16_t{}, sum) + rounded(uint16_t{}, common_sum * shared_scale));
}

}  // namespace

bool moe_down_one_fits(const MoeDown& in) {
  return in.routing.tokens == 1 && in.routing.top_k == kTopK && in.routed.scales != nullptr &&
         in.routed_size == kRoutedSize && in.shared_size == kSharedSize &&
         in.hidden % kTileRows == 0;
}

cudaError_t moe_down_one(const MoeDown& in, const Launch& launch) {
  Shape shape;
  shape.grid = static_cast<unsigned>(in.hidden / kTileRows);
  shape.block = kWarps * kWarp;
  shape.shared_bytes = Tile::kStageBytes;
  return launch_kernel(launch, shape, moe_down_one_token, in,
                       Nvfp4::matrix(in.routed.elements, in.routed.scales),
                       Nvfp4::matrix(in.shared.elements, in.shared.scales));
}

}  // namespace flint::cuda
