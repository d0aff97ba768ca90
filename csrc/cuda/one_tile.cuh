// One token with NVFP4 weights of a known width: a CTA has one tile, and its warps have fetched all
// of it before the wait. What is known costs no instruction: half as many as where a tile has any
// width, in the time that all of a chain wait for.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/one_token.cuh"

namespace flint::cuda {

// Where a lane finds what it copies of a tile: the codes of its row of the lower half, those of the
// upper half's `high` bytes further, and the scales of the row that it copies scales of.
struct TileLane {
  const uint8_t* codes;
  const uint8_t* scales;
  int64_t high;
};

// Of a matrix [rows, kWidth], from chunk `chunk` on; the upper half begins `apart` rows behind row
// `first`, where the lower one begins.
template <int kWidth>
__device__ __forceinline__ TileLane tile_lane(const Nvfp4::Matrix& matrix, int64_t first,
                                              int64_t apart, int chunk) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, copied = lane / 2;
  const int64_t scale_row = first + copied % kHalfTile + (copied < kHalfTile ? int64_t{0} : apart);
  return {matrix.codes + (first + lane / 4) * (kWidth / 2) + chunk * (Nvfp4::kChunk / 2) +
              lane % 4 * kVectorBytes,
          matrix.scales + scale_row * (kWidth / 16) + chunk * Nvfp4::kScaleBytes,
          apart * (kWidth / 2)};
}

// A warp's part of a tile on its way to shared memory, and there.
template <int kChunks>
class TilePart {
 public:
  static constexpr int kBytes = Nvfp4::kPieceBytes<kChunks>;

  __device__ __forceinline__ TilePart(uint8_t* stages, int warp) : stage_(stages + warp * kBytes) {}

  __device__ __forceinline__ void fetch(const TileLane& from) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    constexpr int kRowScales = kChunks * Nvfp4::kScaleBytes, kCopies = kRowScales / kVectorBytes;
    static_assert(kRowScales % kVectorBytes == 0, "scales are copied 16 bytes at a time");
    const uint32_t to = shared_address(stage_);
    const uint32_t row = to + kChunks * Nvfp4::kCodeBytes + lane / 2 * kRowScales;
#pragma unroll
    for (int i = 0; i < kCopies; i += 2) {
      const int copy = i + lane % 2;
      if (i + 2 <= kCopies || copy < kCopies) {
        copy_16_async(row + copy * kVectorBytes, from.scales + copy * kVectorBytes);
      }
    }
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const uint8_t* codes = from.codes + i * (Nvfp4::kChunk / 2);
      const uint32_t at = to + i * Nvfp4::kCodeBytes + lane * kVectorBytes;
      copy_16_async(at, codes);
      copy_16_async(at + Nvfp4::kCodeBytes / 2, codes + from.high);
    }
    close_copies();
  }

  __device__ __forceinline__ void await() const {
    await_copies<0>();
    __syncwarp();  // lanes have copied scales for each other
  }

  __device__ __forceinline__ Nvfp4::Chunk load(int c) const {
    return Nvfp4::load<kChunks>(stage_, c);
  }

 private:
  uint8_t* stage_;
};

// A chunk as the tensor core takes it: of each word two operands, codes as they are; and the
// scales.
struct DecodedChunk {
  uint32_t operand[Nvfp4::kVectors][2][4];
  float2 low_scales, high_scales;

  DecodedChunk() = default;

  __device__ __forceinline__ explicit DecodedChunk(const Nvfp4::Chunk& chunk)
      : low_scales(e4m3_to_floats(chunk.low_scales)),
        high_scales(e4m3_to_floats(chunk.high_scales)) {
#pragma unroll
    for (int i = 0; i < Nvfp4::kVectors; ++i) {
      const CodePairs low = decode_codes(chunk.low[i]), high = decode_codes(chunk.high[i]);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        operand[i][j][0] = low.pair[2 * j];
        operand[i][j][1] = high.pair[2 * j];
        operand[i][j][2] = low.pair[2 * j + 1];
        operand[i][j][3] = high.pair[2 * j + 1];
      }
    }
  }

  // Is decoded by here.
  __device__ __forceinline__ void pin() {
#pragma unroll
    for (auto& pair : operand) {
#pragma unroll
      for (auto& four : pair) {
        asm volatile("" : "+r"(four[0]), "+r"(four[1]), "+r"(four[2]), "+r"(four[3]));
      }
    }
  }

  // Adds its products with chunk c of the staged activations.
  __device__ __forceinline__ void multiply(float& low_sum, float& high_sum, const OneTokenLane& x,
                                           int c) const {
    float blocks[2][4] = {};
#pragma unroll
    for (int i = 0; i < Nvfp4::kVectors; ++i) {
      const uint8_t* from = i < 2 ? x.first : x.second;
      const uint4 b = load_shared(from + (c * Nvfp4::kVectors + i) * 4 * kVectorBytes);
      const auto& one = operand[i][0];
      const auto& two = operand[i][1];
      multiply_add(blocks[i / 2], one[0], one[1], one[2], one[3], b.x, b.y);
      multiply_add(blocks[i / 2], two[0], two[1], two[2], two[3], b.z, b.w);
    }
    // Columns 2t and 2t + 1 are in lane t: its own two blocks.
    low_sum = fmaf(blocks[0][0], low_scales.x, low_sum);
    high_sum = fmaf(blocks[0][2], high_scales.x, high_sum);
    low_sum = fmaf(blocks[1][1], low_scales.y, low_sum);
    high_sum = fmaf(blocks[1][3], high_scales.y, high_sum);
  }
};

// What a CTA's warps share beside the weights. Column 2t + h gets lane t's block h alone, as in
// one_token.cuh; the lanes that have no activations read zeros.
template <int kWarps, int kChunks>
struct OneTile {
  static constexpr int kWarpBytes = kChunks * Nvfp4::kChunk * 2;  // of activations
  static constexpr size_t kStageBytes = size_t{kWarps} * TilePart<kChunks>::kBytes;

  alignas(16) uint8_t staged[kWarps * kWarpBytes];
  alignas(16) uint8_t zeros[kZeroBytes<kChunks>];
  alignas(16) float sums[kTileRows][kWarps];

  // By a warp, after the wait: the sums of its part over its activations, in lanes 4g. With kAhead,
  // the part's first chunk is decoded.
  template <bool kAhead>
  __device__ __forceinline__ OneTokenSums multiply(const TilePart<kChunks>& part,
                                                   const DecodedChunk& first, const uint16_t* x,
                                                   int warp) {
    uint8_t* mine = staged + warp * kWarpBytes;
    const bool shifts = stage(mine, x);
    __syncwarp();
    if constexpr (!kAhead) part.await();
    OneTokenSums result;
    if (shifts) {
      const OneTokenLane lane(mine, zeros);
      float low = 0.0f, high = 0.0f;
      if constexpr (kAhead) first.multiply(low, high, lane, 0);
#pragma unroll
      for (int c = kAhead ? 1 : 0; c < kChunks; ++c) {
        DecodedChunk(part.load(c)).multiply(low, high, lane, c);
      }
      result.low = low * kOneTokenSumScale;
      result.high = high * kOneTokenSumScale;
    } else {
      multiply_unshifted<kChunks>(result, part, mine);
    }
    result.collect();
    return result;
  }

  __device__ __forceinline__ void store(const OneTokenSums& of_warp, int warp) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    if (lane % 4 != 0) return;
    sums[lane / 4][warp] = of_warp.low;
    sums[lane / 4 + kHalfTile][warp] = of_warp.high;
  }

  // A row's sum: those of the warps in their order.
  __device__ __forceinline__ float total(int row) const {
    static_assert(kWarps % 4 == 0, "read four at a time");
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < kWarps; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(&sums[row][i]);
      total = i == 0 ? four.x : total + four.x;
      total += four.y;
      total += four.z;
      total += four.w;
    }
    return total;
  }

 private:
  // As stage_one of a warp's whole part, in half the instructions. A NaN does not count for the
  // range: its products are NaN, whichever way they are made.
  static __device__ __forceinline__ bool stage(uint8_t* to, const uint16_t* x) {
    constexpr int kLoads = kChunks * Nvfp4::kChunk / kVectorElements / kWarp;
    static_assert(kLoads * kWarp * kVectorElements == kChunks * Nvfp4::kChunk);
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    uint4 value[kLoads];
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      value[i] = load_activation(reinterpret_cast<const uint4*>(x) + lane + i * kWarp);
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      largest = larger_magnitudes_of(largest, value[i].x);
      largest = larger_magnitudes_of(largest, value[i].y);
      largest = larger_magnitudes_of(largest, value[i].z);
      largest = larger_magnitudes_of(largest, value[i].w);
    }
    const bool shifts = in_range(largest & 0x7fff7fffu);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      // Shifted as if in range, which is not known as soon.
      auto* staged = reinterpret_cast<uint4*>(to) + Nvfp4::place(lane + i * kWarp, 0, 1);
      *staged = Nvfp4::arrange(shifted(value[i]));
      if (!shifts) *staged = Nvfp4::arrange(value[i]);
    }
    return shifts;
  }
};

}  // namespace flint::cuda
