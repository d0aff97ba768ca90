// Rows of NVFP4 times one row of activations, without writing the expanded rows. No torch here.
#pragma once

#include <cstdint>

#include "cpu/lanes.h"

namespace flint::cpu {

// Whether this CPU has `nvfp4_dot`: 512-bit vectors look 16 codes up at once.
bool has_nvfp4_dot();

// sums[r] = row r of [rows, blocks] blocks of codes, each times its scale, times x [blocks]; the
// sum has the bits of the one over the expanded row.
void nvfp4_dot(const uint8_t* codes, const uint8_t* scales, int64_t rows, const Block* x,
               int64_t blocks, float* sums);

}  // namespace flint::cpu
