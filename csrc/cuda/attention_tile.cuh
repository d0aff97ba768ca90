// A warp's running softmax of eight query heads over tiles of keys and values.
//
// The products are the tensor core's m16n8k16 with the cache as its large operand: logits as
// K q^T (16 keys, 8 heads), and the output transposed as V^T P^T (16 elements, 8 heads).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/attention_pages.cuh"
#include "cuda/mma.cuh"

namespace flint::cuda {

// A maximum as it is subtracted: where every logit is -inf, 0, since -inf - -inf would be NaN.
__device__ __forceinline__ float base_of(float maximum) {
  return maximum == -INFINITY ? 0.0f : maximum;
}

// The eight query heads of a KV head as the product's small operand: lane 4 g + t has of head g the
// elements 8 i + 2 t and the one after.
struct Queries {
  uint32_t pairs[kAttentionHeadDim / 8];

  __device__ __forceinline__ void load(const AttentionDecode& in, int request, int kv_head) {
    const int64_t head = int64_t{kv_head} * kAttentionGroup + lane_index() / 4;
    const auto* from = static_cast<const uint16_t*>(in.q) + request * in.q_row_stride +
                       head * in.q_head_stride + lane_index() % 4 * 2;
#pragma unroll
    for (int i = 0; i < kAttentionHeadDim / 8; ++i) {
      pairs[i] = load_activation(reinterpret_cast<const uint32_t*>(from + 8 * i));
    }
  }
};

// Logits are in units of log2(e). Lane 4 g + t has the heads 2 t and 2 t + 1, and of slice i of the
// output the elements 16 i + g (0, 1: for one head and the other) and 16 i + g + 8 (2, 3).
class WarpAttention {
 public:
  static constexpr int kSlices = kAttentionHeadDim / 16;

  float out[kSlices][4];
  float maximum[2];
  float total[2];  // of the lane's own keys

  __device__ __forceinline__ WarpAttention() {
    const int row = lane_index() % 8, matrix = lane_index() / 8;
    // Matrices of keys 0-7 and 8-15, of one piece and then of the next; for V the other way round.
    k_read_ = piece_place(row, matrix / 2) + matrix % 2 * 8 * kBoxRowBytes;
    v_read_ = piece_place(row, matrix % 2) + matrix / 2 * 8 * kBoxRowBytes;
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (auto& slice : out) slice[0] = slice[1] = slice[2] = slice[3] = 0.0f;
    maximum[0] = maximum[1] = -INFINITY;
    total[0] = total[1] = 0.0f;
  }

  // The first half of a tile, of which keys [first, last) are attended to, at least one: their
  // weights, rounded.
  __device__ __forceinline__ void weigh(uint32_t k_side, const Queries& queries, float scale,
                                        int first, int last) {
    float sums[2][4] = {};
#pragma unroll
    for (int i = 0; i < kSlices; ++i) {
      const uint4 k = load_matrices(k_side + i / 4 * kBoxBytes + (k_read_ ^ i % 4 << 5));
      multiply_add(sums[i % 2], k.x, k.y, k.z, k.w, queries.pairs[2 * i], queries.pairs[2 * i + 1]);
    }
    float p[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) p[i] = (sums[0][i] + sums[1][i]) * scale;
    if (first > 0 || last < kAttentionTile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = lane_index() / 4 + i / 2 * 8;
        if (key < first || key >= last) p[i] = -INFINITY;
      }
    }
    // Once a warp has seen some keys, most tiles raise no maximum.
    const bool raises = fmaxf(p[0], p[2]) > maximum[0] || fmaxf(p[1], p[3]) > maximum[1];
    if (__any_sync(0xffffffffu, raises)) raise(p);
#pragma unroll
    for (int i = 0; i < 4; ++i) p[i] = exp2_approx(p[i] - base_of(maximum[i % 2]));
    total[0] += p[0] + p[2];
    total[1] += p[1] + p[3];
    weights_[0] = transposed(pack_bf16(p[0], p[1]));
    weights_[1] = transposed(pack_bf16(p[2], p[3]));
  }

  // The second half: the values by these weights.
  __device__ __forceinline__ void add_values(uint32_t v_side) {
#pragma unroll
    for (int i = 0; i < kSlices; ++i) {
      const uint4 v = load_transposed(v_side + i / 4 * kBoxBytes + (v_read_ ^ i % 4 << 5));
      multiply_add(out[i], v.x, v.y, v.z, v.w, weights_[0], weights_[1]);
    }
  }

  // The lane's `total` becomes that of all lanes.
  __device__ __forceinline__ void collect() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int step = 4; step < kWarp; step *= 2) {
        total[i] += __shfl_xor_sync(0xffffffffu, total[i], step);
      }
    }
  }

 private:
  __device__ __forceinline__ void raise(const float (&logits)[4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float raised = fmaxf(maximum[i], fmaxf(logits[i], logits[2 + i]));
#pragma unroll
      for (int step = 4; step < kWarp; step *= 2) {
        raised = fmaxf(raised, __shfl_xor_sync(0xffffffffu, raised, step));
      }
      const float factor = exp2_approx(maximum[i] - base_of(raised));
      maximum[i] = raised;
      total[i] *= factor;
#pragma unroll
      for (auto& slice : out) {
        slice[i] *= factor;
        slice[2 + i] *= factor;
      }
    }
  }

  uint32_t k_read_, v_read_;
  uint32_t weights_[2];
};

}  // namespace flint::cuda
