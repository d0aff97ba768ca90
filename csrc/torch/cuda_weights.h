// Weights and routing as the kernels take them.
#pragma once

#include <algorithm>
#include <array>

#include "cuda/experts.h"
#include "cuda/linear.h"
#include "torch/cuda_binding.h"

namespace flint {

inline bool dense(const Tensor& tensor, ScalarType type) {
  return tensor.scalar_type() == type && tensor.is_contiguous();
}

// Weights, NVFP4 where there are scales and else BF16, and whether a kernel can read them.
struct Weights {
  cuda::WeightMatrix matrix{};
  const float* scale_2 = nullptr;
  int64_t scales = 1;  // how many global ones
  bool readable = false;

  Weights(const CudaCall& call, const Tensor& weight, const std::optional<Tensor>& scale,
          const std::optional<Tensor>& scale_2) {
    call.check_on(weight, "weight");
    if (!scale.has_value()) {
      readable = dense(weight, ScalarType::BFloat16);
      matrix = {data<void>(weight), nullptr};
      return;
    }
    call.check_on(*scale, "weight_scale");
    call.check_on(*scale_2, "weight_scale_2");
    readable = dense(weight, ScalarType::Byte) && dense(*scale, ScalarType::Float8_e4m3fn) &&
               dense(*scale_2, ScalarType::Float);
    matrix = {data<void>(weight), data<void>(*scale)};
    this->scale_2 = data<float>(*scale_2);
    scales = scale_2->numel();
  }
};

// All but the output's buffer. `sizes`: of the first shards; `output`: a cuda::LinearOutput.
inline cuda::Linear linear_of(const Weights& weights, const Tensor& x, int64_t rows,
                              const std::array<int64_t, cuda::kMostShards>& sizes, int64_t output) {
  cuda::Linear in{};
  in.weight = weights.matrix;
  in.scale_2 = weights.scale_2;
  in.shards = static_cast<int>(weights.scales);
  for (int i = 0; i < cuda::kMostShards; ++i) {
    in.shard_end[i] = sizes[i] + (i > 0 ? in.shard_end[i - 1] : 0);
  }
  in.x = data<void>(x);
  in.x_stride = row_stride(x);
  in.rows = rows;
  in.tokens = static_cast<int>(x.size(0));
  in.width = static_cast<int>(std::min<int64_t>(x.size(1), 1 << 30));
  in.output = static_cast<cuda::LinearOutput>(output);
  return in;
}

inline cuda::Routing routing_of(const CudaCall& call, const Tensor& ids, int64_t experts) {
  call.check_dense(ids, "topk_ids", ScalarType::Int, ids.numel());
  return {data<int32_t>(ids), static_cast<int>(ids.size(0)), static_cast<int>(ids.size(1)),
          static_cast<int>(experts)};
}

}  // namespace flint
