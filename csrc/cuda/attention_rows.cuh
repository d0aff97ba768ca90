// A warpgroup's running softmax of 64 rows over tiles of keys: logits and outputs as Hopper's
// products leave them, weights as they take them. sm_90a alone.
//
// A row is a query and one of the eight heads that share a KV head. A warp has sixteen of them: two
// queries, of which a lane 4 g + t has head g, and of each eight columns (keys, elements) the
// columns 2 t and 2 t + 1.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device.cuh"
#include "cuda/wgmma.cuh"

namespace flint::cuda {

// Which keys of a tile a warp's two queries see: of query i those from low[i] to high[i], counted
// from the lane's first.
struct SeenKeys {
  int low[2], high[2];
};

// How many of a lane's columns (of each eight the first two, from its own first on) lie before the
// column `end`.
__device__ __forceinline__ int columns_below(int end) {
  return end <= 0 ? 0 : (end - 1) / 8 * 2 + ((end - 1) % 8 == 0 ? 1 : 2);
}

// The bits from number `first` on.
__device__ __forceinline__ uint32_t bits_from(int first) {
  return first >= 32 ? 0 : 0xffffffffu << max(first, 0);
}

template <int kKeys>
class RowAttention {
 public:
  static constexpr int kOut = 128 / 2;

  float out[kOut];          // [element / 8][query][2]
  float logits[kKeys / 2];  // [key / 8][query][2]
  float maximum[2];         // of the logits as the product leaves them
  float total[2];           // of the lane's own keys
  uint32_t weights[kKeys / 16][4];

  __device__ __forceinline__ void clear() {
    maximum[0] = maximum[1] = -INFINITY;
    total[0] = total[1] = 0.0f;
  }

  // In words of bits, which the compiler moves into predicates eight at a time.
  __device__ __forceinline__ void mask(const SeenKeys& seen) {
#pragma unroll
    for (int query = 0; query < 2; ++query) {
      const int begin = columns_below(seen.low[query]), end = columns_below(seen.high[query] + 1);
#pragma unroll
      for (int word = 0; word < kKeys / 4; word += 32) {
        const uint32_t bits = bits_from(begin - word) & ~bits_from(end - word);
#pragma unroll
        for (int i = 0; i < 32 && word + i < kKeys / 4; ++i) {
          float& logit = logits[(word + i) / 2 * 4 + query * 2 + i % 2];
          if ((bits & 1u << i) == 0) logit = -INFINITY;
        }
      }
    }
  }

  // Logits become weights, not yet rounded; `scale` is in units of log2(e). Returns by what sums
  // over the keys before are to be multiplied.
  __device__ __forceinline__ float2 weigh(float scale) {
    float factor[2];
#pragma unroll
    for (int query = 0; query < 2; ++query) {
      float top[2] = {maximum[query], -INFINITY};
#pragma unroll
      for (int i = query * 2; i < kKeys / 2; i += 4) {
        top[0] = fmaxf(top[0], logits[i]);
        top[1] = fmaxf(top[1], logits[i + 1]);
      }
      float raised = fmaxf(top[0], top[1]);
      raised = fmaxf(raised, __shfl_xor_sync(0xffffffffu, raised, 1));
      raised = fmaxf(raised, __shfl_xor_sync(0xffffffffu, raised, 2));
      // Where every logit is -inf: -inf - -inf would be NaN.
      const float base = raised == -INFINITY ? 0.0f : raised * scale;
      factor[query] = exp2_approx(fmaf(maximum[query], scale, -base));
      maximum[query] = raised;
      float sums[2] = {total[query] * factor[query], 0.0f};
#pragma unroll
      for (int i = query * 2; i < kKeys / 2; i += 4) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          logits[i + j] = exp2_approx(fmaf(logits[i + j], scale, -base));
          sums[j] += logits[i + j];
        }
      }
      total[query] = sums[0] + sums[1];
    }
    return make_float2(factor[0], factor[1]);
  }

  __device__ __forceinline__ void round_weights() {
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) {
      weights[i / 4][i % 4] = pack_bf16(logits[2 * i], logits[2 * i + 1]);
    }
  }

  __device__ __forceinline__ void multiply_out(const float2& factor) {
#pragma unroll
    for (int i = 0; i < kOut; ++i) out[i] *= i / 2 % 2 == 0 ? factor.x : factor.y;
  }

  // Over the four lanes of a row.
  __device__ __forceinline__ void collect() {
#pragma unroll
    for (int query = 0; query < 2; ++query) total[query] = lane_sum<4>(total[query]);
  }
};

// Four lanes' words, each of which has one of every kind: afterwards lane i has the four of kind i,
// in the lanes' order.
__device__ __forceinline__ uint4 gather_kinds(uint32_t (&words)[4], int lane) {
  const bool odd = lane & 1, high = lane & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t given = odd ? words[i] : words[i + 1];
    const uint32_t taken = __shfl_xor_sync(0xffffffffu, given, 1);
    (odd ? words[i] : words[i + 1]) = taken;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t given = high ? words[i] : words[i + 2];
    const uint32_t taken = __shfl_xor_sync(0xffffffffu, given, 2);
    (high ? words[i] : words[i + 2]) = taken;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

}  // namespace flint::cuda
