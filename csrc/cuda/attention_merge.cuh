// Parts of a decode attention's result: how warps and CTAs hand them on, and how they become one.
// A part has its own maximum and total of each head; outputs are those of WarpAttention, in slices
// of 16 elements as the lanes hold them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/attention_tile.cuh"

namespace flint::cuda {

inline constexpr int kSlices = WarpAttention::kSlices;
inline constexpr int kSliceBytes = kWarp * 16;
inline constexpr int kOutBytes = kSlices * kSliceBytes;
static_assert(kOutBytes <= kSideBytes);
inline constexpr float kLog2e = 1.44269504f;

// Of the lane's two heads.
struct alignas(16) HeadPair {
  float maximum[2], total[2];
};
static_assert(sizeof(HeadPair) == 16);

// A warp's result to shared memory: `out`, and the four pairs of heads.
__device__ __forceinline__ void put_result(WarpAttention& found, uint8_t* out, HeadPair* heads) {
  found.collect();
  auto* to = reinterpret_cast<float4*>(out) + lane_index();
#pragma unroll
  for (int i = 0; i < kSlices; ++i) {
    to[i * kWarp] = make_float4(found.out[i][0], found.out[i][1], found.out[i][2], found.out[i][3]);
  }
  if (lane_index() < 4) {
    heads[lane_index()] = {{found.maximum[0], found.maximum[1]}, {found.total[0], found.total[1]}};
  }
}

// Several parts as one: of a slice the lane's four elements. In shared memory; the parts' pairs of
// heads, four of each, stand kApart pairs one behind the other.
template <int kApart = 4>
struct Merged {
  HeadPair heads{{-INFINITY, -INFINITY}, {0.0f, 0.0f}};
  float weighted[4] = {};

  // Before any part is added: the maxima of all.
  __device__ __forceinline__ void find_maximum(int parts, const HeadPair* pairs) {
    const HeadPair* own = pairs + lane_index() % 4;
#pragma unroll 4
    for (int i = 0; i < parts; ++i) {
      heads.maximum[0] = fmaxf(heads.maximum[0], own[i * kApart].maximum[0]);
      heads.maximum[1] = fmaxf(heads.maximum[1], own[i * kApart].maximum[1]);
    }
  }

  // In their order; `slices` are the parts' slices, `step` bytes apart.
  __device__ __forceinline__ void add(int parts, const uint8_t* slices, int step,
                                      const HeadPair* pairs) {
    const HeadPair* own = pairs + lane_index() % 4;
    const uint8_t* at = slices + lane_index() * 16;
#pragma unroll 4
    for (int i = 0; i < parts; ++i) {
      const HeadPair pair = own[i * kApart];
      const float4 part = *reinterpret_cast<const float4*>(at);
      const float f0 = exp2_approx(pair.maximum[0] - base_of(heads.maximum[0]));
      const float f1 = exp2_approx(pair.maximum[1] - base_of(heads.maximum[1]));
      heads.total[0] = fmaf(pair.total[0], f0, heads.total[0]);
      heads.total[1] = fmaf(pair.total[1], f1, heads.total[1]);
      weighted[0] = fmaf(part.x, f0, weighted[0]);
      weighted[1] = fmaf(part.y, f1, weighted[1]);
      weighted[2] = fmaf(part.z, f0, weighted[2]);
      weighted[3] = fmaf(part.w, f1, weighted[3]);
      at += step;
    }
  }
};

// A head's sink, read ahead of everything, as it would be the last thing that a result waits for;
// nothing is computed of it until then.
__device__ __forceinline__ float sink_of(const AttentionDecode& in, int head) {
  return in.sinks == nullptr ? -INFINITY : load_weight(in.sinks + head);
}

// The total of a head with its sink; `maximum` is that of the keys alone, in units of log2(e).
__device__ __forceinline__ float denominator(float sink, float maximum, float total) {
  return total + exp2_approx(sink * kLog2e - maximum);
}

// What a request gets that has no tiles: zeros without keys, NaN where its length is none.
__device__ __forceinline__ float without_tiles(int length) { return length == 0 ? 0.0f : NAN; }

__device__ __forceinline__ uint16_t* out_of_head(const AttentionDecode& in, int request, int head) {
  const int64_t row = int64_t{request} * in.cache.kv_heads * kAttentionGroup + head;
  return static_cast<uint16_t*>(in.out) + row * kAttentionHeadDim;
}

}  // namespace flint::cuda
