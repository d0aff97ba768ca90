// Two kernels with one order of summation, so that a row's bits do not depend on which runs:
// the 8 squares of a vector in order, the 32 vectors of a tile (256 elements) by a butterfly, the
// tiles in order.
//
//   rms_norm_cta   a CTA a row, the row in registers; a warp holds a tile, or several
//   rms_norm_any   any width, any alignment, FP32: a warp a row, read twice, element by element
#include "cuda/device.cuh"
#include "cuda/launch.cuh"
#include "cuda/norm.h"
#include "cuda/tiles.h"

namespace flint::cuda {
namespace {

constexpr int kVector = 8;  // BF16 elements of a 16-byte access
constexpr int kTile = kVector * kWarp;

constexpr int kWarpsACta = 4;  // rms_norm_any: rows of a CTA
constexpr int kHidden = 2048;  // the width that has kernels of its own
// More rows than this take CTAs of 128 threads, of which more fit an SM. Measured on an H200, 256
// and 128 threads: 1.81 and 1.85 us for 1 row, 3.83 and 3.87 for 1,024, 6.02 and 5.90 for 2,048.
constexpr int64_t kRowsForSmallCtas = 1024;

struct Row {
  const uint16_t* x;
  const uint16_t* residual;
  const uint16_t* weight;
  uint16_t* normed;
  uint16_t* residual_out;
};

__device__ __forceinline__ Row row_at(const RmsNorm& norm, int64_t row) {
  return {static_cast<const uint16_t*>(norm.x) + row * norm.x_stride,
          static_cast<const uint16_t*>(norm.residual) + row * norm.residual_stride,
          static_cast<const uint16_t*>(norm.weight),
          static_cast<uint16_t*>(norm.normed) + row * norm.width,
          static_cast<uint16_t*>(norm.residual_out) + row * norm.width};
}

// Eight elements of a row as they were read, and what is made of them.
template <bool kAdd>
struct Packed {
  uint4 x;
  uint4 residual;  // kAdd only

  __device__ __forceinline__ void load(const Row& row, int64_t at) {
    x = load_activation(reinterpret_cast<const uint4*>(row.x + at));
    if constexpr (kAdd)
      residual = load_activation(reinterpret_cast<const uint4*>(row.residual + at));
  }

  __device__ __forceinline__ void clear() {
    x = make_uint4(0, 0, 0, 0);
    if constexpr (kAdd) residual = make_uint4(0, 0, 0, 0);
  }

  __device__ __forceinline__ void sums(float (&s)[kVector]) const {
    const uint32_t xs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s[2 * i] = low_half(xs[i]);
      s[2 * i + 1] = high_half(xs[i]);
    }
    if constexpr (kAdd) {
      const uint32_t residuals[4] = {residual.x, residual.y, residual.z, residual.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[2 * i] += low_half(residuals[i]);
        s[2 * i + 1] += high_half(residuals[i]);
      }
    }
  }

  __device__ __forceinline__ float squares() const {
    float s[kVector];
    sums(s);
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < kVector; ++i) total = fmaf(s[i], s[i], total);
    return total;
  }

  __device__ __forceinline__ void store(const Row& row, int64_t at, const uint4& weight,
                                        float scale) const {
    float s[kVector];
    sums(s);
    if constexpr (kAdd) {
      *reinterpret_cast<uint4*>(row.residual_out + at) =
          make_uint4(pack_bf16(s[0], s[1]), pack_bf16(s[2], s[3]), pack_bf16(s[4], s[5]),
                     pack_bf16(s[6], s[7]));
    }
    const uint32_t weights[4] = {weight.x, weight.y, weight.z, weight.w};
    uint32_t normed[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      normed[i] = pack_bf16(s[2 * i] * scale * low_half(weights[i]),
                            s[2 * i + 1] * scale * high_half(weights[i]));
    }
    *reinterpret_cast<uint4*>(row.normed + at) =
        make_uint4(normed[0], normed[1], normed[2], normed[3]);
  }
};

__device__ __forceinline__ float inverse_rms(float squares, const RmsNorm& norm) {
  return rsqrtf(fmaf(squares, norm.inverse_width, norm.eps));
}

// A thread holds kVectors vectors of the row, a whole CTA apart. With `kWidth` the width is known
// and every vector is there; without it, CTAs are a multiple of 4 warps, at most kThreads.
template <bool kAdd, int kVectors, int kThreads, int kWidth>
__global__ void __launch_bounds__(kThreads) rms_norm_cta(const __grid_constant__ RmsNorm norm) {
  static_assert(kWidth == 0 || kWidth == kThreads * kVectors * kVector);
  constexpr int kMostTiles = kVectors * kThreads / kWarp;
  static_assert(kMostTiles % 4 == 0, "tiles are read four at a time");
  __shared__ __align__(16) float tiles[kMostTiles];
  const Row row = row_at(norm, blockIdx.x);
  const int threads = kWidth != 0 ? kThreads : static_cast<int>(blockDim.x);
  const int warps = threads / kWarp, step = threads * kVector;
  const int first = static_cast<int>(threadIdx.x) * kVector;
  const auto there = [&](int i) { return kWidth != 0 || first + i * step < norm.width; };

  // At once, ahead of the wait: a few rows take less time than the next kernel's weights to arrive.
  let_next_kernel_start();
  uint4 weight[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (there(i)) {
      weight[i] = load_weight(reinterpret_cast<const uint4*>(row.weight + first + i * step));
    }
  }
  wait_for_previous_kernel();

  Packed<kAdd> part[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (there(i)) {
      part[i].load(row, first + i * step);
    } else {
      part[i].clear();
    }
  }
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const float tile = lane_sum<kWarp>(part[i].squares());
    if (threadIdx.x % kWarp == 0) tiles[i * warps + threadIdx.x / kWarp] = tile;
  }
  __syncthreads();
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kMostTiles; i += 4) {
    if (kWidth == 0 && i >= kVectors * warps) break;
    const float4 four = *reinterpret_cast<const float4*>(tiles + i);
    squares += four.x;
    squares += four.y;
    squares += four.z;
    squares += four.w;
  }
  const float scale = inverse_rms(squares, norm);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (there(i)) part[i].store(row, first + i * step, weight[i], scale);
  }
}

template <typename T>
__global__ void __launch_bounds__(kWarpsACta* kWarp)
    rms_norm_any(const __grid_constant__ RmsNorm norm) {
  const int64_t index = int64_t{blockIdx.x} * kWarpsACta + threadIdx.x / kWarp;
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (index >= norm.rows) return;
  const bool add = norm.residual != nullptr;
  const T* x = static_cast<const T*>(norm.x) + index * norm.x_stride;
  const T* residual = static_cast<const T*>(norm.residual) + index * norm.residual_stride;
  const T* weight = static_cast<const T*>(norm.weight);
  T* normed = static_cast<T*>(norm.normed) + index * norm.width;
  T* residual_out = static_cast<T*>(norm.residual_out) + index * norm.width;
  const int64_t first = threadIdx.x % kWarp * kVector;

  float squares = 0.0f;
  for (int64_t tile = 0; tile < norm.width; tile += kTile) {
    float vector = 0.0f;
    for (int64_t at = tile + first; at < least(tile + first + kVector, norm.width); ++at) {
      const float s = add ? to_float(x[at]) + to_float(residual[at]) : to_float(x[at]);
      vector = fmaf(s, s, vector);
    }
    squares += lane_sum<kWarp>(vector);
  }
  const float scale = inverse_rms(squares, norm);
  // The same elements in the same lane: an output may be its input.
  for (int64_t tile = 0; tile < norm.width; tile += kTile) {
    for (int64_t at = tile + first; at < least(tile + first + kVector, norm.width); ++at) {
      const float s = add ? to_float(x[at]) + to_float(residual[at]) : to_float(x[at]);
      if (add) store_rounded(residual_out + at, s);
      store_rounded(normed + at, s * scale * to_float(weight[at]));
    }
  }
}

RmsNormPlan plan_for(const RmsNorm& norm) {
  if (norm.plan != RmsNormPlan::kAutomatic) return norm.plan;
  return norm.rows > kRowsForSmallCtas ? RmsNormPlan::kCta128 : RmsNormPlan::kCta256;
}

bool takes_vectors(const RmsNorm& norm) {
  const auto fits = [](const void* pointer, int64_t stride) {
    return keeps_alignment(reinterpret_cast<uint64_t>(pointer), stride, sizeof(uint16_t),
                           sizeof(uint4));
  };
  return norm.bf16 && norm.width <= 16384 && fits(norm.x, norm.x_stride) &&
         fits(norm.residual, norm.residual == nullptr ? 0 : norm.residual_stride) &&
         fits(norm.weight, norm.width) && fits(norm.normed, norm.width) &&
         fits(norm.residual_out, norm.width);
}

// One launch; norm.rows is within a grid.
template <bool kAdd>
cudaError_t launch_vectors(const RmsNorm& norm, const Launch& launch) {
  const auto rows = static_cast<unsigned>(norm.rows);
  if (norm.width == kHidden) {
    return plan_for(norm) == RmsNormPlan::kCta128
               ? launch_kernel(launch, rows, 128, rms_norm_cta<kAdd, 2, 128, kHidden>, norm)
               : launch_kernel(launch, rows, 256, rms_norm_cta<kAdd, 1, 256, kHidden>, norm);
  }
  const auto threads = [&](int vectors) {
    return static_cast<unsigned>(round_up(ceil_div(norm.width, kVector * vectors), 4 * kWarp));
  };
  if (norm.width <= 256 * kVector) {
    return launch_kernel(launch, rows, threads(1), rms_norm_cta<kAdd, 1, 256, 0>, norm);
  }
  if (norm.width <= 512 * kVector * 2) {
    return launch_kernel(launch, rows, threads(2), rms_norm_cta<kAdd, 2, 512, 0>, norm);
  }
  return launch_kernel(launch, rows, threads(4), rms_norm_cta<kAdd, 4, 512, 0>, norm);
}

cudaError_t launch_rows(const RmsNorm& norm, const Launch& launch) {
  if (takes_vectors(norm)) {
    return norm.residual != nullptr ? launch_vectors<true>(norm, launch)
                                    : launch_vectors<false>(norm, launch);
  }
  const auto ctas = static_cast<unsigned>(ceil_div(norm.rows, kWarpsACta));
  const auto kernel = norm.bf16 ? rms_norm_any<uint16_t> : rms_norm_any<float>;
  return launch_kernel(launch, ctas, kWarpsACta * kWarp, kernel, norm);
}

const void* moved(const void* pointer, int64_t bytes) {
  return pointer == nullptr ? nullptr : static_cast<const char*>(pointer) + bytes;
}

void* moved(void* pointer, int64_t bytes) {
  return pointer == nullptr ? nullptr : static_cast<char*>(pointer) + bytes;
}

}  // namespace

cudaError_t rms_norm(const RmsNorm& norm, const Launch& launch) {
  if (norm.width == 0) return cudaSuccess;
  const int64_t bytes = norm.bf16 ? sizeof(uint16_t) : sizeof(float);
  for (int64_t first = 0; first < norm.rows; first += kMostCtas) {
    RmsNorm part = norm;
    part.inverse_width = 1.0f / static_cast<float>(norm.width);
    part.x = moved(norm.x, first * norm.x_stride * bytes);
    part.residual = moved(norm.residual, first * norm.residual_stride * bytes);
    part.normed = moved(norm.normed, first * norm.width * bytes);
    part.residual_out = moved(norm.residual_out, first * norm.width * bytes);
    part.rows = least(norm.rows - first, kMostCtas);
    if (const cudaError_t error = launch_rows(part, launch)) return error;
  }
  return cudaSuccess;
}

}  // namespace flint::cuda
