// See simt.h.
#pragma once

#include <cuda_runtime.h>

#include "cuda/launch.h"

namespace flint::cuda {

struct Shape {
  dim3 grid;
  dim3 block;
  size_t shared_bytes = 0;
  unsigned cluster = 1;
};

inline int emulated_multiprocessors = 1;
inline int multiprocessors() { return emulated_multiprocessors; }

inline constexpr size_t kMostSharedBytes = 227 * 1024 - 4096;
inline size_t shared_bytes_for(int ctas) { return 228 * 1024 / static_cast<size_t>(ctas) - 4096; }
inline size_t shared_bytes_against(int ctas) { return 228 * 1024 / static_cast<size_t>(ctas); }

template <typename... Parameters, typename... Arguments>
cudaError_t launch_kernel(const Launch&, const Shape& shape, void (*kernel)(Parameters...),
                          const Arguments&... arguments) {
  if (shape.shared_bytes > 232448) simt::fail("more shared memory than a CTA can have");
  simt::run_grid({shape.grid.x, shape.grid.y, shape.grid.z}, {shape.block.x, 1, 1},
                 static_cast<int>(shape.cluster), [&] { kernel(arguments...); });
  return cudaSuccess;
}

template <typename... Parameters, typename... Arguments>
cudaError_t launch_kernel(const Launch& launch, dim3 grid, dim3 block,
                          void (*kernel)(Parameters...), const Arguments&... arguments) {
  return launch_kernel(launch, Shape{grid, block}, kernel, arguments...);
}

}  // namespace flint::cuda
