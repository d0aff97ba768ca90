// CTAs of a grid that count each other, so that the last one goes on with what all have written.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace flint::cuda {

// How many arrived before this thread, whose CTA's writes are seen by who arrives later. With
// number `last` the counter is back to zero.
__device__ __forceinline__ uint32_t arrive_at(uint32_t* counter, uint32_t last) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(last)
               : "memory");
  return before;
}

}  // namespace flint::cuda
