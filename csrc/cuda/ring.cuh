// The ring of buffers that an asynchronous pipeline goes round.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace flint::cuda {

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
