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
inline float load_weight(const float* from) { return *from; }
template <typename T>
void keep(T*&) {}

inline uint32_t pack_bf16(float low, float high) {
  return float_to_bf16(low) | static_cast<uint32_t>(float_to_bf16(high)) << 16;
}
inline void store_rounded(uint16_t* to, float value) { *to = float_to_bf16(value); }
inline float exp2_approx(float x) { return std::exp2(x); }

}  // namespace flint::cuda
