// Binds the CPU's BF16 row kernels to torch as ops of the private namespace `flint_native`.
#include <algorithm>
#include <vector>

#include "cpu/attention.h"
#include "cpu/kv_write.h"
#include "cpu/norm.h"
#include "cpu/parallel.h"
#include "cpu/routing.h"
#include "torch/binding.h"

namespace flint {
namespace {

constexpr auto kBf16 = ScalarType::BFloat16;

void rms_norm_out(const Tensor& x, std::optional<Tensor> residual, const Tensor& weight, double eps,
                  Tensor normed, std::optional<Tensor> residual_out, int64_t threads) {
  const int64_t width = weight.numel(), rows = width == 0 ? 0 : x.numel() / width;
  check(x, "x", kBf16, rows * width);
  check(weight, "weight", kBf16, width);
  check(normed, "normed", kBf16, rows * width);
  if (residual.has_value()) check(*residual, "residual", kBf16, rows * width);
  if (residual_out.has_value()) check(*residual_out, "residual_out", kBf16, rows * width);
  cpu::rms_norm(data<uint16_t>(x), data_or_null<uint16_t>(residual), data<uint16_t>(weight),
                static_cast<float>(eps), rows, width, mutable_data<uint16_t>(normed),
                residual_out.has_value() ? mutable_data<uint16_t>(*residual_out) : nullptr,
                static_cast<int>(threads));
}

void silu_and_mul_out(const Tensor& x, Tensor act, int64_t threads) {
  const int64_t width = act.size(act.dim() - 1), rows = width == 0 ? 0 : act.numel() / width;
  check(x, "x", kBf16, rows * 2 * width);
  check(act, "act", kBf16, rows * width);
  cpu::silu_and_mul(data<uint16_t>(x), rows, width, mutable_data<uint16_t>(act),
                    static_cast<int>(threads));
}

void check_cache(const Tensor& cache, const char* name) {
  check_type(cache, name, kBf16);
  STD_TORCH_CHECK(cache.dim() == 4 && (cache.stride(3) == 1 || cache.size(3) <= 1), name,
                  ": want [blocks, page_size, kv_heads, head_dim] with a last stride of 1");
}

PageStrides page_strides(const Tensor& cache) {
  return {cache.stride(0), cache.stride(1), cache.stride(2)};
}

void qk_norm_rope_kv_write_out(const Tensor& qkv, const Tensor& q_weight, const Tensor& k_weight,
                               std::optional<Tensor> cos_sin, const Tensor& positions,
                               const Tensor& slots, Tensor k_cache, Tensor v_cache, double eps,
                               Tensor q, Tensor k) {
  check_cache(k_cache, "k_cache");
  check_cache(v_cache, "v_cache");
  const int64_t dim = k_cache.size(3), kv_heads = k_cache.size(2), rows = qkv.size(0);
  const int64_t heads = qkv.size(1) / dim - 2 * kv_heads;
  check(qkv, "qkv", kBf16, rows * (heads + 2 * kv_heads) * dim);
  check(q_weight, "q_weight", kBf16, dim);
  check(k_weight, "k_weight", kBf16, dim);
  check(positions, "positions", ScalarType::Long, rows);
  check(slots, "slot_mapping", ScalarType::Long, slots.numel());
  check(q, "q", kBf16, rows * heads * dim);
  check(k, "k", kBf16, rows * kv_heads * dim);
  if (cos_sin.has_value()) check(*cos_sin, "cos_sin", ScalarType::Float, cos_sin->size(0) * dim);
  const cpu::QkNormRope in{data<uint16_t>(qkv),
                           rows,
                           heads,
                           data<uint16_t>(q_weight),
                           data<uint16_t>(k_weight),
                           data_or_null<float>(cos_sin),
                           cos_sin.has_value() ? cos_sin->size(0) : 0,
                           data<int64_t>(positions),
                           data<int64_t>(slots),
                           slots.numel(),
                           static_cast<float>(eps)};
  const cpu::KvCache cache{mutable_data<uint16_t>(k_cache),
                           mutable_data<uint16_t>(v_cache),
                           page_strides(k_cache),
                           page_strides(v_cache),
                           k_cache.size(1),
                           kv_heads,
                           dim};
  cpu::qk_norm_rope_kv_write(in, cache, mutable_data<uint16_t>(q), mutable_data<uint16_t>(k));
}

// One call serves decode and prefill. With a chunk (prefill), request b has the query rows
// bounds[b] ... bounds[b + 1] - 1, and each sees `context[b]` paged positions, then the chunk's
// rows up to its own. Without one (decode), row b sees `context[b]` paged positions, its own the
// last.
void attention_out(const Tensor& q, std::optional<Tensor> chunk_k, std::optional<Tensor> chunk_v,
                   std::optional<Tensor> k_cache, std::optional<Tensor> v_cache,
                   std::optional<Tensor> table, std::optional<Tensor> context,
                   std::optional<Tensor> bounds, std::optional<Tensor> sinks, int64_t window,
                   double scale, Tensor out, int64_t threads) {
  const int64_t rows = q.size(0), heads = q.size(1), dim = q.size(2);
  check(q, "q", kBf16, rows * heads * dim);
  check(out, "out", kBf16, rows * heads * dim);
  if (sinks.has_value()) check(*sinks, "sinks", ScalarType::Float, heads);
  const bool prefill = chunk_k.has_value();
  const int64_t requests = prefill ? bounds->numel() - 1 : rows;
  if (requests <= 0 || rows == 0) return;

  cpu::Rows k{}, v{};
  int64_t kv_heads = 0, width = 0;
  if (k_cache.has_value()) {
    check_cache(*k_cache, "k_cache");
    check_cache(*v_cache, "v_cache");
    check(*table, "block_table", ScalarType::Int, table->numel());
    check(*context, "context_lens", ScalarType::Int, requests);
    width = table->numel() / requests;
    kv_heads = k_cache->size(2);
    k.pages = data<uint16_t>(*k_cache);
    v.pages = data<uint16_t>(*v_cache);
    k.strides = page_strides(*k_cache);
    v.strides = page_strides(*v_cache);
    k.page_size = v.page_size = k_cache->size(1);
  }
  if (prefill) {
    check(*bounds, "cu_seqlens", ScalarType::Int, requests + 1);
    check_type(*chunk_k, "k", kBf16);
    check_type(*chunk_v, "v", kBf16);
    STD_TORCH_CHECK(chunk_k->stride(2) == 1 && chunk_v->stride(2) == 1,
                    "k, v: want a last stride of 1");
    kv_heads = chunk_k->size(1);
    k.chunk_row_stride = chunk_k->stride(0);
    k.chunk_head_stride = chunk_k->stride(1);
    v.chunk_row_stride = chunk_v->stride(0);
    v.chunk_head_stride = chunk_v->stride(1);
  }

  const auto* tables = data_or_null<int32_t>(table);
  const auto* contexts = data_or_null<int32_t>(context);
  const auto* starts = data_or_null<int32_t>(bounds);
  // The request of each row, so that threads can share rows and not whole requests.
  std::vector<int32_t> request_of(static_cast<size_t>(rows));
  int64_t work = 1;
  for (int64_t b = 0; b < requests; ++b) {
    const int64_t begin = prefill ? starts[b] : b, end = prefill ? starts[b + 1] : b + 1;
    for (int64_t row = begin; row < end; ++row) {
      request_of[static_cast<size_t>(row)] = static_cast<int32_t>(b);
    }
    const int64_t length = (contexts == nullptr ? 0 : contexts[b]) + (prefill ? end - begin : 0);
    const int64_t seen = window > 0 && window < length ? window : length;
    work = std::max(work, seen * heads * dim);
  }
  const int64_t grain = (int64_t{1} << 21) / work + 1;
  cpu::parallel_for(rows, grain, static_cast<int>(threads), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const int64_t b = request_of[static_cast<size_t>(row)];
      cpu::Rows my_k = k, my_v = v;
      my_k.context = my_v.context = contexts == nullptr ? 0 : contexts[b];
      my_k.table = my_v.table = tables == nullptr ? nullptr : tables + b * width;
      int64_t keys = my_k.context;
      if (prefill) {
        my_k.chunk = data<uint16_t>(*chunk_k) + starts[b] * k.chunk_row_stride;
        my_v.chunk = data<uint16_t>(*chunk_v) + starts[b] * v.chunk_row_stride;
        keys += row - starts[b] + 1;
      }
      const cpu::Query query{data<uint16_t>(q) + row * heads * dim,
                             data_or_null<float>(sinks),
                             window > 0 && window < keys ? keys - window : 0,
                             keys,
                             heads,
                             kv_heads,
                             dim,
                             static_cast<float>(scale)};
      cpu::attend(query, my_k, my_v, mutable_data<uint16_t>(out) + row * heads * dim);
    }
  });
}

void router_topk_out(const Tensor& logits, int64_t top_k, bool renormalize, Tensor weights,
                     Tensor ids) {
  const int64_t rows = logits.size(0), experts = logits.size(1);
  check(logits, "logits", kBf16, rows * experts);
  check(weights, "topk_weights", ScalarType::Float, rows * top_k);
  check(ids, "topk_ids", ScalarType::Int, rows * top_k);
  STD_TORCH_CHECK(top_k <= experts, "top_k: got ", top_k, ", want at most ", experts);
  cpu::router_topk(data<uint16_t>(logits), rows, experts, top_k, renormalize,
                   mutable_data<float>(weights), mutable_data<int32_t>(ids));
}

void routed_act_out(const Tensor& gate_up, Tensor act) {
  const int64_t width = act.size(act.dim() - 1), rows = width == 0 ? 0 : act.numel() / width;
  check(gate_up, "gate_up", ScalarType::Float, rows * 2 * width);
  check(act, "act", kBf16, rows * width);
  cpu::routed_act(data<float>(gate_up), rows, width, mutable_data<uint16_t>(act));
}

void combine_out(const Tensor& y, const Tensor& weights, const Tensor& ids,
                 std::optional<Tensor> shared, int64_t experts, Tensor out) {
  const int64_t rows = out.size(0), width = out.size(1), top_k = ids.size(1);
  check(y, "y", kBf16, rows * top_k * width);
  check(weights, "topk_weights", ScalarType::Float, rows * top_k);
  check(ids, "topk_ids", ScalarType::Int, rows * top_k);
  check(out, "out", kBf16, rows * width);
  if (shared.has_value()) check(*shared, "shared", kBf16, rows * width);
  cpu::combine(data<uint16_t>(y), data<float>(weights), data<int32_t>(ids),
               data_or_null<uint16_t>(shared), rows, top_k, experts, width,
               mutable_data<uint16_t>(out));
}

}  // namespace
}  // namespace flint

STABLE_TORCH_LIBRARY_FRAGMENT(flint_native, m) {
  m.def(
      "rms_norm_out(Tensor x, Tensor? residual, Tensor weight, float eps, Tensor(a!) normed, "
      "Tensor(b!)? residual_out, int num_threads) -> ()");
  m.def("silu_and_mul_out(Tensor x, Tensor(a!) act, int num_threads) -> ()");
  m.def(
      "qk_norm_rope_kv_write_out(Tensor qkv, Tensor q_weight, Tensor k_weight, Tensor? cos_sin, "
      "Tensor positions, Tensor slot_mapping, Tensor(a!) k_cache, Tensor(b!) v_cache, float eps, "
      "Tensor(c!) q, Tensor(d!) k) -> ()");
  m.def(
      "attention_out(Tensor q, Tensor? chunk_k, Tensor? chunk_v, Tensor? k_cache, Tensor? v_cache, "
      "Tensor? block_table, Tensor? context_lens, Tensor? cu_seqlens, Tensor? sinks, int window, "
      "float scale, Tensor(a!) out, int num_threads) -> ()");
  m.def(
      "router_topk_out(Tensor logits, int top_k, bool renormalize, Tensor(a!) topk_weights, "
      "Tensor(b!) topk_ids) -> ()");
  m.def("routed_act_out(Tensor gate_up, Tensor(a!) act) -> ()");
  m.def(
      "combine_out(Tensor y, Tensor topk_weights, Tensor topk_ids, Tensor? shared, int experts, "
      "Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(flint_native, CPU, m) {
  m.impl("rms_norm_out", TORCH_BOX(&flint::rms_norm_out));
  m.impl("silu_and_mul_out", TORCH_BOX(&flint::silu_and_mul_out));
  m.impl("qk_norm_rope_kv_write_out", TORCH_BOX(&flint::qk_norm_rope_kv_write_out));
  m.impl("attention_out", TORCH_BOX(&flint::attention_out));
  m.impl("router_topk_out", TORCH_BOX(&flint::router_topk_out));
  m.impl("routed_act_out", TORCH_BOX(&flint::routed_act_out));
  m.impl("combine_out", TORCH_BOX(&flint::combine_out));
}
