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
  float maximum[2];         // of the logits as the product leaves them, as far as it was followed
  float total[2];           // of the lane's own keys
  uint32_t weights[kKeys / 16][4];

  __device__ __forceinline__ void clear() {
    maximum[0] = maximum[1] = limit_[0] = limit_[1] = -INFINITY;
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

  // Logits become weights, not yet rounded; `scale` is in units of log2(e). `multiplied`: `out` has
  // the keys before, and is multiplied by what a new maximum makes of their weights.
  //
  // Most tiles raise some row's maximum a little. Weights by the maximum before are as good, unless
  // one of them makes up so much of its row that its rounding shows, where the row's own maximum
  // would be 1 and need none: so the maximum is followed if a weight is more than a quarter of the
  // row's sum so far. That is a row's own affair: no other row changes a bit of it.
  __device__ __forceinline__ void weigh(float scale, bool multiplied) {
    float raised[2];
#pragma unroll
    for (int query = 0; query < 2; ++query) {
      float top[2] = {logits[query * 2], logits[query * 2 + 1]};
#pragma unroll
      for (int i = query * 2 + 4; i < kKeys / 2; i += 4) {
        top[0] = fmaxf(top[0], logits[i]);
        top[1] = fmaxf(top[1], logits[i + 1]);
      }
      raised[query] = fmaxf(top[0], top[1]);
      raised[query] = fmaxf(raised[query], __shfl_xor_sync(0xffffffffu, raised[query], 1));
      raised[query] = fmaxf(raised[query], __shfl_xor_sync(0xffffffffu, raised[query], 2));
    }
    if (__any_sync(0xffffffffu, raised[0] * scale > limit_[0] || raised[1] * scale > limit_[1])) {
      follow(raised, scale, multiplied);
    }
#pragma unroll
    for (int query = 0; query < 2; ++query) {
      // Where every logit is -inf: -inf - -inf would be NaN.
      const float base = maximum[query] == -INFINITY ? 0.0f : maximum[query] * scale;
      float sums[2] = {total[query], 0.0f};
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
  }

  // Here and not where the compiler would have them, behind a wait for other warps.
  __device__ __forceinline__ void round_weights() {
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) {
      weights[i / 4][i % 4] = pack_bf16(logits[2 * i], logits[2 * i + 1]);
    }
#pragma unroll
    for (auto& words : weights) {
      asm volatile("" : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3])::"memory");
    }
  }

  // Over the four lanes of a row.
  __device__ __forceinline__ void collect() {
#pragma unroll
    for (int query = 0; query < 2; ++query) total[query] = lane_sum<4>(total[query]);
  }

 private:
  // How far above its maximum a row of this sum may have logits, in units of log2(e): to a quarter
  // of the sum, and never so far that a weight could be out of range. The bits of a number are its
  // logarithm, with a straight line from one power of two to the next, which is below the curve.
  static __device__ __forceinline__ float room(float sum) {
    const float power = static_cast<float>(__float_as_uint(sum)) * 0x1p-23f - (127.0f + 2.0f);
    return fminf(fmaxf(power, 0.0f), 16.0f);
  }

  __device__ __forceinline__ void follow(const float (&raised)[2], float scale, bool multiplied) {
    float factor[2] = {1.0f, 1.0f};
    bool follows = false;
#pragma unroll
    for (int query = 0; query < 2; ++query) {
      float sum = lane_sum<4>(total[query]);
      // The sum has grown since the limit was found.
      if (raised[query] * scale > maximum[query] * scale + room(sum)) {
        factor[query] = exp2_approx((maximum[query] - raised[query]) * scale);
        total[query] *= factor[query];
        sum *= factor[query];
        maximum[query] = raised[query];
        follows = true;
      }
      limit_[query] = maximum[query] * scale + room(sum);
    }
    if (!multiplied || !__any_sync(0xffffffffu, follows)) return;
#pragma unroll
    for (int i = 0; i < kOut; ++i) out[i] *= factor[i / 2 % 2];
  }

  float limit_[2];  // up to which logits move no maximum, in units of log2(e)
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
