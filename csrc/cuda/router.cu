// One cluster of up to 16 CTAs, each with 16 experts. Every CTA norms all tokens for itself, which
// costs less than to wait for another kernel's result; CTA m of the cluster gets the logits of token
// m from all and chooses.
#include "cuda/cluster.cuh"
#include "cuda/launch.cuh"
#include "cuda/router.h"
#include "cuda/split_tile.cuh"
#include "topk_key.h"

namespace flint::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kMostCluster = 16;
constexpr int kMostExperts = kMostCluster * kTileRows;
constexpr int kLaneExperts = kMostExperts / kWarp;
constexpr int kChunks = 4;

using Tile = SplitTile<Bf16, kThreads, kChunks, 1>;
static_assert(kWarps == kMostTokens, "a warp chooses for a token where the cluster is one CTA");

struct Job {
  NormRouter in;
  float inverse_width;
};

// One vector of a token's row, as `rms_norm_cta` adds and norms it, bit by bit.
struct RowVector {
  uint4 x, residual;

  __device__ __forceinline__ void sums(float (&s)[kVectorElements]) const {
    const uint32_t xs[4] = {x.x, x.y, x.z, x.w};
    const uint32_t residuals[4] = {residual.x, residual.y, residual.z, residual.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s[2 * i] = low_half(xs[i]) + low_half(residuals[i]);
      s[2 * i + 1] = high_half(xs[i]) + high_half(residuals[i]);
    }
  }

  __device__ __forceinline__ float squares() const {
    float s[kVectorElements];
    sums(s);
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < kVectorElements; ++i) total = fmaf(s[i], s[i], total);
    return total;
  }
};

__device__ __forceinline__ uint4 packed(const float (&s)[kVectorElements]) {
  return make_uint4(pack_bf16(s[0], s[1]), pack_bf16(s[2], s[3]), pack_bf16(s[4], s[5]),
                    pack_bf16(s[6], s[7]));
}

// The key of topk_key_bf16 back to the logit.
__device__ __forceinline__ float logit_of(uint32_t key) {
  const uint32_t rank = key & 0xffff0000u;
  return __uint_as_float((rank >> 31) != 0 ? rank & 0x7fffffffu : ~rank & 0xffff0000u);
}

// By one warp: a token's experts out of their keys.
__device__ __forceinline__ void choose(const NormRouter& in, const uint32_t* keys, int token) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  uint32_t mine[kLaneExperts];
#pragma unroll
  for (int i = 0; i < kLaneExperts; ++i) {
    const int expert = i * kWarp + lane;
    mine[i] = expert < in.experts ? keys[expert] : 0;
  }
  float total = 0.0f;
  // In rounds of a warp, since a lane keeps one of the chosen.
  float score = 0.0f;
  uint32_t chosen = 0;
  for (int round = 0; round < in.top_k; ++round) {
    uint32_t best = mine[0];
#pragma unroll
    for (int i = 1; i < kLaneExperts; ++i) best = max(best, mine[i]);
    best = __reduce_max_sync(0xffffffffu, best);
#pragma unroll
    for (int i = 0; i < kLaneExperts; ++i) mine[i] = mine[i] == best ? 0 : mine[i];
    if (round == lane) chosen = best;
  }
  score = 1.0f / (1.0f + expf(-logit_of(chosen)));
  for (int round = 0; round < in.top_k; ++round) {
    const float other = __shfl_sync(0xffffffffu, score, round);
    total = round == 0 ? other : total + other;
  }
  if (lane < in.top_k) {
    in.weights[token * in.top_k + lane] = rounded(uint16_t{}, score / (total + 1e-20f));
    in.ids[token * in.top_k + lane] = static_cast<int32_t>(topk_index_bf16(chosen));
  }
}

// A thread holds kVectors vectors of a row, a CTA's threads apart, of kTokens tokens at most.
template <int kVectors, int kTokens>
__global__ void __launch_bounds__(kThreads) norm_router_few(const __grid_constant__ Job job) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ uint32_t keys[kMostTokens][kMostExperts];  // of the tokens that are chosen for here
  __shared__ __align__(16) float squares[kTokens][kVectors * kWarps];
  const NormRouter& in = job.in;
  uint8_t* staged = shared + Tile::kStagesBytes;
  auto* sums = reinterpret_cast<float*>(staged + staged_bytes<Bf16>(in.tokens,
                                                                    Tile::chunks(in.width)));
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp;
  const auto ctas = static_cast<int>(gridDim.x), rank = static_cast<int>(blockIdx.x);
  const int first = rank * kTileRows;
  const int vectors = in.width / kVectorElements;

  Tile tile(shared, Bf16::matrix(in.router, nullptr),
            {first, first + kHalfTile, in.experts, in.experts}, in.width);
  uint4 norm[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int v = i * kThreads + thread;
    norm[i] = make_uint4(0, 0, 0, 0);
    if (v < vectors) norm[i] = load_weight(static_cast<const uint4*>(in.norm) + v);
  }
  arrive_cluster();  // this CTA's shared memory is there
  wait_for_previous_kernel();
  let_next_kernel_start();

  RowVector part[kTokens][kVectors];
#pragma unroll
  for (int m = 0; m < kTokens; ++m) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int v = i * kThreads + thread;
      part[m][i].x = part[m][i].residual = make_uint4(0, 0, 0, 0);
      if (m < in.tokens && v < vectors) {
        const auto* x = static_cast<const uint16_t*>(in.x) + m * in.x_stride;
        const auto* residual = static_cast<const uint16_t*>(in.residual) + m * in.residual_stride;
        part[m][i].x = load_activation(reinterpret_cast<const uint4*>(x) + v);
        part[m][i].residual = load_activation(reinterpret_cast<const uint4*>(residual) + v);
      }
    }
  }
#pragma unroll
  for (int m = 0; m < kTokens; ++m) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const float sum = lane_sum<kWarp>(part[m][i].squares());
      if (thread % kWarp == 0) squares[m][i * kWarps + warp] = sum;
    }
  }
  __syncthreads();
  const int slice = (vectors + ctas - 1) / ctas;  // vectors that this CTA writes
#pragma unroll
  for (int m = 0; m < kTokens; ++m) {
    if (m >= in.tokens) break;
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < kVectors * kWarps; ++i) total += squares[m][i];
    const float scale = rsqrtf(fmaf(total, job.inverse_width, in.eps));
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int v = i * kThreads + thread;
      float s[kVectorElements];
      part[m][i].sums(s);
      const uint4 residual = packed(s);
      const uint32_t weights[4] = {norm[i].x, norm[i].y, norm[i].z, norm[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        s[2 * j] = s[2 * j] * scale * low_half(weights[j]);
        s[2 * j + 1] = s[2 * j + 1] * scale * high_half(weights[j]);
      }
      const uint4 normed = packed(s);
      // Beyond the width weights are zeros, and so is this.
      if (v < Tile::chunks(in.width) * (Bf16::kChunk / kVectorElements)) {
        reinterpret_cast<uint4*>(staged)[Bf16::place(v, m, in.tokens)] = normed;
      }
      if (v < vectors && v / slice == rank) {
        const int64_t to = int64_t{m} * vectors + v;
        static_cast<uint4*>(in.residual_out)[to] = residual;
        static_cast<uint4*>(in.normed)[to] = normed;
      }
    }
  }
  __syncthreads();

  TileSums tile_sums;
  tile.multiply(tile_sums, staged, in.tokens);
  tile_sums.store(sums + warp * kTileSums);
  __syncthreads();
  await_cluster();
  const int token = thread % kMostTokens, expert = first + thread / kMostTokens;
  if (thread < kTileSums && token < in.tokens && expert < in.experts) {
    const float logit = warps_total<kWarps>(sums, thread);
    const auto bits = static_cast<uint16_t>(pack_bf16(logit, 0.0f));
    store_cluster(shared_of(token % ctas, &keys[token / ctas][expert]),
                  topk_key_bf16(bits, static_cast<uint16_t>(expert)));
  }
  __syncwarp();
  arrive_cluster();
  await_cluster();
  if (const int mine = warp * ctas + rank; mine < in.tokens) choose(in, keys[warp], mine);
}

template <int kVectors>
cudaError_t launch_vectors(const NormRouter& in, const Launch& launch) {
  unsigned ctas = 1;
  while (static_cast<int>(ctas) * kTileRows < in.experts) ctas *= 2;
  Shape shape;
  shape.grid = ctas;
  shape.block = kThreads;
  shape.cluster = ctas;
  shape.shared_bytes = Tile::kStagesBytes +
                       staged_bytes<Bf16>(in.tokens, Tile::chunks(in.width)) + Tile::kSumsBytes;
  const Job job{in, 1.0f / static_cast<float>(in.width)};
  return in.tokens == 1 ? launch_kernel(launch, shape, norm_router_few<kVectors, 1>, job)
                        : launch_kernel(launch, shape, norm_router_few<kVectors, kMostTokens>, job);
}

}  // namespace

bool norm_router_fits(const NormRouter& in) {
  const auto fits = [](const void* pointer, int64_t stride) {
    return keeps_alignment(reinterpret_cast<uint64_t>(pointer), stride, sizeof(uint16_t), 16);
  };
  const bool several = in.tokens > 1;
  return 1 <= in.tokens && in.tokens <= kMostTokens && 0 < in.width && in.width % 8 == 0 &&
         in.width <= 2 * kThreads * kVectorElements && in.experts <= kMostExperts &&
         in.top_k <= kWarp && fits(in.x, several ? in.x_stride : 0) &&
         fits(in.residual, several ? in.residual_stride : 0) && fits(in.norm, 0) &&
         fits(in.router, 0) && fits(in.normed, 0) && fits(in.residual_out, 0);
}

cudaError_t norm_router(const NormRouter& in, const Launch& launch) {
  return in.width <= kThreads * kVectorElements ? launch_vectors<1>(in, launch)
                                                : launch_vectors<2>(in, launch);
}

}  // namespace flint::cuda
