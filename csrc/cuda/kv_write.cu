// Three kernels with one order of summation for head_dim 128, so that a row's bits do not depend on
// which runs:
//
//   qk_norm_rope_kv_write_few    16 lanes a head, a head a group: the most threads for few rows
//   qk_norm_rope_kv_write_many   8 lanes a head, 16-byte accesses, a CTA a row of Flint's 40 heads
//   qk_norm_rope_kv_write_any    any head_dim, any alignment, FP32
//
// In the first two, both elements of a RoPE pair are in one lane.
#include "cuda/device.cuh"
#include "cuda/kv_rows.cuh"
#include "cuda/kv_write.h"
#include "cuda/launch.cuh"
#include "cuda/tiles.h"

namespace flint::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kGroups = kThreads / kGroupLanes;
// More rows than this fill the card with fewer, wider threads.
constexpr int64_t kManyRows = 256;
constexpr int64_t kMostGridRows = 65535;  // the limit of a grid's second dimension

// Zeros or NaN in the group's q and k heads.
template <typename T>
__device__ void fill_row(const QkNormRope& in, int64_t row, RowOutcome outcome, int group,
                         int groups, int lane, int lanes) {
  const float value = outcome == RowOutcome::kNaN ? __uint_as_float(0x7fc00000u) : 0.0f;
  const RowOutputs<T> out = row_outputs<T>(in, row, -1);
#pragma unroll 1
  for (int head = group; head < in.heads + in.cache.kv_heads; head += groups) {
    T* to = head < in.heads ? out.q + int64_t{head} * in.cache.head_dim
                            : out.k + int64_t{head - in.heads} * in.cache.head_dim;
#pragma unroll 1
    for (int i = lane; i < in.cache.head_dim; i += lanes) store_rounded(to + i, value);
  }
}

__global__ void __launch_bounds__(kThreads)
    qk_norm_rope_kv_write_few(const __grid_constant__ QkNormRope in) {
  const int lane = static_cast<int>(threadIdx.x) % kGroupLanes;
  const int group =
      static_cast<int>(blockIdx.y) * kGroups + static_cast<int>(threadIdx.x) / kGroupLanes;
  const int groups = static_cast<int>(gridDim.y) * kGroups;
  const int norm_heads = in.heads + in.cache.kv_heads;
  const int heads = norm_heads + in.cache.kv_heads;
  const int64_t row = in.first_row + blockIdx.x;
  const Halves q_weight = load_weights(in.q_weight, lane);
  const Halves k_weight = load_weights(in.k_weight, lane);
  const auto* qkv = static_cast<const uint16_t*>(in.qkv) + row * in.qkv_stride + lane * kQuad;
  wait_for_previous_kernel();
  let_next_kernel_start();

  const int head = group, kv_head = head - in.heads, v_head = head - norm_heads;
  Halves x{make_uint2(0, 0), make_uint2(0, 0)};
  if (head < heads) {
    const uint16_t* from = qkv + head * kFastHeadDim;
    x.first = load_once(reinterpret_cast<const uint2*>(from));
    x.second = load_once(reinterpret_cast<const uint2*>(from + kHalf));
  }
  const RowPlan plan = plan_row(in, row);
  if (plan.outcome != RowOutcome::kCompute) {
    fill_row<uint16_t>(in, row, plan.outcome, group, groups, lane, kGroupLanes);
    return;
  }
  float cos[kQuad] = {1.0f, 1.0f, 1.0f, 1.0f}, sin[kQuad] = {};
  if (in.rope) {
    const float4 c = *reinterpret_cast<const float4*>(plan.cos_sin + lane * kQuad);
    const float4 s = *reinterpret_cast<const float4*>(plan.cos_sin + kHalf + lane * kQuad);
    cos[0] = c.x, cos[1] = c.y, cos[2] = c.z, cos[3] = c.w;
    sin[0] = s.x, sin[1] = s.y, sin[2] = s.z, sin[3] = s.w;
  }
  const RowOutputs<uint16_t> out = row_outputs<uint16_t>(in, row, plan.slot);
  // A v head is normed for nothing: a warp's two groups shuffle together.
  Halves value = normalise(x, kv_head < 0 ? q_weight : k_weight, in.eps);
  if (head >= heads) return;
  if (v_head >= 0) {
    if (out.cached_v != nullptr) store(out.cached_v + v_head * in.cache.v_strides.head, lane, x);
    return;
  }
  if (in.rope) value = rotate(value, cos, sin);
  if (kv_head < 0) {
    store(out.q + head * kFastHeadDim, lane, value);
    return;
  }
  store(out.k + kv_head * kFastHeadDim, lane, value);
  if (out.cached_k != nullptr) {
    store(out.cached_k + kv_head * in.cache.k_strides.head, lane, value);
  }
}

// ------------------------------------------------------------------------------ many rows

constexpr int kOct = 8;  // elements of a 16-byte access
constexpr int kOctLanes = kHalf / kOct;
constexpr int kOctThreads = 160;
constexpr int kOctGroups = kOctThreads / kOctLanes;
constexpr int kOctHeads = 2;  // heads of a group: 20 groups have Flint's 32 + 2 * 4 heads
static_assert(kOctThreads % kWarp == 0, "lanes sum in full warps");

__device__ __forceinline__ void unpack(const uint4& pairs, float (&values)[kOct]) {
  const uint32_t words[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[2 * i] = low_half(words[i]);
    values[2 * i + 1] = high_half(words[i]);
  }
}

__device__ __forceinline__ uint4 pack(const float (&values)[kOct]) {
  return make_uint4(pack_bf16(values[0], values[1]), pack_bf16(values[2], values[3]),
                    pack_bf16(values[4], values[5]), pack_bf16(values[6], values[7]));
}

__device__ __forceinline__ void load_table(const float* from, float (&values)[kOct]) {
  const float4 low = *reinterpret_cast<const float4*>(from);
  const float4 high = *reinterpret_cast<const float4*>(from + 4);
  values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
  values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
}

// The two sums of a lane are those of two neighbouring lanes of `normalise`, and are added as those
// are: the same bits.
__device__ __forceinline__ float head_squares(const float (&first)[kOct],
                                              const float (&second)[kOct]) {
  float left = 0.0f, right = 0.0f;
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    left = fmaf(first[i], first[i], left);
    right = fmaf(first[kQuad + i], first[kQuad + i], right);
  }
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    left = fmaf(second[i], second[i], left);
    right = fmaf(second[kQuad + i], second[kQuad + i], right);
  }
  return lane_sum<kOctLanes>(left) + lane_sum<kOctLanes>(right);
}

// Streamed: measured on an H200, 8,192 rows take 46.2 us so and 48.0 us by plain stores.
__device__ __forceinline__ void store_head(uint16_t* head, int lane, const uint4& first,
                                           const uint4& second) {
  store_streaming(reinterpret_cast<uint4*>(head + lane * kOct), first);
  store_streaming(reinterpret_cast<uint4*>(head + kHalf + lane * kOct), second);
}

// Six CTAs an SM: measured on an H200, 8,192 rows take 47.8 us so, 48.3 with five. Rows fetched
// ahead by bulk copies into a ring are slower, 49 to 53 us, the more so the more of them are under
// way: reads then crowd out the writes.
__global__ void __launch_bounds__(kOctThreads, 6)
    qk_norm_rope_kv_write_many(const __grid_constant__ QkNormRope in) {
  const int lane = static_cast<int>(threadIdx.x) % kOctLanes;
  const int group =
      static_cast<int>(blockIdx.y) * kOctGroups + static_cast<int>(threadIdx.x) / kOctLanes;
  const int groups = static_cast<int>(gridDim.y) * kOctGroups;
  const int norm_heads = in.heads + in.cache.kv_heads;
  const int heads = norm_heads + in.cache.kv_heads;
  const int64_t row = in.first_row + blockIdx.x;
  const auto* qkv = static_cast<const uint16_t*>(in.qkv) + row * in.qkv_stride + lane * kOct;
  wait_for_previous_kernel();
  let_next_kernel_start();

  // Neighbouring groups take neighbouring heads: a CTA reads whole stretches of the row.
  uint4 x_first[kOctHeads], x_second[kOctHeads];
#pragma unroll
  for (int i = 0; i < kOctHeads; ++i) {
    const int head = group + i * groups;
    x_first[i] = x_second[i] = make_uint4(0, 0, 0, 0);
    if (head < heads) {
      const uint16_t* from = qkv + head * kFastHeadDim;
      x_first[i] = load_once(reinterpret_cast<const uint4*>(from));
      x_second[i] = load_once(reinterpret_cast<const uint4*>(from + kHalf));
    }
  }
  const RowPlan plan = plan_row(in, row);
  if (plan.outcome != RowOutcome::kCompute) {
    fill_row<uint16_t>(in, row, plan.outcome, group, groups, lane, kOctLanes);
    return;
  }
  float cos[kOct], sin[kOct];
  if (in.rope) {
    load_table(plan.cos_sin + lane * kOct, cos);
    load_table(plan.cos_sin + kHalf + lane * kOct, sin);
  }
  const RowOutputs<uint16_t> out = row_outputs<uint16_t>(in, row, plan.slot);
#pragma unroll
  for (int i = 0; i < kOctHeads; ++i) {
    const int head = group + i * groups, kv_head = head - in.heads, v_head = head - norm_heads;
    float first[kOct], second[kOct];
    unpack(x_first[i], first);
    unpack(x_second[i], second);
    // A v head is normed for nothing: the groups of a warp shuffle together.
    const float squares = head_squares(first, second);
    if (head >= heads) continue;
    if (v_head >= 0) {
      if (out.cached_v != nullptr) {
        store_head(out.cached_v + v_head * in.cache.v_strides.head, lane, x_first[i], x_second[i]);
      }
      continue;
    }
    const float scale = rsqrtf(fmaf(squares, 1.0f / kFastHeadDim, in.eps));
    const auto* weight =
        static_cast<const uint16_t*>(kv_head < 0 ? in.q_weight : in.k_weight) + lane * kOct;
    float first_weight[kOct], second_weight[kOct];
    unpack(load_weight(reinterpret_cast<const uint4*>(weight)), first_weight);
    unpack(load_weight(reinterpret_cast<const uint4*>(weight + kHalf)), second_weight);
#pragma unroll
    for (int j = 0; j < kOct; ++j) {
      first[j] = first[j] * scale * first_weight[j];
      second[j] = second[j] * scale * second_weight[j];
    }
    uint4 first_pairs = pack(first), second_pairs = pack(second);
    if (in.rope) {
      unpack(first_pairs, first);
      unpack(second_pairs, second);
#pragma unroll
      for (int j = 0; j < kOct; ++j) {
        const float n1 = first[j], n2 = second[j];
        first[j] = __fsub_rn(__fmul_rn(n1, cos[j]), __fmul_rn(n2, sin[j]));
        second[j] = __fadd_rn(__fmul_rn(n2, cos[j]), __fmul_rn(n1, sin[j]));
      }
      first_pairs = pack(first);
      second_pairs = pack(second);
    }
    if (kv_head < 0) {
      store_head(out.q + head * kFastHeadDim, lane, first_pairs, second_pairs);
      continue;
    }
    store_head(out.k + kv_head * kFastHeadDim, lane, first_pairs, second_pairs);
    if (out.cached_k != nullptr) {
      store_head(out.cached_k + kv_head * in.cache.k_strides.head, lane, first_pairs, second_pairs);
    }
  }
}

// ------------------------------------------------------------------------------ any head_dim

// Element by element, any alignment; for head_dim 128 the same order of summation as above.
template <typename T>
__device__ float any_squares(const T* x, int dim, int lane) {
  const int half = dim / 2;
  float squares = 0.0f;
  for (int base = lane * kQuad; base < half; base += kHalf) {
    const int end = base + kQuad < half ? base + kQuad : half;
    for (int i = base; i < end; ++i) squares = fmaf(to_float(x[i]), to_float(x[i]), squares);
    for (int i = half + base; i < half + end; ++i) {
      squares = fmaf(to_float(x[i]), to_float(x[i]), squares);
    }
  }
  if (dim % 2 != 0 && lane == 0) {
    squares = fmaf(to_float(x[dim - 1]), to_float(x[dim - 1]), squares);
  }
  return squares;
}

template <typename T>
__device__ __forceinline__ void store_any(T* to, T* cached, int at, float value) {
  store_rounded(to + at, value);
  if (cached != nullptr) store_rounded(cached + at, value);
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    qk_norm_rope_kv_write_any(const __grid_constant__ QkNormRope in) {
  const int lane = static_cast<int>(threadIdx.x) % kGroupLanes;
  const int group =
      static_cast<int>(blockIdx.y) * kGroups + static_cast<int>(threadIdx.x) / kGroupLanes;
  const int groups = static_cast<int>(gridDim.y) * kGroups;
  const int dim = in.cache.head_dim, half = dim / 2;
  const int heads = in.heads + 2 * in.cache.kv_heads;
  const int64_t row = in.first_row + blockIdx.x;
  wait_for_previous_kernel();
  let_next_kernel_start();

  const RowPlan plan = plan_row(in, row);
  if (plan.outcome != RowOutcome::kCompute) {
    fill_row<T>(in, row, plan.outcome, group, groups, lane, kGroupLanes);
    return;
  }
  const RowOutputs<T> out = row_outputs<T>(in, row, plan.slot);
  const float inverse_dim = 1.0f / static_cast<float>(dim);
  // Every lane goes round equally often: they shuffle together.
  for (int first = 0; first < heads; first += groups) {
    const int head = first + group;
    const bool any = head < heads;
    const T* x =
        static_cast<const T*>(in.qkv) + row * in.qkv_stride + int64_t{any ? head : 0} * dim;
    const float squares = lane_sum<kGroupLanes>(any_squares(x, dim, lane));
    if (!any) continue;
    const int64_t kv_head = head - in.heads, v_head = kv_head - in.cache.kv_heads;
    if (v_head >= 0) {
      if (out.cached_v == nullptr) continue;
      T* cached = out.cached_v + v_head * in.cache.v_strides.head;
      for (int i = lane; i < dim; i += kGroupLanes) cached[i] = x[i];
      continue;
    }
    const float scale = rsqrtf(fmaf(squares, inverse_dim, in.eps));
    T* to = kv_head < 0 ? out.q + int64_t{head} * dim : out.k + kv_head * dim;
    T* cached = kv_head < 0 || out.cached_k == nullptr
                    ? nullptr
                    : out.cached_k + kv_head * in.cache.k_strides.head;
    const T* weight = static_cast<const T*>(head < in.heads ? in.q_weight : in.k_weight);
    const auto normed = [&](int i) {
      return rounded(T{}, to_float(x[i]) * scale * to_float(weight[i]));
    };
    if (!in.rope) {
      for (int i = lane; i < dim; i += kGroupLanes) store_any(to, cached, i, normed(i));
      continue;
    }
    for (int i = lane; i < half; i += kGroupLanes) {
      const float n1 = normed(i), n2 = normed(half + i);
      const float cos = plan.cos_sin[i], sin = plan.cos_sin[half + i];
      store_any(to, cached, i, __fsub_rn(__fmul_rn(n1, cos), __fmul_rn(n2, sin)));
      store_any(to, cached, half + i, __fadd_rn(__fmul_rn(n2, cos), __fmul_rn(n1, sin)));
    }
  }
}

// ------------------------------------------------------------------------------ cache write alone

// `Unit`: what one access moves; strides and head_dim are in units here.
template <typename Unit>
__global__ void __launch_bounds__(kThreads) copy_to_cache(const __grid_constant__ KvCacheWrite in) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const KvCache& cache = in.cache;
  const int64_t row = in.first_row + blockIdx.x;
  const int64_t slot = load_index(in.slots, row, true).value(in.slots.wide);
  if (slot < 0 || slot >= cache.slots) return;
  const auto page_size = static_cast<uint32_t>(cache.page_size);
  const auto narrow = static_cast<uint32_t>(slot);
  const auto* k = static_cast<const Unit*>(in.k) + row * in.k_row_stride;
  const auto* v = static_cast<const Unit*>(in.v) + row * in.v_row_stride;
  auto* to_k = static_cast<Unit*>(cache.k) + slot_offset_32(cache.k_strides, page_size, narrow);
  auto* to_v = static_cast<Unit*>(cache.v) + slot_offset_32(cache.v_strides, page_size, narrow);
  for (int i = static_cast<int>(threadIdx.x); i < cache.kv_heads * cache.head_dim; i += kThreads) {
    const int head = i / cache.head_dim, at = i % cache.head_dim;
    const Unit k_unit = k[head * in.k_head_stride + at];
    const Unit v_unit = v[head * in.v_head_stride + at];
    to_k[head * cache.k_strides.head + at] = k_unit;
    to_v[head * cache.v_strides.head + at] = v_unit;
  }
}

// ------------------------------------------------------------------------------ launch

bool fits(const void* pointer, int64_t stride, int64_t element_bytes, int64_t alignment) {
  return keeps_alignment(reinterpret_cast<uint64_t>(pointer), stride, element_bytes, alignment);
}

bool fits(const void* pointer, const PageStrides& strides, int64_t element_bytes,
          int64_t alignment) {
  return fits(pointer, strides.block, element_bytes, alignment) &&
         fits(pointer, strides.row, element_bytes, alignment) &&
         fits(pointer, strides.head, element_bytes, alignment);
}

// Whether accesses of `bytes` fit everything that the kernels for head_dim 128 touch.
bool takes_vectors(const QkNormRope& in, int64_t bytes) {
  const auto rows = [bytes](const void* pointer, int64_t stride) {
    return fits(pointer, stride, sizeof(uint16_t), bytes);
  };
  return in.bf16 && in.cache.head_dim == kFastHeadDim && rows(in.qkv, in.qkv_stride) &&
         rows(in.q_weight, 0) && rows(in.k_weight, 0) && rows(in.q, 0) && rows(in.k, 0) &&
         fits(in.cos_sin, 0, sizeof(float), sizeof(float4)) &&
         fits(in.cache.k, in.cache.k_strides, sizeof(uint16_t), bytes) &&
         fits(in.cache.v, in.cache.v_strides, sizeof(uint16_t), bytes);
}

PageStrides in_units(const PageStrides& strides, int64_t elements) {
  return {strides.block / elements, strides.row / elements, strides.head / elements};
}

KvCacheWrite in_units(const KvCacheWrite& in, int elements) {
  KvCacheWrite out = in;
  out.k_row_stride /= elements;
  out.k_head_stride /= elements;
  out.v_row_stride /= elements;
  out.v_head_stride /= elements;
  out.cache.head_dim /= elements;
  out.cache.k_strides = in_units(in.cache.k_strides, elements);
  out.cache.v_strides = in_units(in.cache.v_strides, elements);
  return out;
}

}  // namespace

cudaError_t qk_norm_rope_kv_write(const QkNormRope& in, const Launch& launch) {
  const int64_t heads = int64_t{in.heads} + 2 * in.cache.kv_heads;
  const bool in_grid = heads <= kGroups * kMostGridRows;
  const bool many = in_grid && in.rows > kManyRows && takes_vectors(in, sizeof(uint4));
  const bool few = in_grid && !many && takes_vectors(in, sizeof(uint2));
  const auto kernel = many      ? qk_norm_rope_kv_write_many
                      : few     ? qk_norm_rope_kv_write_few
                      : in.bf16 ? qk_norm_rope_kv_write_any<uint16_t>
                                : qk_norm_rope_kv_write_any<float>;
  const unsigned threads = many ? kOctThreads : kThreads;
  const int64_t heads_a_cta = many ? kOctGroups * kOctHeads : kGroups;
  const auto down = static_cast<unsigned>(least(ceil_div(heads, heads_a_cta), kMostGridRows));
  for (int64_t first = 0; first < in.rows; first += kMostCtas) {
    QkNormRope part = in;
    part.first_row = first;
    const dim3 grid(static_cast<unsigned>(least(in.rows - first, kMostCtas)), down);
    if (const cudaError_t error = launch_kernel(launch, grid, threads, kernel, part)) return error;
  }
  return cudaSuccess;
}

cudaError_t kv_cache_write(const KvCacheWrite& in, const Launch& launch) {
  const int64_t bytes = in.element_bytes, unit = sizeof(uint4);
  const bool wide =
      fits(in.k, in.k_row_stride, bytes, unit) && fits(in.k, in.k_head_stride, bytes, unit) &&
      fits(in.v, in.v_row_stride, bytes, unit) && fits(in.v, in.v_head_stride, bytes, unit) &&
      in.cache.head_dim * bytes % unit == 0 && fits(in.cache.k, in.cache.k_strides, bytes, unit) &&
      fits(in.cache.v, in.cache.v_strides, bytes, unit);
  const auto kernel = wide         ? copy_to_cache<uint4>
                      : bytes == 2 ? copy_to_cache<uint16_t>
                                   : copy_to_cache<uint32_t>;
  KvCacheWrite part = wide ? in_units(in, static_cast<int>(unit / bytes)) : in;
  for (int64_t first = 0; first < in.slots.count; first += kMostCtas) {
    part.first_row = first;
    const auto ctas = static_cast<unsigned>(least(in.slots.count - first, kMostCtas));
    if (const cudaError_t error = launch_kernel(launch, ctas, kThreads, kernel, part)) return error;
  }
  return cudaSuccess;
}

}  // namespace flint::cuda
