// CTAs of a cluster, which run together and write into each other's shared memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/async_copy.cuh"

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

__device__ __forceinline__ void store_cluster(uint32_t to, uint32_t value) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}

__device__ __forceinline__ void store_cluster(uint32_t to, uint16_t value) {
  asm volatile("st.shared::cluster.u16 [%0], %1;" ::"r"(to), "h"(value) : "memory");
}

// Every thread of the cluster comes to `arrive_cluster`, and what it wrote before is seen by those
// that come back from `await_cluster`. A thread with nothing to read may leave after the first.
__device__ __forceinline__ void arrive_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void await_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

}  // namespace flint::cuda
