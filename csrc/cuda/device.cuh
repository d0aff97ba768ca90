// What the row kernels share on the device: wide accesses, BF16 in pairs, sums across lanes, and
// the two instructions of programmatic dependent launch (PDL).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "bf16.h"

namespace flint::cuda {

inline constexpr int kWarp = 32;

// ------------------------------------------------------------------------------ PDL

// Waits until the kernel ahead has finished and its writes are visible; nothing at all where the
// launch is an ordinary one. Every thread of every CTA comes here before it reads an activation:
// a kernel further down the chain relies on this one having waited. The clobber keeps the
// compiler from moving a load up.
__device__ __forceinline__ void wait_for_previous_kernel() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Lets the next kernel's CTAs start as soon as there is room. After the own wait, so that what that
// kernel reads before its wait is never a tensor that is still being written two kernels ahead of
// it. Norm and router do so at once, since what follows them reads nothing there but what no kernel
// of a chain writes: weights, positions and slots.
__device__ __forceinline__ void let_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ------------------------------------------------------------------------------ barriers

// __syncthreads() of kThreads threads, in whole warps, by a barrier of their own: 1 to 15.
template <int kThreads>
__device__ __forceinline__ void sync_threads(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

// Comes to the same barrier and does not wait there.
template <int kThreads>
__device__ __forceinline__ void arrive_at_threads(int barrier) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

// ------------------------------------------------------------------------------ memory

// An activation: never through the read-only path (ld.global.nc), because with PDL the kernel ahead
// may still be writing when this one starts. Read once or not, through L1: measured on an H200,
// SiLU of 8,192 rows takes 70.5 us so and 73.4 us past it, RMSNorm 17.5 and 18.0.
__device__ __forceinline__ uint4 load_activation(const uint4* from) {
  uint4 value;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from)
               : "memory");
  return value;
}

__device__ __forceinline__ uint32_t load_activation(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

// The same past L1, which the q/k kernels want free for the table and the weights.
__device__ __forceinline__ uint4 load_once(const uint4* from) {
  uint4 value;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from)
               : "memory");
  return value;
}

__device__ __forceinline__ uint2 load_once(const uint2* from) {
  uint2 value;
  asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
               : "=r"(value.x), "=r"(value.y)
               : "l"(from)
               : "memory");
  return value;
}

// A result that nothing reads soon: first out of L2.
__device__ __forceinline__ void store_streaming(uint4* to, const uint4& value) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(to), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

// A weight, which no kernel in flight writes, ahead of the wait. Not by ld.global.nc (__ldg), which
// ptxas moves behind the wait.
__device__ __forceinline__ uint4 load_weight(const uint4* from) {
  uint4 value;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from));
  return value;
}

__device__ __forceinline__ uint2 load_weight(const uint2* from) {
  uint2 value;
  asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "l"(from));
  return value;
}

__device__ __forceinline__ float load_weight(const float* from) {
  float value;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(value) : "l"(from));
  return value;
}

// From here on `pointer` stands in registers: what of a kernel's parameters is read only at its end
// comes late.
template <typename T>
__device__ __forceinline__ void keep(T*& pointer) {
  asm volatile("" : "+l"(pointer));
}

// ------------------------------------------------------------------------------ BF16

// An element of a tensor: BF16 as its bits, or FP32.
__device__ __forceinline__ float to_float(uint16_t bits) { return bf16_to_float(bits); }
__device__ __forceinline__ float to_float(float value) { return value; }

__device__ __forceinline__ float low_half(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_half(uint32_t pair) {
  return __uint_as_float(pair & 0xffff0000u);
}

// Both rounded to nearest even by one instruction; `low` is the element at the lower address.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ void store_rounded(uint16_t* to, float value) {
  *to = static_cast<uint16_t>(pack_bf16(value, 0.0f));
}
__device__ __forceinline__ void store_rounded(float* to, float value) { *to = value; }

// What is left of `value` in the type of the activations.
__device__ __forceinline__ float rounded(uint16_t, float value) {
  return low_half(pack_bf16(value, 0.0f));
}
__device__ __forceinline__ float rounded(float, float value) { return value; }

// The larger of each half's magnitude, with either sign; of a NaN and a number the number.
__device__ __forceinline__ uint32_t larger_magnitudes_of(uint32_t left, uint32_t right) {
  uint32_t larger;
  asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(left), "r"(right));
  return larger;
}

// ------------------------------------------------------------------------------ E4M3

// Two E4M3 values.
__device__ __forceinline__ float2 e4m3_to_floats(uint16_t two) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(two));
  float2 values;
  asm("{.reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
      : "=f"(values.x), "=f"(values.y)
      : "r"(halves));
  return values;
}

// ------------------------------------------------------------------------------ sums

// 2^x to an ulp or two; what is below the normal numbers is 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The sum over the `kLanes` neighbouring lanes that a lane belongs to, the same bits in each of
// them. All 32 lanes must come here together.
template <int kLanes>
__device__ __forceinline__ float lane_sum(float value) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, step);
  }
  return value;
}

}  // namespace flint::cuda
