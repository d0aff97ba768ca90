// The kernels of a few tokens, as functions that Python can call: they return -1 where the kernels
// do not take the call, else what the launch returned. `where`: what the kernel in front writes is
// copied there, from `from`, when it is waited for.
#include "cuda/experts.h"
#include "cuda/launch.cuh"
#include "cuda/linear.h"
#include "cuda/qkv.h"

namespace {

using namespace flint;
using namespace flint::cuda;

constexpr Launch kLaunch{nullptr, true};

struct Run {
  int multiprocessors, late_copies;
  unsigned seed;
  void* where;
  const void* from;
  int64_t bytes;
};

void prepare(const Run& run) {
  emulated_multiprocessors = run.multiprocessors;
  simt::options = {run.seed, run.late_copies != 0,
                   [=] { std::memcpy(run.where, run.from, static_cast<size_t>(run.bytes)); }};
}

}  // namespace

extern "C" int emulated_linear(const Run* run, const void* weight, const void* scales,
                               const float* scale_2, int shards, int64_t first_shard, const void* x,
                               int tokens, int width, int64_t rows, int output, void* out) {
  const Linear in{
      {weight, scales},    scale_2, shards, {first_shard}, x, width, out, rows, tokens, width,
      LinearOutput{output}};
  if (!linear_fits(in)) return -1;
  prepare(*run);
  return linear(in, kLaunch);
}

extern "C" int emulated_qkv(const Run* run, const void* weight, const void* scales,
                            const float* scale_2, int shards, const void* x, int tokens, int width,
                            int heads, int kv_heads, const void* q_weight, const void* k_weight,
                            const float* cos_sin, int64_t table_rows, const int32_t* positions,
                            const int32_t* slots, void* k, void* v, int64_t pages, int page_size,
                            float eps, void* q) {
  QkvLinear in{{weight, scales}, scale_2, shards, x, width, width, {}};
  QkNormRope& rest = in.rest;
  rest.q_weight = q_weight;
  rest.k_weight = k_weight;
  rest.cos_sin = cos_sin;
  rest.q = q;
  rest.rows = tokens;
  rest.table_rows = table_rows;
  rest.positions = {positions, tokens, false};
  rest.slots = {slots, tokens, false};
  const int64_t row = int64_t{kv_heads} * 128;
  const PageStrides strides{page_size * row, row, 128};
  rest.cache = {k, v, strides, strides, pages * page_size, page_size, kv_heads, 128};
  rest.heads = heads;
  rest.eps = eps;
  rest.rope = cos_sin != nullptr;
  rest.bf16 = true;
  if (!qkv_linear_fits(in)) return -1;
  prepare(*run);
  return qkv_linear(in, kLaunch);
}

extern "C" int emulated_moe_gate_up(const Run* run, const int32_t* ids, int tokens, int top_k,
                                    int experts, const void* x, int hidden, int routed_size,
                                    int shared_size, const void* routed, const void* routed_scales,
                                    const float* routed_scale_2, const void* shared,
                                    const void* shared_scales, const float* shared_scale_2,
                                    int shared_shards, void* routed_act, void* shared_act) {
  const MoeGateUp in{{ids, tokens, top_k, experts},
                     x,
                     hidden,
                     hidden,
                     routed_size,
                     shared_size,
                     {routed, routed_scales},
                     routed_scale_2,
                     {shared, shared_scales},
                     shared_scale_2,
                     shared_shards,
                     routed_act,
                     shared_act};
  if (!moe_gate_up_fits(in)) return -1;
  prepare(*run);
  return moe_gate_up(in, kLaunch);
}

extern "C" int emulated_moe_down(const Run* run, const int32_t* ids, int tokens, int top_k,
                                 int experts, const float* weights, const void* routed_act,
                                 const void* shared_act, int hidden, int routed_size,
                                 int shared_size, const void* routed, const void* routed_scales,
                                 const float* routed_scale_2, const void* shared,
                                 const void* shared_scales, const float* shared_scale_2,
                                 void* out) {
  const MoeDown in{{ids, tokens, top_k, experts},
                   weights,
                   routed_act,
                   shared_act,
                   hidden,
                   routed_size,
                   shared_size,
                   {routed, routed_scales},
                   routed_scale_2,
                   {shared, shared_scales},
                   shared_scale_2,
                   out};
  if (!moe_down_fits(in)) return -1;
  prepare(*run);
  return moe_down(in, kLaunch);
}
