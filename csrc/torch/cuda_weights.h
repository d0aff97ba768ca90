// Weights and routing as the kernels take them.
#pragma once

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

inline cuda::Routing routing_of(const CudaCall& call, const Tensor& ids, int64_t experts) {
  call.check_dense(ids, "topk_ids", ScalarType::Int, ids.numel());
  return {data<int32_t>(ids), static_cast<int>(ids.size(0)), static_cast<int>(ids.size(1)),
          static_cast<int>(experts)};
}

}  // namespace flint
