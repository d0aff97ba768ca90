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
constexpr int32_t kLastPosition = INT32_MAX - 1;  // the length after it has to be a number too

// Where a row's table puts its next token; -1 where that is nowhere.
__device__ void set_slot(int32_t* slot, const int32_t* table, const DecodeAdvance& in, bool sound,
                         int32_t position) {
  if (*slot < 0) return;  // of a kind of layer that there is none of
  const int32_t page = position / in.page_size;
  *slot = sound && page < in.width ? table[page] * in.page_size + position % in.page_size : -1;
}

__global__ void __launch_bounds__(kThreads) advance_rows(const __grid_constant__ DecodeAdvance in) {
  const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  // Whatever reads these tensors ahead of its own wait is complete then, and nothing that follows
  // may read them so.
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (row >= in.rows || in.seq_lens[row] <= 0) return;
  const int32_t length = in.seq_lens[row];
  const bool sound = in.positions[row] == length - 1 && length <= in.width * in.page_size;
  // By the length, which is above 0, and not by a position, which may be anything.
  const int32_t position = min(length, kLastPosition);
  const int64_t token = *static_cast<const volatile int64_t*>(in.tokens + row);
  in.history[row * in.length + position % in.length] = token;
  in.input_ids[row] = token < 0 ? 0 : token;
  in.positions[row] = position;
  in.seq_lens[row] = position + 1;
  in.offsets[row] = int64_t{position} + 1;
  set_slot(in.slots + row, in.block_table + row * in.width, in, sound, position);
  set_slot(in.window_slots + row, in.window_block_table + row * in.width, in, sound, position);
}

}  // namespace

cudaError_t decode_advance(const DecodeAdvance& in, const Launch& launch) {
  const Shape shape{dim3(static_cast<unsigned>(ceil_div(in.rows, kThreads))), dim3(kThreads)};
  return launch_kernel(launch, shape, advance_rows, in);
}

}  // namespace flint::cuda
