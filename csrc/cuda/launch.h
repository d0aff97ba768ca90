// How a kernel of this library is launched. No torch here.
#pragma once

#include <cuda_runtime_api.h>

namespace flint::cuda {

struct Launch {
  cudaStream_t stream;
  bool pdl;  // programmatic dependent launch: start while the kernel ahead still runs
};

}  // namespace flint::cuda
