// RMSNorm, with and without a residual, and the SiLU gate on the CPU. BF16 rows, dense. No torch.
#pragma once

#include <cstdint>

namespace flint::cpu {

// Of each row: s = x + residual (x alone where `residual` is null), in fp32;
// residual_out = round(s) (unless null); normed = round((s * rsqrt(mean(s^2) + eps)) * weight).
// x, residual, normed, residual_out [rows, width]; weight [width]. The outputs may be the inputs.
void rms_norm(const uint16_t* x, const uint16_t* residual, const uint16_t* weight, float eps,
              int64_t rows, int64_t width, uint16_t* normed, uint16_t* residual_out, int threads);

// act [rows, width] = round((g / (1 + exp(-g))) * u) of x [rows, 2 * width], gate first.
void silu_and_mul(const uint16_t* x, int64_t rows, int64_t width, uint16_t* act, int threads);

}  // namespace flint::cpu
