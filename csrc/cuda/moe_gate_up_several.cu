// Gate and up of two to eight tokens: a warp has a tile for itself, so that a lane ends up with
// gate and up of its tokens and nothing is exchanged between warps; a tile's addresses are found
// once.
#include "cuda/expert_groups.cuh"
#include "cuda/gate_up_tiles.cuh"
#include "cuda/launch.cuh"
#include "cuda/moe_act.cuh"
#include "cuda/tile_stream.cuh"

namespace flint::cuda {
namespace {

// Flint's 3,200 tiles at most are two for each of 13 warps an SM; but then one of its schedulers
// has a warp more than the others. Measured on an H200: 24.7 us with 16 warps, 25.2 with 13.
constexpr int kThreads = 512, kChunks = 4, kStages = 2;
constexpr int kWarps = kThreads / kWarp;
constexpr int kStagedChunks = 2;  // of activations, at once

using Stream = TileStream<Nvfp4, 1, kChunks, kStages, true>;

struct Job {
  MoeGateUp in;
  GateUpTiles tiles;
  int pieces;
};

// Dynamic shared memory: the stages, the activations.
__global__ void __launch_bounds__(kThreads, 1)
    moe_gate_up_several_tokens(const __grid_constant__ Job job,
                               const __grid_constant__ Nvfp4::Matrix routed,
                               const __grid_constant__ Nvfp4::Matrix common) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ ExpertGroups groups;
  __shared__ float2 scales[kMostEntries];  // of a group: gate's and up's
  const MoeGateUp& in = job.in;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp;
  const int tokens = in.routing.tokens;
  uint8_t* staged = shared + kWarps * Stream::kBytes;

  // Ahead of the weights, or the wait would be late; nothing is computed of them before they are
  // used.
  const float2 shared_scales = make_float2(load_weight(in.shared_scale_2),
                                           load_weight(in.shared_scale_2 + in.shared_shards - 1));
  GateUpWalk at(job.tiles, warp * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x)),
      ahead = at;
  int tiles = job.tiles.shared_tiles;  // as far as they are known
  Stream stream(shared + warp * Stream::kBytes, 0);
  Stream::Lane from;
  int fetch_piece = 0;
  const auto fetch_next = [&] {
    if (ahead.tile >= tiles) return stream.skip();
    if (fetch_piece == 0) {
      const bool is_shared = ahead.tile < job.tiles.shared_tiles;
      const int size = is_shared ? in.shared_size : in.routed_size;
      const int row = (is_shared ? ahead.tile : ahead.row) * kHalfTile;
      const int64_t expert = is_shared ? 0 : groups.expert[ahead.group];
      from.find(is_shared ? common : Nvfp4::from_row(routed, expert * 2 * size, in.hidden),
                {row, size + row, size, 2 * size}, in.hidden);
    }
    stream.fetch(from, fetch_piece);
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
  const int staged_parts = job.pieces * (kChunks / kStagedChunks);
  for (int part = warp; part < staged_parts; part += kWarps) {
    stage_chunks<Nvfp4, kStagedChunks>(staged, static_cast<const uint16_t*>(in.x), in.x_stride,
                                       tokens, in.hidden, part * kStagedChunks);
  }
  groups.find(in.routing, id);
  __syncthreads();
  tiles += groups.count * job.tiles.expert_tiles;
#pragma unroll 1
  for (; fetched < kStages; ++fetched) fetch_next();
  if (thread < groups.count) {
    const float* scale = in.routed_scale_2 + 2 * groups.expert[thread];
    scales[thread] = make_float2(load_weight(scale), load_weight(scale + 1));
  }
  __syncthreads();

  const int x_step = staged_step(tokens), low_row = lane / 4, first_token = lane % 4 * 2;
#pragma unroll 1
  for (; at.tile < tiles; at.advance(job.tiles)) {
    TileSums sums;
    sums.clear();
#pragma unroll 1
    for (int piece = 0; piece < job.pieces; ++piece) {
      multiply_piece<Nvfp4, kChunks>(
          sums, stream, staged_chunk<Nvfp4>(staged, tokens, stream.chunk_of(piece)), x_step);
      fetch_next();
    }
    const bool is_shared = at.tile < job.tiles.shared_tiles;
    const float2 scale = is_shared ? shared_scales : scales[at.group];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = first_token + i;
      if (token >= tokens) break;
      const float gate = sums.total(i) * Nvfp4::kSumScale * scale.x;
      const float up = sums.total(2 + i) * Nvfp4::kSumScale * scale.y;
      if (is_shared) {
        store_rounded(static_cast<uint16_t*>(in.shared_act) + token * in.shared_size +
                          at.tile * kHalfTile + low_row,
                      shared_act(gate, up));
        continue;
      }
      const int place = groups.place[at.group][token];
      if (place < 0) continue;
      const int entry = token * in.routing.top_k + place;
      store_rounded(static_cast<uint16_t*>(in.routed_act) + entry * in.routed_size +
                        at.row * kHalfTile + low_row,
                    routed_act(gate, up));
    }
  }

  clear_skipped(in, groups.group_of);
}

size_t shared_bytes(const MoeGateUp& in) {
  return size_t{kWarps} * Stream::kBytes +
         staged_bytes<Nvfp4>(in.routing.tokens, Stream::pieces(in.hidden) * kChunks);
}

}  // namespace

bool moe_gate_up_several_fits(const MoeGateUp& in) {
  return in.routing.tokens > 1 && in.routed.scales != nullptr && in.hidden % Stream::kPiece == 0 &&
         shared_bytes(in) <= kMostSharedBytes;
}

cudaError_t moe_gate_up_several(const MoeGateUp& in, const Launch& launch) {
  Job job{in, GateUpTiles(in), Stream::pieces(in.hidden)};
  Shape shape;
  shape.grid = static_cast<unsigned>(least(ceil_div(job.tiles.most, kWarps), multiprocessors()));
  shape.block = kThreads;
  shape.shared_bytes = shared_bytes(in);
  job.tiles.walk_in_steps_of(static_cast<int>(shape.grid.x) * kWarps);
  return launch_kernel(launch, shape, moe_gate_up_several_tokens, job,
                       Nvfp4::matrix(in.routed.elements, in.routed.scales),
                       Nvfp4::matrix(in.shared.elements, in.shared.scales));
}

}  // namespace flint::cuda
