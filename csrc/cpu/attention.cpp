#include "cpu/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/clones.h"
#include "cpu/rows.h"

namespace flint::cpu {
namespace {

FLINT_CLONES float dot(const float* a, const uint16_t* b, int64_t count) {
  return lane_sum(count, [a, b](int64_t i) { return a[i] * bf16_to_float(b[i]); });
}

FLINT_CLONES void add_scaled(float* sum, float factor, const uint16_t* x, int64_t count) {
  for (int64_t i = 0; i < count; ++i) sum[i] += factor * bf16_to_float(x[i]);
}

}  // namespace

void attend(const Query& query, const Rows& k, const Rows& v, uint16_t* out) {
  const int64_t dim = query.head_dim, group = query.heads / query.kv_heads;
  const int64_t keys = query.last - query.first;
  if (keys <= 0) {
    std::fill_n(out, query.heads * dim, uint16_t{0});
    return;
  }
  std::vector<float> q(static_cast<size_t>(dim)), sum(static_cast<size_t>(dim));
  std::vector<float> p(static_cast<size_t>(keys));
  // Where the keys and values of a KV head lie: found once for all the query heads that share it.
  std::vector<const uint16_t*> k_rows(static_cast<size_t>(keys)), v_rows(k_rows.size());
  for (int64_t head = 0; head < query.heads; ++head) {
    if (head % group == 0) {
      for (int64_t j = 0; j < keys; ++j) {
        k_rows[j] = k.at(query.first + j, head / group);
        v_rows[j] = v.at(query.first + j, head / group);
      }
    }
    for (int64_t i = 0; i < dim; ++i) q[i] = bf16_to_float(query.q[head * dim + i]);
    float maximum = -std::numeric_limits<float>::infinity();
    for (int64_t j = 0; j < keys; ++j) {
      p[j] = dot(q.data(), k_rows[j], dim) * query.scale;
      maximum = std::max(maximum, p[j]);
    }
    std::fill(sum.begin(), sum.end(), 0.0f);
    for (int64_t j = 0; j < keys; ++j) {
      p[j] = std::exp(p[j] - maximum);
      // P is rounded before it is normalised; the row sum is made of the unrounded ones.
      add_scaled(sum.data(), round_to_bf16(p[j]), v_rows[j], dim);
    }
    float denominator = lane_sum(keys, [&p](int64_t j) { return p[j]; });
    if (query.sinks != nullptr) denominator += std::exp(query.sinks[head] - maximum);
    for (int64_t i = 0; i < dim; ++i) out[head * dim + i] = float_to_bf16(sum[i] / denominator);
  }
}

}  // namespace flint::cpu
