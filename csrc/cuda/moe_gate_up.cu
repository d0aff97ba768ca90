// A tile is eight gate rows of an expert and the eight up rows that go with them. Tiles of the
// shared expert come first: their weights are fetched before the experts are known.
#include "cuda/expert_groups.cuh"
#include "cuda/launch.cuh"
#include "cuda/one_token.cuh"
#include "cuda/tile_stream.cuh"

namespace flint::cuda {
namespace {

struct Job {
  MoeGateUp in;
  int shared_tiles, expert_tiles;
  int step_groups, step_rows;  // a grid of tiles
  int pieces;
};

// The tiles of a CTA, a grid apart: tile t of all is the shared expert's, or tile `row` of group
// `group`. No step divides.
struct Walk {
  int tile, group, row;

  __device__ __forceinline__ Walk(const Job& job, int first)
      : tile(first),
        group((first - job.shared_tiles) / job.expert_tiles),
        row((first - job.shared_tiles) % job.expert_tiles) {
    if (row < 0) {
      row += job.expert_tiles;
      --group;
    }
  }

  __device__ __forceinline__ void advance(const Job& job) {
    tile += static_cast<int>(gridDim.x);
    group += job.step_groups;
    row += job.step_rows;
    if (row >= job.expert_tiles) {
      row -= job.expert_tiles;
      ++group;
    }
  }
};

__device__ __forceinline__ float fast_sigmoid(float x) {
  return __fdividef(1.0f, 1.0f + __expf(-x));
}

// Dynamic shared memory: the stages, the activations, the warps' sums of two tiles.
template <typename Format, int kThreads, int kChunks, int kStages, bool kOne>
__global__ void __launch_bounds__(kThreads, 1)
    moe_gate_up_few(const __grid_constant__ Job job,
                    const __grid_constant__ typename Format::Matrix routed,
                    const __grid_constant__ typename Format::Matrix common) {
  constexpr int kWarps = kThreads / kWarp;
  constexpr int kSums = kOne ? kTileRows : kTileSums;  // of a warp
  constexpr int kColumns = kOne ? 1 : kMostTokens;     // of these
  using Stream = TileStream<Format, kWarps, kChunks, kStages>;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ ExpertGroups groups;
  __shared__ float2 scales[kMostEntries];  // of a group: gate's and up's
  const MoeGateUp& in = job.in;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp;
  const int tokens = kOne ? 1 : in.routing.tokens, grid = static_cast<int>(gridDim.x);
  uint8_t* staged = shared + Stream::kBytes;
  auto* sums = reinterpret_cast<float*>(
      staged + staged_bytes<Format>(tokens, job.pieces * Stream::kPiece / Format::kChunk));
  auto* zeros = reinterpret_cast<uint8_t*>(sums + 2 * kWarps * kSums);

  // Ahead of the weights, or the wait would be late; nothing is computed of them before they are
  // used.
  float2 shared_scales = make_float2(1.0f, 1.0f);
  if constexpr (Format::kNvfp4) {
    shared_scales.x = load_weight(in.shared_scale_2);
    shared_scales.y = load_weight(in.shared_scale_2 + in.shared_shards - 1);
  }
  Walk at(job, static_cast<int>(blockIdx.x)), ahead = at;
  int tiles = job.shared_tiles;  // as far as they are known
  Stream stream(shared, warp);
  int fetch_piece = 0;
  const auto fetch_next = [&] {
    if (ahead.tile >= tiles) return stream.skip();
    const bool is_shared = ahead.tile < job.shared_tiles;
    const int size = is_shared ? in.shared_size : in.routed_size;
    const int row = (is_shared ? ahead.tile : ahead.row) * kHalfTile;
    const int64_t expert = is_shared ? 0 : groups.expert[ahead.group];
    stream.fetch(is_shared ? common : Format::from_row(routed, expert * 2 * size, in.hidden),
                 {row, size + row, size, 2 * size}, in.hidden, fetch_piece);
    if (++fetch_piece < job.pieces) return;
    fetch_piece = 0;
    ahead.advance(job);
  };
  int fetched = 0;
#pragma unroll 1
  for (; fetched < kStages && ahead.tile < tiles; ++fetched) fetch_next();
  if constexpr (kOne) make_zeros<kChunks>(zeros);  // a barrier follows the wait
  wait_for_previous_kernel();
  // At once, for the experts' weights in front of which this kernel stands are on their way long
  // before the next one's.
  let_next_kernel_start();
  const int id = groups.load(in.routing);
  unsigned shifts = 0;  // of a piece, a bit
  for (int piece = 0; piece < job.pieces; ++piece) {
    const auto* x = static_cast<const uint16_t*>(in.x);
    const int chunk = stream.chunk_of(piece);
    if constexpr (kOne) {
      const bool shifted = stage_one<kChunks>(staged, x, in.hidden, chunk);
      shifts |= shifted ? 1u << piece : 0u;
    } else {
      stage_chunks<Format, kChunks>(staged, x, in.x_stride, tokens, in.hidden, chunk);
    }
  }
  groups.find(in.routing, id);
  __syncthreads();
  tiles += groups.count * job.expert_tiles;
#pragma unroll 1
  for (; fetched < kStages; ++fetched) fetch_next();
  float2 group_scales = make_float2(1.0f, 1.0f);
  if (Format::kNvfp4 && thread < groups.count) {
    const float* from = in.routed_scale_2 + 2 * groups.expert[thread];
    group_scales = make_float2(load_weight(from), load_weight(from + 1));
  }

  const int step = staged_step(tokens);
  int buffer = 0;
#pragma unroll 1
  for (bool first = true; at.tile < tiles; at.advance(job), first = false) {
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
    float* to = sums + buffer * kWarps * kSums;
    buffer ^= 1;
    if constexpr (kOne) {
      store_rows(one_sums, to + warp * kSums);
    } else {
      tile_sums.store(to + warp * kSums);
    }
    if (first && thread < groups.count) scales[thread] = group_scales;
    __syncthreads();
    const int token = thread % kColumns, in_tile = thread / kColumns;
    if (in_tile >= kHalfTile || token >= tokens) continue;
    constexpr float kScale = kOne ? 1.0f : Format::kSumScale;
    float gate = warps_total<kWarps, kSums>(to, thread) * kScale;
    float up = warps_total<kWarps, kSums>(to, thread + kSums / 2) * kScale;
    if (at.tile < job.shared_tiles) {
      const int row = at.tile * kHalfTile + in_tile;
      const float g = rounded(uint16_t{}, gate * shared_scales.x);
      const float u = rounded(uint16_t{}, up * shared_scales.y);
      store_rounded(static_cast<uint16_t*>(in.shared_act) + token * in.shared_size + row,
                    g / (1.0f + expf(-g)) * u);
      continue;
    }
    const int group = at.group, row = at.row * kHalfTile + in_tile;
    const int place = groups.place[group][token];
    if (place < 0) continue;
    if constexpr (Format::kNvfp4) {
      gate *= scales[group].x;
      up *= scales[group].y;
    }
    const int entry = token * in.routing.top_k + place;
    store_rounded(static_cast<uint16_t*>(in.routed_act) + entry * in.routed_size + row,
                  gate * fast_sigmoid(gate) * up);
  }

  // What is skipped gives zeros.
  const int entries = tokens * in.routing.top_k;
  for (int entry = static_cast<int>(blockIdx.x); entry < entries; entry += grid) {
    if (groups.group_of[entry] >= 0) continue;
    for (int i = thread; i < in.routed_size; i += kThreads) {
      static_cast<uint16_t*>(in.routed_act)[entry * in.routed_size + i] = 0;
    }
  }
}

template <typename Format, int kThreads, int kChunks, int kStages, bool kOne = false>
cudaError_t launch_plan(const MoeGateUp& in, int most_ctas, const Launch& launch) {
  constexpr int kWarps = kThreads / kWarp;
  using Stream = TileStream<Format, kWarps, kChunks, kStages>;
  if constexpr (Format::kNvfp4 && !kOne) {
    if (in.routing.tokens == 1 && Stream::pieces(in.hidden) <= kMostPiecesOfOne) {
      return launch_plan<Format, kThreads, kChunks, kStages, true>(in, most_ctas, launch);
    }
  }
  Job job{};
  job.in = in;
  job.shared_tiles = in.shared_size / kHalfTile;
  job.expert_tiles = in.routed_size / kHalfTile;
  job.pieces = Stream::pieces(in.hidden);
  const int64_t most_tiles =
      job.shared_tiles + int64_t{in.routing.tokens} * in.routing.top_k * job.expert_tiles;
  Shape shape;
  shape.grid = static_cast<unsigned>(least(most_tiles, most_ctas));
  job.step_groups = static_cast<int>(shape.grid.x) / job.expert_tiles;
  job.step_rows = static_cast<int>(shape.grid.x) % job.expert_tiles;
  shape.block = kThreads;
  shape.shared_bytes =
      Stream::kBytes +
      staged_bytes<Format>(in.routing.tokens, job.pieces * Stream::kPiece / Format::kChunk) +
      2 * size_t{kWarps} * (kOne ? kTileRows : kTileSums) * sizeof(float) +
      (kOne ? kZeroBytes<kChunks> : 0);
  return launch_kernel(launch, shape, moe_gate_up_few<Format, kThreads, kChunks, kStages, kOne>,
                       job, Format::matrix(in.routed.elements, in.routed.scales),
                       Format::matrix(in.shared.elements, in.shared.scales));
}

}  // namespace

bool moe_gate_up_fits(const MoeGateUp& in) {
  const bool nvfp4 = in.routed.scales != nullptr;
  const auto aligned = [](const void* pointer, uint64_t bytes) {
    return reinterpret_cast<uint64_t>(pointer) % bytes == 0;
  };
  const int tokens = in.routing.tokens;
  return 1 <= tokens && tokens <= kMostTokens && in.routing.top_k <= kWarp &&
         tokens * in.routing.top_k <= kMostEntries && in.routing.experts < (1 << 24) &&
         in.hidden > 0 && in.hidden % (nvfp4 ? 64 : 8) == 0 && in.hidden <= 4096 &&
         in.routed_size > 0 && in.routed_size % kHalfTile == 0 && in.routed_size < (1 << 20) &&
         in.shared_size > 0 && in.shared_size % kHalfTile == 0 && in.shared_size < (1 << 20) &&
         aligned(in.routed.elements, 16) && aligned(in.shared.elements, 16) &&
         (!nvfp4 || (aligned(in.routed.scales, 16) && aligned(in.shared.scales, 16))) &&
         keeps_alignment(reinterpret_cast<uint64_t>(in.x), tokens > 1 ? in.x_stride : 0, 2, 16);
}

cudaError_t moe_gate_up(const MoeGateUp& in, const Launch& launch) {
  // Chosen by times on an H200 with Flint's shapes: one token's tiles all at once, several tokens'
  // by CTAs that stay.
  const bool one = in.routing.tokens == 1;
  const int processors = multiprocessors();
  if (in.routed.scales == nullptr) return launch_plan<Bf16, 256, 4, 2>(in, processors, launch);
  if (in.hidden % kScaleCopyWidth != 0) {
    return launch_plan<Nvfp4, 256, 1, 2>(in, 2 * processors, launch);
  }
  constexpr int kAllCtas = 1 << 20;
  return one ? launch_plan<Nvfp4, 128, 4, 1>(in, kAllCtas, launch)
             : launch_plan<Nvfp4, 256, 2, 3>(in, 2 * processors, launch);
}

}  // namespace flint::cuda
