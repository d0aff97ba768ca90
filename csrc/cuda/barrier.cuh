// Barriers in shared memory that count arrivals and bytes (mbarrier).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/async_copy.cuh"

namespace flint::cuda {

// A phase is over when all arrivals and all announced bytes have come; phases have the parities 0,
// 1, 0, ... Addresses are 32 bits, as shared_address gives them.

__device__ __forceinline__ void init_barrier(uint32_t barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers known to the copy unit and to the cluster; a cluster barrier follows.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives, and announces bytes that copies will bring.
__device__ __forceinline__ void expect_bytes(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// At the same barrier of CTA `rank` of the cluster.
__device__ __forceinline__ void arrive_at(uint32_t rank, uint32_t barrier) {
  asm volatile(
      "{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; "
      "mbarrier.arrive.shared::cluster.b64 _, [there];}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

// Waits until the phase of this parity is over.
__device__ __forceinline__ void await_phase(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{.reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, "
      "[%0], %1; @!done bra again;}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// A barrier as a variable in shared memory.
class Barrier {
 public:
  // By one thread; all that use the barrier are to be past a barrier of theirs after it.
  __device__ __forceinline__ void init(uint32_t arrivals) { init_barrier(address(), arrivals); }

  // Arrives, and announces bytes.
  __device__ __forceinline__ void arrive_expecting(uint32_t bytes) {
    expect_bytes(address(), bytes);
  }

  __device__ __forceinline__ void wait(uint32_t parity) const { await_phase(address(), parity); }

  __device__ __forceinline__ uint32_t address() const { return shared_address(this); }

 private:
  uint64_t word_;
};

}  // namespace flint::cuda
