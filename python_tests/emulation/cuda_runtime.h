// What the kernels use of the CUDA language and runtime. See simt.h.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "simt.h"

#define FLINT_EMULATED
#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ thread_local
#define __align__(bytes) __attribute__((aligned(bytes)))

#define threadIdx (simt::current->index)
#define blockIdx (simt::current->cta->index)
#define gridDim (simt::grid_size)
#define blockDim (simt::block_size)

using cudaError_t = int;
using cudaStream_t = void*;
inline constexpr int cudaSuccess = 0, cudaErrorNotSupported = 801;

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }

template <typename Left, typename Right>
auto max(Left left, Right right) {
  using T = std::common_type_t<Left, Right>;
  return static_cast<T>(left) < static_cast<T>(right) ? static_cast<T>(right)
                                                      : static_cast<T>(left);
}
template <typename Left, typename Right>
auto min(Left left, Right right) {
  using T = std::common_type_t<Left, Right>;
  return static_cast<T>(right) < static_cast<T>(left) ? static_cast<T>(right)
                                                      : static_cast<T>(left);
}
inline float __uint_as_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t __float_as_uint(float value) { return std::bit_cast<uint32_t>(value); }
inline float __frcp_rn(float value) { return 1.0f / value; }
inline float __fmul_rn(float left, float right) { return left * right; }
inline float __fadd_rn(float left, float right) { return left + right; }
inline float __fsub_rn(float left, float right) { return left - right; }
inline float __fdividef(float left, float right) { return left / right; }
inline float __expf(float value) { return std::exp(value); }
inline float rsqrtf(float value) { return 1.0f / std::sqrt(value); }
inline int __popc(unsigned bits) { return std::popcount(bits); }
inline int __popcll(uint64_t bits) { return std::popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __ffsll(long long bits) { return __builtin_ffsll(bits); }

// The larger of each half.
inline uint32_t __vmaxu2(uint32_t left, uint32_t right) {
  return std::max(left & 0xffff, right & 0xffff) | std::max(left >> 16, right >> 16) << 16;
}

// The bytes of `low` and `high` that the four nibbles of `selector` name.
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= static_cast<uint32_t>(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  }
  return result;
}

template <typename T>
T __ldcg(const T* from) {
  return *from;
}
// In memory that other CTAs do not know.
inline int atomicAdd(int* to, int value) { return std::exchange(*to, *to + value); }

inline void __syncthreads() { simt::sync_cta(); }
inline void __syncwarp() { simt::sync_warp(); }
inline int __any_sync(unsigned, bool value) {
  const auto all = simt::gather(value);
  return std::any_of(all.begin(), all.end(), [](bool each) { return each; });
}
inline unsigned __ballot_sync(unsigned, bool value) {
  const auto all = simt::gather(value);
  unsigned bits = 0;
  for (size_t i = 0; i < all.size(); ++i) bits |= static_cast<unsigned>(all[i]) << i;
  return bits;
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  const auto all = simt::gather(value);
  return *std::max_element(all.begin(), all.end());
}
inline unsigned __reduce_or_sync(unsigned, unsigned value) {
  unsigned bits = 0;
  for (const unsigned each : simt::gather(value)) bits |= each;
  return bits;
}
template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  return simt::gather(value)[static_cast<size_t>(lane)];
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int step) {
  return simt::gather(value)[static_cast<size_t>(simt::current->lane() ^ step)];
}
template <typename T>
T __shfl_up_sync(unsigned, T value, int step) {
  const int lane = simt::current->lane();
  return simt::gather(value)[static_cast<size_t>(lane < step ? lane : lane - step)];
}
template <typename T>
unsigned __match_any_sync(unsigned, T value) {
  const auto all = simt::gather(value);
  unsigned bits = 0;
  for (size_t i = 0; i < all.size(); ++i) bits |= static_cast<unsigned>(all[i] == value) << i;
  return bits;
}
