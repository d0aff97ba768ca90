// A product of one token with NVFP4 weights of Flint's widths, rounded: a CTA a tile.
#include "cuda/launch.cuh"
#include "cuda/linear.h"
#include "cuda/one_tile.cuh"

namespace flint::cuda {
namespace {

struct Job {
  const float* scale_2;
  int shards;
  int shard_end[kMostShards];
  const uint16_t* x;
  uint16_t* out;
};

// Read ahead of the wait: after it, its way from memory would be the last thing that the result
// waits for.
__device__ __forceinline__ float scale_of_row(const Job& job, int row) {
  int shard = 0;
#pragma unroll
  for (int i = 1; i < kMostShards; ++i) shard += row >= job.shard_end[i - 1];
  return load_weight(job.scale_2 + shard);
}

template <int kWidth, int kWarps>
constexpr int kWarpChunks = kWidth / Nvfp4::kChunk / kWarps;

// With kAhead a warp decodes its first chunk before the wait, which pays where a CTA has the SM for
// itself. Dynamic shared memory: the weights.
template <int kWidth, int kWarps, bool kAhead>
__global__ void __launch_bounds__(kWarps* kWarp, kAhead ? 2 : 1)
    linear_one_token(const __grid_constant__ Job job,
                     const __grid_constant__ Nvfp4::Matrix weight) {
  constexpr int kChunks = kWarpChunks<kWidth, kWarps>;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ OneTile<kWarps, kChunks> tile;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp;
  const int first = static_cast<int>(blockIdx.x) * kTileRows, row = first + thread;
  const TilePart<kChunks> part(shared, warp);
  part.fetch(tile_lane<kWidth>(weight, first, kHalfTile, warp * kChunks));
  make_zeros<kChunks>(tile.zeros);
  const float scale = thread < kTileRows ? scale_of_row(job, row) : 0.0f;
  const uint16_t* x = job.x + warp * kChunks * Nvfp4::kChunk;
  uint16_t* out = job.out + row;
  keep(x);
  keep(out);
  __syncthreads();
  DecodedChunk decoded;
  if constexpr (kAhead) {
    part.await();
    decoded = DecodedChunk(part.load(0));
    decoded.pin();
  }
  wait_for_previous_kernel();
  let_next_kernel_start();
  tile.store(tile.template multiply<kAhead>(part, decoded, x, warp), warp);
  __syncthreads();
  if (thread < kTileRows) store_rounded(out, tile.total(thread) * scale);
}

template <int kWidth, int kWarps, bool kAhead>
cudaError_t launch_width(const Linear& in, const Launch& launch) {
  constexpr int kChunks = kWarpChunks<kWidth, kWarps>;
  static_assert(kWarps * kChunks * Nvfp4::kChunk == kWidth);
  Job job{in.scale_2,
          in.shards,
          {},
          static_cast<const uint16_t*>(in.x),
          static_cast<uint16_t*>(in.out)};
  for (int i = 0; i < kMostShards; ++i) {
    job.shard_end[i] = i + 1 < in.shards ? static_cast<int>(in.shard_end[i]) : 0x7fffffff;
  }
  const Nvfp4::Matrix weight = Nvfp4::matrix(in.weight.elements, in.weight.scales);
  Shape shape;
  shape.grid = static_cast<unsigned>(in.rows / kTileRows);
  shape.block = kWarps * kWarp;
  shape.shared_bytes = OneTile<kWarps, kChunks>::kStageBytes;
  return launch_kernel(launch, shape, linear_one_token<kWidth, kWarps, kAhead>, job, weight);
}

}  // namespace

bool linear_one_fits(const Linear& in) {
  return in.tokens == 1 && in.weight.scales != nullptr && in.output == LinearOutput::kRounded &&
         in.rows % kTileRows == 0 && (in.width == 2048 || in.width == 4096 || in.width == 6144);
}

// Chosen by times on an H200 with Flint's shapes.
cudaError_t linear_one(const Linear& in, const Launch& launch) {
  switch (in.width) {
    case 2048:
      return launch_width<2048, 4, false>(in, launch);
    case 4096:
      return launch_width<4096, 8, true>(in, launch);
    default:
      return launch_width<6144, 8, false>(in, launch);
  }
}

}  // namespace flint::cuda
