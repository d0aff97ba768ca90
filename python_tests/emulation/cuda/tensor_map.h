// See simt.h.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

namespace flint::cuda {

struct TensorInMemory {
  const void* elements;
  int64_t sizes[4];
  int64_t stride_bytes[3];
  int box[4];
};

inline cudaError_t describe(const TensorInMemory& tensor, CUtensorMap* map) {
  if (tensor.box[0] != 64 || reinterpret_cast<uintptr_t>(tensor.elements) % 16 != 0) {
    simt::fail("a tensor map of another kind");
  }
  map->base = static_cast<const char*>(tensor.elements);
  map->steps[0] = 2;
  for (int i = 0; i < 4; ++i) {
    map->sizes[i] = static_cast<uint64_t>(tensor.sizes[i]);
    map->box[i] = static_cast<uint32_t>(tensor.box[i]);
    if (i > 0) map->steps[i] = static_cast<uint64_t>(tensor.stride_bytes[i - 1]);
    if (i > 0 && tensor.sizes[i] > 1 && tensor.stride_bytes[i - 1] % 16 != 0) return 1;
  }
  return cudaSuccess;
}

}  // namespace flint::cuda
