// Descriptions of matrices for the tensor memory accelerator (TMA), made on the host. No torch
// here.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace flint::cuda {

// A row-major matrix, read in boxes of `box_rows` x `box_columns` elements; elements outside read
// as zero. `swizzled`: a row of a box is 128 bytes, and chunk c (16 bytes) of row r lies in shared
// memory where chunk c ^ (r % 8) would.
struct MatrixInMemory {
  const void* elements;
  CUtensorMapDataType type;
  int64_t rows, columns;
  int64_t stride_bytes;  // from row to row, a multiple of 16
  int box_rows, box_columns;
  bool swizzled;
};

// The driver's function is looked up at run time: the library loads where there is no driver.
inline auto find_tensor_map_encoder() {
  using Encoder =
      CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                   const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                   CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  void* found = nullptr;
  cudaDriverEntryPointQueryResult state{};
  const auto error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                                      cudaEnableDefault, &state);
  const bool usable = error == cudaSuccess && state == cudaDriverEntryPointSuccess;
  return usable ? reinterpret_cast<Encoder>(found) : nullptr;
}

inline cudaError_t describe(const MatrixInMemory& matrix, CUtensorMap* map) {
  static const auto encode = find_tensor_map_encoder();
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint64_t size[] = {static_cast<cuuint64_t>(matrix.columns),
                             static_cast<cuuint64_t>(matrix.rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(matrix.stride_bytes)};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(matrix.box_columns),
                            static_cast<cuuint32_t>(matrix.box_rows)};
  const cuuint32_t steps[] = {1, 1};
  const CUresult result =
      encode(map, matrix.type, 2, const_cast<void*>(matrix.elements), size, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE,
             matrix.swizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// A tensor of BF16 with four dimensions, the innermost first and contiguous, read in boxes whose
// innermost dimension is 64 elements; swizzled as above, elements outside read as zero. The stride
// of a dimension of one is never used.
struct TensorInMemory {
  const void* elements;
  int64_t sizes[4];
  int64_t stride_bytes[3];  // of the outer three, multiples of 16
  int box[4];
};

inline cudaError_t describe(const TensorInMemory& tensor, CUtensorMap* map) {
  static const auto encode = find_tensor_map_encoder();
  if (encode == nullptr) return cudaErrorNotSupported;
  cuuint64_t sizes[4], strides[3];
  cuuint32_t box[4];
  const cuuint32_t steps[] = {1, 1, 1, 1};
  for (int i = 0; i < 4; ++i) {
    sizes[i] = static_cast<cuuint64_t>(tensor.sizes[i]);
    box[i] = static_cast<cuuint32_t>(tensor.box[i]);
    if (i > 0) {
      strides[i - 1] =
          static_cast<cuuint64_t>(tensor.sizes[i] > 1 ? tensor.stride_bytes[i - 1] : 16);
    }
  }
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<void*>(tensor.elements), sizes,
             strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// A row-major matrix of bytes with rows of `columns`, a multiple of 128, read in boxes of
// `box_rows` whole rows: of which the first 128 columns come first, row behind row and with chunks
// exchanged as above, then the next 128.
struct RowsInMemory {
  const void* bytes;
  int64_t rows, columns;
  int box_rows;  // up to 256; columns up to 128 * 256
};

inline cudaError_t describe(const RowsInMemory& matrix, CUtensorMap* map) {
  static const auto encode = find_tensor_map_encoder();
  if (encode == nullptr) return cudaErrorNotSupported;
  constexpr int kAcross = 128;
  const auto blocks = static_cast<cuuint32_t>(matrix.columns / kAcross);
  const cuuint64_t size[] = {kAcross, static_cast<cuuint64_t>(matrix.rows), blocks};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(matrix.columns), kAcross};
  const cuuint32_t box[] = {kAcross, static_cast<cuuint32_t>(matrix.box_rows), blocks};
  const cuuint32_t steps[] = {1, 1, 1};
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, const_cast<void*>(matrix.bytes), size, strides,
             box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace flint::cuda
