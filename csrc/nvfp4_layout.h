// NVFP4: its two layouts and the values of its codes and scales, for the host and for the device.
//
// GGUF keeps 64 values in a super-block of 36 bytes: four scales, then four blocks of 8 code
// bytes, in which the low nibbles are values 0-7 and the high nibbles values 8-15. ModelOpt keeps
// the same codes in order, low nibble first, and the scales in a tensor of their own. A block of
// 8 code bytes is handled as one little-endian 64-bit word.
#pragma once

#include <bit>
#include <cstdint>

#if defined(__CUDACC__)
#define FLINT_HD __host__ __device__ __forceinline__
#else
#define FLINT_HD inline
#endif

namespace flint::nvfp4 {

inline constexpr int kBlockValues = 16;
inline constexpr int kBlockBytes = kBlockValues / 2;
inline constexpr int kSuperblockValues = 64;
inline constexpr int kSuperblockScales = kSuperblockValues / kBlockValues;
inline constexpr int kSuperblockCodeBytes = kSuperblockValues / 2;
inline constexpr int kSuperblockBytes = kSuperblockScales + kSuperblockCodeBytes;

// Where GGUF keeps the codes of a block (counted over all super-blocks) and the scales of a
// super-block, in bytes.
FLINT_HD constexpr int64_t gguf_codes_at(int64_t block) {
  return block / kSuperblockScales * kSuperblockBytes + kSuperblockScales +
         block % kSuperblockScales * kBlockBytes;
}

FLINT_HD constexpr int64_t gguf_scales_at(int64_t superblock) {
  return superblock * kSuperblockBytes;
}

// Swaps the bits of `mask` with those `shift` places higher.
FLINT_HD constexpr uint64_t swap_bits(uint64_t word, uint64_t mask, int shift) {
  const uint64_t moved = ((word >> shift) ^ word) & mask;
  return word ^ moved ^ (moved << shift);
}

// The two layouts differ by a perfect shuffle of a block's 16 nibbles: swap neighbouring nibbles,
// then bytes, then 16-bit halves.
FLINT_HD constexpr uint64_t block_gguf_to_modelopt(uint64_t codes) {
  codes = swap_bits(codes, 0x00f000f000f000f0u, 4);
  codes = swap_bits(codes, 0x0000ff000000ff00u, 8);
  return swap_bits(codes, 0x00000000ffff0000u, 16);
}

FLINT_HD constexpr uint64_t block_modelopt_to_gguf(uint64_t codes) {
  codes = swap_bits(codes, 0x00000000ffff0000u, 16);
  codes = swap_bits(codes, 0x0000ff000000ff00u, 8);
  return swap_bits(codes, 0x00f000f000f000f0u, 4);
}

// 0x80 in each byte of `scales` whose low seven bits are 0x7f (NaN in E4M3).
FLINT_HD constexpr uint32_t nan_scales(uint32_t scales) {
  return ((scales & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
}

// Four GGUF scales as ModelOpt's: ggml does not read the sign bit, and takes 0x7f for zero.
// 0xff has no counterpart; gguf_scales_bad finds it.
FLINT_HD constexpr uint32_t scales_gguf_to_modelopt(uint32_t scales) {
  const uint32_t zero = (nan_scales(scales) >> 7) * 0x7fu;
  return scales & 0x7f7f7f7fu & ~zero;
}

// 0x80 in each byte that has no ModelOpt form: 0xff.
FLINT_HD constexpr uint32_t gguf_scales_bad(uint32_t scales) { return nan_scales(scales) & scales; }

// 0x80 in each byte that has no GGUF form: NaN, and every negative scale but -0 (0x80). The others
// are carried over by clearing the sign bit, which changes -0 alone.
FLINT_HD constexpr uint32_t modelopt_scales_bad(uint32_t scales) {
  const uint32_t nonzero = ((scales & 0x7f7f7f7fu) + 0x7f7f7f7fu) & 0x80808080u;
  return nan_scales(scales) | (scales & nonzero);
}

// The 16 E2M1 values as the high halves of their fp32 (that is, as BF16) bits.
inline constexpr uint16_t kE2M1Bits[16] = {0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040,
                                           0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0,
                                           0xc000, 0xc040, 0xc080, 0xc0c0};

// The value of an E4M3FN byte, exact: bias 7, subnormal steps of 2^-9, no infinity.
FLINT_HD constexpr float e4m3_value(uint8_t byte) {
  const uint32_t sign = (byte & 0x80u) << 24;
  const uint32_t magnitude = byte & 0x7fu;
  if (magnitude == 0x7f) return std::bit_cast<float>(sign | 0x7fc00000u);
  if (magnitude < 8) {
    const float value = static_cast<float>(magnitude) * 0x1p-9f;
    return sign != 0 ? -value : value;
  }
  return std::bit_cast<float>(sign | ((magnitude << 20) + (120u << 23)));
}

static_assert(gguf_codes_at(0) == 4 && gguf_codes_at(3) == 28 && gguf_codes_at(4) == 40);
static_assert(gguf_codes_at((int64_t{1} << 33) + 1) == (int64_t{1} << 31) * 36 + 12);
static_assert(block_gguf_to_modelopt(0xf7e6d5c4b3a29180u) == 0xfedcba9876543210u);
static_assert(block_modelopt_to_gguf(0xfedcba9876543210u) == 0xf7e6d5c4b3a29180u);
static_assert(scales_gguf_to_modelopt(0xb87f7e80u) == 0x38007e00u);
static_assert(gguf_scales_bad(0xff7fb880u) == 0x80000000u);
static_assert(modelopt_scales_bad(0xffb8807fu) == 0x80800080u);
static_assert(e4m3_value(0x01) == 0x1p-9f && e4m3_value(0x7e) == 448.0f);
static_assert(e4m3_value(0xb8) == -1.0f && e4m3_value(0xff) != e4m3_value(0xff));

}  // namespace flint::nvfp4
