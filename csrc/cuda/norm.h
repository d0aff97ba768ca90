// RMSNorm, with and without a residual, and the SiLU gate on the GPU. No torch here.
//
// Rows may lie any stride apart; their elements are contiguous. BF16, or FP32 with an FP32 weight
// (then nothing is rounded). Any width, any alignment, any number of rows, 0 among them.
#pragma once

#include <cstdint>

#include "cuda/launch.h"

namespace flint::cuda {

// How rows of 2,048 elements are spread over threads; the bits are the same. For measuring, the
// choice can be made by hand.
enum class RmsNormPlan : int { kAutomatic = 0, kCta256 = 1, kCta128 = 2 };

// s = x + residual (x alone where `residual` is null), in fp32; residual_out = round(s);
// normed = round((s * rsqrt(mean(s^2) + eps)) * weight). The outputs are dense and may be the
// inputs. A row's bits depend on the row alone: not on how many rows there are, nor on alignment.
struct RmsNorm {
  const void* x;         // [rows, width], x_stride elements apart
  const void* residual;  // [rows, width], or null
  const void* weight;    // [width]
  void* normed;          // [rows, width]
  void* residual_out;    // [rows, width], null where `residual` is
  int64_t x_stride, residual_stride;
  int64_t rows, width;
  float eps;
  bool bf16;  // else FP32
  RmsNormPlan plan = RmsNormPlan::kAutomatic;
  float inverse_width = 0.0f;  // for the kernels; rms_norm sets it
};

cudaError_t rms_norm(const RmsNorm& norm, const Launch& launch);

// act = round((g / (1 + exp(-g))) * u) of x = [gate | up].
struct SiluAndMul {
  const void* x;  // [rows, 2 * width], x_stride elements apart
  void* act;      // [rows, width], dense
  int64_t x_stride;
  int64_t rows, width;
  bool bf16;  // else FP32
};

cudaError_t silu_and_mul(const SiluAndMul& silu, const Launch& launch);

}  // namespace flint::cuda
