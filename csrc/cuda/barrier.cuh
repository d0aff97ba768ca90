// Barriers in shared memory that count arrivals and bytes (mbarrier).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/async_copy.cuh"

namespace flint::cuda {

// In shared memory. A phase is over when all arrivals and all expected bytes have come; phases have
// the parities 0, 1, 0, ...
class Barrier {
 public:
  // By one thread; all that use the barrier are to be past a barrier of theirs after it.
  __device__ __forceinline__ void init(uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(arrivals)
                 : "memory");
  }

  // Arrives, and the phase wants so many bytes more.
  __device__ __forceinline__ void arrive_expecting(uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()),
                 "r"(bytes)
                 : "memory");
  }

  // Until the phase of this parity is over.
  __device__ __forceinline__ void wait(uint32_t parity) const {
    asm volatile(
        "{\n"
        ".reg .pred over;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n"
        "@!over bra again;\n"
        "}" ::"r"(address()),
        "r"(parity)
        : "memory");
  }

  __device__ __forceinline__ uint32_t address() const { return shared_address(this); }

 private:
  uint64_t word_;
};

// What the initialising thread does after its last `init`: other CTAs of the cluster see the
// barriers.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

}  // namespace flint::cuda
