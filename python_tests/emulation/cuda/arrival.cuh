// See simt.h.
#pragma once

#include <cuda_runtime.h>

namespace flint::cuda {

inline uint32_t arrive_at(uint32_t* counter, uint32_t last) {
  const uint32_t before = *counter;  // CTAs of a grid run one after the other
  *counter = before >= last ? 0 : before + 1;
  return before;
}

}  // namespace flint::cuda
