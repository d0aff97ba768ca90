// Written by `python -m microbench.linear_plans --header` from the rows of
// docs/results/h200/linear_plans.json: what a product of many tokens costs by how it
// is cut, in nanoseconds. No torch here.
//
// There are no such rows yet: these were fitted to a run of a tree that was not committed.
#pragma once

namespace flint::cuda {

// Of tiles of so many tokens: a launch, each step of 256 columns of a CTA, each tile
// of a CTA but its first; and CTAs that share a tile's columns, once and for each.
struct LinearCosts {
  int tokens, start, step, tile, shared, share;
};

inline constexpr LinearCosts kLinearCosts[] = {
    {64, 4860, 1290, 1770, 500, 180},
    {128, 5980, 1580, 3720, 870, 130},
    {256, 7870, 2270, 6410, 1560, 60},
};

}  // namespace flint::cuda
