// What the kernels use of the CUDA language and runtime. See simt.h.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "simt.h"

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

struct uint4 {
  uint32_t x, y, z, w;
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
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

using std::max;
using std::min;
inline float __uint_as_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t __float_as_uint(float value) { return std::bit_cast<uint32_t>(value); }
inline float __frcp_rn(float value) { return 1.0f / value; }

inline void __syncthreads() { simt::sync_cta(); }
inline void __syncwarp() { simt::sync_warp(); }
inline int __any_sync(unsigned, bool value) {
  const auto all = simt::gather(value);
  return std::any_of(all.begin(), all.end(), [](bool each) { return each; });
}
inline unsigned __ballot_sync(unsigned, bool value) {
  const auto all = simt::gather(value);
  unsigned set = 0;
  for (size_t i = 0; i < all.size(); ++i) set |= all[i] ? 1u << i : 0u;
  return set;
}
inline int __popc(unsigned bits) { return std::popcount(bits); }
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
