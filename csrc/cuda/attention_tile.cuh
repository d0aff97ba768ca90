// A warp's part of decode attention: tiles of 16 keys and values of one KV head brought into shared
// memory, and the running softmax of eight query heads over them.
//
// The products are the tensor core's m16n8k16 with the cache as its large operand: logits as
// K q^T (16 keys, 8 heads), and the output transposed as V^T P^T (16 elements, 8 heads).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "attention_split.h"
#include "cuda/async_copy.cuh"
#include "cuda/attention.h"
#include "cuda/device.cuh"
#include "cuda/mma.cuh"

namespace flint::cuda {

inline constexpr int kRowBytes = kAttentionHeadDim * 2;
inline constexpr int kSideBytes = kAttentionTile * kRowBytes;  // K of a tile, or V
inline constexpr int kTileBytes = 2 * kSideBytes;
inline constexpr int kRowLanes = kRowBytes / 16;  // that copy a row

// A tile's 16-byte pieces stand in a row in another order, so that eight lanes that read one piece
// of eight rows (V) or four pieces of two neighbouring rows (K) meet different banks.
__device__ __forceinline__ int row_twist(int row) { return (row & 1) << 2 | (row >> 1 & 3); }

// ------------------------------------------------------------------------------ into shared memory

// What all tiles of a launch have in common.
struct Pages {
  const char* k;
  const char* v;
  int64_t k_block, k_row, k_head, v_block, v_row, v_head;  // bytes
  int64_t blocks;
  uint32_t tiles;  // of a page
};

// Where a tile's first row of one head lies; null where the page is not in the cache.
struct TileSource {
  const char* k;
  const char* v;
};

__device__ __forceinline__ TileSource tile_source(const Pages& pages, int tile, int page,
                                                  int kv_head) {
  if (page < 0 || page >= pages.blocks) return {nullptr, nullptr};
  const int64_t row = int64_t{static_cast<uint32_t>(tile) % pages.tiles} * kAttentionTile;
  return {pages.k + page * pages.k_block + row * pages.k_row + kv_head * pages.k_head,
          pages.v + page * pages.v_block + row * pages.v_row + kv_head * pages.v_head};
}

// Rows [first, last) of the tile, by one warp; the others become zeros, and are not read, but for
// row `later`, which is left as it is. A page that is not there: keys of NaN.
__device__ __forceinline__ void copy_tile(uint32_t to, const TileSource& from, const Pages& pages,
                                          int first, int last, int later) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int piece = lane % kRowLanes, odd = lane / kRowLanes;
  if (from.k == nullptr) {
    for (int at = lane * 16; at < kTileBytes; at += kWarp * 16) {
      const uint32_t fill = at < kSideBytes ? 0x7fc07fc0u : 0u;
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(to + at), "r"(fill) : "memory");
    }
    return;
  }
  const char* k = from.k + odd * pages.k_row + piece * 16;
  const char* v = from.v + odd * pages.v_row + piece * 16;
  const bool whole = first <= 0 && last >= kAttentionTile && later < 0;
#pragma unroll
  for (int i = 0; i < kAttentionTile / 2; ++i) {
    const int row = 2 * i + odd;
    const uint32_t at = to + row * kRowBytes + (piece ^ row_twist(row)) * 16;
    const bool there = whole || (row >= first && row < last);
    if (whole || row != later) {
      copy_16_async(at, k, there);
      copy_16_async(at + kSideBytes, v, there);
    }
    k += 2 * pages.k_row;
    v += 2 * pages.v_row;
  }
}

// Row `row` alone: half of the warp K, the other half V.
__device__ __forceinline__ void copy_row(uint32_t to, const TileSource& from, const Pages& pages,
                                         int row) {
  if (from.k == nullptr) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int piece = lane % kRowLanes;
  const bool is_v = lane >= kRowLanes;
  const char* source = is_v ? from.v + row * pages.v_row : from.k + row * pages.k_row;
  copy_16_async(to + (is_v ? kSideBytes : 0) + row * kRowBytes + (piece ^ row_twist(row)) * 16,
                source + piece * 16, true);
}

// ------------------------------------------------------------------------------ on the tensor core

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// A maximum as it is subtracted: where every logit is -inf, 0, since -inf - -inf would be NaN.
__device__ __forceinline__ float base_of(float maximum) {
  return maximum == -INFINITY ? 0.0f : maximum;
}

__device__ __forceinline__ uint4 load_shared(uint32_t from) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(from)
               : "memory");
  return value;
}

// Four 8 x 8 matrices of BF16, each transposed; lanes 8 i ... give the rows of matrix i.
__device__ __forceinline__ uint4 load_transposed(uint32_t from) {
  uint4 value;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(from)
               : "memory");
  return value;
}

__device__ __forceinline__ uint32_t transposed(uint32_t matrix) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(matrix));
  return result;
}

// The eight query heads of a KV head. Lane 4 g + t has of head g the 16-byte pieces t, 4 + t, 8 + t
// and 12 + t: a permutation of the summands, and `WarpAttention` reads K by the same.
struct Queries {
  uint4 pieces[4];

  __device__ __forceinline__ void load(const AttentionDecode& in, int request, int kv_head) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int64_t head = int64_t{kv_head} * kAttentionGroup + lane / 4;
    const auto* from = static_cast<const uint16_t*>(in.q) + request * in.q_row_stride +
                       head * in.q_head_stride + lane % 4 * 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pieces[i] = load_activation(reinterpret_cast<const uint4*>(from + i * 32));
    }
  }
};

// Where the lane reads in a tile.
struct TileReads {
  uint32_t k, v;

  __device__ __forceinline__ TileReads() {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int g = lane / 4, t = lane % 4;
    k = g * kRowBytes + (t ^ row_twist(g)) * 16;
    // Matrices of keys 0-7 and 8-15, each of an even and an odd piece.
    const int row = lane % 8, matrix = lane / 8;
    v = kSideBytes + (row + matrix / 2 * 8) * kRowBytes + (matrix % 2 ^ row_twist(row)) * 16;
  }
};

// The running softmax of eight heads over the tiles of one warp. Logits are in units of log2(e).
// Lane 4 g + t has the heads 2 t and 2 t + 1, and of slice i of the output the elements 16 i + g (0,
// 1: for one head and the other) and 16 i + g + 8 (2, 3).
struct WarpAttention {
  static constexpr int kSlices = kAttentionHeadDim / 16;

  float out[kSlices][4];
  float maximum[2];
  float total[2];  // of the lane's own keys

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (auto& slice : out) slice[0] = slice[1] = slice[2] = slice[3] = 0.0f;
    maximum[0] = maximum[1] = -INFINITY;
    total[0] = total[1] = 0.0f;
  }

  // A tile of which keys [first, last) are attended to, at least one.
  __device__ __forceinline__ void absorb(uint32_t tile, const TileReads& reads,
                                         const Queries& queries, float scale, int first,
                                         int last) {
    float sums[2][4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 low = load_shared(tile + (reads.k ^ i << 6));
      const uint4 high = load_shared(tile + (reads.k ^ i << 6) + 8 * kRowBytes);
      const uint4& q = queries.pieces[i];
      multiply_add(sums[0], low.x, high.x, low.y, high.y, q.x, q.y);
      multiply_add(sums[1], low.z, high.z, low.w, high.w, q.z, q.w);
    }
    float logits[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) logits[i] = (sums[0][i] + sums[1][i]) * scale;
    if (first > 0 || last < kAttentionTile) {
      const int key = static_cast<int>(threadIdx.x) % kWarp / 4;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = key + i / 2 * 8;
        if (at < first || at >= last) logits[i] = -INFINITY;
      }
    }
    const bool raises = fmaxf(logits[0], logits[2]) > maximum[0] ||
                        fmaxf(logits[1], logits[3]) > maximum[1];
    if (__any_sync(0xffffffffu, raises)) raise(logits);
    float p[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) p[i] = exp2_approx(logits[i] - base_of(maximum[i % 2]));
    total[0] += p[0] + p[2];
    total[1] += p[1] + p[3];
    const uint32_t low = transposed(pack_bf16(p[0], p[1]));
    const uint32_t high = transposed(pack_bf16(p[2], p[3]));
#pragma unroll
    for (int i = 0; i < kSlices; ++i) {
      const uint4 v = load_transposed(tile + (reads.v ^ i << 5));
      multiply_add(out[i], v.x, v.y, v.z, v.w, low, high);
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
};

}  // namespace flint::cuda
