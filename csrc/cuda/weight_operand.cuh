// NVFP4 codes and scales in shared memory to the tensor core's left operand in registers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/nvfp4_decode.cuh"
#include "cuda/product.h"
#include "cuda/shared_loads.cuh"

namespace flint::cuda {

// The bits of `first` under the mask, else those of `second`.
__device__ __forceinline__ uint32_t choose_bits(uint32_t mask, uint32_t first, uint32_t second) {
  uint32_t chosen;  // by one instruction, which the compiler does not find
  asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(chosen) : "r"(first), "r"(second), "r"(mask));
  return chosen;
}

// A row's eight codes of 16 columns that belong to lane t of four (2t, 2t + 1, 2t + 8, 2t + 9), out
// of the two words that hold them all; as BF16 pairs, times `scale`.
__device__ __forceinline__ void decode_block(uint32_t first, uint32_t second, uint32_t selector,
                                             uint32_t scale, uint32_t& low, uint32_t& high) {
  constexpr uint32_t kMagnitudes = 0x01c001c0u, kSigns = 0x80008000u;
  // The lane's byte of both words, twice; then the even codes of the lower half stand where the odd
  // ones of the upper half do: in bits 4-7 those of the first word, in bits 12-15 of the second.
  const uint32_t bytes = __byte_perm(first, second, selector);
  const uint32_t codes = choose_bits(0x0000ffffu, bytes << 4, bytes);
  const uint32_t one = (codes & 0x00f000f0u) * ((1u << 8) + (1u << 2)) & (kMagnitudes | kSigns);
  const uint32_t two = (codes & kSigns) | (codes >> 6 & kMagnitudes);
  low = multiply_bf16_pairs(one, scale);
  high = multiply_bf16_pairs(two, scale);
}

// A thread's left operands of 256 columns: of two rows of weights, kApart rows apart, of which the
// lower has its codes at `codes` (chunk c of them at the address ^ 16c) and its scales at `scales`.
// kBlocks of its blocks of 16 columns are decoded at a time.
template <int kBlocks, int kApart, bool kArranged>
struct WeightOperand {
  static constexpr uint32_t kCodesApart = kApart * kWeightColumns / 2;
  static constexpr uint32_t kScalesApart = kApart * kWeightColumns / 16;

  uint32_t codes, selector;
  uint4 low_scales, high_scales;

  __device__ __forceinline__ WeightOperand(uint32_t codes, uint32_t scales, int column)
      : codes(codes),
        selector(0x4040u + 0x1111u * column),
        low_scales(load_shared(scales)),
        high_scales(load_shared(scales + kScalesApart)) {}

  // a[i] for block `first + i` (of 16 columns) of 64 columns `part`.
  __device__ __forceinline__ void decode(uint32_t (&a)[kBlocks][4], int part, int first) const {
#pragma unroll
    for (int i = 0; i < kBlocks; i += 2) {
      const int chunk = 2 * part + (first + i) / 2, shift = 16 * (chunk % 2);
      const uint32_t from = codes ^ static_cast<uint32_t>(chunk << 4);
      const uint4 l = load_shared(from), h = load_shared(from + kCodesApart);
      const ScalePairs ls = decode_scales(static_cast<uint16_t>(word(low_scales, part) >> shift));
      const ScalePairs hs = decode_scales(static_cast<uint16_t>(word(high_scales, part) >> shift));
      decode_block(l.x, l.y, selector, ls.first, a[i][0], a[i][2]);
      decode_block(h.x, h.y, selector, hs.first, a[i][1], a[i][3]);
      decode_block(l.z, l.w, selector, ls.second, a[i + 1][0], a[i + 1][2]);
      decode_block(h.z, h.w, selector, hs.second, a[i + 1][1], a[i + 1][3]);
    }
  }

  static __device__ __forceinline__ uint32_t word(const uint4& four, int index) {
    return index == 0 ? four.x : index == 1 ? four.y : index == 2 ? four.z : four.w;
  }
};

// With the columns of x arranged: of the 256, lane t of four has the 64 from 64t on, and of those a
// part's 16, which are one block with one scale, make the lane's operands of 64 columns of
// products.
template <int kBlocks, int kApart>
struct WeightOperand<kBlocks, kApart, true> {
  static constexpr uint32_t kCodesApart = kApart * kWeightColumns / 2;
  static constexpr uint32_t kScalesApart = kApart * kWeightColumns / 16;

  uint32_t codes;
  uint32_t low_scales, high_scales;

  __device__ __forceinline__ WeightOperand(uint32_t codes, uint32_t scales, int column)
      : codes(codes ^ static_cast<uint32_t>(column << 5)),
        low_scales(load_shared_word(scales + 4 * column)),
        high_scales(load_shared_word(scales + kScalesApart + 4 * column)) {}

  __device__ __forceinline__ void decode(uint32_t (&a)[kBlocks][4], int part, int) {
    static_assert(kBlocks == 4);
    const uint32_t from = (codes ^ static_cast<uint32_t>(part / 2 << 4)) + part % 2 * 8;
    const uint2 low = load_shared_words(from), high = load_shared_words(from + kCodesApart);
    decode_block(a, 0, low.x, low.y, decode_scale(low_scales >> 8 * part));
    decode_block(a, 1, high.x, high.y, decode_scale(high_scales >> 8 * part));
  }

  // Sixteen codes of a row; `row`: 0 or 1, the lower or the upper one.
  static __device__ __forceinline__ void decode_block(uint32_t (&a)[kBlocks][4], int row,
                                                      uint32_t first, uint32_t second,
                                                      uint32_t scale) {
    const CodePairs one = decode_codes(first), two = decode_codes(second);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[i][row] = multiply_bf16_pairs(one.pair[i], scale);
      a[i][row + 2] = multiply_bf16_pairs(two.pair[i], scale);
    }
  }
};

}  // namespace flint::cuda
