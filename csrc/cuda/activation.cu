#include "cuda/device.cuh"
#include "cuda/launch.cuh"
#include "cuda/norm.h"
#include "cuda/silu.cuh"
#include "cuda/tiles.h"

namespace flint::cuda {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ uint32_t act_pair(uint32_t gate, uint32_t up) {
  return pack_bf16(silu(low_half(gate)) * low_half(up), silu(high_half(gate)) * high_half(up));
}

// Eight BF16 elements a thread and row.
__global__ void __launch_bounds__(kThreads) silu_and_mul_8(const __grid_constant__ SiluAndMul in) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t at = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * 8;
  if (at >= in.width) return;
  for (int64_t row = int64_t{blockIdx.y} * blockDim.y + threadIdx.y; row < in.rows;
       row += int64_t{gridDim.y} * blockDim.y) {
    const auto* x = static_cast<const uint16_t*>(in.x) + row * in.x_stride + at;
    const uint4 gate = load_activation(reinterpret_cast<const uint4*>(x));
    const uint4 up = load_activation(reinterpret_cast<const uint4*>(x + in.width));
    auto* act = static_cast<uint16_t*>(in.act) + row * in.width + at;
    *reinterpret_cast<uint4*>(act) = make_uint4(act_pair(gate.x, up.x), act_pair(gate.y, up.y),
                                                act_pair(gate.z, up.z), act_pair(gate.w, up.w));
  }
}

// Any width, any alignment, FP32: an element a thread and row.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    silu_and_mul_any(const __grid_constant__ SiluAndMul in) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t at = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (at >= in.width) return;
  for (int64_t row = int64_t{blockIdx.y} * blockDim.y + threadIdx.y; row < in.rows;
       row += int64_t{gridDim.y} * blockDim.y) {
    const T* x = static_cast<const T*>(in.x) + row * in.x_stride + at;
    const float value = silu(to_float(x[0])) * to_float(x[in.width]);
    store_rounded(static_cast<T*>(in.act) + row * in.width + at, value);
  }
}

bool takes_vectors(const SiluAndMul& in) {
  const auto fits = [](const void* pointer, int64_t stride) {
    return keeps_alignment(reinterpret_cast<uint64_t>(pointer), stride, sizeof(uint16_t),
                           sizeof(uint4));
  };
  return in.bf16 && fits(in.x, in.x_stride) && fits(in.act, in.width);
}

}  // namespace

cudaError_t silu_and_mul(const SiluAndMul& in, const Launch& launch) {
  if (in.width == 0 || in.rows == 0) return cudaSuccess;
  const bool vectors = takes_vectors(in);
  const ElementTiles tiles = element_tiles(vectors ? in.width / 8 : in.width, in.rows, kThreads);
  const dim3 block(static_cast<unsigned>(tiles.across), static_cast<unsigned>(tiles.down));
  const dim3 grid(static_cast<unsigned>(tiles.ctas_across), static_cast<unsigned>(tiles.ctas_down));
  const auto kernel = vectors   ? silu_and_mul_8
                      : in.bf16 ? silu_and_mul_any<uint16_t>
                                : silu_and_mul_any<float>;
  return launch_kernel(launch, grid, block, kernel, in);
}

}  // namespace flint::cuda
