// The driver's function that makes tensor maps, and how it is found. See simt.h.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

using cudaDriverEntryPointQueryResult = int;
inline constexpr int cudaDriverEntryPointSuccess = 0, cudaEnableDefault = 0;
using PFN_cuTensorMapEncodeTiled_v12000 = int (*)(CUtensorMap*, int, uint32_t, void*,
                                                  const cuuint64_t*, const cuuint64_t*,
                                                  const cuuint32_t*, const cuuint32_t*, int, int,
                                                  int, int);

inline int emulated_encode(CUtensorMap* map, int, uint32_t rank, void* base,
                           const cuuint64_t* sizes, const cuuint64_t* steps, const cuuint32_t* box,
                           const cuuint32_t*, int, int swizzle, int, int) {
  if (rank != 5 || box[0] != 64 || box[1] != 16 || box[2] != 2 || box[3] != 1 || box[4] != 1 ||
      swizzle != CU_TENSOR_MAP_SWIZZLE_128B) {
    simt::fail("a tensor map of another kind");
  }
  map->base = static_cast<const char*>(base);
  std::copy(sizes, sizes + 5, map->sizes);
  map->steps[0] = 2;
  std::copy(steps, steps + 4, map->steps + 1);
  const bool fits = std::all_of(steps, steps + 4, [](cuuint64_t step) { return step % 16 == 0; });
  return fits ? CUDA_SUCCESS : 1;
}

inline int cudaGetDriverEntryPointByVersion(const char*, void** function, int, int, int* result) {
  *function = reinterpret_cast<void*>(emulated_encode);
  *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
