// Tensor maps of the driver. See simt.h.
#pragma once

#include <cstdint>

struct alignas(64) CUtensorMap {
  const char* base;
  uint64_t sizes[5], steps[5];
  uint32_t box[5];
};
using cuuint64_t = uint64_t;
using cuuint32_t = uint32_t;
enum {
  CUDA_SUCCESS = 0,
  CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
  CU_TENSOR_MAP_INTERLEAVE_NONE,
  CU_TENSOR_MAP_SWIZZLE_128B,
  CU_TENSOR_MAP_L2_PROMOTION_NONE,
  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
};
