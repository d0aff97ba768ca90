// Barriers in shared memory and the copies that complete them: what Hopper's asynchronous pipelines
// are made of. Addresses are 32 bits, as shared_address gives them.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/async_copy.cuh"
#include "cuda/cluster.cuh"

namespace flint::cuda {

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

// The box at (row, column) of a described matrix.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap& matrix, int row,
                                         int column, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(&matrix), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

// The same to every CTA of `ranks` (a bit for each), at the same place of its shared memory; each
// CTA's own barrier counts its bytes.
__device__ __forceinline__ void copy_box_to(uint16_t ranks, uint32_t to, const CUtensorMap& matrix,
                                            int row, int column, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(&matrix), "r"(column), "r"(row), "r"(barrier), "h"(ranks)
      : "memory");
}

__device__ __forceinline__ void prefetch_description(const CUtensorMap& matrix) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&matrix) : "memory");
}

// A place in a ring of `kStages` buffers. `parity` is that of the barriers' phase: the reader waits
// for it at "full", the writer for the opposite one at "empty".
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace flint::cuda
