// The routed experts of many tokens with BF16 weights. No torch here.
#pragma once

#include "cuda/experts.h"

namespace flint::cuda {

// How many tokens a tile has at most.
int bf16_tile(const Routing& routing);

cudaError_t routed_experts_bf16(const RoutedExperts& in, const Launch& launch);

}  // namespace flint::cuda
