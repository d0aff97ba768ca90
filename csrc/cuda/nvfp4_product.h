// NVFP4 weights times many tokens, on Hopper. No torch here.
#pragma once

#include <cstdint>

#include "cuda/launch.h"
#include "cuda/linear.h"

namespace flint::cuda {

enum class ProductOutput : int {
  kRounded,        // round(scale * sum)
  kSiluOfRounded,  // gate rows, then up rows, both rounded: round((g / (1 + exp(-g))) * u)
  kSilu,           // gate and up in fp32: round(g * sigmoid(g) * u)
};

}  // namespace flint::cuda
