// Attention and the cache write on the CPU, BF16: the ops of flint_kernels/ops/attention.py and
// kv_write.py, and those of low_latency.py that fuse them.
#include "cpu/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/kv_write.h"
#include "cpu/parallel.h"
#include "cpu/values.h"
#include "torch/products.h"

namespace flint {
namespace {

constexpr auto kBf16 = ScalarType::BFloat16;

void check_cache(const Tensor& cache, const char* name) {
  check_type(cache, name, kBf16);
  STD_TORCH_CHECK(cache.dim() == 4 && (cache.stride(3) == 1 || cache.size(3) <= 1), name,
                  ": want [blocks, page_size, kv_heads, head_dim] with a last stride of 1");
}

PageStrides page_strides(const Tensor& cache) {
  return {cache.stride(0), cache.stride(1), cache.stride(2)};
}

// int32 or int64 indices, in order.
std::vector<int64_t> integers(const Tensor& given, const char* name) {
  const Tensor tensor = dense(given);
  const int64_t count = tensor.numel();
  if (tensor.scalar_type() == ScalarType::Int) {
    check(tensor, name, ScalarType::Int, count);
    return {data<int32_t>(tensor), data<int32_t>(tensor) + count};
  }
  check(tensor, name, ScalarType::Long, count);
  return {data<int64_t>(tensor), data<int64_t>(tensor) + count};
}

// What becomes of the rows of q, k and v once they are projected.
struct Write {
  Tensor q_weight, k_weight;
  std::optional<Tensor> cos_sin;
  std::vector<int64_t> positions, slots;
  Tensor k_cache, v_cache;
  float eps;
  int64_t kv_heads, dim;

  Write(const Tensor& q_weight, const Tensor& k_weight, const std::optional<Tensor>& cos_sin,
        const Tensor& positions, const Tensor& slot_mapping, const Tensor& k_cache,
        const Tensor& v_cache, double eps)
      : q_weight(dense(q_weight)),
        k_weight(dense(k_weight)),
        cos_sin(dense(cos_sin)),
        positions(integers(positions, "positions")),
        slots(integers(slot_mapping, "slot_mapping")),
        k_cache(k_cache),
        v_cache(v_cache),
        eps(static_cast<float>(eps)),
        kv_heads(k_cache.size(2)),
        dim(k_cache.size(3)) {
    check_cache(k_cache, "k_cache");
    check_cache(v_cache, "v_cache");
    check(this->q_weight, "q_weight", kBf16, dim);
    check(this->k_weight, "k_weight", kBf16, dim);
    if (this->cos_sin.has_value()) {
      check(*this->cos_sin, "cos_sin", ScalarType::Float, table_rows() * dim);
    }
  }

  int64_t table_rows() const { return cos_sin.has_value() ? cos_sin->size(0) : 0; }

  bool are_slots() const {
    return cpu::are_slots(slots, k_cache.size(0) * k_cache.size(1), positions, cos_sin.has_value(),
                          table_rows());
  }

  // The heads of q in rows of `columns` values.
  int64_t query_heads(int64_t columns) const { return columns / dim - 2 * kv_heads; }

  // qkv [rows, (heads + 2 * kv_heads) * dim] -> q [rows, heads, dim], k [rows, kv_heads, dim].
  void operator()(const uint16_t* qkv, int64_t heads, uint16_t* q, uint16_t* k) const {
    const cpu::QkNormRope in{qkv,
                             static_cast<int64_t>(positions.size()),
                             heads,
                             data<uint16_t>(q_weight),
                             data<uint16_t>(k_weight),
                             data_or_null<float>(cos_sin),
                             table_rows(),
                             positions.data(),
                             slots.data(),
                             static_cast<int64_t>(slots.size()),
                             eps};
    const cpu::KvCache cache{mutable_data<uint16_t>(k_cache),
                             mutable_data<uint16_t>(v_cache),
                             page_strides(k_cache),
                             page_strides(v_cache),
                             k_cache.size(1),
                             kv_heads,
                             dim};
    cpu::qk_norm_rope_kv_write(in, cache, q, k);
  }
};

Results qk_norm_rope_kv_write(const Tensor& qkv, const Tensor& q_weight, const Tensor& k_weight,
                              std::optional<Tensor> cos_sin, const Tensor& positions,
                              const Tensor& slot_mapping, Tensor k_cache, Tensor v_cache,
                              double eps, bool enable_pdl, std::optional<Tensor> q_out,
                              std::optional<Tensor> k_out, bool checked) {
  static thread_local Admitted admitted;
  if (!admitted(checked, qkv, q_weight, k_weight, cos_sin, positions, slot_mapping,
                Written{k_cache}, Written{v_cache}, eps, enable_pdl)) {
    return {};
  }
  const Write write(q_weight, k_weight, cos_sin, positions, slot_mapping, k_cache, v_cache, eps);
  if (!checked && !write.are_slots()) return {};
  const Tensor projected = dense(qkv);
  const int64_t rows = qkv.size(0), heads = write.query_heads(qkv.size(1));
  const Tensor q = given_or_new(q_out, {rows, heads, write.dim}, kBf16);
  const Tensor k = given_or_new(k_out, {rows, write.kv_heads, write.dim}, kBf16);
  STD_TORCH_CHECK(static_cast<int64_t>(write.positions.size()) == rows, "positions: want ", rows);
  check(projected, "qkv", kBf16, rows * (heads + 2 * write.kv_heads) * write.dim);
  check(q, "q_out", kBf16, rows * heads * write.dim);
  check(k, "k_out", kBf16, rows * write.kv_heads * write.dim);
  write(data<uint16_t>(projected), heads, mutable_data<uint16_t>(q), mutable_data<uint16_t>(k));
  return {q, k};
}

Results qkv_norm_rope_kv_write(const Tensor& x, const Matrix& matrix, const Write& write,
                               const std::optional<Tensor>& q_out) {
  const Tensor rows_of_x = dense(x);
  const cpu::Activations rows = activations_of(rows_of_x, matrix.view.k);
  const int64_t columns = matrix.view.n, heads = write.query_heads(columns);
  const int64_t kv = write.kv_heads * write.dim;
  const Tensor q = given_or_new(q_out, {rows.rows, heads, write.dim}, kBf16);
  STD_TORCH_CHECK(static_cast<int64_t>(write.positions.size()) == rows.rows, "positions: want ",
                  rows.rows);
  STD_TORCH_CHECK(heads > 0 && heads * write.dim + 2 * kv == columns, "weight: got ", columns,
                  " rows");
  check(q, "q_out", kBf16, rows.rows * heads * write.dim);
  const auto qkv = scratch<uint16_t>(rows.rows * columns), k = scratch<uint16_t>(rows.rows * kv);
  multiply(rows, matrix, {columns - 2 * kv, kv, kv}, {nullptr, qkv.get()});
  write(qkv.get(), heads, mutable_data<uint16_t>(q), k.get());
  return {q};
}

Results nvfp4_qkv_norm_rope_kv_write(const Tensor& x, const Tensor& weight, const Tensor& scale,
                                     const Tensor& scale_2, const Tensor& q_weight,
                                     const Tensor& k_weight, std::optional<Tensor> cos_sin,
                                     const Tensor& positions, const Tensor& slot_mapping,
                                     Tensor k_cache, Tensor v_cache, double eps,
                                     std::optional<Tensor> workspace, bool enable_pdl,
                                     std::optional<Tensor> q_out, bool checked) {
  static thread_local Admitted admitted;
  if (!admitted(checked, x, weight, scale, scale_2, q_weight, k_weight, cos_sin, positions,
                slot_mapping, Written{k_cache}, Written{v_cache}, eps, workspace, enable_pdl)) {
    return {};
  }
  const Write write(q_weight, k_weight, cos_sin, positions, slot_mapping, k_cache, v_cache, eps);
  if (!checked && !write.are_slots()) return {};
  return qkv_norm_rope_kv_write(x, Matrix(weight, scale, scale_2), write, q_out);
}

Results bf16_qkv_norm_rope_kv_write(const Tensor& x, const Tensor& weight, const Tensor& q_weight,
                                    const Tensor& k_weight, std::optional<Tensor> cos_sin,
                                    const Tensor& positions, const Tensor& slot_mapping,
                                    Tensor k_cache, Tensor v_cache, double eps,
                                    std::optional<Tensor> workspace, bool enable_pdl,
                                    std::optional<Tensor> q_out, bool checked) {
  static thread_local Admitted admitted;
  if (!admitted(checked, x, weight, q_weight, k_weight, cos_sin, positions, slot_mapping,
                Written{k_cache}, Written{v_cache}, eps, workspace, enable_pdl)) {
    return {};
  }
  const Write write(q_weight, k_weight, cos_sin, positions, slot_mapping, k_cache, v_cache, eps);
  if (!checked && !write.are_slots()) return {};
  return qkv_norm_rope_kv_write(x, Matrix(weight), write, q_out);
}

// The paged keys and values of a call: those of a decode step, or the past of chunks.
struct Past {
  Tensor k_cache, v_cache, table, lengths;
  cpu::Tables tables;

  Past(const Tensor& k_cache, const Tensor& v_cache, const Tensor& block_table,
       const Tensor& lengths_given)
      : k_cache(k_cache),
        v_cache(v_cache),
        table(dense(block_table)),
        lengths(dense(lengths_given)) {
    check_cache(k_cache, "k_cache");
    check_cache(v_cache, "v_cache");
    const int64_t requests = table.size(0), width = table.size(1);
    check(table, "block_table", ScalarType::Int, requests * width);
    check(lengths, "lengths", ScalarType::Int, requests);
    tables = {data<int32_t>(table), data<int32_t>(lengths), requests, width,
              k_cache.size(1),      k_cache.size(0)};
  }

  cpu::Rows rows_of(const Tensor& cache) const {
    cpu::Rows rows{};
    rows.pages = data<uint16_t>(cache);
    rows.strides = page_strides(cache);
    rows.page_size = tables.page_size;
    return rows;
  }
};

// The rows of one request among those of the call; what it sees is paged, then of the chunk.
struct Request {
  int64_t begin, end;     // its query rows
  int64_t context;        // paged positions
  int64_t first_visible;  // paged and chunk positions that its first query sees
  const int32_t* table;
};

struct Attention {
  Tensor q;
  std::optional<Tensor> sinks;
  int64_t window;
  float scale;
  int64_t kv_heads;
  cpu::Rows k{}, v{};

  Attention(const Tensor& q_given, const std::optional<Tensor>& sinks_given, int64_t window,
            std::optional<double> scale_given, int64_t kv_heads)
      : q(dense(q_given)), sinks(dense(sinks_given)), window(window), kv_heads(kv_heads) {
    const int64_t rows = q.size(0), heads = q.size(1), dim = q.size(2);
    // As Python's `dim ** -0.5`, the same bits.
    scale = static_cast<float>(scale_given.value_or(std::pow(static_cast<double>(dim), -0.5)));
    check(q, "q", kBf16, rows * heads * dim);
    if (sinks.has_value()) check(*sinks, "sinks", ScalarType::Float, heads);
  }

  // Threads share rows and not whole requests. `chunked`: rows of k and v follow the pages.
  Results operator()(const std::vector<Request>& requests, bool chunked,
                     const std::optional<Tensor>& given) const {
    const int64_t rows = q.size(0), heads = q.size(1), dim = q.size(2);
    const Tensor out = given_or_new(given, {rows, heads, dim}, kBf16);
    check(out, "out", kBf16, rows * heads * dim);
    std::vector<const Request*> request_of(static_cast<size_t>(rows));
    int64_t work = 1;
    for (const Request& request : requests) {
      std::fill(request_of.begin() + request.begin, request_of.begin() + request.end, &request);
      const int64_t length = request.first_visible + request.end - request.begin;
      work = std::max(work, (window > 0 ? std::min(window, length) : length) * heads * dim);
    }
    const int64_t grain = (int64_t{1} << 21) / work + 1;
    cpu::parallel_for(rows, grain, threads(), [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        const Request& request = *request_of[static_cast<size_t>(row)];
        cpu::Rows my_k = k, my_v = v;
        my_k.context = my_v.context = request.context;
        my_k.table = my_v.table = request.table;
        if (chunked) {
          my_k.chunk = k.chunk + request.begin * k.chunk_row_stride;
          my_v.chunk = v.chunk + request.begin * v.chunk_row_stride;
        }
        const int64_t keys = request.first_visible + row - request.begin;
        const cpu::Query query{data<uint16_t>(q) + row * heads * dim,
                               data_or_null<float>(sinks),
                               window > 0 && window < keys ? keys - window : 0,
                               keys,
                               heads,
                               kv_heads,
                               dim,
                               scale};
        cpu::attend(query, my_k, my_v, mutable_data<uint16_t>(out) + row * heads * dim);
      }
    });
    return {out};
  }
};

Results attention_decode(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                         const Tensor& block_table, const Tensor& seq_lens,
                         std::optional<Tensor> sinks, int64_t window, std::optional<double> scale,
                         std::optional<Tensor> workspace, bool enable_pdl,
                         std::optional<Tensor> out, bool checked) {
  static thread_local Admitted admitted;
  if (!admitted(checked, q, k_cache, v_cache, block_table, seq_lens, sinks, window, scale,
                workspace, enable_pdl)) {
    return {};
  }
  const Past past(k_cache, v_cache, block_table, seq_lens);
  if (!checked && !cpu::are_pages(past.tables, window > 0 ? window : -1)) return {};
  Attention attention(q, sinks, window, scale, k_cache.size(2));
  attention.k = past.rows_of(k_cache);
  attention.v = past.rows_of(v_cache);
  std::vector<Request> requests;
  for (int64_t b = 0; b < past.tables.requests; ++b) {
    const int64_t length = past.tables.lengths[b];
    requests.push_back({b, b + 1, length, length, past.tables.pages + b * past.tables.width});
  }
  return attention(requests, false, out);
}

Results attention_prefill(const Tensor& q, const Tensor& k_given, const Tensor& v_given,
                          const Tensor& cu_seqlens, std::optional<Tensor> k_cache,
                          std::optional<Tensor> v_cache, std::optional<Tensor> block_table,
                          std::optional<Tensor> context_lens, std::optional<Tensor> sinks,
                          int64_t window, std::optional<double> scale,
                          std::optional<int64_t> max_query_len, std::optional<Tensor> workspace,
                          bool enable_pdl, std::optional<Tensor> out, bool checked) {
  static thread_local Admitted admitted;
  if (!admitted(checked, q, k_given, v_given, cu_seqlens, k_cache, v_cache, block_table,
                context_lens, sinks, window, scale, max_query_len, workspace, enable_pdl)) {
    return {};
  }
  const Tensor bounds = dense(cu_seqlens);
  const int64_t offsets = bounds.numel();
  check(bounds, "cu_seqlens", ScalarType::Int, offsets);
  const auto* starts = data<int32_t>(bounds);
  std::optional<Past> past;
  if (k_cache.has_value()) past.emplace(*k_cache, *v_cache, *block_table, *context_lens);
  if (!checked) {
    const int64_t longest = max_query_len.value_or(std::numeric_limits<int64_t>::max());
    if (!cpu::are_offsets(starts, offsets, q.size(0), longest)) return {};
    if (past.has_value() && !cpu::are_pages(past->tables, window > 0 ? window - 1 : -1)) return {};
  }
  const Tensor k = k_given.stride(2) == 1 ? k_given : dense(k_given);
  const Tensor v = v_given.stride(2) == 1 ? v_given : dense(v_given);
  check_type(k, "k", kBf16);
  check_type(v, "v", kBf16);
  Attention attention(q, sinks, window, scale, k.size(1));
  if (past.has_value()) {
    attention.k = past->rows_of(*k_cache);
    attention.v = past->rows_of(*v_cache);
  }
  attention.k.chunk = data<uint16_t>(k);
  attention.v.chunk = data<uint16_t>(v);
  attention.k.chunk_row_stride = k.stride(0);
  attention.k.chunk_head_stride = k.stride(1);
  attention.v.chunk_row_stride = v.stride(0);
  attention.v.chunk_head_stride = v.stride(1);
  std::vector<Request> requests;
  for (int64_t b = 0; b + 1 < offsets; ++b) {
    const int64_t context = past.has_value() ? past->tables.lengths[b] : 0;
    const int32_t* table = past.has_value() ? past->tables.pages + b * past->tables.width : nullptr;
    requests.push_back({starts[b], starts[b + 1], context, context + 1, table});
  }
  return attention(requests, true, out);
}

}  // namespace
}  // namespace flint

STABLE_TORCH_LIBRARY_FRAGMENT(flint_native, m) {
  m.def(
      "qk_norm_rope_kv_write(Tensor qkv, Tensor q_weight, Tensor k_weight, Tensor? cos_sin, "
      "Tensor positions, Tensor slot_mapping, Tensor(a!) k_cache, Tensor(b!) v_cache, "
      "float eps=1e-6, *, bool enable_pdl=False, Tensor(p!)? q_out=None, Tensor(q!)? k_out=None, "
      "bool checked=False) -> Tensor[]");
  m.def(
      "nvfp4_qkv_norm_rope_kv_write(Tensor x, Tensor weight, Tensor weight_scale, "
      "Tensor weight_scale_2, Tensor q_weight, Tensor k_weight, Tensor? cos_sin, "
      "Tensor positions, Tensor slot_mapping, Tensor(a!) k_cache, Tensor(b!) v_cache, "
      "float eps=1e-6, *, Tensor? workspace=None, bool enable_pdl=False, "
      "Tensor(p!)? q_out=None, bool checked=False) -> Tensor[]");
  m.def(
      "bf16_qkv_norm_rope_kv_write(Tensor x, Tensor weight, Tensor q_weight, Tensor k_weight, "
      "Tensor? cos_sin, Tensor positions, Tensor slot_mapping, Tensor(a!) k_cache, "
      "Tensor(b!) v_cache, float eps=1e-6, *, Tensor? workspace=None, bool enable_pdl=False, "
      "Tensor(p!)? q_out=None, bool checked=False) -> Tensor[]");
  m.def(
      "attention_decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, "
      "Tensor seq_lens, Tensor? sinks=None, int window=0, float? scale=None, *, "
      "Tensor? workspace=None, bool enable_pdl=False, Tensor(p!)? out=None, bool checked=False) "
      "-> Tensor[]");
  m.def(
      "attention_prefill(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, Tensor? k_cache=None, "
      "Tensor? v_cache=None, Tensor? block_table=None, Tensor? context_lens=None, "
      "Tensor? sinks=None, int window=0, float? scale=None, int? max_query_len=None, *, "
      "Tensor? workspace=None, bool enable_pdl=False, Tensor(p!)? out=None, bool checked=False) "
      "-> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(flint_native, CPU, m) {
  m.impl("qk_norm_rope_kv_write", TORCH_BOX(&flint::qk_norm_rope_kv_write));
  m.impl("nvfp4_qkv_norm_rope_kv_write", TORCH_BOX(&flint::nvfp4_qkv_norm_rope_kv_write));
  m.impl("bf16_qkv_norm_rope_kv_write", TORCH_BOX(&flint::bf16_qkv_norm_rope_kv_write));
  m.impl("attention_decode", TORCH_BOX(&flint::attention_decode));
  m.impl("attention_prefill", TORCH_BOX(&flint::attention_prefill));
}
