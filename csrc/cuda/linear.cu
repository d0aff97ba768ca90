// A product of 1 to 8 tokens with a matrix: the weights are read once, in tiles of 16 rows. A tile
// belongs to kSplit warps, which share it along the width and add their sums up through shared
// memory; with kSplit 1 a warp has a tile for itself. Each takes tiles a grid apart, and fetches
// ahead of the tile that it works on.
#include "cuda/launch.cuh"
#include "cuda/linear.h"
#include "cuda/one_token.cuh"
#include "cuda/tile_stream.cuh"

namespace flint::cuda {
namespace {

struct Job {
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
};

// The global scales, read ahead of everything: after the wait their way from memory would be the
// last thing that a result waits for, and behind the weights the wait would be late. Nothing is
// computed of them until they are used.
struct ShardScales {
  float scale[kMostShards];

  __device__ __forceinline__ ShardScales(const Job& job, bool nvfp4) {
#pragma unroll
    for (int i = 0; i < kMostShards; ++i) {
      scale[i] = 1.0f;
      if (nvfp4 && i < job.shards) scale[i] = load_weight(job.scale_2 + i);
    }
  }

  __device__ __forceinline__ float of_row(const Job& job, int row) const {
    float found = scale[0];
#pragma unroll
    for (int i = 1; i < kMostShards; ++i) {
      if (row >= job.shard_end[i - 1]) found = scale[i];
    }
    return found;
  }
};

// Writes an element of a tile of sums; with kSiluAndMul `high` is the one eight rows below.
template <LinearOutput kOutput>
__device__ __forceinline__ void finish(const Job& job, const ShardScales& scales, int tile, int row,
                                       int token, float sum, float high) {
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

// Dynamic shared memory: the stages, the activations, the warps' sums of two tiles; with kOne,
// zeros.
template <typename Format, LinearOutput kOutput, int kThreads, bool kSplit, int kChunks,
          int kStages, bool kOne>
__global__ void __launch_bounds__(kThreads, 1)
    linear_few(const __grid_constant__ Job job,
               const __grid_constant__ typename Format::Matrix weight) {
  constexpr bool kSilu = kOutput == LinearOutput::kSiluAndMul;
  constexpr int kWarps = kThreads / kWarp, kOwners = kSplit ? 1 : kWarps;
  constexpr int kSums = kOne ? kTileRows : kTileSums;  // of a warp
  using Stream = TileStream<Format, kSplit ? kWarps : 1, kChunks, kStages>;
  constexpr int kPieceChunks = Stream::kPiece / Format::kChunk;
  extern __shared__ __align__(128) uint8_t shared[];
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int owner = kSplit ? 0 : warp;  // of the tile
  const int tokens = kOne ? 1 : job.tokens;
  uint8_t* staged = shared + kOwners * Stream::kBytes;
  auto* sums =
      reinterpret_cast<float*>(staged + staged_bytes<Format>(tokens, job.pieces * kPieceChunks));
  auto* zeros = reinterpret_cast<uint8_t*>(sums + (kSplit ? 2 * kWarps * kSums : 0));
  const int first_tile = static_cast<int>(blockIdx.x) * kOwners + owner;
  const int tile_step = static_cast<int>(gridDim.x) * kOwners;
  const auto rows_of = [&](int tile) {
    const int low = tile * (kSilu ? kHalfTile : kTileRows);
    return kSilu ? TileRows{low, job.rows + low, job.rows, 2 * job.rows}
                 : TileRows{low, low + kHalfTile, job.rows, job.rows};
  };

  const ShardScales scales(job, Format::kNvfp4);
  Stream stream(shared + owner * Stream::kBytes, kSplit ? warp : 0);
  int fetch_tile = first_tile, fetch_piece = 0;
  const auto fetch_next = [&] {
    if (fetch_tile >= job.tiles) return stream.skip();
    stream.fetch(weight, rows_of(fetch_tile), job.width, fetch_piece);
    if (++fetch_piece == job.pieces) {
      fetch_piece = 0;
      fetch_tile += tile_step;
    }
  };
#pragma unroll
  for (int i = 0; i < kStages; ++i) fetch_next();
  if constexpr (kOne) {
    make_zeros<kChunks>(zeros);
    __syncthreads();
  }
  wait_for_previous_kernel();
  let_next_kernel_start();
  // A warp stages what it multiplies, or with tiles of its own a part of what all multiply.
  unsigned shifts = 0;  // of a piece, a bit
  for (int piece = kSplit ? 0 : warp; piece < job.pieces; piece += kSplit ? 1 : kWarps) {
    const int chunk = stream.chunk_of(piece);
    if constexpr (kOne) {
      const bool shifted = stage_one<kChunks>(staged, job.x, job.width, chunk);
      shifts |= shifted ? 1u << piece : 0u;
    } else {
      stage_chunks<Format, kChunks>(staged, job.x, job.x_stride, tokens, job.width, chunk);
    }
  }
  if constexpr (kSplit) {
    __syncwarp();
  } else if constexpr (kOne) {
    shifts = __reduce_or_sync(0xffffffffu, shifts);
    __shared__ unsigned all_shifts[kWarps];
    if (threadIdx.x % kWarp == 0) all_shifts[warp] = shifts;
    __syncthreads();
    shifts = 0;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) shifts |= all_shifts[i];
  } else {
    __syncthreads();
  }

  const int step = staged_step(tokens);
  int buffer = 0;
#pragma unroll 1
  for (int tile = first_tile; tile < job.tiles; tile += tile_step) {
    TileSums tile_sums;
    OneTokenSums one_sums;
    if constexpr (!kOne) tile_sums.clear();
#pragma unroll 1
    for (int piece = 0; piece < job.pieces; ++piece) {
      const int chunk = stream.chunk_of(piece);
      if constexpr (kOne) {
        multiply_one<kChunks>(one_sums, stream, staged + chunk * Format::kChunk * 2, zeros,
                              (shifts >> piece & 1) != 0);
      } else {
        multiply_piece<Format, kChunks>(tile_sums, stream,
                                        staged_chunk<Format>(staged, tokens, chunk), step);
      }
      fetch_next();
    }
    if constexpr (kSplit) {
      float* to = sums + buffer * kWarps * kSums;
      buffer ^= 1;
      if constexpr (kOne) {
        store_rows(one_sums, to + warp * kSums);
      } else {
        tile_sums.store(to + warp * kSums);
      }
      __syncthreads();
      constexpr int kElements = kSilu ? kSums / 2 : kSums, kColumns = kOne ? 1 : kMostTokens;
      const int element = static_cast<int>(threadIdx.x), token = element % kColumns;
      if (element < kElements && token < tokens) {
        constexpr float kScale = kOne ? 1.0f : Format::kSumScale;
        const float low = warps_total<kWarps, kSums>(to, element) * kScale;
        const float high =
            kSilu ? warps_total<kWarps, kSums>(to, element + kElements) * kScale : 0.0f;
        finish<kOutput>(job, scales, tile, element / kColumns, token, low, high);
      }
    } else if constexpr (kOne) {
      one_sums.collect();
      const int lane = static_cast<int>(threadIdx.x) % kWarp, row = lane / 4;
      if (lane % 4 == 0) {
        finish<kOutput>(job, scales, tile, row, 0, one_sums.low, one_sums.high);
        if constexpr (!kSilu) {
          finish<kOutput>(job, scales, tile, row + kHalfTile, 0, one_sums.high, 0.0f);
        }
      }
    } else {
      const int lane = static_cast<int>(threadIdx.x) % kWarp, row = lane / 4, token = lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float low = tile_sums.total(i) * Format::kSumScale;
        const float high = tile_sums.total(2 + i) * Format::kSumScale;
        finish<kOutput>(job, scales, tile, row, token + i, low, high);
        if constexpr (!kSilu) {
          finish<kOutput>(job, scales, tile, row + kHalfTile, token + i, high, 0.0f);
        }
      }
    }
  }
}

Job job_of(const Linear& in) {
  Job job{};
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

constexpr int kAllCtas = 1 << 20;

// How a kernel is made for a format and a shape: kThreads threads, which split a tile or not, and
// kStages stages of kChunks chunks a warp.
template <int kThreads_, bool kSplit_, int kChunks_, int kStages_>
struct Plan {
  static constexpr int kThreads = kThreads_, kChunks = kChunks_, kStages = kStages_;
  static constexpr bool kSplit = kSplit_;
};

template <typename Format, typename P>
using StreamOf = TileStream<Format, P::kSplit ? P::kThreads / kWarp : 1, P::kChunks, P::kStages>;

template <typename Format, typename P, bool kOne>
size_t shared_bytes(const Linear& in) {
  using Stream = StreamOf<Format, P>;
  constexpr size_t kWarps = P::kThreads / kWarp;
  const int chunks = Stream::pieces(in.width) * Stream::kPiece / Format::kChunk;
  return (P::kSplit ? 1 : kWarps) * Stream::kBytes + staged_bytes<Format>(in.tokens, chunks) +
         (P::kSplit ? 2 * kWarps * (kOne ? kTileRows : kTileSums) * sizeof(float) : 0) +
         (kOne ? kZeroBytes<P::kChunks> : 0);
}

template <typename Format, LinearOutput kOutput, typename P, bool kOne>
cudaError_t launch_tokens(const Linear& in, int most_ctas, const Launch& launch) {
  Job job = job_of(in);
  job.pieces = StreamOf<Format, P>::pieces(job.width);
  Shape shape;
  const int tiles_a_cta = P::kSplit ? 1 : P::kThreads / kWarp;
  shape.grid = static_cast<unsigned>(least(ceil_div(job.tiles, tiles_a_cta), most_ctas));
  shape.block = P::kThreads;
  shape.shared_bytes = shared_bytes<Format, P, kOne>(in);
  return launch_kernel(
      launch, shape,
      linear_few<Format, kOutput, P::kThreads, P::kSplit, P::kChunks, P::kStages, kOne>, job,
      Format::matrix(in.weight.elements, in.weight.scales));
}

// What takes any width, in the least shared memory.
using Odd = Plan<256, true, 1, 2>;

template <typename Format, LinearOutput kOutput, typename P>
cudaError_t launch_plan(const Linear& in, int most_ctas, const Launch& launch) {
  if (shared_bytes<Format, P, false>(in) > kMostSharedBytes) {
    return launch_tokens<Format, kOutput, Odd, false>(in, kAllCtas, launch);
  }
  if constexpr (Format::kNvfp4) {
    if (in.tokens == 1 && StreamOf<Format, P>::pieces(in.width) <= kMostPiecesOfOne) {
      return launch_tokens<Format, kOutput, P, true>(in, most_ctas, launch);
    }
  }
  return launch_tokens<Format, kOutput, P, false>(in, most_ctas, launch);
}

// Chosen by times on an H200 with Flint's shapes.
template <LinearOutput kOutput>
cudaError_t launch_nvfp4(const Linear& in, const Launch& launch) {
  using Narrow = Plan<128, true, 4, 1>;
  using Middle = Plan<256, true, 4, 1>;
  using Wide = Plan<256, true, 6, 1>;
  if (in.width % kScaleCopyWidth != 0)
    return launch_plan<Nvfp4, kOutput, Odd>(in, kAllCtas, launch);
  if constexpr (kOutput == LinearOutput::kLogits) {
    return launch_plan<Nvfp4, kOutput, Plan<384, false, 4, 3>>(in, multiprocessors(), launch);
  }
  if constexpr (kOutput == LinearOutput::kSiluAndMul) {
    return launch_plan<Nvfp4, kOutput, Plan<128, true, 4, 2>>(in, 3 * multiprocessors(), launch);
  }
  if (in.width <= 2048) return launch_plan<Nvfp4, kOutput, Narrow>(in, kAllCtas, launch);
  if (in.width <= 4096) return launch_plan<Nvfp4, kOutput, Middle>(in, kAllCtas, launch);
  return launch_plan<Nvfp4, kOutput, Wide>(in, kAllCtas, launch);
}

template <LinearOutput kOutput>
cudaError_t launch_bf16(const Linear& in, const Launch& launch) {
  if constexpr (kOutput == LinearOutput::kLogits) {
    return launch_plan<Bf16, kOutput, Plan<256, false, 4, 2>>(in, multiprocessors(), launch);
  }
  if (in.width <= 2048) {
    return launch_plan<Bf16, kOutput, Plan<256, true, 4, 1>>(in, kAllCtas, launch);
  }
  // Wider rows leave less room beside eight tokens' activations.
  return in.width <= 4096 ? launch_plan<Bf16, kOutput, Plan<256, true, 4, 2>>(in, kAllCtas, launch)
                          : launch_plan<Bf16, kOutput, Plan<256, true, 2, 3>>(in, kAllCtas, launch);
}

template <LinearOutput kOutput>
cudaError_t launch_output(const Linear& in, const Launch& launch) {
  return in.weight.scales != nullptr ? launch_nvfp4<kOutput>(in, launch)
                                     : launch_bf16<kOutput>(in, launch);
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
         aligned(in.weight.elements, 16) && (!nvfp4 || aligned(in.weight.scales, 16)) &&
         keeps_alignment(reinterpret_cast<uint64_t>(in.x), in.tokens > 1 ? in.x_stride : 0, 2, 16);
}

cudaError_t linear(const Linear& in, const Launch& launch) {
  switch (in.output) {
    case LinearOutput::kSiluAndMul:
      return launch_output<LinearOutput::kSiluAndMul>(in, launch);
    case LinearOutput::kLogits:
      return launch_output<LinearOutput::kLogits>(in, launch);
    default:
      return launch_output<LinearOutput::kRounded>(in, launch);
  }
}

}  // namespace flint::cuda
