// A tile is eight gate rows of an expert and the eight up rows that go with them. Tiles of the
// shared expert come first: their weights are fetched before the experts are known.
#include "cuda/expert_groups.cuh"
#include "cuda/launch.cuh"
#include "cuda/split_tile.cuh"

namespace flint::cuda {
namespace {

template <typename Format>
struct Job {
  MoeGateUp in;
  typename Format::Matrix routed, shared;
  int shared_tiles, expert_tiles;
  int pieces;
};

__device__ __forceinline__ float fast_sigmoid(float x) {
  return __fdividef(1.0f, 1.0f + __expf(-x));
}

// Dynamic shared memory: the stages of the warps, the activations, the warps' sums of two tiles.
template <typename Format, int kThreads, int kChunks, int kStages>
__global__ void __launch_bounds__(kThreads) moe_gate_up_few(const __grid_constant__ Job<Format> job) {
  using Split = SplitTile<Format, kThreads, kChunks, kStages>;
  constexpr int kWarps = Split::kWarps, kStageBytes = Split::kStageBytes;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ __align__(8) ExpertGroups groups;
  __shared__ float2 scales[kMostEntries];  // of a group: gate's and up's
  const MoeGateUp& in = job.in;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp;
  const int tokens = in.routing.tokens, grid = static_cast<int>(gridDim.x);
  uint8_t* stages = shared + warp * kStages * kStageBytes;
  uint8_t* staged = shared + Split::kStagesBytes;
  auto* sums =
      reinterpret_cast<float*>(staged + staged_bytes<Format>(tokens, Split::chunks(in.hidden)));
  const auto chunk_of = [&](int piece) { return (piece * kWarps + warp) * kChunks; };

  int tiles = job.shared_tiles;  // as far as they are known
  int fetch_tile = static_cast<int>(blockIdx.x), fetch_part = 0, fetch_stage = 0;
  typename Format::template Lane<kChunks> from;
  const auto find_lane = [&] {
    if (fetch_tile < job.shared_tiles) {
      const int row = fetch_tile * kHalfTile, size = in.shared_size;
      from.find(job.shared, {row, size + row, size, 2 * size}, in.hidden);
    } else if (fetch_tile < tiles) {
      const int routed = fetch_tile - job.shared_tiles, group = routed / job.expert_tiles;
      const int row = routed % job.expert_tiles * kHalfTile, size = in.routed_size;
      const int64_t first = int64_t{groups.expert[group]} * 2 * size;
      from.find(Format::from_row(job.routed, first, in.hidden), {row, size + row, size, 2 * size},
                in.hidden);
    }
  };
  const auto fetch_next = [&] {
    if (fetch_tile < tiles) {
      if (fetch_part == 0) find_lane();
      from.fetch(shared_address(stages) + static_cast<uint32_t>(fetch_stage * kStageBytes),
                 chunk_of(fetch_part));
      if (++fetch_part == job.pieces) {
        fetch_part = 0;
        fetch_tile += grid;
      }
    }
    close_copies();
    fetch_stage = fetch_stage + 1 == kStages ? 0 : fetch_stage + 1;
  };
  int fetched = 0;
#pragma unroll 1
  for (; fetched < kStages && fetch_tile < tiles; ++fetched) fetch_next();
  float2 shared_scales = make_float2(1.0f, 1.0f);
  if constexpr (Format::kNvfp4) {
    shared_scales.x = load_weight(in.shared_scale_2) * Format::kSumScale;
    shared_scales.y = load_weight(in.shared_scale_2 + in.shared_shards - 1) * Format::kSumScale;
  }
  wait_for_previous_kernel();
  let_next_kernel_start();
  groups.find(in.routing);
  for (int piece = 0; piece < job.pieces; ++piece) {
    stage_piece<Format, kChunks>(staged, static_cast<const uint16_t*>(in.x), in.x_stride, tokens,
                                 in.hidden, chunk_of(piece));
  }
  __syncthreads();
  tiles += groups.count * job.expert_tiles;
#pragma unroll 1
  for (; fetched < kStages; ++fetched) fetch_next();
  if (Format::kNvfp4 && thread < groups.count) {  // read after the barrier of the first tile
    const float* from = in.routed_scale_2 + 2 * groups.expert[thread];
    scales[thread] = make_float2(load_weight(from) * Format::kSumScale,
                                 load_weight(from + 1) * Format::kSumScale);
  }

  const int step = staged_step(tokens);
  int stage = 0, buffer = 0;
#pragma unroll 1
  for (int tile = static_cast<int>(blockIdx.x); tile < tiles; tile += grid) {
    TileSums tile_sums;
    tile_sums.clear();
#pragma unroll 1
    for (int piece = 0; piece < job.pieces; ++piece) {
      await_copies<kStages - 1>();
      __syncwarp();
      Format::template multiply<kChunks>(
          tile_sums, stages + stage * kStageBytes,
          staged_chunk<Format>(staged, tokens, chunk_of(piece)), step);
      stage = stage + 1 == kStages ? 0 : stage + 1;
      __syncwarp();
      fetch_next();
    }
    float* to = sums + buffer * kWarps * kTileSums;
    buffer ^= 1;
    tile_sums.store(to + warp * kTileSums);
    __syncthreads();
    const int token = thread % kMostTokens, in_tile = thread / kMostTokens;
    if (in_tile >= kHalfTile || token >= tokens) continue;
    float gate = warps_total<kWarps>(to, thread);
    float up = warps_total<kWarps>(to, thread + kTileSums / 2);
    if (tile < job.shared_tiles) {
      const int row = tile * kHalfTile + in_tile;
      const float g = rounded(uint16_t{}, gate * shared_scales.x);
      const float u = rounded(uint16_t{}, up * shared_scales.y);
      store_rounded(static_cast<uint16_t*>(in.shared_act) + token * in.shared_size + row,
                    g / (1.0f + expf(-g)) * u);
      continue;
    }
    const int routed = tile - job.shared_tiles, group = routed / job.expert_tiles;
    const int row = routed % job.expert_tiles * kHalfTile + in_tile;
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

template <typename Format, int kThreads, int kChunks, int kStages>
cudaError_t launch_plan(const MoeGateUp& in, int most_ctas, const Launch& launch) {
  using Split = SplitTile<Format, kThreads, kChunks, kStages>;
  Job<Format> job{};
  job.in = in;
  job.routed = Format::matrix(in.routed.elements, in.routed.scales);
  job.shared = Format::matrix(in.shared.elements, in.shared.scales);
  job.shared_tiles = in.shared_size / kHalfTile;
  job.expert_tiles = in.routed_size / kHalfTile;
  job.pieces = Split::pieces(in.hidden);
  const int64_t most_tiles =
      job.shared_tiles + int64_t{in.routing.tokens} * in.routing.top_k * job.expert_tiles;
  Shape shape;
  shape.grid = static_cast<unsigned>(least(most_tiles, most_ctas));
  shape.block = kThreads;
  shape.shared_bytes = Split::kStagesBytes +
                       staged_bytes<Format>(in.routing.tokens, Split::chunks(in.hidden)) +
                       2 * Split::kSumsBytes;
  return launch_kernel(launch, shape, moe_gate_up_few<Format, kThreads, kChunks, kStages>, job);
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
  const bool few = in.routing.tokens == 1;
  if (in.routed.scales == nullptr) {
    return few ? launch_plan<Bf16, 256, 4, 2>(in, 128, launch)
               : launch_plan<Bf16, 256, 4, 2>(in, 132, launch);
  }
  if (in.hidden % 256 != 0) return launch_plan<Nvfp4, 256, 1, 2>(in, 264, launch);
  return few ? launch_plan<Nvfp4, 256, 2, 4>(in, 128, launch)
             : launch_plan<Nvfp4, 256, 2, 3>(in, 264, launch);
}

}  // namespace flint::cuda
