// Launches a product of product.cuh.
#pragma once

#include <algorithm>

#include "cuda/launch.cuh"
#include "cuda/product.cuh"
#include "cuda/tensor_map.h"
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
  const int columns = in.weight.scales != nullptr ? kWeightColumns : kXColumns;
  return in.width > 0 && in.width % columns == 0 && 0 < features && features % 8 == 0 &&
         0 < in.weight_rows && in.weight_rows < kMost && 0 < in.x_rows && in.x_rows < kMost &&
         in.x_stride >= in.width && in.x_stride < kMost && in.x_stride % 8 == 0 &&
         aligned(in.weight.elements) && aligned(in.weight.scales) && aligned(in.x) && aligned(out);
}

// Codes and scales, in boxes of the rows of a warpgroup.
inline cudaError_t describe_nvfp4(const ProductOperands& in, ProductJob* job) {
  const int64_t width = in.width;
  const MatrixInMemory codes{in.weight.elements, CU_TENSOR_MAP_DATA_TYPE_UINT8,
                             in.weight_rows,     width / 2,
                             width / 2,          kHalfRows,
                             kWeightColumns / 2, true};
  const MatrixInMemory scales{
      in.weight.scales, CU_TENSOR_MAP_DATA_TYPE_UINT8, in.weight_rows, width / 16, width / 16,
      kHalfRows,        kWeightColumns / 16,           false};
  if (const auto error = describe(codes, &job->weights); error != cudaSuccess) return error;
  return describe(scales, &job->scales);
}

// In boxes of a tile's 128 rows, eight by eight; with a gate, eight gate rows and the eight up rows
// that go with them, in turns.
inline cudaError_t describe_bf16(const ProductOperands& in, bool gated, ProductJob* job) {
  const int64_t row = int64_t{in.width} * 2;
  const int64_t last_up = gated ? job->features : 0;  // up rows of the last expert
  const int parts = gated ? 2 : 1;
  const TensorInMemory weights{in.weight.elements,
                               {in.width, 8, parts, (in.weight_rows - last_up) / 8},
                               {row, job->features * row, 8 * row},
                               {kXColumns, 8, parts, kRowTile / 8 / parts}};
  return describe(weights, &job->weights);
}

inline cudaError_t describe_x(const ProductOperands& in, int box, ProductJob* job) {
  const int64_t width = in.width, stride = in.x_rows > 1 ? in.x_stride * 2 : width * 2;
  const MatrixInMemory x{
      in.x, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, in.x_rows, width, stride, box, kXColumns, true};
  return describe(x, &job->x);
}

template <typename Plan>
int row_tiles(int features, bool gated) {
  return static_cast<int>(
      ceil_div(features, (Plan::kSplit ? 1 : kCluster) * (gated ? kHalfRows : kRowTile)));
}

// `tiles`: the most that there can be, of a cluster. `shares`: CTAs that share the columns of one.
template <typename Plan, ProductOutput kOutput>
cudaError_t launch_product(void (*kernel)(ProductJob), const ProductOperands& in, ProductJob* job,
                           int64_t tiles, const Launch& launch, int shares = 1) {
  constexpr bool kGated = kOutput != ProductOutput::kRounded;
  auto error = Plan::kBf16 ? describe_bf16(in, kGated, job) : describe_nvfp4(in, job);
  if (error != cudaSuccess) return error;
  error = describe_x(in, Plan::kBox, job);
  if (error != cudaSuccess) return error;
  const unsigned cluster = Plan::kSplit ? shares : kCluster;
  const int64_t room = Plan::kSplit ? tiles : int64_t{multiprocessors()} * Plan::kCtas / kCluster;
  const auto clusters = static_cast<unsigned>(std::max<int64_t>(1, std::min(tiles, room)));
  const Shape shape{dim3(clusters * cluster), dim3(Plan::kThreads), Plan::kSharedBytes, cluster};
  return launch_kernel(launch, shape, kernel, *job);
}

}  // namespace flint::cuda
