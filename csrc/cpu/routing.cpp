#include "cpu/routing.h"

#include <algorithm>
#include <functional>
#include <vector>

#include "cpu/rows.h"
#include "topk_key.h"

namespace flint::cpu {

void router_topk(const uint16_t* logits, int64_t rows, int64_t experts, int64_t top_k,
                 bool renormalize, float* weights, int32_t* ids) {
  std::vector<uint64_t> keys(static_cast<size_t>(experts));
  for (int64_t row = 0; row < rows; ++row) {
    const uint16_t* x = logits + row * experts;
    float* w = weights + row * top_k;
    for (int64_t e = 0; e < experts; ++e) {
      keys[e] = topk_key(bf16_to_float(x[e]), static_cast<uint32_t>(e));
    }
    std::partial_sort(keys.begin(), keys.begin() + top_k, keys.end(), std::greater<>());
    float sum = 0.0f;
    for (int64_t k = 0; k < top_k; ++k) {
      const uint32_t expert = topk_index(keys[k]);
      ids[row * top_k + k] = static_cast<int32_t>(expert);
      w[k] = sigmoid(bf16_to_float(x[expert]));
      sum += w[k];
    }
    for (int64_t k = 0; k < top_k; ++k) {
      w[k] = round_to_bf16(renormalize ? w[k] / (sum + 1e-20f) : w[k]);
    }
  }
}

void routed_act(const float* gate_up, int64_t rows, int64_t width, uint16_t* act) {
  for (int64_t row = 0; row < rows; ++row) {
    const float* gate = gate_up + row * 2 * width;
    for (int64_t i = 0; i < width; ++i) {
      act[row * width + i] = float_to_bf16(gate[i] * sigmoid(gate[i]) * gate[width + i]);
    }
  }
}

void combine(const uint16_t* y, const float* weights, const int32_t* ids, const uint16_t* shared,
             int64_t rows, int64_t top_k, int64_t experts, int64_t width, uint16_t* out) {
  std::vector<float> sum(static_cast<size_t>(width));
  for (int64_t row = 0; row < rows; ++row) {
    sum.assign(sum.size(), 0.0f);
    for (int64_t k = row * top_k; k < (row + 1) * top_k; ++k) {
      if (ids[k] < 0 || ids[k] >= experts) continue;
      for (int64_t i = 0; i < width; ++i) sum[i] += weights[k] * bf16_to_float(y[k * width + i]);
    }
    for (int64_t i = 0; i < width; ++i) {
      uint16_t routed = float_to_bf16(sum[i]);
      if (shared != nullptr) {
        routed = float_to_bf16(bf16_to_float(routed) + bf16_to_float(shared[row * width + i]));
      }
      out[row * width + i] = routed;
    }
  }
}

}  // namespace flint::cpu
