// A CTA has 16 rows of the weights, a cluster of eight one head. The CTAs send their rounded
// elements of token m to CTA m of the cluster, which norms, turns and writes the head.
#include "cuda/cluster.cuh"
#include "cuda/kv_rows.cuh"
#include "cuda/launch.cuh"
#include "cuda/one_token.cuh"
#include "cuda/qkv.h"
#include "cuda/tile_stream.cuh"

namespace flint::cuda {
namespace {

constexpr unsigned kHeadCtas = kFastHeadDim / kTileRows;
static_assert(kHeadCtas == kMostTokens, "a CTA of the cluster for each token");

struct Job {
  const float* scale_2;
  int shards;
  const uint16_t* x;
  int64_t x_stride;
  int tokens, width;
  QkNormRope rest;
};

// The head that this CTA finishes for one token, by 16 lanes.
struct HeadEnd {
  RowOutcome outcome;
  uint16_t* to;  // where the head goes; null: nowhere
  Halves weight;
  float cos[kQuad], sin[kQuad];

  // Ahead of the wait: nothing here is written by a kernel in flight.
  __device__ __forceinline__ void load(const QkNormRope& in, int token, int head, int lane) {
    const RowPlan plan = plan_row(in, token);
    outcome = plan.outcome;
    const int64_t slot = outcome == RowOutcome::kCompute ? plan.slot : -1;
    const RowOutputs<uint16_t> out = row_outputs<uint16_t>(in, token, slot);
    to = out.cached_k;
    if (head < in.heads) {
      to = out.q + head * kFastHeadDim;
    } else if (to != nullptr) {
      to += (head - in.heads) * in.cache.k_strides.head;
    }
    weight = load_weights(head < in.heads ? in.q_weight : in.k_weight, lane);
#pragma unroll
    for (int i = 0; i < kQuad; ++i) cos[i] = 1.0f, sin[i] = 0.0f;
    if (in.rope && outcome == RowOutcome::kCompute) {
      const float4 c = *reinterpret_cast<const float4*>(plan.cos_sin + lane * kQuad);
      const float4 s = *reinterpret_cast<const float4*>(plan.cos_sin + kHalf + lane * kQuad);
      cos[0] = c.x, cos[1] = c.y, cos[2] = c.z, cos[3] = c.w;
      sin[0] = s.x, sin[1] = s.y, sin[2] = s.z, sin[3] = s.w;
    }
  }

  // By a whole warp, whose upper half computes the same once more: its lanes sum together.
  __device__ __forceinline__ void finish(const QkNormRope& in, const uint16_t* elements, int lane,
                                         bool stores) const {
    const auto* from = reinterpret_cast<const uint2*>(elements + lane * kQuad);
    Halves value = normalise({from[0], from[kHalf / kQuad]}, weight, in.eps);
    if (!stores || to == nullptr) return;
    if (in.rope) value = rotate(value, cos, sin);
    if (outcome != RowOutcome::kCompute) {
      const uint32_t filling = outcome == RowOutcome::kNaN ? 0x7fc07fc0u : 0u;
      value.first = value.second = make_uint2(filling, filling);
    }
    store(to, lane, value);
  }
};

template <typename Format, int kThreads, int kChunks, int kStages, bool kOne>
__global__ void __launch_bounds__(kThreads, 1)
    qkv_few(const __grid_constant__ Job job,
            const __grid_constant__ typename Format::Matrix weight) {
  constexpr int kWarps = kThreads / kWarp;
  constexpr int kSums = kOne ? kTileRows : kTileSums;  // of a warp
  constexpr int kColumns = kOne ? 1 : kMostTokens;     // of these
  using Stream = TileStream<Format, kWarps, kChunks, kStages>;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ __align__(16) uint16_t elements[kFastHeadDim];  // of the token that is finished here
  uint8_t* staged = shared + Stream::kBytes;
  const int pieces = Stream::pieces(job.width);
  auto* sums = reinterpret_cast<float*>(
      staged + staged_bytes<Format>(job.tokens, pieces * Stream::kPiece / Format::kChunk));
  auto* zeros = reinterpret_cast<uint8_t*>(sums + kWarps * kSums);
  const QkNormRope& in = job.rest;
  const int thread = static_cast<int>(threadIdx.x);
  const int first = static_cast<int>(blockIdx.x) * kTileRows;
  const int head = static_cast<int>(blockIdx.x / kHeadCtas);
  const int rank = static_cast<int>(cluster_rank());
  const int norm_heads = in.heads + in.cache.kv_heads;

  // Loads in the order in which they are wanted back; nothing is computed of them before the wait.
  float scale = 1.0f;
  if constexpr (Format::kNvfp4) {
    const int shard = head < in.heads ? 0 : head < norm_heads ? 1 : 2;
    scale = load_weight(job.scale_2 + (job.shards == 1 ? 0 : shard));
  }
  const TileRows rows{first, first + kHalfTile, 1 << 30, 1 << 30};
  Stream stream(shared, thread / kWarp);
  int fetched = 0;
  const auto fetch_next = [&] {
    if (fetched >= pieces) return stream.skip();
    stream.fetch(weight, rows, job.width, fetched++);
  };
#pragma unroll
  for (int i = 0; i < kStages; ++i) fetch_next();
  HeadEnd end;
  const bool ends = head < norm_heads && rank < job.tokens && thread < kGroupLanes;
  if (ends) end.load(in, rank, head, thread);
  if (head < norm_heads) arrive_cluster();  // this CTA's shared memory is there
  const int row = thread / kColumns, token = thread % kColumns;
  const bool has_element = thread < kSums && token < job.tokens;
  uint16_t* cached_v = nullptr;
  if (head >= norm_heads && has_element) {
    const RowPlan plan = plan_row(in, token);
    const bool cached = plan.outcome == RowOutcome::kCompute && plan.slot >= 0;
    cached_v = row_outputs<uint16_t>(in, token, cached ? plan.slot : -1).cached_v;
  }
  if constexpr (kOne) {
    make_zeros<kChunks>(zeros);
    __syncthreads();
  }
  wait_for_previous_kernel();
  let_next_kernel_start();

  unsigned shifts = 0;  // of a piece, a bit
  for (int piece = 0; piece < pieces; ++piece) {
    const int chunk = stream.chunk_of(piece);
    if constexpr (kOne) {
      const bool shifted = stage_one<kChunks>(staged, job.x, job.width, chunk);
      shifts |= shifted ? 1u << piece : 0u;
    } else {
      stage_chunks<Format, kChunks>(staged, job.x, job.x_stride, job.tokens, job.width, chunk);
    }
  }
  __syncwarp();
  TileSums tile_sums;
  OneTokenSums one_sums;
  if constexpr (!kOne) tile_sums.clear();
#pragma unroll 1
  for (int piece = 0; piece < pieces; ++piece) {
    const int chunk = stream.chunk_of(piece);
    if constexpr (kOne) {
      multiply_one<kChunks>(one_sums, stream, staged + chunk * Format::kChunk * 2, zeros,
                            (shifts >> piece & 1) != 0);
    } else {
      multiply_piece<Format, kChunks>(tile_sums, stream,
                                      staged_chunk<Format>(staged, job.tokens, chunk),
                                      staged_step(job.tokens));
    }
    fetch_next();
  }
  if constexpr (kOne) {
    store_rows(one_sums, sums + thread / kWarp * kSums);
  } else {
    tile_sums.store(sums + thread / kWarp * kSums);
    scale *= Format::kSumScale;
  }
  __syncthreads();
  if (head >= norm_heads) {  // v: nothing but a copy
    if (cached_v == nullptr) return;
    cached_v += (head - norm_heads) * in.cache.v_strides.head + rank * kTileRows + row;
    store_rounded(cached_v, warps_total<kWarps, kSums>(sums, thread) * scale);
    return;
  }
  await_cluster();
  if (has_element) {
    const float element = warps_total<kWarps, kSums>(sums, thread) * scale;
    store_cluster(shared_of(token, elements + rank * kTileRows + row),
                  static_cast<uint16_t>(pack_bf16(element, 0.0f)));
  }
  __syncwarp();
  arrive_cluster();
  if (rank >= job.tokens) return;
  await_cluster();
  if (thread < kWarp) end.finish(in, elements, thread % kGroupLanes, ends);
}

template <typename Format, int kThreads, int kChunks, int kStages, bool kOne = false>
cudaError_t launch_plan(const QkvLinear& in, const Launch& launch) {
  constexpr int kWarps = kThreads / kWarp;
  using Stream = TileStream<Format, kWarps, kChunks, kStages>;
  const int pieces = Stream::pieces(in.width);
  if constexpr (Format::kNvfp4 && !kOne) {
    if (in.rest.rows == 1 && pieces <= kMostPiecesOfOne) {
      return launch_plan<Format, kThreads, kChunks, kStages, true>(in, launch);
    }
  }
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
  shape.shared_bytes = Stream::kBytes +
                       staged_bytes<Format>(job.tokens, pieces * Stream::kPiece / Format::kChunk) +
                       size_t{kWarps} * (kOne ? kTileRows : kTileSums) * sizeof(float) +
                       (kOne ? kZeroBytes<kChunks> : 0);
  return launch_kernel(launch, shape, qkv_few<Format, kThreads, kChunks, kStages, kOne>, job,
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
  if (in.weight.scales == nullptr) return launch_plan<Bf16, 256, 4, 1>(in, launch);
  return in.width % kScaleCopyWidth == 0 ? launch_plan<Nvfp4, 128, 4, 1>(in, launch)
                                         : launch_plan<Nvfp4, 128, 1, 2>(in, launch);
}

}  // namespace flint::cuda
