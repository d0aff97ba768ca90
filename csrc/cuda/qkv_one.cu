// The projection to q, k and v of one token with NVFP4 weights of Flint's width. CTAs and clusters
// have what they have in qkv.cu. A warp more than the products need finds meanwhile where things
// go, and finishes: a position leads to a row of the table, and where both are far, the products'
// warps would be late for the wait.

#include <algorithm>

#include "cuda/launch.cuh"
#include "cuda/one_tile.cuh"
#include "cuda/qkv.h"
#include "cuda/qkv_head.cuh"

namespace flint::cuda {
namespace {

constexpr int kWidth = 2048, kWarps = 4, kChunks = kWidth / Nvfp4::kChunk / kWarps;
constexpr int kThreads = (kWarps + 1) * kWarp;
using Tile = OneTile<kWarps, kChunks>;

// Barriers that one side passes without waiting.
constexpr int kZerosThere = 1, kSumsThere = 2;

struct Job {
  const float* scale_2;
  int shards;
  const uint16_t* x;
  QkNormRope rest;
};

// What a warp of the products does. `first`: the first row of weights.
__device__ __forceinline__ void multiply(const Nvfp4::Matrix& weight, Tile& tile, uint8_t* stages,
                                         const uint16_t* x, int first, int warp, bool norms) {
  const TilePart<kChunks> part(stages, warp);
  part.fetch(tile_lane<kWidth>(weight, first, kHalf, warp * kChunks));
  x += warp * kChunks * Nvfp4::kChunk;
  keep(x);
  if (norms) announce_cluster();
  sync_threads<kThreads>(kZerosThere);
  wait_for_previous_kernel();
  let_next_kernel_start();
  tile.store(tile.multiply<false>(part, DecodedChunk(), x, warp), warp);
  arrive_at_threads<kThreads>(kSumsThere);
}

// Dynamic shared memory: the weights.
__global__ void __launch_bounds__(kThreads, 1)
    qkv_one_token(const __grid_constant__ Job job, const __grid_constant__ Nvfp4::Matrix weight) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ Tile tile;
  __shared__ __align__(16) HeadSquares head_squares;
  const QkNormRope& in = job.rest;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int head = static_cast<int>(blockIdx.x / kHeadCtas);
  const int rank = static_cast<int>(blockIdx.x % kHeadCtas);
  const int norm_heads = in.heads + in.cache.kv_heads;
  const bool norms = head < norm_heads;
  if (warp < kWarps) {
    const int first = head * kFastHeadDim + rank * kHalfTile;
    return multiply(weight, tile, shared, job.x, first, warp, norms);
  }

  for (int i = lane; i < kZeroBytes<kChunks> / kVectorBytes; i += kWarp) {
    reinterpret_cast<uint4*>(tile.zeros)[i] = make_uint4(0, 0, 0, 0);
  }
  arrive_at_threads<kThreads>(kZerosThere);
  if (norms) {
    if (lane == 0) head_squares.init(1);
    __syncwarp();
    announce_cluster();
  }
  const int shard = head < in.heads ? 0 : norms ? 1 : 2;
  const float scale = load_weight(job.scale_2 + (job.shards == 1 ? 0 : shard));
  const bool has_pair = lane < kHalfTile;
  Pair mine;
  if (has_pair) mine.load(in, 0, head, rank * kHalfTile + lane);
  if (norms) await_cluster();
  wait_for_previous_kernel();
  let_next_kernel_start();
  sync_threads<kThreads>(kSumsThere);
  float low = 0.0f, high = 0.0f;
  if (has_pair) {
    low = rounded(uint16_t{}, tile.total(lane) * scale);
    high = rounded(uint16_t{}, tile.total(lane + kHalfTile) * scale);
  }
  if (norms) head_squares.send<1>(rank, lane, 0, low, high, has_pair);
  if (!has_pair) return;
  if (norms) {
    mine.finish(in, low, high, head_squares.await(0));
  } else {
    mine.store(low, high);
  }
}

}  // namespace

bool qkv_one_fits(const QkvLinear& in) {
  return in.rest.rows == 1 && in.weight.scales != nullptr && in.width == kWidth;
}

cudaError_t qkv_one(const QkvLinear& in, const Launch& launch) {
  const Job job{in.scale_2, in.shards, static_cast<const uint16_t*>(in.x), in.rest};
  Shape shape;
  shape.grid = static_cast<unsigned>(in.rest.heads + 2 * in.rest.cache.kv_heads) * kHeadCtas;
  shape.block = kThreads;
  shape.cluster = kHeadCtas;
  // Five CTAs an SM at most: where more fit, Flint's 320 are spread less evenly; where only three
  // do, the next kernel's weights come later.
  constexpr size_t kDeclaredHere = sizeof(Tile) + sizeof(HeadSquares);
  const size_t room = shared_bytes_for(5);
  shape.shared_bytes = std::max(Tile::kStageBytes, room > kDeclaredHere ? room - kDeclaredHere : 0);
  return launch_kernel(launch, shape, qkv_one_token, job,
                       Nvfp4::matrix(in.weight.elements, in.weight.scales));
}

}  // namespace flint::cuda
