// A product of 1 to 8 tokens with a matrix: the weights are read once, in tiles of 16 rows. A tile
// belongs to kSplit warps, which share it along the width and add their sums up through shared
// memory; with kSplit 1 a warp has a tile for itself. Each takes tiles a grid apart, and fetches
// ahead of the tile that it works on.
#include "cuda/launch.cuh"
#include "cuda/linear.h"
#include "cuda/tiles.h"
#include "cuda/weight_tiles.cuh"

namespace flint::cuda {
namespace {

template <typename Format>
struct Job {
  typename Format::Matrix weight;
  const float* scale_2;
  int shards;
  int shard_end[kMostShards];
  const uint16_t* x;
  int64_t x_stride;
  void* out;
  int rows;  // of the output: of the weight, or half of those
  int tiles;
  int tokens, width;
  int pieces;  // of a tile, for a warp
  int trigger = 2;
};

// The global scales, read ahead of the wait: after it their way from memory would be the last thing
// that a result waits for.
template <typename Format>
struct ShardScales {
  float scale[kMostShards];

  __device__ __forceinline__ explicit ShardScales(const Job<Format>& job) {
#pragma unroll
    for (int i = 0; i < kMostShards; ++i) {
      scale[i] = Format::kSumScale;
      if (Format::kNvfp4 && i < job.shards) scale[i] *= load_weight(job.scale_2 + i);
    }
  }

  __device__ __forceinline__ float of_row(const Job<Format>& job, int row) const {
    float found = scale[0];
#pragma unroll
    for (int i = 1; i < kMostShards; ++i) {
      if (row >= job.shard_end[i - 1]) found = scale[i];
    }
    return found;
  }
};

// Writes an element of a tile of sums; with kSiluAndMul `high` is the one eight rows below.
template <typename Format, LinearOutput kOutput>
__device__ __forceinline__ void finish(const Job<Format>& job, const ShardScales<Format>& scales,
                                       int tile, int row, int token, float sum, float high) {
  if (token >= job.tokens) return;
  if constexpr (kOutput == LinearOutput::kSiluAndMul) {
    const int at = tile * kHalfTile + row;
    if (at >= job.rows) return;
    const float g = rounded(uint16_t{}, sum * scales.of_row(job, at));
    const float u = rounded(uint16_t{}, high * scales.of_row(job, job.rows + at));
    store_rounded(static_cast<uint16_t*>(job.out) + int64_t{token} * job.rows + at,
                  g / (1.0f + expf(-g)) * u);
  } else {
    const int at = tile * kTileRows + row;
    if (at >= job.rows) return;
    const int64_t to = int64_t{token} * job.rows + at;
    if constexpr (kOutput == LinearOutput::kLogits) {
      static_cast<float*>(job.out)[to] = sum * scales.of_row(job, at);
    } else {
      store_rounded(static_cast<uint16_t*>(job.out) + to, sum * scales.of_row(job, at));
    }
  }
}

// Dynamic shared memory: the stages of the warps, the activations, the warps' sums of two tiles.
template <typename Format, LinearOutput kOutput, int kThreads, bool kSplit, int kChunks,
          int kStages>
__global__ void __launch_bounds__(kThreads) linear_few(const __grid_constant__ Job<Format> job) {
  extern __shared__ __align__(128) uint8_t shared[];
  constexpr bool kSilu = kOutput == LinearOutput::kSiluAndMul;
  constexpr int kWarps = kThreads / kWarp;
  constexpr int kStageBytes = Format::template kPieceBytes<kChunks>;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int split_warps = kSplit ? kWarps : 1, split_warp = kSplit ? warp : 0;
  uint8_t* stages = shared + warp * kStages * kStageBytes;
  uint8_t* staged = shared + kWarps * kStages * kStageBytes;
  auto* sums = reinterpret_cast<float*>(
      staged + staged_bytes<Format>(job.tokens, job.pieces * split_warps * kChunks));
  const int first_tile = static_cast<int>(blockIdx.x) * (kSplit ? 1 : kWarps) + (kSplit ? 0 : warp);
  const int tile_step = static_cast<int>(gridDim.x) * (kSplit ? 1 : kWarps);
  // Pieces of the warps lie in turn along the width.
  const auto chunk_of = [&](int piece) { return (piece * split_warps + split_warp) * kChunks; };

  int fetch_tile = first_tile, fetch_part = 0, fetch_stage = 0;
  typename Format::template Lane<kChunks> from;
  const auto find_lane = [&] {
    const int low = fetch_tile * (kSilu ? kHalfTile : kTileRows);
    from.find(job.weight,
              kSilu ? TileRows{low, job.rows + low, job.rows, 2 * job.rows}
                    : TileRows{low, low + kHalfTile, job.rows, job.rows},
              job.width);
  };
  const auto fetch_next = [&] {
    if (fetch_tile < job.tiles) {
      from.fetch(shared_address(stages) + static_cast<uint32_t>(fetch_stage * kStageBytes),
                 chunk_of(fetch_part));
      if (++fetch_part == job.pieces) {
        fetch_part = 0;
        fetch_tile += tile_step;
        find_lane();
      }
    }
    close_copies();
    fetch_stage = fetch_stage + 1 == kStages ? 0 : fetch_stage + 1;
  };
  if (job.trigger == 0) let_next_kernel_start();
  find_lane();
#pragma unroll
  for (int i = 0; i < kStages; ++i) fetch_next();
  const ShardScales<Format> scales(job);
  if (job.trigger == 1) let_next_kernel_start();
  wait_for_previous_kernel();
  if (job.trigger == 2) let_next_kernel_start();
  if constexpr (kSplit) {
    for (int piece = 0; piece < job.pieces; ++piece) {
      stage_piece<Format, kChunks>(staged, job.x, job.x_stride, job.tokens, job.width,
                                   chunk_of(piece));
    }
    __syncwarp();
  } else {
    for (int piece = warp; piece < job.pieces; piece += kWarps) {
      stage_piece<Format, kChunks>(staged, job.x, job.x_stride, job.tokens, job.width,
                                   chunk_of(piece));
    }
    __syncthreads();
  }

  const int step = staged_step(job.tokens);
  int stage = 0, buffer = 0;
#pragma unroll 1
  for (int tile = first_tile; tile < job.tiles; tile += tile_step) {
    TileSums tile_sums;
    tile_sums.clear();
#pragma unroll 1
    for (int piece = 0; piece < job.pieces; ++piece) {
      await_copies<kStages - 1>();
      __syncwarp();
      Format::template multiply<kChunks>(
          tile_sums, stages + stage * kStageBytes,
          staged_chunk<Format>(staged, job.tokens, chunk_of(piece)), step);
      stage = stage + 1 == kStages ? 0 : stage + 1;
      __syncwarp();
      fetch_next();
    }
    if constexpr (kSplit) {
      float* to = sums + buffer * kWarps * kTileSums;
      tile_sums.store(to + warp * kTileSums);
      __syncthreads();
      const int element = static_cast<int>(threadIdx.x);
      constexpr int kElements = kSilu ? kTileSums / 2 : kTileSums;
      if (element < kElements && element % kMostTokens < job.tokens) {
        float low = 0.0f, high = 0.0f;
#pragma unroll
        for (int i = 0; i < kWarps; ++i) {
          low += to[i * kTileSums + element];
          if constexpr (kSilu) high += to[i * kTileSums + kElements + element];
        }
        finish<Format, kOutput>(job, scales, tile, element / kMostTokens, element % kMostTokens, low,
                                high);
      }
      buffer ^= 1;
    } else {
      const int lane = static_cast<int>(threadIdx.x) % kWarp, row = lane / 4, token = lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float low = tile_sums.total(i), high = tile_sums.total(2 + i);
        finish<Format, kOutput>(job, scales, tile, row, token + i, low, high);
        if constexpr (!kSilu) {
          finish<Format, kOutput>(job, scales, tile, row + kHalfTile, token + i, high, 0.0f);
        }
      }
    }
  }
}

template <typename Format>
Job<Format> job_of(const Linear& in) {
  Job<Format> job{};
  job.weight = Format::matrix(in.weight.elements, in.weight.scales);
  job.scale_2 = in.scale_2;
  job.shards = in.shards;
  for (int i = 0; i < kMostShards; ++i) {
    job.shard_end[i] = i + 1 < in.shards ? static_cast<int>(in.shard_end[i]) : 0x7fffffff;
  }
  job.x = static_cast<const uint16_t*>(in.x);
  job.x_stride = in.x_stride;
  job.out = in.out;
  const bool halves = in.output == LinearOutput::kSiluAndMul;
  job.rows = static_cast<int>(halves ? in.rows / 2 : in.rows);
  job.tiles = static_cast<int>(ceil_div(job.rows, halves ? kHalfTile : kTileRows));
  job.tokens = in.tokens;
  job.width = in.width;
  return job;
}

template <typename Format, LinearOutput kOutput, int kThreads, bool kSplit, int kChunks, int kStages>
cudaError_t launch_plan(Job<Format>& job, int most_ctas, const Launch& launch) {
  constexpr int kWarps = kThreads / kWarp;
  const int chunks = static_cast<int>(ceil_div(job.width, Format::kChunk));
  job.pieces = static_cast<int>(ceil_div(chunks, kChunks * (kSplit ? kWarps : 1)));
  Shape shape;
  shape.grid = static_cast<unsigned>(least(ceil_div(job.tiles, kSplit ? 1 : kWarps), most_ctas));
  shape.block = kThreads;
  shape.shared_bytes =
      size_t{kWarps} * kStages * Format::template kPieceBytes<kChunks> +
      staged_bytes<Format>(job.tokens, job.pieces * kChunks * (kSplit ? kWarps : 1)) +
      (kSplit ? 2 * size_t{kWarps} * kTileSums * sizeof(float) : 0);
  return launch_kernel(launch, shape, linear_few<Format, kOutput, kThreads, kSplit, kChunks, kStages>,
                       job);
}

template <typename Format, LinearOutput kOutput>
cudaError_t launch_output(const Linear& in, const Launch& launch) {
  Job<Format> job = job_of<Format>(in);
  return launch_plan<Format, kOutput, 256, true, 2, 2>(job, 264, launch);
}

template <typename Format>
cudaError_t launch_format(const Linear& in, const Launch& launch) {
  switch (in.output) {
    case LinearOutput::kSiluAndMul:
      return launch_output<Format, LinearOutput::kSiluAndMul>(in, launch);
    case LinearOutput::kLogits:
      return launch_output<Format, LinearOutput::kLogits>(in, launch);
    default:
      return launch_output<Format, LinearOutput::kRounded>(in, launch);
  }
}

}  // namespace

bool linear_fits(const Linear& in) {
  const bool nvfp4 = in.weight.scales != nullptr;
  const auto aligned = [](const void* pointer, uint64_t bytes) {
    return reinterpret_cast<uint64_t>(pointer) % bytes == 0;
  };
  return 1 <= in.tokens && in.tokens <= kMostTokens && 0 < in.width &&
         in.width % (nvfp4 ? 64 : 8) == 0 && int64_t{in.tokens} * in.width <= 8 * 6144 &&
         0 < in.rows && in.rows < (1 << 30) && 1 <= in.shards && in.shards <= kMostShards &&
         aligned(in.weight.elements, 16) && (!nvfp4 || aligned(in.weight.scales, 4)) &&
         keeps_alignment(reinterpret_cast<uint64_t>(in.x), in.tokens > 1 ? in.x_stride : 0, 2, 16);
}

cudaError_t linear(const Linear& in, const Launch& launch) {
  return in.weight.scales != nullptr ? launch_format<Nvfp4>(in, launch)
                                     : launch_format<Bf16>(in, launch);
}

}  // namespace flint::cuda
