// One cluster of up to 16 CTAs, each with 16 experts. Every CTA norms all tokens for itself, which
// costs less than to wait for another kernel's result; CTA m of the cluster gets the logits of
// token m from all and chooses.
#include "cuda/cluster.cuh"
#include "cuda/launch.cuh"
#include "cuda/router.h"
#include "cuda/tile_stream.cuh"
#include "topk_key.h"

namespace flint::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarp;
// The norm's threads: half of the CTA for every other token.
constexpr int kRowThreads = 256;
constexpr int kRowWarps = kRowThreads / kWarp;
constexpr int kMostCluster = 16;
constexpr int kMostExperts = kMostCluster * kTileRows;
constexpr int kLaneExperts = kMostExperts / kWarp;

constexpr int kChunks = 2;
using Stream = TileStream<Bf16, kWarps, kChunks, 1>;

struct Job {
  NormRouter in;
  float inverse_width;
  int slice;  // vectors of a row that a CTA writes
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

__device__ __forceinline__ void order(uint32_t& high, uint32_t& low) {
  const uint32_t larger = max(high, low);
  low = min(high, low);
  high = larger;
}

// Falling, by a network of comparators.
__device__ __forceinline__ void sort(uint32_t (&keys)[8]) {
  constexpr int kNetwork[19][2] = {{0, 1}, {2, 3}, {4, 5}, {6, 7}, {0, 2}, {1, 3}, {4, 6},
                                   {5, 7}, {1, 2}, {5, 6}, {0, 4}, {3, 7}, {1, 5}, {2, 6},
                                   {1, 4}, {3, 6}, {2, 4}, {3, 5}, {3, 4}};
#pragma unroll
  for (const auto& pair : kNetwork) order(keys[pair[0]], keys[pair[1]]);
}
static_assert(kLaneExperts == 8, "the network is for eight");

// By one warp: a token's experts out of their keys. With kTopK known, no step waits for a loop.
template <int kTopK>
__device__ __forceinline__ void choose(const NormRouter& in, const uint32_t* keys, int token) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int top_k = kTopK > 0 ? kTopK : in.top_k;
  uint32_t mine[kLaneExperts];
#pragma unroll
  for (int i = 0; i < kLaneExperts; ++i) {
    const int expert = i * kWarp + lane;
    mine[i] = expert < in.experts ? keys[expert] : 0;
  }
  sort(mine);
  uint32_t chosen = 0;  // lane r keeps the r-th
#pragma unroll
  for (int round = 0; round < top_k; ++round) {
    const uint32_t best = __reduce_max_sync(0xffffffffu, mine[0]);
    if (round == lane) chosen = best;
    const bool taken = mine[0] == best;
#pragma unroll
    for (int i = 0; i + 1 < kLaneExperts; ++i) mine[i] = taken ? mine[i + 1] : mine[i];
    if (taken) mine[kLaneExperts - 1] = 0;
  }
  const float score = 1.0f / (1.0f + expf(-topk_logit_bf16(chosen)));
  float total = __shfl_sync(0xffffffffu, score, 0);
#pragma unroll
  for (int round = 1; round < top_k; ++round) total += __shfl_sync(0xffffffffu, score, round);
  if (lane < top_k) {
    in.ids[token * top_k + lane] = static_cast<int32_t>(topk_index_bf16(chosen));
    in.weights[token * top_k + lane] = rounded(uint16_t{}, score / (total + 1e-20f));
  }
}

// A thread holds kVectors vectors of a row, kRowThreads apart, of kTokens tokens at most, which are
// every other one.
template <int kVectors, int kTokens>
__global__ void __launch_bounds__(kThreads, kVectors* kTokens == 1 ? 2 : 1)
    norm_router_few(const __grid_constant__ Job job) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ uint32_t keys[kMostTokens][kMostExperts];  // of the tokens that are chosen for here
  __shared__ Barrier keys_complete;
  __shared__ float squares[2 * kTokens][kVectors * kRowWarps];
  const NormRouter& in = job.in;
  const int pieces = Stream::pieces(in.width);
  const int chunks = pieces * Stream::kPiece / Bf16::kChunk;
  uint8_t* staged = shared + Stream::kBytes;
  auto* sums = reinterpret_cast<float*>(staged + staged_bytes<Bf16>(in.tokens, chunks));
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp;
  const int half = thread / kRowThreads, row_thread = thread % kRowThreads;
  const auto ctas = static_cast<int>(gridDim.x), rank = static_cast<int>(blockIdx.x);
  const int first = rank * kTileRows, vectors = in.width / kVectorElements;
  const Bf16::Matrix router = Bf16::matrix(in.router, nullptr);
  const TileRows rows{first, first + kHalfTile, in.experts, in.experts};

  uint4 norm[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int v = i * kRowThreads + row_thread;
    norm[i] = make_uint4(0, 0, 0, 0);
    if (v < vectors) norm[i] = load_weight(static_cast<const uint4*>(in.norm) + v);
  }
  // At once: the next kernel's experts are known only when this one has ended, and its shared one
  // waits for nothing in flight.
  let_next_kernel_start();
  Stream stream(shared, warp);
  stream.fetch(router, rows, in.width, 0);
  if (thread == 0) {
    keys_complete.init(1);
    publish_barriers();
    const int mine = in.tokens > rank ? (in.tokens - rank - 1) / ctas + 1 : 0;
    keys_complete.arrive_expecting(static_cast<uint32_t>(mine * in.experts) * sizeof(uint32_t));
  }
  __syncwarp();
  announce_cluster();
  await_cluster();
  wait_for_previous_kernel();

  RowVector part[kTokens][kVectors];
#pragma unroll
  for (int m = 0; m < kTokens; ++m) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int token = 2 * m + half, v = i * kRowThreads + row_thread;
      part[m][i].x = part[m][i].residual = make_uint4(0, 0, 0, 0);
      if (token < in.tokens && v < vectors) {
        const auto* x = static_cast<const uint16_t*>(in.x) + token * in.x_stride;
        const auto* residual =
            static_cast<const uint16_t*>(in.residual) + token * in.residual_stride;
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
      if (thread % kWarp == 0) squares[2 * m + half][i * kRowWarps + warp % kRowWarps] = sum;
    }
  }
  __syncthreads();
#pragma unroll
  for (int m = 0; m < kTokens; ++m) {
    const int token = 2 * m + half;
    if (token >= in.tokens) break;
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < kVectors * kRowWarps; ++i) total += squares[token][i];
    const float scale = rsqrtf(fmaf(total, job.inverse_width, in.eps));
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int v = i * kRowThreads + row_thread;
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
      // Beyond the width x is zero, and so is this.
      if (v < chunks * (Bf16::kChunk / kVectorElements)) {
        reinterpret_cast<uint4*>(staged)[Bf16::place(v, token, in.tokens)] = normed;
      }
      if (v >= rank * job.slice && v < min(vectors, (rank + 1) * job.slice)) {
        const int64_t to = int64_t{token} * vectors + v;
        static_cast<uint4*>(in.residual_out)[to] = residual;
        static_cast<uint4*>(in.normed)[to] = normed;
      }
    }
  }
  __syncthreads();

  TileSums tile_sums;
  tile_sums.clear();
#pragma unroll 1
  for (int piece = 0; piece < pieces; ++piece) {
    multiply_piece<Bf16, kChunks>(tile_sums, stream,
                                  staged_chunk<Bf16>(staged, in.tokens, stream.chunk_of(piece)),
                                  staged_step(in.tokens));
    if (piece + 1 == pieces) break;
    stream.fetch(router, rows, in.width, piece + 1);
  }
  tile_sums.store(sums + warp * kTileSums);
  __syncthreads();
  const int token = thread % kMostTokens, expert = first + thread / kMostTokens;
  if (thread < kTileSums && token < in.tokens && expert < in.experts) {
    const float logit = warps_total<kWarps>(sums, thread);
    const auto bits = static_cast<uint16_t>(pack_bf16(logit, 0.0f));
    const auto to = static_cast<uint32_t>(token % ctas);
    send_cluster(shared_of(to, &keys[token / ctas][expert]),
                 topk_key_bf16(bits, static_cast<uint16_t>(expert)), shared_of(to, &keys_complete));
  }
  if (const int mine = warp * ctas + rank; mine < in.tokens) {
    keys_complete.wait(0);
    if (in.top_k == 6) {
      choose<6>(in, keys[warp], mine);
    } else {
      choose<0>(in, keys[warp], mine);
    }
  }
}

template <int kVectors>
cudaError_t launch_vectors(const NormRouter& in, const Launch& launch) {
  unsigned ctas = 2;  // at least: one alone would be no cluster, whose instructions it has
  while (static_cast<int>(ctas) * kTileRows < in.experts) ctas *= 2;
  const int chunks = Stream::pieces(in.width) * Stream::kPiece / Bf16::kChunk;
  Shape shape;
  shape.grid = ctas;
  shape.block = kThreads;
  shape.cluster = ctas;
  shape.shared_bytes = Stream::kBytes + staged_bytes<Bf16>(in.tokens, chunks) +
                       size_t{kWarps} * kTileSums * sizeof(float);
  const Job job{in, 1.0f / static_cast<float>(in.width),
                static_cast<int>(ceil_div(in.width / kVectorElements, ctas))};
  return in.tokens == 1
             ? launch_kernel(launch, shape, norm_router_few<kVectors, 1>, job)
             : launch_kernel(launch, shape, norm_router_few<kVectors, kMostTokens / 2>, job);
}

}  // namespace

bool norm_router_fits(const NormRouter& in) {
  const auto fits = [](const void* pointer, int64_t stride) {
    return keeps_alignment(reinterpret_cast<uint64_t>(pointer), stride, sizeof(uint16_t), 16);
  };
  const bool several = in.tokens > 1;
  return 1 <= in.tokens && in.tokens <= kMostTokens && 0 < in.width && in.width % 8 == 0 &&
         in.width <= 2 * kRowThreads * kVectorElements && in.experts <= kMostExperts &&
         in.top_k <= kWarp && fits(in.x, several ? in.x_stride : 0) &&
         fits(in.residual, several ? in.residual_stride : 0) && fits(in.norm, 0) &&
         fits(in.router, 0) && fits(in.normed, 0) && fits(in.residual_out, 0);
}

cudaError_t norm_router(const NormRouter& in, const Launch& launch) {
  return in.width <= kRowThreads * kVectorElements ? launch_vectors<1>(in, launch)
                                                   : launch_vectors<2>(in, launch);
}

}  // namespace flint::cuda
