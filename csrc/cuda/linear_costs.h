// Written by `python -m microbench.linear_plans --header` from docs/results/h200/linear_plans.json.
// What a product of many tokens costs by how its tiles are cut, in nanoseconds. No torch here.
#pragma once

namespace flint::cuda {

// Of a tile of so many tokens: a launch of one, each of its steps of 256 columns, each further tile
// of a CTA; and CTAs that share the columns of a tile, once and for each CTA.
struct LinearCosts {
  int tokens, start, step, tile, shared, share;
};

inline constexpr LinearCosts kLinearCosts[] = {
    {64, 4280, 1303, 1700, 1200, 200},
    {128, 5500, 1550, 2500, 1200, 200},
    {256, 6500, 2260, 3600, 2500, 300},
};

}  // namespace flint::cuda
