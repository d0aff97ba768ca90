// A CTA has 16 rows of the output: of the same rows of all chosen experts and of the shared one.
// The warps take pieces of these in turn, one expert's at a time, and leave each piece's sums
// in shared memory; at the end they are added, weighted and combined in the order of selection.

#include "cuda/expert_groups.cuh"
#include "cuda/launch.cuh"
#include "cuda/tile_stream.cuh"

namespace flint::cuda {
namespace {

struct Job {
  MoeDown in;
  int shared_pieces, expert_pieces;
};

// Rows of activations, a warp a row; zeros beyond the width.
template <typename Format>
__device__ __forceinline__ void stage_rows(uint8_t* to, int bytes, const void* from, int rows,
                                           int width) {
  const int vectors = width / kVectorElements, padded = bytes / kVectorBytes;
  const int lane = static_cast<int>(threadIdx.x) % kWarp,
            warps = static_cast<int>(blockDim.x) / kWarp;
  for (int row = static_cast<int>(threadIdx.x) / kWarp; row < rows; row += warps) {
    const auto* x = static_cast<const uint4*>(from) + row * vectors;
    auto* staged = reinterpret_cast<uint4*>(to + row * bytes);
#pragma unroll 2
    for (int v = lane; v < padded; v += kWarp) {
      const uint4 value = v < vectors ? load_activation(x + v) : make_uint4(0, 0, 0, 0);
      staged[Format::place(v, 0, 1)] = Format::arrange(value);
    }
  }
}

// Dynamic shared memory: the stages, the activations of all entries and of the shared expert, the
// warps' sums of all pieces, the experts' outputs.
template <typename Format, int kThreads, int kChunks, int kStages, bool kWhole>
__global__ void __launch_bounds__(kThreads, 1)
    moe_down_few(const __grid_constant__ Job job,
                 const __grid_constant__ typename Format::Matrix routed,
                 const __grid_constant__ typename Format::Matrix common) {
  constexpr int kWarps = kThreads / kWarp;
  using Stream = TileStream<Format, 1, kChunks, kStages, kWhole>;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ ExpertGroups groups;
  __shared__ float scales[kMostEntries], weights[kMostEntries];  // of an entry
  const MoeDown& in = job.in;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp;
  const int warp = thread / kWarp;
  const int tokens = in.routing.tokens, entries = tokens * in.routing.top_k;
  constexpr int kPieceBytes = Stream::kPiece * 2;  // of a row of activations
  const int entry_bytes = job.expert_pieces * kPieceBytes;
  const int shared_bytes = job.shared_pieces * kPieceBytes;
  uint8_t* staged = shared + kWarps * Stream::kBytes;
  uint8_t* entry_rows = staged;
  uint8_t* shared_rows = entry_rows + entries * entry_bytes;
  auto* sums = reinterpret_cast<float*>(shared_rows + tokens * shared_bytes);
  const int first = static_cast<int>(blockIdx.x) * kTileRows;
  const TileRows rows{first, first + kHalfTile, in.hidden, in.hidden};

  float shared_scale = 1.0f;
  if constexpr (Format::kNvfp4) shared_scale = load_weight(in.shared_scale_2);
  // Ahead of the wait: the kernel in front of this has passed its own, so ids and weights are
  // there.
  Stream stream(shared + warp * Stream::kBytes, 0);
  groups.find(in.routing, groups.load(in.routing));
  __syncthreads();
  const int pieces = job.shared_pieces + groups.count * job.expert_pieces;
  // Where piece `piece` of all lies.
  struct Part {
    int width, piece;
    int group;  // -1: the shared expert's
  };
  const auto part_of = [&](int piece) {
    if (piece < job.shared_pieces) return Part{in.shared_size, piece, -1};
    const int routed_piece = piece - job.shared_pieces;
    if (job.expert_pieces == 1) return Part{in.routed_size, 0, routed_piece};  // without a division
    const int group = routed_piece / job.expert_pieces;
    return Part{in.routed_size, routed_piece - group * job.expert_pieces, group};
  };
  int fetch_piece = warp;
  const auto fetch_next = [&] {
    if (fetch_piece >= pieces) return stream.skip();
    const Part part = part_of(fetch_piece);
    const bool is_shared = part.group < 0;
    const int64_t expert = is_shared ? 0 : groups.expert[part.group];
    stream.fetch(is_shared ? common : Format::from_row(routed, expert * in.hidden, part.width),
                 rows, part.width, part.piece);
    fetch_piece += kWarps;
  };
  const bool weighs = thread < entries && groups.group_of[thread] >= 0;
  float scale = 1.0f, weight = 0.0f;  // of this thread's entry
  if (weighs) {
    const int expert = groups.expert[groups.group_of[thread]];
    if constexpr (Format::kNvfp4) scale = load_weight(in.routed_scale_2 + expert);
    weight = load_weight(in.weights + thread);
  }
#pragma unroll
  for (int i = 0; i < kStages; ++i) fetch_next();
  wait_for_previous_kernel();
  let_next_kernel_start();
  stage_rows<Format>(entry_rows, entry_bytes, in.routed_act, entries, in.routed_size);
  stage_rows<Format>(shared_rows, shared_bytes, in.shared_act, tokens, in.shared_size);
  if (weighs) {
    scales[thread] = scale;
    weights[thread] = weight;
  }
  __syncthreads();

#pragma unroll 1
  for (int piece = warp; piece < pieces; piece += kWarps) {
    const int token = min(lane / 4, tokens - 1);
    const Part part = part_of(piece);
    const uint8_t* x = shared_rows + token * shared_bytes;
    if (part.group >= 0) {
      // A token that did not choose the expert multiplies what nobody reads.
      const int place = max(groups.place[part.group][token], 0);
      x = entry_rows + (token * in.routing.top_k + place) * entry_bytes;
    }
    x += (stream.chunk_of(part.piece) * Format::kVectors * 4 + lane % 4) * kVectorBytes;
    TileSums piece_sums;
    piece_sums.clear();
    multiply_piece<Format, kChunks>(piece_sums, stream, x, staged_step(1));
    piece_sums.store(sums + piece * kTileSums);
    fetch_next();
  }
  __syncthreads();

  // The experts' outputs, weighted, all at once; the shared one's comes after a token's others.
  const int places = in.routing.top_k + 1;
  float* outputs = sums + pieces * kTileSums;
  for (int i = thread; i < places * kTileRows * tokens; i += kThreads) {
    const int token = i % tokens, row = i / tokens % kTileRows, place = i / tokens / kTileRows;
    const bool is_shared = place == in.routing.top_k;
    const int entry = token * in.routing.top_k + place;
    const int group = is_shared ? 0 : groups.group_of[entry];
    float output = 0.0f;
    if (group >= 0) {
      const int from = is_shared ? 0 : job.shared_pieces + group * job.expert_pieces;
      const int count = is_shared ? job.shared_pieces : job.expert_pieces;
      const float* at = sums + from * kTileSums + row * kMostTokens + token;
      float total = at[0];
      for (int j = 1; j < count; ++j) total += at[j * kTileSums];
      total *= Format::kSumScale * (is_shared ? shared_scale : scales[entry]);
      // Rounded before it is added, as the reference does.
      output = rounded(uint16_t{}, total);
      if (!is_shared) output = __fmul_rn(output, weights[entry]);
    }
    outputs[i] = output;
  }
  __syncthreads();

  const int token = thread % tokens, row = thread / tokens;
  if (row >= kTileRows || first + row >= in.hidden) return;
  const float* at = outputs + thread;
  float sum = 0.0f;
#pragma unroll 6
  for (int place = 0; place < in.routing.top_k; ++place) {
    sum = __fadd_rn(sum, at[place * kTileRows * tokens]);
  }
  store_rounded(static_cast<uint16_t*>(in.out) + token * in.hidden + first + row,
                rounded(uint16_t{}, sum) + at[in.routing.top_k * kTileRows * tokens]);
}

template <typename Format, int kThreads, int kChunks, int kStages, bool kWhole>
cudaError_t launch_plan(const MoeDown& in, const Launch& launch) {
  constexpr int kWarps = kThreads / kWarp;
  using Stream = TileStream<Format, 1, kChunks, kStages, kWhole>;
  Job job{};
  job.in = in;
  job.shared_pieces = Stream::pieces(in.shared_size);
  job.expert_pieces = Stream::pieces(in.routed_size);
  const int tokens = in.routing.tokens, entries = tokens * in.routing.top_k;
  const size_t row = Stream::kPiece * 2, tile = kTileSums * sizeof(float);
  Shape shape;
  shape.grid = static_cast<unsigned>(ceil_div(in.hidden, kTileRows));
  shape.block = kThreads;
  shape.shared_bytes =
      size_t{kWarps} * Stream::kBytes +
      (size_t(entries) * job.expert_pieces + size_t(tokens) * job.shared_pieces) * row +
      size_t(job.shared_pieces + entries * job.expert_pieces) * tile +
      size_t(in.routing.top_k + 1) * tile;
  return launch_kernel(launch, shape, moe_down_few<Format, kThreads, kChunks, kStages, kWhole>, job,
                       Format::matrix(in.routed.elements, in.routed.scales),
                       Format::matrix(in.shared.elements, in.shared.scales));
}

}  // namespace

// Their activations and sums are what shared memory holds.
constexpr int kMostDownEntries = 56;

bool moe_down_fits(const MoeDown& in) {
  const bool nvfp4 = in.routed.scales != nullptr;
  const auto aligned = [](const void* pointer, uint64_t bytes) {
    return reinterpret_cast<uint64_t>(pointer) % bytes == 0;
  };
  const int tokens = in.routing.tokens, unit = nvfp4 ? 64 : 8;
  return 1 <= tokens && tokens <= kMostTokens && in.routing.top_k <= kWarp &&
         tokens * in.routing.top_k <= kMostDownEntries && in.routing.experts < (1 << 24) &&
         in.hidden > 0 && in.hidden < (1 << 20) && in.routed_size > 0 && in.shared_size > 0 &&
         in.routed_size % unit == 0 && in.shared_size % unit == 0 && in.routed_size <= 512 &&
         in.shared_size <= 1024 && aligned(in.routed.elements, 16) &&
         aligned(in.shared.elements, 16) && aligned(in.routed_act, 16) &&
         aligned(in.shared_act, 16) &&
         (!nvfp4 || (aligned(in.routed.scales, 16) && aligned(in.shared.scales, 16)));
}

cudaError_t moe_down(const MoeDown& in, const Launch& launch) {
  if (moe_down_one_fits(in)) return moe_down_one(in, launch);
  if (in.routed.scales == nullptr) {
    return in.routing.tokens == 1 ? launch_plan<Bf16, 512, 4, 1, false>(in, launch)
                                  : launch_plan<Bf16, 256, 4, 1, false>(in, launch);
  }
  // Whole tiles, and pieces of four chunks.
  if (in.hidden % kTileRows != 0 || in.routed_size % 512 != 0 || in.shared_size % 512 != 0) {
    return launch_plan<Nvfp4, 256, 1, 2, false>(in, launch);
  }
  return launch_plan<Nvfp4, 544, 4, 1, true>(in, launch);
}

}  // namespace flint::cuda
