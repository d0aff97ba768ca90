// The products of experts that have a few tokens each, with NVFP4 weights. No torch here.
#pragma once

#include "cuda/expert_order.h"
#include "cuda/experts.h"

namespace flint::cuda {

// How many tokens a tile has at most, which is how wide the product is. What is best follows from
// how many entries an expert has on average.
inline constexpr int kThinStep = 8;
int thin_tile(const Routing& routing);  // 0: these kernels are not the best

// Whether they take these widths.
bool thin_fits(const RoutedExperts& in);

// `tile` is that of `order`. x, in the order of tokens, into in.act; and in.entry_act, or in.act
// where there is none, into in.rows: both in the order of entries.
cudaError_t thin_gate_up(int tile, const RoutedExperts& in, const ExpertOrder& order,
                         const Launch& launch);
cudaError_t thin_down(int tile, const RoutedExperts& in, const ExpertOrder& order,
                      const Launch& launch);

}  // namespace flint::cuda
