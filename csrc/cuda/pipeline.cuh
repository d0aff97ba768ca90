// Copies of boxes of a matrix, which complete barriers in shared memory, and the ring that they go
// round: what Hopper's asynchronous pipelines are made of. Addresses are 32 bits, as shared_address
// gives them.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/barrier.cuh"
#include "cuda/cluster.cuh"
#include "cuda/ring.cuh"

namespace flint::cuda {

// The box at (row, column) of a described matrix.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap& matrix, int row,
                                         int column, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(&matrix), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

// The box at `at`, the innermost dimension first, of a described tensor of four dimensions.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap& tensor, const int (&at)[4],
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
      "l"(&tensor), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(barrier)
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

}  // namespace flint::cuda
