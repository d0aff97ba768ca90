// The one place that calls cudaLaunchKernelEx.
#pragma once

#include <cuda_runtime.h>

#include <utility>

#include "cuda/launch.h"

namespace flint::cuda {

// Shared memory is static in all kernels of rows.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_kernel(const Launch& launch, dim3 grid, dim3 block,
                          void (*kernel)(Parameters...), Arguments&&... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = launch.stream;
  config.attrs = &attribute;
  config.numAttrs = launch.pdl ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

}  // namespace flint::cuda
