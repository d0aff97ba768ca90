// The products of experts that have a few tokens each. No torch here.
#pragma once

#include <cstdint>

#include "cuda/expert_order.h"
#include "cuda/experts.h"

namespace flint::cuda {

// Which plan: by how many tokens an expert has on average; its tiles are of so many at most.
enum class Thin : int { kNo, kSixteen, kThirtyTwo };

Thin thin_of(const Routing& routing);
int thin_tile(Thin thin);

// Whether the kernels take these sizes.
bool thin_fits(const RoutedExperts& in);

// x, in the order of tokens, into in.act; and in.entry_act, or in.act where there is none, into
// in.rows: both in the order of entries.
cudaError_t thin_gate_up(Thin thin, const RoutedExperts& in, const ExpertOrder& order,
                         const Launch& launch);
cudaError_t thin_down(Thin thin, const RoutedExperts& in, const ExpertOrder& order,
                      const Launch& launch);

}  // namespace flint::cuda
