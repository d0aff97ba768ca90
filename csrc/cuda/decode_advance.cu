// What follows the drawing of tokens: positions, slots, lengths and ids of the next step.
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device.cuh"
#include "cuda/launch.cuh"
#include "cuda/sampling.h"
#include "cuda/tiles.h"

namespace flint::cuda {
namespace {

constexpr int kThreads = 128;

__device__ void set_slot(int32_t* slot, const int32_t* table, int64_t width, int page_size,
                         int32_t position) {
  if (*slot < 0) return;  // of a kind of layer that there is none of
  const int32_t page = position / page_size;
  *slot = page < width ? table[page] * page_size + position % page_size : -1;
}

__global__ void __launch_bounds__(kThreads) advance_rows(const __grid_constant__ DecodeAdvance in) {
  const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  // Whatever reads these tensors ahead of its own wait is complete then, and nothing that follows
  // may read them so.
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (row >= in.rows || in.seq_lens[row] <= 0) return;
  const int64_t token = *static_cast<const volatile int64_t*>(in.tokens + row);
  const int32_t position = in.positions[row] + 1;
  in.history[row * in.length + position % in.length] = token;
  in.input_ids[row] = token < 0 ? 0 : token;
  in.positions[row] = position;
  in.seq_lens[row] = position + 1;
  in.offsets[row] = int64_t{position} + 1;
  set_slot(in.slots + row, in.block_table + row * in.width, in.width, in.page_size, position);
  set_slot(in.window_slots + row, in.window_block_table + row * in.width, in.width, in.page_size,
           position);
}

}  // namespace

cudaError_t decode_advance(const DecodeAdvance& in, const Launch& launch) {
  const Shape shape{dim3(static_cast<unsigned>(ceil_div(in.rows, kThreads))), dim3(kThreads)};
  return launch_kernel(launch, shape, advance_rows, in);
}

}  // namespace flint::cuda
