// A CTA has 16 rows of the output: of the same rows of all chosen experts and of the shared one.
// The warps take pieces of these in turn, one expert's at a time, and leave each piece's sums in
// shared memory; at the end they are added, weighted and combined in the order of selection.
#include "cuda/expert_groups.cuh"
#include "cuda/launch.cuh"
#include "cuda/split_tile.cuh"

namespace flint::cuda {
namespace {

template <typename Format>
struct Job {
  MoeDown in;
  typename Format::Matrix routed, shared;
  int shared_pieces, expert_pieces;
};

// Rows of activations that all warps multiply with, in the order of the lanes, one after another.
template <typename Format>
__host__ __device__ constexpr int row_bytes(int pieces, int chunks) {
  return staged_bytes<Format>(1, pieces * chunks);
}

template <typename Format>
__device__ __forceinline__ void stage_rows(uint8_t* to, int bytes, const void* from, int rows,
                                           int width) {
  const int vectors = width / kVectorElements, padded = bytes / kVectorBytes;
  for (int i = static_cast<int>(threadIdx.x); i < rows * padded;
       i += static_cast<int>(blockDim.x)) {
    const int row = i / padded, v = i % padded;
    uint4 value = make_uint4(0, 0, 0, 0);
    if (v < vectors) {
      value = load_activation(static_cast<const uint4*>(from) + row * vectors + v);
    }
    reinterpret_cast<uint4*>(to + row * bytes)[Format::place(v, 0, 1)] = Format::arrange(value);
  }
}

// Dynamic shared memory: the stages of the warps, the activations of all entries and of the shared
// expert, the sums of all pieces.
template <typename Format, int kThreads, int kChunks, int kStages>
__global__ void __launch_bounds__(kThreads) moe_down_few(const __grid_constant__ Job<Format> job) {
  constexpr int kWarps = kThreads / kWarp;
  constexpr int kStageBytes = Format::template kPieceBytes<kChunks>;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ __align__(8) ExpertGroups groups;
  __shared__ float scales[kMostEntries], weights[kMostEntries];  // of an entry
  const MoeDown& in = job.in;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp;
  const int tokens = in.routing.tokens, entries = tokens * in.routing.top_k;
  const int entry_bytes = row_bytes<Format>(job.expert_pieces, kChunks);
  const int shared_bytes = row_bytes<Format>(job.shared_pieces, kChunks);
  uint8_t* stages = shared + warp * kStages * kStageBytes;
  uint8_t* entry_rows = shared + kWarps * kStages * kStageBytes;
  uint8_t* shared_rows = entry_rows + entries * entry_bytes;
  auto* sums = reinterpret_cast<float*>(shared_rows + tokens * shared_bytes);
  const int first = static_cast<int>(blockIdx.x) * kTileRows;
  const TileRows rows{first, first + kHalfTile, in.hidden, in.hidden};

  // Ahead of the wait: the kernel in front of this has passed its own, so ids and weights are there.
  groups.find(in.routing);
  __syncthreads();
  const int pieces = job.shared_pieces + groups.count * job.expert_pieces;
  int fetch_piece = warp, fetch_stage = 0;
  const auto fetch_next = [&] {
    if (fetch_piece < pieces) {
      typename Format::template Lane<kChunks> from;
      int part = fetch_piece;
      if (part < job.shared_pieces) {
        from.find(job.shared, rows, in.shared_size);
      } else {
        part -= job.shared_pieces;
        const int64_t row = int64_t{groups.expert[part / job.expert_pieces]} * in.hidden;
        from.find(Format::from_row(job.routed, row, in.routed_size), rows, in.routed_size);
        part %= job.expert_pieces;
      }
      from.fetch(shared_address(stages) + static_cast<uint32_t>(fetch_stage * kStageBytes),
                 part * kChunks);
      fetch_piece += kWarps;
    }
    close_copies();
    fetch_stage = fetch_stage + 1 == kStages ? 0 : fetch_stage + 1;
  };
#pragma unroll
  for (int i = 0; i < kStages; ++i) fetch_next();
  if (thread < entries && groups.group_of[thread] >= 0) {
    scales[thread] = Format::kSumScale;
    if constexpr (Format::kNvfp4) {
      scales[thread] *= load_weight(in.routed_scale_2 + groups.expert[groups.group_of[thread]]);
    }
    weights[thread] = load_weight(in.weights + thread);
  }
  float shared_scale = Format::kSumScale;
  if constexpr (Format::kNvfp4) shared_scale *= load_weight(in.shared_scale_2);
  wait_for_previous_kernel();
  let_next_kernel_start();
  stage_rows<Format>(entry_rows, entry_bytes, in.routed_act, entries, in.routed_size);
  stage_rows<Format>(shared_rows, shared_bytes, in.shared_act, tokens, in.shared_size);
  __syncthreads();

  int stage = 0;
#pragma unroll 1
  for (int piece = warp; piece < pieces; piece += kWarps) {
    const int token = min(lane / 4, tokens - 1);
    int part = piece;
    const uint8_t* x;
    if (part < job.shared_pieces) {
      x = shared_rows + token * shared_bytes;
    } else {
      part -= job.shared_pieces;
      // A token that did not choose the expert multiplies what nobody reads.
      const int place = max(groups.place[part / job.expert_pieces][token], 0);
      x = entry_rows + (token * in.routing.top_k + place) * entry_bytes;
      part %= job.expert_pieces;
    }
    x += (part * kChunks * Format::kVectors * 4 + lane % 4) * kVectorBytes;
    TileSums piece_sums;
    piece_sums.clear();
    await_copies<kStages - 1>();
    __syncwarp();
    Format::template multiply<kChunks>(piece_sums, stages + stage * kStageBytes, x, staged_step(1));
    piece_sums.store(sums + piece * kTileSums);
    stage = stage + 1 == kStages ? 0 : stage + 1;
    __syncwarp();
    fetch_next();
  }
  __syncthreads();

  const int token = thread % kMostTokens, row = first + thread / kMostTokens;
  if (thread >= kTileSums || token >= tokens || row >= in.hidden) return;
  const auto total_of = [&](int first_piece, int count) {
    float total = sums[first_piece * kTileSums + thread];
    for (int i = 1; i < count; ++i) total += sums[(first_piece + i) * kTileSums + thread];
    return total;
  };
  float routed = 0.0f;
  for (int place = 0; place < in.routing.top_k; ++place) {
    const int entry = token * in.routing.top_k + place, group = groups.group_of[entry];
    if (group < 0) continue;
    const float y = rounded(uint16_t{}, total_of(job.shared_pieces + group * job.expert_pieces,
                                                 job.expert_pieces) *
                                            scales[entry]);
    // Not contracted: the product is rounded before it is added, as the reference does.
    routed = __fadd_rn(routed, __fmul_rn(weights[entry], y));
  }
  const float common = total_of(0, job.shared_pieces) * shared_scale;
  store_rounded(static_cast<uint16_t*>(in.out) + token * in.hidden + row,
                rounded(uint16_t{}, routed) + rounded(uint16_t{}, common));
}

template <typename Format, int kThreads, int kChunks, int kStages>
cudaError_t launch_plan(const MoeDown& in, const Launch& launch) {
  Job<Format> job{};
  job.in = in;
  job.routed = Format::matrix(in.routed.elements, in.routed.scales);
  job.shared = Format::matrix(in.shared.elements, in.shared.scales);
  const auto pieces = [](int width) {
    return static_cast<int>(ceil_div(ceil_div(width, Format::kChunk), kChunks));
  };
  job.shared_pieces = pieces(in.shared_size);
  job.expert_pieces = pieces(in.routed_size);
  const int tokens = in.routing.tokens, entries = tokens * in.routing.top_k;
  Shape shape;
  shape.grid = static_cast<unsigned>(ceil_div(in.hidden, kTileRows));
  shape.block = kThreads;
  shape.shared_bytes =
      size_t{kThreads / kWarp} * kStages * Format::template kPieceBytes<kChunks> +
      size_t(entries) * row_bytes<Format>(job.expert_pieces, kChunks) +
      size_t(tokens) * row_bytes<Format>(job.shared_pieces, kChunks) +
      size_t(job.shared_pieces + entries * job.expert_pieces) * kTileSums * sizeof(float);
  return launch_kernel(launch, shape, moe_down_few<Format, kThreads, kChunks, kStages>, job);
}

}  // namespace

bool moe_down_fits(const MoeDown& in) {
  const bool nvfp4 = in.routed.scales != nullptr;
  const auto aligned = [](const void* pointer, uint64_t bytes) {
    return reinterpret_cast<uint64_t>(pointer) % bytes == 0;
  };
  const int tokens = in.routing.tokens, unit = nvfp4 ? 64 : 8;
  return 1 <= tokens && tokens <= kMostTokens && in.routing.top_k <= kWarp &&
         tokens * in.routing.top_k <= kMostEntries && in.routing.experts < (1 << 24) &&
         in.hidden > 0 && in.hidden < (1 << 20) && in.routed_size > 0 && in.shared_size > 0 &&
         in.routed_size % unit == 0 && in.shared_size % unit == 0 && in.routed_size <= 512 &&
         in.shared_size <= 1024 && aligned(in.routed.elements, 16) &&
         aligned(in.shared.elements, 16) && aligned(in.routed_act, 16) &&
         aligned(in.shared_act, 16) &&
         (!nvfp4 || (aligned(in.routed.scales, 16) && aligned(in.shared.scales, 16)));
}

cudaError_t moe_down(const MoeDown& in, const Launch& launch) {
  const bool few = in.routing.tokens == 1;
  if (in.routed.scales == nullptr) {
    return few ? launch_plan<Bf16, 512, 4, 1>(in, launch)
               : launch_plan<Bf16, 256, 4, 2>(in, launch);
  }
  if (in.routed_size % 256 != 0 || in.shared_size % 256 != 0) {
    return launch_plan<Nvfp4, 256, 1, 2>(in, launch);
  }
  return few ? launch_plan<Nvfp4, 512, 2, 1>(in, launch)
             : launch_plan<Nvfp4, 512, 2, 2>(in, launch);
}

}  // namespace flint::cuda
