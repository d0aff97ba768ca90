#include "cpu/norm.h"

#include <atomic>
#include <cmath>
#include <vector>

#include "cpu/parallel.h"
#include "cpu/rows.h"

namespace flint::cpu {
namespace {

// Elements that are worth a thread.
constexpr int64_t kGrain = int64_t{1} << 18;

int64_t rows_a_thread(int64_t width) { return kGrain / (width + 1) + 1; }

}  // namespace

void rms_norm(const uint16_t* x, const uint16_t* residual, const uint16_t* weight, float eps,
              int64_t rows, int64_t width, uint16_t* normed, uint16_t* residual_out, int threads) {
  if (width == 0) return;
  const auto count = static_cast<size_t>(width);
  std::vector<float> scratch(count * static_cast<size_t>(threads < 1 ? 1 : threads));
  std::atomic<int> worker{0};
  parallel_for(rows, rows_a_thread(width), threads, [&](int64_t begin, int64_t end) {
    float* sum = scratch.data() + count * static_cast<size_t>(worker.fetch_add(1));
    for (int64_t row = begin; row < end; ++row) {
      const int64_t at = row * width;
      for (int64_t i = 0; i < width; ++i) sum[i] = bf16_to_float(x[at + i]);
      if (residual != nullptr) {
        for (int64_t i = 0; i < width; ++i) sum[i] += bf16_to_float(residual[at + i]);
      }
      const float scale = inverse_rms(sum, width, eps);
      for (int64_t i = 0; i < width; ++i) {
        // The norm sees the sum as it is, not the rounded residual.
        normed[at + i] = float_to_bf16(sum[i] * scale * bf16_to_float(weight[i]));
        if (residual_out != nullptr) residual_out[at + i] = float_to_bf16(sum[i]);
      }
    }
  });
}

void silu_and_mul(const uint16_t* x, int64_t rows, int64_t width, uint16_t* act, int threads) {
  parallel_for(rows, rows_a_thread(8 * width), threads, [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const uint16_t* gate = x + row * 2 * width;
      for (int64_t i = 0; i < width; ++i) {
        const float g = bf16_to_float(gate[i]);
        const float u = bf16_to_float(gate[width + i]);
        act[row * width + i] = float_to_bf16(g / (1.0f + std::exp(-g)) * u);
      }
    }
  });
}

}  // namespace flint::cpu
