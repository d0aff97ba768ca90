// One token with NVFP4 weights, for a third less work than several have.
//
// Seven of the tensor core's eight columns would be idle. They take the block scales out of the
// loop: column 2t + h gets the activations of lane t's block h alone, so that each column sums one
// block of 16 codes, and the block's scale multiplies that sum instead of the codes. The codes are
// multiplied as they are, value * 2^-126, with activations times 2^63; so the sums stay in range
// for activations from 2^-30 to 2^62, which a warp checks as it stages them. Others take the way of
// several tokens.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/tile_stream.cuh"

namespace flint::cuda {

inline constexpr uint32_t kActivationShift = 0x5f005f00u;  // 2^63, twice
inline constexpr float kOneTokenSumScale = 0x1p63f;
inline constexpr uint32_t kLeastActivation = (127 - 30) << 7;  // as the bits of a BF16
inline constexpr uint32_t kEndOfActivations = (127 + 62) << 7;

// Pieces that a warp can keep a bit for: whether it staged them shifted.
inline constexpr int kMostPiecesOfOne = 32;

// The larger of each half's magnitude.
__device__ __forceinline__ uint32_t larger_magnitudes(uint32_t largest, uint32_t pair) {
  return __vmaxu2(largest, pair & 0x7fff7fffu);
}

// Whether activations whose magnitudes' maximum over the warp's lanes is this are in range.
__device__ __forceinline__ bool in_range(uint32_t largest) {
  const uint32_t high = max(largest >> 16, largest & 0xffffu);
  const uint32_t all = __reduce_max_sync(0xffffffffu, high);
  return all == 0 || (all >= kLeastActivation && all < kEndOfActivations);
}

__device__ __forceinline__ uint4 shifted(const uint4& x) {
  return make_uint4(
      multiply_bf16_pairs(x.x, kActivationShift), multiply_bf16_pairs(x.y, kActivationShift),
      multiply_bf16_pairs(x.z, kActivationShift), multiply_bf16_pairs(x.w, kActivationShift));
}

// As stage_chunks for one row; returns whether it is staged shifted, the same in all lanes.
// `kWhole`: all of the row's chunks are there.
template <int kChunks, bool kWhole = false>
__device__ __forceinline__ bool stage_one(uint8_t* to, const uint16_t* x, int width,
                                          int first_chunk) {
  constexpr int kVectors = kChunks * Nvfp4::kChunk / kVectorElements;
  constexpr int kLoads = (kVectors + kWarp - 1) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int first = first_chunk * (Nvfp4::kChunk / kVectorElements) + lane;
  const int vectors = width / kVectorElements;
  uint4 value[kLoads];
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int v = first + i * kWarp;
    const bool mine = kVectors % kWarp == 0 || lane + i * kWarp < kVectors;
    value[i] = make_uint4(0, 0, 0, 0);
    if (mine && (kWhole || v < vectors)) {
      value[i] = load_activation(reinterpret_cast<const uint4*>(x) + v);
    }
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    largest = larger_magnitudes(largest, value[i].x);
    largest = larger_magnitudes(largest, value[i].y);
    largest = larger_magnitudes(largest, value[i].z);
    largest = larger_magnitudes(largest, value[i].w);
  }
  const bool shifts = in_range(largest);
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if (kVectors % kWarp != 0 && lane + i * kWarp >= kVectors) continue;
    // Shifted as if in range, which is not known as soon.
    auto* staged = reinterpret_cast<uint4*>(to) + Nvfp4::place(first + i * kWarp, 0, 1);
    *staged = Nvfp4::arrange(shifted(value[i]));
    if (!shifts) *staged = Nvfp4::arrange(value[i]);
  }
  return shifts;
}

// Where a lane finds the activations of its two columns' blocks: in the staged row, or zeros, of
// which there are kChunks chunks.
struct OneTokenLane {
  const uint8_t* first;   // words 0 and 1 of a lane's four
  const uint8_t* second;  // words 2 and 3

  __device__ __forceinline__ OneTokenLane(const uint8_t* staged_chunk, const uint8_t* zeros) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp, column = lane / 4, t = lane % 4;
    const uint8_t* mine = staged_chunk + t * kVectorBytes;
    first = column == 2 * t ? mine : zeros;
    second = column == 2 * t + 1 ? mine : zeros;
  }
};

// Sums of rows g and g + 8 over the blocks of lane 4g + t.
struct OneTokenSums {
  float low = 0.0f, high = 0.0f;

  // The rows' sums, in lanes 4g.
  __device__ __forceinline__ void collect() {
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      low += __shfl_xor_sync(0xffffffffu, low, step);
      high += __shfl_xor_sync(0xffffffffu, high, step);
    }
  }
};

// Adds the products of a warp's part of the oldest piece.
template <int kChunks, typename Stream>
__device__ __forceinline__ void multiply_shifted(OneTokenSums& sums, const Stream& stream,
                                                 const OneTokenLane& x) {
  float low_sum = 0.0f, high_sum = 0.0f;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const Nvfp4::Chunk chunk = stream.load(c);
    const float2 low_scales = e4m3_to_floats(chunk.low_scales);
    const float2 high_scales = e4m3_to_floats(chunk.high_scales);
    float blocks[2][4] = {};
#pragma unroll
    for (int i = 0; i < Nvfp4::kVectors; ++i) {
      const uint8_t* from = i < 2 ? x.first : x.second;
      const uint4 b = load_shared(from + (c * Nvfp4::kVectors + i) * 4 * kVectorBytes);
      const CodePairs l = decode_codes(chunk.low[i]), h = decode_codes(chunk.high[i]);
      multiply_add(blocks[i / 2], l.pair[0], h.pair[0], l.pair[1], h.pair[1], b.x, b.y);
      multiply_add(blocks[i / 2], l.pair[2], h.pair[2], l.pair[3], h.pair[3], b.z, b.w);
    }
    // Columns 2t and 2t + 1 are in lane t: its own two blocks.
    low_sum = fmaf(blocks[0][0], low_scales.x, low_sum);
    high_sum = fmaf(blocks[0][2], high_scales.x, high_sum);
    low_sum = fmaf(blocks[1][1], low_scales.y, low_sum);
    high_sum = fmaf(blocks[1][3], high_scales.y, high_sum);
  }
  sums.low = fmaf(low_sum, kOneTokenSumScale, sums.low);
  sums.high = fmaf(high_sum, kOneTokenSumScale, sums.high);
}

// The same for a piece that is not staged shifted: as for several tokens, of which column 0 is
// read. Not unrolled: it is rare, and short code is what it has to be.
template <int kChunks, typename Stream>
__device__ __forceinline__ void multiply_unshifted(OneTokenSums& sums, const Stream& stream,
                                                   const uint8_t* staged_chunk) {
  const int t = static_cast<int>(threadIdx.x) % 4;
  TileSums tile;
  tile.clear();
  constexpr int kStep = 4 * kVectorBytes;
#pragma unroll 1
  for (int c = 0; c < kChunks; ++c) {
    Nvfp4::multiply_chunk(tile, stream.load(c),
                          staged_chunk + c * Nvfp4::kVectors * kStep + t * kVectorBytes, kStep);
  }
  if (t != 0) return;
  sums.low = fmaf(tile.total(0), kNvfp4SumScale, sums.low);
  sums.high = fmaf(tile.total(2), kNvfp4SumScale, sums.high);
}

// Bytes of zeros for the lanes of a piece of kChunks chunks that have no activations.
template <int kChunks>
inline constexpr int kZeroBytes = kChunks * Nvfp4::kChunk * 2;

// By the whole CTA; a barrier must follow.
template <int kChunks>
__device__ __forceinline__ void make_zeros(uint8_t* zeros) {
  for (int i = static_cast<int>(threadIdx.x); i < kZeroBytes<kChunks> / kVectorBytes;
       i += static_cast<int>(blockDim.x)) {
    reinterpret_cast<uint4*>(zeros)[i] = make_uint4(0, 0, 0, 0);
  }
}

// Adds the oldest piece of a stream; `staged_chunk` is the place of its first chunk, `shifts` what
// stage_one returned for it.
template <int kChunks, typename Stream>
__device__ __forceinline__ void multiply_one(OneTokenSums& sums, Stream& stream,
                                             const uint8_t* staged_chunk, const uint8_t* zeros,
                                             bool shifts) {
  stream.front();
  if (shifts) {
    multiply_shifted<kChunks>(sums, stream, OneTokenLane(staged_chunk, zeros));
  } else {
    multiply_unshifted<kChunks>(sums, stream, staged_chunk);
  }
  stream.pop();
}

// Stores a warp's sums as [16 rows].
__device__ __forceinline__ void store_rows(OneTokenSums& sums, float* to) {
  sums.collect();
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  if (lane % 4 == 0) {
    to[lane / 4] = sums.low;
    to[lane / 4 + kHalfTile] = sums.high;
  }
}

}  // namespace flint::cuda
