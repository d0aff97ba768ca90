// A CTA has 16 rows of the weights, a cluster of eight one head. The CTAs send their rounded
// elements of token m to CTA m of the cluster, which norms, turns and writes the head.
#include "cuda/cluster.cuh"
#include "cuda/kv_rows.cuh"
#include "cuda/launch.cuh"
#include "cuda/qkv.h"
#include "cuda/split_tile.cuh"

namespace flint::cuda {
namespace {

constexpr unsigned kHeadCtas = kFastHeadDim / kTileRows;
static_assert(kHeadCtas == kMostTokens, "a CTA of the cluster for each token");

template <typename Format>
struct Job {
  typename Format::Matrix weight;
  const float* scale_2;
  int shards;
  const uint16_t* x;
  int64_t x_stride;
  int tokens, width;
  QkNormRope rest;
};

// The head that this CTA finishes for one token, by 16 lanes.
struct HeadEnd {
  RowPlan plan;
  Halves weight;
  float cos[kQuad], sin[kQuad];

  // Ahead of the wait: nothing here is written by a kernel in flight.
  __device__ __forceinline__ void load(const QkNormRope& in, int token, int head, int lane) {
    plan = plan_row(in, token);
    weight = load_weights(head < in.heads ? in.q_weight : in.k_weight, lane);
#pragma unroll
    for (int i = 0; i < kQuad; ++i) cos[i] = 1.0f, sin[i] = 0.0f;
    if (in.rope && plan.outcome == RowOutcome::kCompute) {
      const float4 c = *reinterpret_cast<const float4*>(plan.cos_sin + lane * kQuad);
      const float4 s = *reinterpret_cast<const float4*>(plan.cos_sin + kHalf + lane * kQuad);
      cos[0] = c.x, cos[1] = c.y, cos[2] = c.z, cos[3] = c.w;
      sin[0] = s.x, sin[1] = s.y, sin[2] = s.z, sin[3] = s.w;
    }
  }

  // By a whole warp, whose upper half computes the same once more: its lanes sum together.
  __device__ __forceinline__ void finish(const QkNormRope& in, const uint16_t* elements, int token,
                                         int head, int lane, bool stores) const {
    const auto* from = reinterpret_cast<const uint2*>(elements + lane * kQuad);
    Halves value = normalise({from[0], from[kHalf / kQuad]}, weight, in.eps);
    if (!stores) return;
    if (in.rope) value = rotate(value, cos, sin);
    if (plan.outcome != RowOutcome::kCompute) {
      const uint32_t filling = plan.outcome == RowOutcome::kNaN ? 0x7fc07fc0u : 0u;
      value.first = value.second = make_uint2(filling, filling);
    }
    const int64_t slot = plan.outcome == RowOutcome::kCompute ? plan.slot : -1;
    const RowOutputs<uint16_t> out = row_outputs<uint16_t>(in, token, slot);
    if (head < in.heads) {
      store(out.q + head * kFastHeadDim, lane, value);
    } else if (out.cached_k != nullptr) {
      store(out.cached_k + (head - in.heads) * in.cache.k_strides.head, lane, value);
    }
  }
};

template <typename Format, int kThreads, int kChunks, int kStages>
__global__ void __launch_bounds__(kThreads) qkv_few(const __grid_constant__ Job<Format> job) {
  using Tile = SplitTile<Format, kThreads, kChunks, kStages>;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ __align__(16) uint16_t elements[kFastHeadDim];  // of the token that is finished here
  uint8_t* staged = shared + Tile::kStagesBytes;
  auto* sums =
      reinterpret_cast<float*>(staged + staged_bytes<Format>(job.tokens, Tile::chunks(job.width)));
  const QkNormRope& in = job.rest;
  const int thread = static_cast<int>(threadIdx.x);
  const int first = static_cast<int>(blockIdx.x) * kTileRows;
  const int head = static_cast<int>(blockIdx.x / kHeadCtas);
  const int rank = static_cast<int>(cluster_rank());
  const int norm_heads = in.heads + in.cache.kv_heads;

  Tile tile(shared, job.weight, {first, first + kHalfTile, 1 << 30, 1 << 30}, job.width);
  float scale = Format::kSumScale;
  if constexpr (Format::kNvfp4) {
    const int shard = head < in.heads ? 0 : head < norm_heads ? 1 : 2;
    scale *= load_weight(job.scale_2 + (job.shards == 1 ? 0 : shard));
  }
  HeadEnd end;
  const bool ends = head < norm_heads && rank < job.tokens && thread < kGroupLanes;
  if (ends) end.load(in, rank, head, thread);
  if (head < norm_heads) arrive_cluster();  // this CTA's shared memory is there
  const int row = thread / kMostTokens, token = thread % kMostTokens;
  const bool has_element = thread < kTileSums && token < job.tokens;
  uint16_t* cached_v = nullptr;
  if (head >= norm_heads && has_element) {
    const RowPlan plan = plan_row(in, token);
    const bool cached = plan.outcome == RowOutcome::kCompute && plan.slot >= 0;
    cached_v = row_outputs<uint16_t>(in, token, cached ? plan.slot : -1).cached_v;
  }
  wait_for_previous_kernel();
  let_next_kernel_start();

  tile.stage(staged, job.x, job.x_stride, job.tokens);
  TileSums tile_sums;
  tile.multiply(tile_sums, staged, job.tokens);
  tile_sums.store(sums + thread / kWarp * kTileSums);
  __syncthreads();
  if (head >= norm_heads) {  // v: nothing but a copy
    if (cached_v == nullptr) return;
    cached_v += (head - norm_heads) * in.cache.v_strides.head + rank * kTileRows + row;
    store_rounded(cached_v, warps_total<Tile::kWarps>(sums, thread) * scale);
    return;
  }
  await_cluster();
  if (has_element) {
    const float element = warps_total<Tile::kWarps>(sums, thread) * scale;
    store_cluster(shared_of(token, elements + rank * kTileRows + row),
                  static_cast<uint16_t>(pack_bf16(element, 0.0f)));
  }
  __syncwarp();
  arrive_cluster();
  if (rank >= job.tokens) return;
  await_cluster();
  if (thread < kWarp) end.finish(in, elements, rank, head, thread % kGroupLanes, ends);
}

template <typename Format, int kThreads, int kChunks, int kStages>
cudaError_t launch_plan(const QkvLinear& in, const Launch& launch) {
  using Tile = SplitTile<Format, kThreads, kChunks, kStages>;
  Job<Format> job{};
  job.weight = Format::matrix(in.weight.elements, in.weight.scales);
  job.scale_2 = in.scale_2;
  job.shards = in.shards;
  job.x = static_cast<const uint16_t*>(in.x);
  job.x_stride = in.x_stride;
  job.tokens = static_cast<int>(in.rest.rows);
  job.width = in.width;
  job.rest = in.rest;
  Shape shape;
  shape.grid = static_cast<unsigned>(in.rest.heads + 2 * in.rest.cache.kv_heads) * kHeadCtas;
  shape.block = kThreads;
  shape.cluster = kHeadCtas;
  shape.shared_bytes = Tile::kStagesBytes +
                       staged_bytes<Format>(job.tokens, Tile::chunks(job.width)) +
                       Tile::kSumsBytes;
  return launch_kernel(launch, shape, qkv_few<Format, kThreads, kChunks, kStages>, job);
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
  if (in.weight.scales == nullptr) return launch_plan<Bf16, 256, 2, 2>(in, launch);
  return in.width % 256 == 0 ? launch_plan<Nvfp4, 128, 4, 1>(in, launch)
                             : launch_plan<Nvfp4, 128, 1, 2>(in, launch);
}

}  // namespace flint::cuda
