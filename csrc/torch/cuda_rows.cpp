// Binds the GPU's row kernels to torch as ops of the private namespace `flint_native`.
#include "cuda/kv_write.h"
#include "cuda/norm.h"
#include "cuda/router.h"
#include "torch/cuda_binding.h"
#include "torch/cuda_cache.h"

namespace flint {
namespace {

// x and residual [rows, width], rows any stride apart; weight [width]; the outputs dense.
void rms_norm_cuda_out(const Tensor& x, std::optional<Tensor> residual, const Tensor& weight,
                       double eps, Tensor normed, std::optional<Tensor> residual_out,
                       bool enable_pdl, int64_t plan) {
  const CudaCall call(x, enable_pdl);
  const bool bf16 = is_bf16(x);
  call.check_rows(x, "x", bf16);
  STD_TORCH_CHECK(x.dim() == 2, "x: want [rows, width]");
  STD_TORCH_CHECK(residual.has_value() == residual_out.has_value(),
                  "residual_out: want one exactly where there is a residual");
  STD_TORCH_CHECK(0 <= plan && plan <= static_cast<int64_t>(cuda::RmsNormPlan::kCta128),
                  "plan: got ", plan, ", want 0 to 2");
  const int64_t rows = x.size(0), width = x.size(1);
  call.check_dense(weight, "weight", bf16, width);
  call.check_dense(normed, "normed", bf16, rows * width);
  cuda::RmsNorm norm{};
  norm.x = data<void>(x);
  norm.weight = data<void>(weight);
  norm.normed = mutable_data<void>(normed);
  norm.x_stride = row_stride(x);
  norm.rows = rows;
  norm.width = width;
  norm.eps = static_cast<float>(eps);
  norm.bf16 = bf16;
  norm.plan = static_cast<cuda::RmsNormPlan>(plan);
  if (residual.has_value()) {
    call.check_rows(*residual, "residual", bf16);
    STD_TORCH_CHECK(residual->dim() == 2 && residual->size(0) == rows && residual->size(1) == width,
                    "residual: want the shape of x");
    call.check_dense(*residual_out, "residual_out", bf16, rows * width);
    norm.residual = data<void>(*residual);
    norm.residual_stride = row_stride(*residual);
    norm.residual_out = mutable_data<void>(*residual_out);
  }
  CudaCall::check_launch(cuda::rms_norm(norm, call.launch()), "rms_norm");
}

// x [rows, 2 * width], rows any stride apart; act [rows, width] dense.
void silu_and_mul_cuda_out(const Tensor& x, Tensor act, bool enable_pdl) {
  const CudaCall call(x, enable_pdl);
  const bool bf16 = is_bf16(x);
  call.check_rows(x, "x", bf16);
  STD_TORCH_CHECK(x.dim() == 2 && x.size(1) % 2 == 0, "x: want [rows, 2 * width]");
  const int64_t rows = x.size(0), width = x.size(1) / 2;
  call.check_dense(act, "act", bf16, rows * width);
  const cuda::SiluAndMul silu{data<void>(x), mutable_data<void>(act), row_stride(x), rows, width,
                              bf16};
  CudaCall::check_launch(cuda::silu_and_mul(silu, call.launch()), "silu_and_mul");
}

void qk_norm_rope_kv_write_cuda_out(const Tensor& qkv, const Tensor& q_weight,
                                    const Tensor& k_weight, std::optional<Tensor> cos_sin,
                                    const Tensor& positions, const Tensor& slot_mapping,
                                    Tensor k_cache, Tensor v_cache, double eps, Tensor q, Tensor k,
                                    bool enable_pdl) {
  const CudaCall call(qkv, enable_pdl);
  const bool bf16 = is_bf16(qkv);
  call.check_rows(qkv, "qkv", bf16);
  STD_TORCH_CHECK(qkv.dim() == 2, "qkv: want [rows, (heads + 2 * kv_heads) * head_dim]");
  cuda::QkNormRope in{};
  in.cache = checked_cache(call, k_cache, v_cache, bf16);
  const int64_t rows = qkv.size(0), dim = in.cache.head_dim, kv_heads = in.cache.kv_heads;
  const int64_t heads = qkv.size(1) / dim - 2 * kv_heads;
  STD_TORCH_CHECK(heads > 0 && (heads + 2 * kv_heads) * dim == qkv.size(1), "qkv: got ",
                  qkv.size(1), " columns, want whole heads of the cache's head_dim");
  call.check_dense(q_weight, "q_weight", bf16, dim);
  call.check_dense(k_weight, "k_weight", bf16, dim);
  call.check_dense(q, "q", bf16, rows * heads * dim);
  call.check_dense(k, "k", bf16, rows * kv_heads * dim);
  in.qkv = data<void>(qkv);
  in.q_weight = data<void>(q_weight);
  in.k_weight = data<void>(k_weight);
  in.q = mutable_data<void>(q);
  in.k = mutable_data<void>(k);
  in.qkv_stride = row_stride(qkv);
  in.rows = rows;
  in.slots = checked_indices(call, slot_mapping, "slot_mapping");
  in.heads = static_cast<int>(heads);
  in.eps = static_cast<float>(eps);
  in.bf16 = bf16;
  if (cos_sin.has_value()) {
    STD_TORCH_CHECK(cos_sin->dim() == 2 && dim % 2 == 0,
                    "cos_sin: want [positions, head_dim] with an even head_dim");
    call.check_dense(*cos_sin, "cos_sin", ScalarType::Float, cos_sin->size(0) * dim);
    in.positions = checked_indices(call, positions, "positions");
    STD_TORCH_CHECK(in.positions.count == rows, "positions: got ", in.positions.count, ", want ",
                    rows);
    in.rope = true;
    in.cos_sin = data<float>(*cos_sin);
    in.table_rows = cos_sin->size(0);
  }
  CudaCall::check_launch(cuda::qk_norm_rope_kv_write(in, call.launch()), "qk_norm_rope_kv_write");
}

// k, v [rows, kv_heads, head_dim], the last dimension contiguous; a slot for each written row.
void kv_cache_write_cuda_out(const Tensor& k, const Tensor& v, const Tensor& slot_mapping,
                             Tensor k_cache, Tensor v_cache, bool enable_pdl) {
  const CudaCall call(k, enable_pdl);
  const bool bf16 = is_bf16(k);
  call.check_rows(k, "k", bf16);
  call.check_rows(v, "v", bf16);
  cuda::KvCacheWrite in{};
  in.cache = checked_cache(call, k_cache, v_cache, bf16);
  for (const Tensor& rows : {k, v}) {
    STD_TORCH_CHECK(rows.dim() == 3 && rows.size(0) == k.size(0) &&
                        rows.size(1) == in.cache.kv_heads && rows.size(2) == in.cache.head_dim,
                    "k, v: want [rows, kv_heads, head_dim]");
  }
  in.slots = checked_indices(call, slot_mapping, "slot_mapping");
  STD_TORCH_CHECK(in.slots.count <= k.size(0), "slot_mapping: got ", in.slots.count,
                  ", want at most ", k.size(0));
  in.k = data<void>(k);
  in.v = data<void>(v);
  in.k_row_stride = k.stride(0);
  in.k_head_stride = k.stride(1);
  in.v_row_stride = v.stride(0);
  in.v_head_stride = v.stride(1);
  in.element_bytes = bf16 ? 2 : 4;
  CudaCall::check_launch(cuda::kv_cache_write(in, call.launch()), "kv_cache_write");
}

// logits [tokens, experts] BF16, rows any stride apart. False, with nothing done, where the kernel
// does not take these sizes.
bool router_topk_cuda_out(const Tensor& logits, int64_t top_k, bool renormalize, Tensor weights,
                          Tensor ids, bool enable_pdl) {
  const CudaCall call(logits, enable_pdl);
  call.check_rows(logits, "logits", true);
  STD_TORCH_CHECK(logits.dim() == 2, "logits: want [tokens, experts]");
  if (logits.size(1) > 1 << 16 || top_k > 1 << 16) return false;
  call.check_dense(weights, "weights", ScalarType::Float, logits.size(0) * top_k);
  call.check_dense(ids, "ids", ScalarType::Int, logits.size(0) * top_k);
  const cuda::RouterTopk in{data<void>(logits),
                            row_stride(logits),
                            logits.size(0),
                            mutable_data<float>(weights),
                            mutable_data<int32_t>(ids),
                            static_cast<int>(logits.size(1)),
                            static_cast<int>(top_k),
                            renormalize};
  if (!cuda::router_topk_fits(in)) return false;
  CudaCall::check_launch(cuda::router_topk(in, call.launch()), "router_topk");
  return true;
}

}  // namespace
}  // namespace flint

STABLE_TORCH_LIBRARY_FRAGMENT(flint_native, m) {
  m.def(
      "rms_norm_cuda_out(Tensor x, Tensor? residual, Tensor weight, float eps, Tensor(a!) normed, "
      "Tensor(b!)? residual_out, bool enable_pdl, int plan=0) -> ()");
  m.def(
      "router_topk_cuda_out(Tensor logits, int top_k, bool renormalize, Tensor(a!) weights, "
      "Tensor(b!) ids, bool enable_pdl) -> bool");
  m.def("silu_and_mul_cuda_out(Tensor x, Tensor(a!) act, bool enable_pdl) -> ()");
  m.def(
      "qk_norm_rope_kv_write_cuda_out(Tensor qkv, Tensor q_weight, Tensor k_weight, "
      "Tensor? cos_sin, Tensor positions, Tensor slot_mapping, Tensor(a!) k_cache, "
      "Tensor(b!) v_cache, float eps, Tensor(c!) q, Tensor(d!) k, bool enable_pdl) -> ()");
  m.def(
      "kv_cache_write_cuda_out(Tensor k, Tensor v, Tensor slot_mapping, Tensor(a!) k_cache, "
      "Tensor(b!) v_cache, bool enable_pdl) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(flint_native, CUDA, m) {
  m.impl("rms_norm_cuda_out", TORCH_BOX(&flint::rms_norm_cuda_out));
  m.impl("router_topk_cuda_out", TORCH_BOX(&flint::router_topk_cuda_out));
  m.impl("silu_and_mul_cuda_out", TORCH_BOX(&flint::silu_and_mul_cuda_out));
  m.impl("qk_norm_rope_kv_write_cuda_out", TORCH_BOX(&flint::qk_norm_rope_kv_write_cuda_out));
  m.impl("kv_cache_write_cuda_out", TORCH_BOX(&flint::kv_cache_write_cuda_out));
}
