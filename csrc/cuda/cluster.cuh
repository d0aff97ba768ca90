// CTAs of a cluster, which run together and write into each other's shared memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/barrier.cuh"

namespace flint::cuda {

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ uint32_t cluster_size() {
  uint32_t size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}

// `here`, an address in this CTA's shared memory, as the same place in the memory of CTA `rank`.
__device__ __forceinline__ uint32_t shared_of(uint32_t rank, const void* here) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(here)), "r"(rank));
  return there;
}

__device__ __forceinline__ uint32_t shared_of(uint32_t rank, uint32_t here) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
  return there;
}

// From an address that shared_of gave.
__device__ __forceinline__ float4 load_cluster(uint32_t from) {
  float4 value;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(from)
               : "memory");
  return value;
}

// Stores four bytes and counts them for a barrier, both in the memory of the same CTA: who waits
// for that barrier sees them. No fence: a cluster's barrier with release would first wait for all
// that this thread has ever written, to global memory too.
__device__ __forceinline__ void send_cluster(uint32_t to, uint32_t value, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
      "r"(value), "r"(barrier)
      : "memory");
}

// The same with eight bytes, in one message.
__device__ __forceinline__ void send_cluster(uint32_t to, const float2& value, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::
          "r"(to),
      "r"(__float_as_uint(value.x)), "r"(__float_as_uint(value.y)), "r"(barrier)
      : "memory");
}

// Every thread of the cluster comes to `announce_cluster`, and those that come back from
// `await_cluster` know that all CTAs run and that the barriers which they published are there. No
// other write is seen through this. A thread that will not write to others may leave after the
// first.
__device__ __forceinline__ void announce_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

// The same, and what the thread wrote before is seen by those that come back.
__device__ __forceinline__ void arrive_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void await_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

}  // namespace flint::cuda
