// See simt.h.
#pragma once

#include "cuda/device.cuh"

namespace flint::cuda {

inline constexpr int kWarpgroup = 4 * kWarp;

template <int kRegisters>
void give_registers() {}

template <int kRegisters>
void take_registers() {}

}  // namespace flint::cuda
