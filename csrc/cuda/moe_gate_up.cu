// Gate and up of any number of tokens and any width: the warps of a CTA share a tile along the
// width and add their sums up through shared memory. NVFP4 of Flint's widths has ways of its own:
// moe_gate_up_one.cu, moe_gate_up_several.cu.
#include "cuda/expert_groups.cuh"
#include "cuda/gate_up_tiles.cuh"
#include "cuda/launch.cuh"
#include "cuda/moe_act.cuh"
#include "cuda/tile_stream.cuh"

namespace flint::cuda {
namespace {

struct Job {
  MoeGateUp in;
  GateUpTiles tiles;
  int pieces;
};

// Dynamic shared memory: the stages, the activations, the warps' sums of two tiles.
template <typename Format, int kThreads, int kChunks, int kStages>
__global__ void __launch_bounds__(kThreads, 1)
    moe_gate_up_few(const __grid_constant__ Job job,
                    const __grid_constant__ typename Format::Matrix routed,
                    const __grid_constant__ typename Format::Matrix common) {
  constexpr int kWarps = kThreads / kWarp;
  using Stream = TileStream<Format, kWarps, kChunks, kStages>;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ ExpertGroups groups;
  __shared__ float2 scales[kMostEntries];  // of a group: gate's and up's
  const MoeGateUp& in = job.in;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp;
  const int tokens = in.routing.tokens;
  uint8_t* staged = shared + Stream::kBytes;
  auto* sums = reinterpret_cast<float*>(
      staged + staged_bytes<Format>(tokens, job.pieces * Stream::kPiece / Format::kChunk));

  // Ahead of the weights, or the wait would be late; nothing is computed of them before they are
  // used.
  float2 shared_scales = make_float2(1.0f, 1.0f);
  if constexpr (Format::kNvfp4) {
    shared_scales.x = load_weight(in.shared_scale_2);
    shared_scales.y = load_weight(in.shared_scale_2 + in.shared_shards - 1);
  }
  GateUpWalk at(job.tiles, static_cast<int>(blockIdx.x)), ahead = at;
  int tiles = job.tiles.shared_tiles;  // as far as they are known
  Stream stream(shared, warp);
  int fetch_piece = 0;
  const auto fetch_next = [&] {
    if (ahead.tile >= tiles) return stream.skip();
    const bool is_shared = ahead.tile < job.tiles.shared_tiles;
    const int size = is_shared ? in.shared_size : in.routed_size;
    const int row = (is_shared ? ahead.tile : ahead.row) * kHalfTile;
    const int64_t expert = is_shared ? 0 : groups.expert[ahead.group];
    stream.fetch(is_shared ? common : Format::from_row(routed, expert * 2 * size, in.hidden),
                 {row, size + row, size, 2 * size}, in.hidden, fetch_piece);
    if (++fetch_piece < job.pieces) return;
    fetch_piece = 0;
    ahead.advance(job.tiles);
  };
  int fetched = 0;
#pragma unroll 1
  for (; fetched < kStages && ahead.tile < tiles; ++fetched) fetch_next();
  wait_for_previous_kernel();
  // Now: this kernel's experts' weights are on their way long before the next one's.
  let_next_kernel_start();
  const int id = groups.load(in.routing);
  for (int piece = 0; piece < job.pieces; ++piece) {
    stage_chunks<Format, kChunks>(staged, static_cast<const uint16_t*>(in.x), in.x_stride, tokens,
                                  in.hidden, stream.chunk_of(piece));
  }
  groups.find(in.routing, id);
  __syncthreads();
  tiles += groups.count * job.tiles.expert_tiles;
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
  for (bool first = true; at.tile < tiles; at.advance(job.tiles), first = false) {
    TileSums tile_sums;
    tile_sums.clear();
#pragma unroll 1
    for (int piece = 0; piece < job.pieces; ++piece) {
      multiply_piece<Format, kChunks>(
          tile_sums, stream, staged_chunk<Format>(staged, tokens, stream.chunk_of(piece)), step);
      fetch_next();
    }
    float* to = sums + buffer * kWarps * kTileSums;
    buffer ^= 1;
    tile_sums.store(to + warp * kTileSums);
    if (first && thread < groups.count) scales[thread] = group_scales;
    __syncthreads();
    const int token = thread % kMostTokens, in_tile = thread / kMostTokens;
    if (in_tile >= kHalfTile || token >= tokens) continue;
    float gate = warps_total<kWarps>(to, thread) * Format::kSumScale;
    float up = warps_total<kWarps>(to, thread + kTileSums / 2) * Format::kSumScale;
    if (at.tile < job.tiles.shared_tiles) {
      const int row = at.tile * kHalfTile + in_tile;
      store_rounded(static_cast<uint16_t*>(in.shared_act) + token * in.shared_size + row,
                    shared_act(gate * shared_scales.x, up * shared_scales.y));
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
                  routed_act(gate, up));
  }

  clear_skipped(in, groups.group_of);
}

template <typename Format, int kThreads, int kChunks, int kStages>
cudaError_t launch_plan(const MoeGateUp& in, int most_ctas, const Launch& launch) {
  using Stream = TileStream<Format, kThreads / kWarp, kChunks, kStages>;
  Job job{in, GateUpTiles(in), Stream::pieces(in.hidden)};
  Shape shape;
  shape.grid = static_cast<unsigned>(least(job.tiles.most, most_ctas));
  shape.block = kThreads;
  shape.shared_bytes =
      Stream::kBytes +
      staged_bytes<Format>(in.routing.tokens, job.pieces * Stream::kPiece / Format::kChunk) +
      2 * size_t{kThreads / kWarp} * kTileSums * sizeof(float);
  job.tiles.walk_in_steps_of(static_cast<int>(shape.grid.x));
  return launch_kernel(launch, shape, moe_gate_up_few<Format, kThreads, kChunks, kStages>, job,
                       Format::matrix(in.routed.elements, in.routed.scales),
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
  if (moe_gate_up_one_fits(in)) return moe_gate_up_one(in, launch);
  if (moe_gate_up_several_fits(in)) return moe_gate_up_several(in, launch);
  return in.routed.scales == nullptr
             ? launch_plan<Bf16, 256, 4, 2>(in, multiprocessors(), launch)
             : launch_plan<Nvfp4, 256, 1, 2>(in, 2 * multiprocessors(), launch);
}

}  // namespace flint::cuda
