// NVFP4 weights times many tokens, on Hopper. No torch here.
#pragma once

namespace flint::cuda {

inline constexpr int kWeightColumns = 256;  // of a stage of NVFP4 weights

enum class ProductOutput : int {
  kRounded,        // round(scale * sum)
  kSiluOfRounded,  // gate rows, then up rows, both rounded: round((g / (1 + exp(-g))) * u)
  kSilu,           // gate and up in fp32: round(g * sigmoid(g) * u)
};

// Which tokens a tile has: rows [first, first + count) of x.
struct alignas(16) TokenTile {
  int expert, first, count;
  int gathered;  // a counter of product_gather.cuh, 0 before and after
};

}  // namespace flint::cuda
