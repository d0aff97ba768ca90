// NVFP4 codes and scales as BF16 pairs, in registers. `code * scale` is exact in BF16.
//
// The cost that decides is that of the integer pipe, half as wide as the others: a pair of codes
// takes two masks there, a multiplication (which shifts sign and magnitude by different amounts at
// once) and a BF16 product elsewhere.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device.cuh"
#include "cuda/mma.cuh"

namespace flint::cuda {

// Weights come out of the registers smaller by this power of two, which belongs to the fp32 sums.
inline constexpr float kNvfp4SumScale = 256.0f;

// A code's magnitude in bits 6-8 of a BF16 and its sign in bit 15 make value * 2^-126, the
// subnormal code included. The scales carry 2^118.
inline constexpr float kScaleShift = 0x1p118f;

// Of the eight codes of a word, codes i and i + 4 as a pair.
struct CodePairs {
  uint32_t pair[4];
};

__device__ __forceinline__ CodePairs decode_codes(uint32_t word) {
  constexpr uint32_t kBits = 0x81c081c0u;
  constexpr uint32_t kFromBit0 = (1u << 12) + (1u << 6), kFromBit4 = (1u << 8) + (1u << 2);
  const uint32_t upper = word >> 8;
  return {{((word & 0x000f000fu) * kFromBit0) & kBits, ((word & 0x00f000f0u) * kFromBit4) & kBits,
           ((upper & 0x000f000fu) * kFromBit0) & kBits,
           ((upper & 0x00f000f0u) * kFromBit4) & kBits}};
}

// Two E4M3 scales, each as a pair of itself, times 2^118.
struct ScalePairs {
  uint32_t first, second;
};

__device__ __forceinline__ ScalePairs decode_scales(uint16_t two) {
  float2 scales = e4m3_to_floats(two);
  scales.x *= kScaleShift;
  scales.y *= kScaleShift;
  return {pack_bf16(scales.x, scales.x), pack_bf16(scales.y, scales.y)};
}

// The lowest byte's E4M3 scale as a pair of itself, times 2^118.
__device__ __forceinline__ uint32_t decode_scale(uint32_t byte) {
  const float scale = e4m3_to_floats(static_cast<uint16_t>(byte)).x * kScaleShift;
  return pack_bf16(scale, scale);
}

}  // namespace flint::cuda
