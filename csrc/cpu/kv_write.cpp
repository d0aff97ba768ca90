#include "cpu/kv_write.h"

#include <algorithm>
#include <vector>

#include "cpu/rows.h"

namespace flint::cpu {
namespace {

// One head: norm, round, turn (unless `cos_sin` is null), round. `scratch` [dim].
void head(const uint16_t* x, const uint16_t* weight, const float* cos_sin, int64_t dim, float eps,
          float* scratch, uint16_t* out) {
  for (int64_t i = 0; i < dim; ++i) scratch[i] = bf16_to_float(x[i]);
  const float scale = inverse_rms(scratch, dim, eps);
  for (int64_t i = 0; i < dim; ++i) {
    out[i] = float_to_bf16(scratch[i] * scale * bf16_to_float(weight[i]));
  }
  if (cos_sin == nullptr) return;
  const int64_t half = dim / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float first = bf16_to_float(out[i]), second = bf16_to_float(out[half + i]);
    const float cos = cos_sin[i], sin = cos_sin[half + i];
    out[i] = float_to_bf16(first * cos - second * sin);
    out[half + i] = float_to_bf16(second * cos + first * sin);
  }
}

}  // namespace

void qk_norm_rope_kv_write(const QkNormRope& in, const KvCache& cache, uint16_t* q, uint16_t* k) {
  const int64_t dim = cache.head_dim, heads = in.query_heads, kv_heads = cache.kv_heads;
  std::vector<float> scratch(static_cast<size_t>(dim));
  for (int64_t row = 0; row < in.rows; ++row) {
    const uint16_t* x = in.qkv + row * (heads + 2 * kv_heads) * dim;
    uint16_t* q_row = q + row * heads * dim;
    uint16_t* k_row = k + row * kv_heads * dim;
    const float* table = nullptr;
    if (in.cos_sin != nullptr) {
      const int64_t position = in.positions[row];
      if (position < 0 || position >= in.table_rows) {
        // Only a row without a slot comes here with such a position: it is padding.
        std::fill_n(q_row, heads * dim, uint16_t{0});
        std::fill_n(k_row, kv_heads * dim, uint16_t{0});
        continue;
      }
      table = in.cos_sin + position * dim;
    }
    for (int64_t h = 0; h < heads; ++h) {
      head(x + h * dim, in.q_weight, table, dim, in.eps, scratch.data(), q_row + h * dim);
    }
    for (int64_t h = 0; h < kv_heads; ++h) {
      head(x + (heads + h) * dim, in.k_weight, table, dim, in.eps, scratch.data(), k_row + h * dim);
    }
    const int64_t slot = row < in.slot_count ? in.slots[row] : -1;
    for (int64_t h = 0; h < kv_heads && slot >= 0; ++h) {
      std::copy_n(k_row + h * dim, dim,
                  cache.k + slot_offset(cache.k_strides, cache.page_size, slot, h));
      std::copy_n(x + (heads + kv_heads + h) * dim, dim,
                  cache.v + slot_offset(cache.v_strides, cache.page_size, slot, h));
    }
  }
}

}  // namespace flint::cpu
