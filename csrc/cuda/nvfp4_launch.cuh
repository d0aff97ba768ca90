// Launches a product of nvfp4_product.cuh.
#pragma once

#include <algorithm>

#include "cuda/nvfp4_product.cuh"
#include "cuda/tiles.h"

namespace flint::cuda {

// What a product reads: weights [weight_rows, width], x [x_rows, width] with rows x_stride elements
// apart.
struct ProductOperands {
  WeightMatrix weight;
  int64_t weight_rows;
  const void* x;
  int64_t x_rows, x_stride;
  int width;
};

// Whether the copies of a product can read it, and its results be written in pieces of 16 bytes.
inline bool product_fits(const ProductOperands& in, const void* out, int64_t features) {
  const auto aligned = [](const void* pointer) {
    return reinterpret_cast<uint64_t>(pointer) % 16 == 0;
  };
  constexpr int64_t kMost = int64_t{1} << 30;
  return in.weight.scales != nullptr && in.width > 0 && in.width % kWeightColumns == 0 &&
         0 < features && features % 8 == 0 && 0 < in.weight_rows && in.weight_rows < kMost &&
         0 < in.x_rows && in.x_rows < kMost && in.x_stride >= in.width && in.x_stride < kMost &&
         in.x_stride % 8 == 0 && aligned(in.weight.elements) && aligned(in.weight.scales) &&
         aligned(in.x) && aligned(out);
}

inline cudaError_t describe_operands(const ProductOperands& in, int box, ProductJob* job) {
  const int64_t width = in.width;
  const MatrixInMemory codes{in.weight.elements, CU_TENSOR_MAP_DATA_TYPE_UINT8,
                             in.weight_rows,     width / 2,
                             width / 2,          kHalfRows,
                             kWeightColumns / 2, true};
  const MatrixInMemory scales{
      in.weight.scales, CU_TENSOR_MAP_DATA_TYPE_UINT8, in.weight_rows, width / 16, width / 16,
      kHalfRows,        kWeightColumns / 16,           false};
  const MatrixInMemory x{in.x,
                         CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                         in.x_rows,
                         width,
                         in.x_rows > 1 ? in.x_stride * 2 : width * 2,
                         box,
                         kXColumns,
                         true};
  if (const auto error = describe(codes, &job->codes); error != cudaSuccess) return error;
  if (const auto error = describe(scales, &job->scales); error != cudaSuccess) return error;
  return describe(x, &job->x);
}

inline int row_pairs(int features, bool gated) {
  return static_cast<int>(ceil_div(features, kCluster * (gated ? kHalfRows : kRowTile)));
}

// `tiles`: the most pairs of tiles that there can be.
template <typename Plan>
cudaError_t launch_product(void (*kernel)(ProductJob), const ProductOperands& in, ProductJob* job,
                           int64_t tiles, const Launch& launch) {
  if (const auto error = describe_operands(in, Plan::kBox, job); error != cudaSuccess) return error;
  const int64_t room = int64_t{multiprocessors()} * Plan::kCtas / kCluster;
  const auto clusters = static_cast<unsigned>(std::max<int64_t>(1, std::min(tiles, room)));
  const Shape shape{dim3(clusters * kCluster), dim3(Plan::kThreads), Plan::kSharedBytes, kCluster};
  return launch_kernel(launch, shape, kernel, *job);
}

}  // namespace flint::cuda
