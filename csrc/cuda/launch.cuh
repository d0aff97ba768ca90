// The one place that calls cudaLaunchKernelEx.
#pragma once

#include <cuda_runtime.h>

#include <utility>

#include "cuda/launch.h"

namespace flint::cuda {

// How a kernel is spread: `shared_bytes` of dynamic shared memory a CTA, `cluster` CTAs that run
// together and read each other's shared memory (1: none).
struct Shape {
  dim3 grid;
  dim3 block;
  size_t shared_bytes = 0;
  unsigned cluster = 1;
};

// Every kernel may have 48 KB; what it declares itself comes on top of `shared_bytes`.
inline constexpr size_t kSharedWithoutAsking = 32 * 1024;
// What a CTA can have on every GPU that this is built for but sm_120, less what kernels declare.
inline constexpr size_t kMostSharedBytes = 227 * 1024 - 4096;
inline constexpr unsigned kPortableCluster = 8;

// What a kernel of this shape has to be told before it is launched, or asked about.
template <typename... Parameters>
cudaError_t prepare_kernel(const Shape& shape, void (*kernel)(Parameters...)) {
  // Kernels with much shared memory ask for the same division of it and L1: an SM that has to
  // change that must first be empty, and would never begin with one beside the one ahead of it.
  if (shape.shared_bytes > 0) {
    const auto error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                            cudaSharedmemCarveoutMaxShared);
    if (error != cudaSuccess) return error;
  }
  if (shape.shared_bytes > kSharedWithoutAsking) {
    const auto error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            static_cast<int>(shape.shared_bytes));
    if (error != cudaSuccess) return error;
  }
  if (shape.cluster > kPortableCluster) {
    const auto error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

template <typename... Parameters, typename... Arguments>
cudaError_t launch_kernel(const Launch& launch, const Shape& shape, void (*kernel)(Parameters...),
                          Arguments&&... arguments) {
  if (const auto error = prepare_kernel(shape, kernel); error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2]{};
  unsigned count = 0;
  if (launch.pdl) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {shape.cluster, 1, 1};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = launch.stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

// How many clusters of this shape the current device runs at the same time; 0 where it has none.
template <typename... Parameters>
int most_clusters(const Shape& shape, void (*kernel)(Parameters...)) {
  if (prepare_kernel(shape, kernel) != cudaSuccess) return 0;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {shape.cluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int count = 0;
  return cudaOccupancyMaxActiveClusters(&count, kernel, &config) == cudaSuccess ? count : 0;
}

// Of the current device.
inline int multiprocessors() {
  int device = 0, count = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count > 0 ? count : 1;
}

// So much dynamic shared memory that `ctas` CTAs fit an SM and no more do.
inline size_t shared_bytes_for(int ctas) {
  int device = 0, bytes = 0, most = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  constexpr int kDeclared = 4096;  // at most, by a kernel and by the runtime
  const int share = (bytes < ctas * most ? bytes / ctas : most) - kDeclared;
  return share > 0 ? static_cast<size_t>(share) : 0;
}

// The least of which `ctas` CTAs do not fit an SM: who only wants to keep them out leaves the rest
// to the kernels beside this one.
inline size_t shared_bytes_against(int ctas) {
  int device = 0, bytes = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  return static_cast<size_t>(bytes / ctas);  // and some more is taken for each by the runtime
}

// Shared memory is static in the kernels of rows.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_kernel(const Launch& launch, dim3 grid, dim3 block,
                          void (*kernel)(Parameters...), Arguments&&... arguments) {
  return launch_kernel(launch, Shape{grid, block}, kernel, std::forward<Arguments>(arguments)...);
}

}  // namespace flint::cuda
