// One row of q, k and v: where it goes, and a head of 128 elements normed and turned by 16 lanes.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device.cuh"
#include "cuda/kv_write.h"

namespace flint::cuda {

inline constexpr int kGroupLanes = 16;  // of a head
inline constexpr int kFastHeadDim = 128;
inline constexpr int kHalf = kFastHeadDim / 2;
inline constexpr int kQuad = 4;  // elements of an 8-byte access

static_assert(kGroupLanes * kQuad == kHalf);

// An index as it was loaded: nothing is made of it before the next load is on its way.
struct IndexWords {
  int32_t low, high;

  __device__ __forceinline__ int64_t value(bool wide) const {
    return wide ? static_cast<int64_t>(high) << 32 | static_cast<uint32_t>(low) : low;
  }
};

// The index's 4 or 8 bytes; -1 where it is not `wanted`.
__device__ __forceinline__ IndexWords load_index(const Indices& indices, int64_t i, bool wanted) {
  const auto* at = static_cast<const int32_t*>(indices.data) + (indices.wide ? 2 * i : i);
  IndexWords words{-1, -1};
  if (wanted) words.low = at[0];
  if (wanted && indices.wide) words.high = at[1];
  return words;
}

struct RowPlan {
  RowOutcome outcome;
  int64_t slot;
  const float* cos_sin;  // the row's part of the table; of no use but with RoPE and kCompute
};

__device__ __forceinline__ RowPlan plan_row(const QkNormRope& in, int64_t row) {
  const IndexWords position_words = load_index(in.positions, row, in.rope);
  const IndexWords slot_words = load_index(in.slots, row, row < in.slots.count);
  const int64_t position = position_words.value(in.positions.wide);
  const int64_t slot = slot_words.value(in.slots.wide);
  const bool inside = !in.rope || (position >= 0 && position < in.table_rows);
  const float* cos_sin = in.cos_sin + (in.rope && inside ? position * in.cache.head_dim : 0);
  return {row_outcome(slot, in.cache.slots, inside), slot, cos_sin};
}

// Where a row's heads go: found once a row, since it takes divisions by the page size.
template <typename T>
struct RowOutputs {
  T* q;
  T* k;
  T* cached_k;  // null: the row is not cached
  T* cached_v;
};

template <typename T>
__device__ __forceinline__ RowOutputs<T> row_outputs(const QkNormRope& in, int64_t row,
                                                     int64_t slot) {
  const KvCache& cache = in.cache;
  RowOutputs<T> out{static_cast<T*>(in.q) + row * in.heads * cache.head_dim,
                    static_cast<T*>(in.k) + row * cache.kv_heads * cache.head_dim, nullptr,
                    nullptr};
  if (slot >= 0) {
    const auto page_size = static_cast<uint32_t>(cache.page_size);
    const auto narrow = static_cast<uint32_t>(slot);
    out.cached_k = static_cast<T*>(cache.k) + slot_offset_32(cache.k_strides, page_size, narrow);
    out.cached_v = static_cast<T*>(cache.v) + slot_offset_32(cache.v_strides, page_size, narrow);
  }
  return out;
}

__device__ __forceinline__ void unpack(const uint2& pairs, float (&values)[kQuad]) {
  values[0] = low_half(pairs.x);
  values[1] = high_half(pairs.x);
  values[2] = low_half(pairs.y);
  values[3] = high_half(pairs.y);
}

__device__ __forceinline__ uint2 pack(const float (&values)[kQuad]) {
  return make_uint2(pack_bf16(values[0], values[1]), pack_bf16(values[2], values[3]));
}

// ------------------------------------------------------------------------------ head_dim 128

struct Halves {
  uint2 first, second;  // four elements of each half of a head
};

__device__ __forceinline__ Halves load_weights(const void* weight, int lane) {
  const auto* from = static_cast<const uint16_t*>(weight) + lane * kQuad;
  return {load_weight(reinterpret_cast<const uint2*>(from)),
          load_weight(reinterpret_cast<const uint2*>(from + kHalf))};
}

__device__ __forceinline__ void store(uint16_t* head, int lane, const Halves& value) {
  *reinterpret_cast<uint2*>(head + lane * kQuad) = value.first;
  *reinterpret_cast<uint2*>(head + kHalf + lane * kQuad) = value.second;
}

__device__ __forceinline__ Halves normalise(const Halves& x, const Halves& weight, float eps) {
  float first[kQuad], second[kQuad], first_weight[kQuad], second_weight[kQuad];
  unpack(x.first, first);
  unpack(x.second, second);
  unpack(weight.first, first_weight);
  unpack(weight.second, second_weight);
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kQuad; ++i) squares = fmaf(first[i], first[i], squares);
#pragma unroll
  for (int i = 0; i < kQuad; ++i) squares = fmaf(second[i], second[i], squares);
  squares = lane_sum<kGroupLanes>(squares);
  const float scale = rsqrtf(fmaf(squares, 1.0f / kFastHeadDim, eps));
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    first[i] = first[i] * scale * first_weight[i];
    second[i] = second[i] * scale * second_weight[i];
  }
  return {pack(first), pack(second)};
}

// Not contracted: the products are rounded before they are added, as the reference does.
__device__ __forceinline__ Halves rotate(const Halves& x, const float (&cos)[kQuad],
                                         const float (&sin)[kQuad]) {
  float first[kQuad], second[kQuad];
  unpack(x.first, first);
  unpack(x.second, second);
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    const float n1 = first[i], n2 = second[i];
    first[i] = __fsub_rn(__fmul_rn(n1, cos[i]), __fmul_rn(n2, sin[i]));
    second[i] = __fadd_rn(__fmul_rn(n2, cos[i]), __fmul_rn(n1, sin[i]));
  }
  return {pack(first), pack(second)};
}

}  // namespace flint::cuda
