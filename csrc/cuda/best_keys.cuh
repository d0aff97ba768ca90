// The 32 largest of many 64-bit keys, by warps. A list is 32 keys, one a lane, falling; it has 0
// where there are fewer. Keys are distinct, so the result does not depend on the order of the work.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device.cuh"

namespace flint::cuda {

__device__ __forceinline__ uint64_t lane_key(uint64_t key, int step) {
  const auto low = __shfl_xor_sync(0xffffffffu, static_cast<uint32_t>(key), step);
  const auto high = __shfl_xor_sync(0xffffffffu, static_cast<uint32_t>(key >> 32), step);
  return uint64_t{high} << 32 | low;
}

// The larger of the two goes to the lane whose bit `step` is not set, or is where `rising`.
__device__ __forceinline__ uint64_t compare_exchange(uint64_t key, int step, bool rising) {
  const uint64_t other = lane_key(key, step);
  const bool is_upper = (threadIdx.x & static_cast<unsigned>(step)) != 0;
  return (key > other) != (is_upper != rising) ? key : other;
}

// Falls over the lanes what falls first and then rises, or the other way round.
__device__ __forceinline__ uint64_t sort_bitonic(uint64_t key) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) key = compare_exchange(key, step, false);
  return key;
}

// One key of each lane as a list.
__device__ __forceinline__ uint64_t sort_keys(uint64_t key) {
#pragma unroll
  for (int size = 2; size < kWarp; size *= 2) {
    const bool rising = (threadIdx.x & static_cast<unsigned>(size)) != 0;
#pragma unroll
    for (int step = size / 2; step > 0; step /= 2) key = compare_exchange(key, step, rising);
  }
  return sort_bitonic(key);
}

// The best 32 of two lists, as a list; `reversed` is the second one, rising over the lanes.
__device__ __forceinline__ uint64_t merge_reversed(uint64_t list, uint64_t reversed) {
  return sort_bitonic(list > reversed ? list : reversed);
}

// The lists of all kWarps warps of a CTA as one, in warp 0. `room` is in shared memory.
template <int kWarps>
__device__ __forceinline__ uint64_t merge_warps(uint64_t list, uint64_t (*room)[kWarp]) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
  for (int half = kWarps / 2; half > 0; half /= 2) {
    if (half <= warp && warp < 2 * half) room[warp][lane] = list;
    __syncthreads();
    if (warp < half) list = merge_reversed(list, room[warp + half][kWarp - 1 - lane]);
  }
  return list;
}

}  // namespace flint::cuda
