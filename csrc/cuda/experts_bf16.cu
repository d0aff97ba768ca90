// The routed experts of many tokens with BF16 weights.
#include "cuda/experts_bf16.h"
#include "cuda/experts_product.cuh"

namespace flint::cuda {
namespace {

// For experts of few tokens each, whose weights' bytes are what takes the time, and of many.
using Few = ProductPlan<WeightForm::kBf16, 64, 32, 1, 8, 8>;
using Many = ProductPlan<WeightForm::kBf16, 256, 32, 1, 4, 4>;

bool is_few(const Routing& routing) {
  return int64_t{routing.tokens} * routing.top_k <= int64_t{48} * routing.experts;
}

}  // namespace

int bf16_tile(const Routing& routing) { return is_few(routing) ? Few::kTokens : Many::kTokens; }

cudaError_t routed_experts_bf16(const RoutedExperts& in, const Launch& launch) {
  return is_few(in.routing) ? launch_steps<Few>(in, launch) : launch_steps<Many>(in, launch);
}

}  // namespace flint::cuda
