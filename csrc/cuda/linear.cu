// A product of 1 to 8 tokens with a matrix: the weights are read once, in tiles of 16 rows. A tile
// belongs to kTeam warps, which share it along the width and add their sums up through shared
// memory; a team of one has the tile for itself. Each takes tiles a grid apart, and fetches ahead
// of the tile that it works on.

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
template <typename Format, LinearOutput kOutput, int kThreads, int kTeam, int kChunks, int kStages,
          bool kWhole, bool kOne>
__global__ void __launch_bounds__(kThreads, 1)
    linear_few(const __grid_constant__ Job job,
               const __grid_constant__ typename Format::Matrix weight) {
  constexpr bool kSilu = kOutput == LinearOutput::kSiluAndMul;
  constexpr int kWarps = kThreads / kWarp, kTeams = kWarps / kTeam;
  static_assert(kTeams * kTeam == kWarps);
  constexpr int kSums = kOne ? kTileRows : kTileSums;  // of a warp
  using Stream = TileStream<Format, kTeam, kChunks, kStages, kWhole>;
  constexpr int kPieceChunks = Stream::kPiece / Format::kChunk;
  extern __shared__ __align__(128) uint8_t shared[];
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int team = warp / kTeam, member = warp % kTeam;
  const int tokens = kOne ? 1 : job.tokens;
  uint8_t* staged = shared + kTeams * Stream::kBytes;
  auto* sums =
      reinterpret_cast<float*>(staged + staged_bytes<Format>(tokens, job.pieces * kPieceChunks));
  auto* zeros = reinterpret_cast<uint8_t*>(sums + (kTeam > 1 ? 2 * kWarps * kSums : 0));
  const int first_tile = static_cast<int>(blockIdx.x) * kTeams + team;
  const int tile_step = static_cast<int>(gridDim.x) * kTeams;
  const auto rows_of = [&](int tile) {
    const int low = tile * (kSilu ? kHalfTile : kTileRows);
    return kSilu ? TileRows{low, job.rows + low, job.rows, 2 * job.rows}
                 : TileRows{low, low + kHalfTile, job.rows, job.rows};
  };

  const ShardScales scales(job, Format::kNvfp4);
  Stream stream(shared + team * Stream::kBytes, member);
  sums += team * 2 * kTeam * kSums;
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
  unsigned shifts = 0;          // of a piece, a bit
  if constexpr (kTeams == 1) {  // a warp stages what it multiplies
    for (int piece = 0; piece < job.pieces; ++piece) {
      const int chunk = stream.chunk_of(piece);
      if constexpr (kOne) {
        const bool shifted = stage_one<kChunks, kWhole>(staged, job.x, job.width, chunk);
        shifts |= shifted ? 1u << piece : 0u;
      } else {
        stage_chunks<Format, kChunks>(staged, job.x, job.x_stride, tokens, job.width, chunk);
      }
    }
    __syncwarp();
  } else if constexpr (kOne) {  // or a part of what all multiply
    static_assert(kTeam == 1, "a bit for a warp's part of a piece");
    for (int piece = warp; piece < job.pieces; piece += kWarps) {
      const bool shifted =
          stage_one<kChunks, kWhole>(staged, job.x, job.width, stream.chunk_of(piece));
      shifts |= shifted ? 1u << piece : 0u;
    }
    shifts = __reduce_or_sync(0xffffffffu, shifts);
    __shared__ unsigned all_shifts[kWarps];
    if (threadIdx.x % kWarp == 0) all_shifts[warp] = shifts;
    __syncthreads();
    shifts = 0;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) shifts |= all_shifts[i];
  } else {
    constexpr int kPart = kChunks % 2 == 0 ? 2 : 1;  // chunks that a warp stages at once
    for (int part = warp; part < job.pieces * kPieceChunks / kPart; part += kWarps) {
      stage_chunks<Format, kPart>(staged, job.x, job.x_stride, tokens, job.width, part * kPart);
    }
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
    if constexpr (kTeam > 1) {
      float* to = sums + buffer * kTeam * kSums;
      buffer ^= 1;
      if constexpr (kOne) {
        store_rows(one_sums, to + member * kSums);
      } else {
        tile_sums.store(to + member * kSums);
      }
      if constexpr (kTeams == 1) {
        __syncthreads();
      } else {
        sync_threads<kTeam * kWarp>(1 + team);
      }
      constexpr int kElements = kSilu ? kSums / 2 : kSums, kColumns = kOne ? 1 : kMostTokens;
      const int first = static_cast<int>(threadIdx.x) - team * kTeam * kWarp;
#pragma unroll
      for (int element = first; element < kElements; element += kTeam * kWarp) {
        const int token = element % kColumns;
        if (token >= tokens) continue;
        constexpr float kScale = kOne ? 1.0f : Format::kSumScale;
        const float low = warps_total<kTeam, kSums>(to, element) * kScale;
        const float high =
            kSilu ? warps_total<kTeam, kSums>(to, element + kElements) * kScale : 0.0f;
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

// How a kernel is made for a format and a shape: kThreads threads in teams of kTeam warps, and
// kStages stages of kChunks chunks a warp; whether for whole tiles and pieces alone.
template <int kThreads_, int kTeam_, int kChunks_, int kStages_, bool kWhole_ = true>
struct Plan {
  static constexpr int kThreads = kThreads_, kChunks = kChunks_, kStages = kStages_;
  static constexpr int kTeam = kTeam_, kTeams = kThreads / kWarp / kTeam;
  static constexpr bool kWhole = kWhole_;
};

template <typename Format, typename P>
using StreamOf = TileStream<Format, P::kTeam, P::kChunks, P::kStages, P::kWhole>;

template <typename Format, typename P, bool kOne>
size_t shared_bytes(const Linear& in) {
  using Stream = StreamOf<Format, P>;
  constexpr size_t kWarps = P::kThreads / kWarp;
  const int chunks = Stream::pieces(in.width) * Stream::kPiece / Format::kChunk;
  return P::kTeams * Stream::kBytes + staged_bytes<Format>(in.tokens, chunks) +
         (P::kTeam > 1 ? 2 * kWarps * (kOne ? kTileRows : kTileSums) * sizeof(float) : 0) +
         (kOne ? kZeroBytes<P::kChunks> : 0);
}

template <typename Format, LinearOutput kOutput, typename P, bool kOne>
cudaError_t launch_tokens(const Linear& in, int most_ctas, const Launch& launch) {
  Job job = job_of(in);
  job.pieces = StreamOf<Format, P>::pieces(job.width);
  Shape shape;
  shape.grid = static_cast<unsigned>(least(ceil_div(job.tiles, P::kTeams), most_ctas));
  shape.block = P::kThreads;
  shape.shared_bytes = shared_bytes<Format, P, kOne>(in);
  return launch_kernel(
      launch, shape,
      linear_few<Format, kOutput, P::kThreads, P::kTeam, P::kChunks, P::kStages, P::kWhole, kOne>,
      job, Format::matrix(in.weight.elements, in.weight.scales));
}

// What takes any width, in the least shared memory.
using Odd = Plan<256, 8, 1, 2, false>;

template <typename Format, LinearOutput kOutput, typename P>
bool takes(const Linear& in) {
  return shared_bytes<Format, P, false>(in) <= kMostSharedBytes &&
         (!P::kWhole || (in.rows % kTileRows == 0 && in.width % StreamOf<Format, P>::kPiece == 0));
}

template <typename Format, LinearOutput kOutput, typename P>
cudaError_t launch_plan(const Linear& in, int most_ctas, const Launch& launch) {
  if (!takes<Format, kOutput, P>(in)) {
    return launch_tokens<Format, kOutput, Odd, false>(in, kAllCtas, launch);
  }
  if constexpr (Format::kNvfp4 && kOutput != LinearOutput::kRounded &&
                (P::kTeams == 1 || P::kTeam == 1)) {
    if (in.tokens == 1 && StreamOf<Format, P>::pieces(in.width) <= kMostPiecesOfOne) {
      return launch_tokens<Format, kOutput, P, true>(in, most_ctas, launch);
    }
  }
  return launch_tokens<Format, kOutput, P, false>(in, most_ctas, launch);
}

// Chosen by times on an H200 with Flint's shapes.
template <LinearOutput kOutput>
cudaError_t launch_nvfp4(const Linear& in, const Launch& launch) {
  const int processors = multiprocessors();
  if constexpr (kOutput == LinearOutput::kLogits) {
    return launch_plan<Nvfp4, kOutput, Plan<384, 1, 4, 3>>(in, processors, launch);
  } else if constexpr (kOutput == LinearOutput::kSiluAndMul) {
    // Eight tokens' activations are staged once an SM.
    return in.tokens > 1
               ? launch_plan<Nvfp4, kOutput, Plan<384, 2, 2, 4>>(in, processors, launch)
               : launch_plan<Nvfp4, kOutput, Plan<128, 4, 4, 2>>(in, 3 * processors, launch);
  } else {
    if (in.width <= 2048) {
      return launch_plan<Nvfp4, kOutput, Plan<128, 4, 4, 1>>(in, kAllCtas, launch);
    }
    return in.width <= 4096 ? launch_plan<Nvfp4, kOutput, Plan<256, 8, 4, 1>>(in, kAllCtas, launch)
                            : launch_plan<Nvfp4, kOutput, Plan<256, 8, 6, 1>>(in, kAllCtas, launch);
  }
}

template <LinearOutput kOutput>
cudaError_t launch_bf16(const Linear& in, const Launch& launch) {
  if constexpr (kOutput == LinearOutput::kLogits) {
    return launch_plan<Bf16, kOutput, Plan<256, 1, 4, 2>>(in, multiprocessors(), launch);
  } else {
    if (in.width <= 2048) {
      return launch_plan<Bf16, kOutput, Plan<256, 8, 4, 1>>(in, kAllCtas, launch);
    }
    // Wider rows leave less room beside eight tokens' activations.
    return in.width <= 4096 ? launch_plan<Bf16, kOutput, Plan<256, 8, 4, 2>>(in, kAllCtas, launch)
                            : launch_plan<Bf16, kOutput, Plan<256, 8, 2, 3>>(in, kAllCtas, launch);
  }
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
      return linear_one_fits(in) ? linear_one(in, launch)
                                 : launch_output<LinearOutput::kRounded>(in, launch);
  }
}

}  // namespace flint::cuda
