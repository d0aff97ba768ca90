// A CTA has 8 rows of a head's weights and the 8 that RoPE pairs them with, a cluster of eight CTAs
// the whole head. Of their elements they tell each other the sums of squares alone; then each
// norms, turns and writes its own.

#include <algorithm>

#include "cuda/launch.cuh"
#include "cuda/qkv.h"
#include "cuda/qkv_head.cuh"
#include "cuda/tile_stream.cuh"

namespace flint::cuda {
namespace {

struct Job {
  const float* scale_2;
  int shards;
  const uint16_t* x;
  int64_t x_stride;
  int tokens, width;
  QkNormRope rest;
};

template <typename Format, int kThreads, int kChunks, int kStages, bool kWhole>
__global__ void __launch_bounds__(kThreads, 1)
    qkv_few(const __grid_constant__ Job job,
            const __grid_constant__ typename Format::Matrix weight) {
  constexpr int kWarps = kThreads / kWarp;
  using Stream = TileStream<Format, kWarps, kChunks, kStages, kWhole>;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ __align__(16) HeadSquares head_squares;
  uint8_t* staged = shared + Stream::kBytes;
  const int pieces = Stream::pieces(job.width);
  auto* sums = reinterpret_cast<float*>(
      staged + staged_bytes<Format>(job.tokens, pieces * Stream::kPiece / Format::kChunk));
  const QkNormRope& in = job.rest;
  const int thread = static_cast<int>(threadIdx.x);
  const int head = static_cast<int>(blockIdx.x / kHeadCtas);
  const int rank = static_cast<int>(blockIdx.x % kHeadCtas);
  const int first = head * kFastHeadDim + rank * kHalfTile;
  const int norm_heads = in.heads + in.cache.kv_heads;

  // Loads in the order in which they are wanted back; nothing is computed of them before the wait.
  float scale = 1.0f;
  if constexpr (Format::kNvfp4) {
    const int shard = head < in.heads ? 0 : head < norm_heads ? 1 : 2;
    scale = load_weight(job.scale_2 + (job.shards == 1 ? 0 : shard));
  }
  const TileRows rows{first, first + kHalf, 1 << 30, 1 << 30};
  Stream stream(shared, thread / kWarp);
  int fetched = 0;
  const auto fetch_next = [&] {
    if (fetched >= pieces) return stream.skip();
    stream.fetch(weight, rows, job.width, fetched++);
  };
#pragma unroll
  for (int i = 0; i < kStages; ++i) fetch_next();
  const bool norms = head < norm_heads;
  if (norms) {
    if (thread == 0) head_squares.init(job.tokens);
    __syncwarp();
    announce_cluster();
  }
  const int pair = thread / kMostTokens, token = thread % kMostTokens;
  const bool has_pair = pair < kHalfTile && token < job.tokens;
  Pair mine;
  if (has_pair) mine.load(in, token, head, rank * kHalfTile + pair);
  if (norms) await_cluster();
  wait_for_previous_kernel();
  let_next_kernel_start();

  for (int piece = 0; piece < pieces; ++piece) {
    stage_chunks<Format, kChunks>(staged, job.x, job.x_stride, job.tokens, job.width,
                                  stream.chunk_of(piece));
  }
  __syncwarp();
  TileSums tile_sums;
  tile_sums.clear();
#pragma unroll 1
  for (int piece = 0; piece < pieces; ++piece) {
    const int chunk = stream.chunk_of(piece);
    multiply_piece<Format, kChunks>(tile_sums, stream,
                                    staged_chunk<Format>(staged, job.tokens, chunk),
                                    staged_step(job.tokens));
    fetch_next();
  }
  tile_sums.store(sums + thread / kWarp * kTileSums);
  scale *= Format::kSumScale;
  __syncthreads();
  // In whole warps, which send together.
  if (thread >= kHalfTile * kMostTokens) return;
  float low = 0.0f, high = 0.0f;
  if (has_pair) {
    low = rounded(uint16_t{}, warps_total<kWarps>(sums, thread) * scale);
    high = rounded(uint16_t{}, warps_total<kWarps>(sums, thread + kTileSums / 2) * scale);
  }
  if (norms) head_squares.send<kMostTokens>(rank, pair, token, low, high, has_pair);
  if (!has_pair) return;
  if (norms) {
    mine.finish(in, low, high, head_squares.await(token));
  } else {
    mine.store(low, high);
  }
}

template <typename Format, int kThreads, int kChunks, int kStages, bool kWhole>
cudaError_t launch_plan(const QkvLinear& in, const Launch& launch) {
  constexpr int kWarps = kThreads / kWarp;
  using Stream = TileStream<Format, kWarps, kChunks, kStages, kWhole>;
  const int pieces = Stream::pieces(in.width);
  const Job job{in.scale_2,
                in.shards,
                static_cast<const uint16_t*>(in.x),
                in.x_stride,
                static_cast<int>(in.rest.rows),
                in.width,
                in.rest};
  const int heads = in.rest.heads + 2 * in.rest.cache.kv_heads;
  Shape shape;
  shape.grid = static_cast<unsigned>(heads) * kHeadCtas;
  shape.block = kThreads;
  shape.cluster = kHeadCtas;
  const size_t wanted = Stream::kBytes +
                        staged_bytes<Format>(job.tokens, pieces * Stream::kPiece / Format::kChunk) +
                        size_t{kWarps} * kTileSums * sizeof(float);
  // Where a fourth CTA fits, some SMs get four of Flint's 320 and others one: measured on an H200,
  // 5.2 us instead of 4.6. No more than that: decode attention is to begin beside them.
  shape.shared_bytes = std::max(wanted, shared_bytes_against(4));
  return launch_kernel(launch, shape, qkv_few<Format, kThreads, kChunks, kStages, kWhole>, job,
                       Format::matrix(in.weight.elements, in.weight.scales));
}

}  // namespace

bool qkv_linear_fits(const QkvLinear& in) {
  const QkNormRope& rest = in.rest;
  const auto fits = [](const void* pointer, int64_t stride, int64_t bytes) {
    return keeps_alignment(reinterpret_cast<uint64_t>(pointer), stride, sizeof(uint16_t), bytes);
  };
  const auto cache_fits = [&](const void* pointer, const PageStrides& strides) {
    return fits(pointer, strides.block, 8) && fits(pointer, strides.row, 8) &&
           fits(pointer, strides.head, 8);
  };
  Linear linear{};
  linear.weight = in.weight;
  linear.scale_2 = in.scale_2;
  linear.shards = 1;
  linear.x = in.x;
  linear.x_stride = in.x_stride;
  linear.rows = int64_t{kFastHeadDim} * (rest.heads + 2 * rest.cache.kv_heads);
  linear.tokens = static_cast<int>(least(rest.rows, kMostTokens + 1));
  linear.width = in.width;
  return linear_fits(linear) && rest.cache.head_dim == kFastHeadDim && rest.bf16 &&
         cache_fits(rest.cache.k, rest.cache.k_strides) &&
         cache_fits(rest.cache.v, rest.cache.v_strides) && fits(rest.q_weight, 0, 8) &&
         fits(rest.k_weight, 0, 8) && fits(rest.q, 0, 8) &&
         reinterpret_cast<uint64_t>(rest.cos_sin) % 16 == 0;
}

cudaError_t qkv_linear(const QkvLinear& in, const Launch& launch) {
  if (qkv_one_fits(in)) return qkv_one(in, launch);
  if (in.weight.scales == nullptr) {
    return in.width % 2048 == 0 ? launch_plan<Bf16, 256, 4, 1, true>(in, launch)
                                : launch_plan<Bf16, 256, 1, 2, false>(in, launch);
  }
  if (in.width % 2048 != 0) return launch_plan<Nvfp4, 128, 1, 2, false>(in, launch);
  return launch_plan<Nvfp4, 128, 4, 1, true>(in, launch);
}

}  // namespace flint::cuda
