// The stream that torch launches on. Nothing of torch's CUDA library is linked.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace flint {

// The current stream of `device`. Throws where torch has no CUDA.
cudaStream_t current_cuda_stream(int32_t device);

}  // namespace flint
