// Copies from global to shared memory by the bulk copy engine (cp.async.bulk), and the barriers in
// shared memory that count their bytes. One thread asks for a copy of any length; who waits for the
// barrier sees the bytes.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/async_copy.cuh"

namespace flint::cuda {

// In shared memory. A phase is over when all arrivals and all expected bytes have come; phases
// have the parities 0, 1, 0, ...
class Barrier {
 public:
  // By one thread; all that use the barrier are to be past a __syncthreads() after it.
  __device__ __forceinline__ void init(uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(arrivals)
                 : "memory");
  }

  __device__ __forceinline__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address()) : "memory");
  }

  // Arrives, and the phase wants so many bytes more.
  __device__ __forceinline__ void arrive_expecting(uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()),
                 "r"(bytes)
                 : "memory");
  }

  // Until the phase of this parity is over. At once for parity 1 of a new barrier: the phase before
  // its first counts as over.
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

// What the initialising thread does after its last `init`: the copy engine sees the barriers.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// `bytes` a multiple of 16, both addresses too; they count for `barrier`.
__device__ __forceinline__ void copy_bulk(void* to, const void* from, uint32_t bytes,
                                          const Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(barrier.address())
      : "memory");
}

// A place in a ring of kStages stages, and the parity of its turn.
template <int kStages>
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage < kStages) return;
    stage = 0;
    parity ^= 1;
  }
};

}  // namespace flint::cuda
