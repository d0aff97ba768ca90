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

// Named barriers; threads may also pass one, by warpgroup.cuh.
struct EmulatedBarrier {
  int arrived = 0;
  uint64_t meetings = 0;
};
inline thread_local std::array<EmulatedBarrier, 16> emulated_named;

inline void arrive_named(int barrier, int threads) {
  EmulatedBarrier& named = emulated_named.at(static_cast<size_t>(barrier));
  if (++named.arrived < threads) return;
  named.arrived = 0;
  ++named.meetings;
}

template <int kThreads>
void sync_threads(int barrier) {
  const EmulatedBarrier& named = emulated_named.at(static_cast<size_t>(barrier));
  const uint64_t meeting = named.meetings;
  arrive_named(barrier, kThreads);
  simt::wait_until([&named, meeting] { return named.meetings != meeting; });
}

template <int kLanes>
float lane_sum(float value) {
  for (int step = kLanes / 2; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  return value;
}

inline uint32_t pack_bf16(float low, float high) {
  return float_to_bf16(low) | static_cast<uint32_t>(float_to_bf16(high)) << 16;
}
inline void store_rounded(uint16_t* to, float value) { *to = float_to_bf16(value); }
inline float exp2_approx(float x) { return std::exp2(x); }

}  // namespace flint::cuda
