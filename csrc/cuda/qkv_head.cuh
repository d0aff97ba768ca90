// What becomes of a head's elements behind the projection to q, k and v: eight CTAs have 16 of them
// each, and tell each other the sums of squares alone.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/cluster.cuh"
#include "cuda/kv_rows.cuh"
#include "cuda/weight_tiles.cuh"

namespace flint::cuda {

inline constexpr unsigned kHeadCtas = kFastHeadDim / kTileRows;
inline constexpr int kCtaQuads = kHalfTile / kQuad;  // of a head's kGroupLanes
static_assert(kHeadCtas * kCtaQuads == kGroupLanes);

// A pair of a token's elements, `at` and kHalf after it in the head, and what becomes of them.
struct Pair {
  RowOutcome outcome;
  uint16_t* to;  // where the first goes; null: nowhere
  uint16_t weight[2];
  float cos = 1.0f, sin = 0.0f;

  // Ahead of the wait: nothing here is written by a kernel in flight.
  __device__ __forceinline__ void load(const QkNormRope& in, int token, int head, int at) {
    const RowPlan plan = plan_row(in, token);
    outcome = plan.outcome;
    const bool computes = outcome == RowOutcome::kCompute;
    const RowOutputs<uint16_t> out =
        row_outputs<uint16_t>(in, token, computes ? plan.slot : int64_t{-1});
    const int kv_head = head - in.heads, v_head = kv_head - in.cache.kv_heads;
    if (kv_head < 0) {
      to = out.q + head * kFastHeadDim + at;
    } else if (v_head < 0) {
      to = out.cached_k;
      if (to != nullptr) to += kv_head * in.cache.k_strides.head + at;
    } else {
      to = out.cached_v;
      if (to != nullptr) to += v_head * in.cache.v_strides.head + at;
    }
    const auto* norm = static_cast<const uint16_t*>(kv_head < 0 ? in.q_weight : in.k_weight) + at;
    weight[0] = norm[0];
    weight[1] = norm[kHalf];
    if (in.rope && computes) {
      cos = plan.cos_sin[at];
      sin = plan.cos_sin[kHalf + at];
    }
  }

  __device__ __forceinline__ void store(float first, float second) const {
    if (to == nullptr) return;
    store_rounded(to, first);
    store_rounded(to + kHalf, second);
  }

  // As kv_rows.cuh norms and turns them.
  __device__ __forceinline__ void finish(const QkNormRope& in, float first, float second,
                                         float squares) const {
    if (outcome != RowOutcome::kCompute) {
      const float filling = outcome == RowOutcome::kNaN ? __uint_as_float(0x7fc00000u) : 0.0f;
      return store(filling, filling);
    }
    const float scale = rsqrtf(fmaf(squares, 1.0f / kFastHeadDim, in.eps));
    const float n1 = rounded(uint16_t{}, first * scale * to_float(weight[0]));
    const float n2 = rounded(uint16_t{}, second * scale * to_float(weight[1]));
    if (!in.rope) return store(n1, n2);
    // Not contracted: the products are rounded before they are added, as the reference does.
    store(__fsub_rn(__fmul_rn(n1, cos), __fmul_rn(n2, sin)),
          __fadd_rn(__fmul_rn(n2, cos), __fmul_rn(n1, sin)));
  }
};

// The squares of a head, of which each CTA has kCtaQuads lanes' worth; summed in the order of
// kv_rows.cuh: four elements, then the four that they are paired with, then lanes by a butterfly.
struct HeadSquares {
  float lane[kMostTokens][kGroupLanes];
  Barrier complete;

  __device__ __forceinline__ void init(int tokens) {
    complete.init(1);
    publish_barriers();
    complete.arrive_expecting(static_cast<uint32_t>(tokens * kGroupLanes * sizeof(float)));
  }

  // By all threads of a warp, neighbouring pairs kColumns lanes apart: to all CTAs of the cluster.
  template <int kColumns>
  __device__ __forceinline__ void send(int rank, int pair, int token, float first, float second,
                                       bool sends) {
    const int thread = static_cast<int>(threadIdx.x) % kWarp;
    const int from = thread / (kQuad * kColumns) * (kQuad * kColumns) + thread % kColumns;
    float firsts[kQuad], seconds[kQuad], squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      firsts[i] = __shfl_sync(0xffffffffu, first, from + i * kColumns);
      seconds[i] = __shfl_sync(0xffffffffu, second, from + i * kColumns);
    }
#pragma unroll
    for (int i = 0; i < kQuad; ++i) squares = fmaf(firsts[i], firsts[i], squares);
#pragma unroll
    for (int i = 0; i < kQuad; ++i) squares = fmaf(seconds[i], seconds[i], squares);
    if (!sends) return;
    // The quad's four threads have the same sum: each serves some of the CTAs.
    constexpr int kEach = kHeadCtas / kQuad;
    const float* here = &lane[token][rank * kCtaQuads + pair / kQuad];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const auto to = static_cast<uint32_t>(pair % kQuad * kEach + i);
      send_cluster(shared_of(to, here), __float_as_uint(squares), shared_of(to, &complete));
    }
  }

  __device__ __forceinline__ float await(int token) const {
    complete.wait(0);
    float sum[kGroupLanes];
#pragma unroll
    for (int i = 0; i < kGroupLanes; ++i) sum[i] = lane[token][i];
#pragma unroll
    for (int level = 1; level <= 4; ++level) {
      const int half = kGroupLanes >> level;
#pragma unroll
      for (int i = 0; i < kGroupLanes / 2; ++i) {
        if (i < half) sum[i] += sum[i + half];
      }
    }
    static_assert(kGroupLanes == 1 << 4);
    return sum[0];
  }
};

}  // namespace flint::cuda
