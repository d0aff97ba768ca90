// See simt.h.
#pragma once

#include <cuda_runtime.h>

#include "bf16.h"

namespace flint::cuda {

inline constexpr int kWarp = simt::kLanes;

inline void wait_for_previous_kernel() {
  if (simt::options.previous_kernel) {
    std::call_once(*simt::previous_kernel_once, simt::options.previous_kernel);
  }
}
inline void let_next_kernel_start() {}

template <typename T>
T load_activation(const T* from) {
  return *from;
}
template <typename T>
T load_once(const T* from) {
  return *from;
}
template <typename T>
T load_weight(const T* from) {
  return *from;
}
template <typename T>
void keep(T*&) {}

template <int kThreads>
void sync_threads(int barrier) {
  simt::sync_threads(barrier, kThreads);
}
template <int kThreads>
void arrive_at_threads(int barrier) {
  simt::arrive_at_barrier(barrier, kThreads);
}

inline float to_float(uint16_t bits) { return bf16_to_float(bits); }
inline float low_half(uint32_t pair) { return __uint_as_float(pair << 16); }
inline float high_half(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
inline float rounded(uint16_t, float value) { return bf16_to_float(float_to_bf16(value)); }

inline uint32_t larger_magnitudes_of(uint32_t left, uint32_t right) {
  const auto larger = [](uint32_t a, uint32_t b) {
    a &= 0x7fff, b &= 0x7fff;
    return a > 0x7f80 ? b : b > 0x7f80 ? a : a > b ? a : b;
  };
  return larger(left, right) | larger(left >> 16, right >> 16) << 16;
}

inline float2 e4m3_to_floats(uint16_t two) {
  const auto value = [](int byte) {
    const int exponent = byte >> 3 & 15, mantissa = byte & 7;
    float magnitude = exponent == 0
                          ? std::ldexp(static_cast<float>(mantissa), -9)
                          : std::ldexp(1.0f + static_cast<float>(mantissa) / 8, exponent - 7);
    if ((byte & 0x7f) == 0x7f) magnitude = std::nanf("");
    return byte & 0x80 ? -magnitude : magnitude;
  };
  return {value(two & 0xff), value(two >> 8)};
}

template <int kLanes>
float lane_sum(float value) {
  for (int step = kLanes / 2; step > 0; step /= 2)
    value += __shfl_xor_sync(0xffffffffu, value, step);
  return value;
}

inline uint32_t pack_bf16(float low, float high) {
  return float_to_bf16(low) | static_cast<uint32_t>(float_to_bf16(high)) << 16;
}
inline void store_rounded(uint16_t* to, float value) { *to = float_to_bf16(value); }
inline float exp2_approx(float x) { return std::exp2(x); }

}  // namespace flint::cuda
