// Copies of whole boxes of a tensor into shared memory by the tensor memory accelerator (TMA).
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/barrier.cuh"

namespace flint::cuda {

// The thread's accesses of shared memory come before copies that are started later, by it or by
// threads that it meets at a barrier.
__device__ __forceinline__ void order_before_copies() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The same of its accesses of all memory, and of copies of what others wrote and it knows of.
__device__ __forceinline__ void order_with_copies() {
  asm volatile("fence.proxy.async;" ::: "memory");
}

// `map` is a parameter of the kernel.
__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(&map)) : "memory");
}

// Bytes that lie together; addresses and the number are multiples of 16. The barrier counts them.
__device__ __forceinline__ void copy_bytes(uint32_t to, const void* from, uint32_t bytes,
                                           const Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(to),
      "l"(reinterpret_cast<uint64_t>(from)), "r"(bytes), "r"(barrier.address())
      : "memory");
}

// The barrier counts the box's bytes.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap& map, int first, int second,
                                         int third, const Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(first), "r"(second), "r"(third),
      "r"(barrier.address())
      : "memory");
}

__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap& map, const int (&at)[5],
                                         const Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(to),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]),
      "r"(at[4]), "r"(barrier.address())
      : "memory");
}

}  // namespace flint::cuda
