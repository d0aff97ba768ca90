// Two kernels: each CTA of the first finds the best 32 of its part of a row's logits; in the second
// a CTA makes one list of a row's lists, and a warp draws from it.
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/best_keys.cuh"
#include "cuda/device.cuh"
#include "cuda/launch.cuh"
#include "cuda/sampling.h"
#include "cuda/tiles.h"
#include "philox.h"
#include "topk_key.h"

namespace flint::cuda {
namespace {

constexpr int kPartThreads = 256, kPartLogits = 4;
constexpr int kPart = kPartThreads * kPartLogits;
constexpr int kDrawThreads = 1024;
constexpr int64_t kMostParts = int64_t{1} << 20;

__device__ __host__ constexpr int64_t parts_of(int64_t count) { return ceil_div(count, kPart); }

// 0 for what is no candidate: NaN and -inf. +inf counts as the largest finite value.
__device__ __forceinline__ uint64_t key_of(float logit, int64_t token) {
  constexpr float kLargest = 3.40282347e38f;
  if (!(logit >= -kLargest)) return 0;
  return topk_key(min(logit, kLargest), static_cast<uint32_t>(token));
}

__device__ __forceinline__ float load_logit(const float* from) {
  return __uint_as_float(load_activation(reinterpret_cast<const uint32_t*>(from)));
}

// Of a key that is none of 0; the logit 0 has lost its sign.
__device__ __forceinline__ float logit_of(uint64_t key) {
  const auto rank = static_cast<uint32_t>(key >> 32);
  return __uint_as_float((rank >> 31) != 0 ? rank & 0x7fffffffu : ~rank);
}

__global__ void __launch_bounds__(kPartThreads) best_of_part(const __grid_constant__ Sample in) {
  __shared__ uint64_t room[kPartThreads / kWarp][kWarp];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t row = blockIdx.y;
  const int64_t first = int64_t{blockIdx.x} * kPart + threadIdx.x;
  const float* logits = in.logits + row * in.stride;
  uint64_t keys[kPartLogits];
#pragma unroll
  for (int i = 0; i < kPartLogits; ++i) {
    const int64_t token = first + i * kPartThreads;
    keys[i] = token < in.count ? key_of(load_logit(logits + token), token) : 0;
  }
  uint64_t best = sort_keys(keys[0]);
#pragma unroll
  for (int i = 1; i < kPartLogits; ++i) {
    // Rising: sorted as the complements are.
    best = merge_reversed(best, ~sort_keys(~keys[i]));
  }
  best = merge_warps<kPartThreads / kWarp>(best, room);
  if (threadIdx.x < kWarp) {
    in.candidates[(row * parts_of(in.count) + blockIdx.x) * kWarp + threadIdx.x] = best;
  }
}

// What a row's token is drawn by.
struct Draw {
  float temperature, top_p;
  int32_t top_k;
  int64_t seed, offset;

  __device__ bool greedy() const { return temperature == 0; }

  __device__ bool legal(int most) const {
    const bool finite = temperature >= 0 && temperature <= 3.40282347e38f;
    const bool kept = greedy() ? top_k >= 0 : 1 <= top_k && top_k <= most;
    return finite && kept && top_p > 0 && top_p <= 1;
  }
};

// The place in `list` of the token that is drawn. All lanes of a warp get it. Sums are in the order
// of the list, as on the CPU.
__device__ int drawn_place(uint64_t list, int candidates, const Draw& draw, double* room) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const double temperature = draw.temperature;
  const double scaled = static_cast<double>(logit_of(list)) / temperature;
  const double first = __shfl_sync(0xffffffffu, scaled, 0);
  const double chance = lane < candidates ? exp(scaled - first) : 0;
  room[lane] = chance;
  __syncwarp();
  double total = 0;
  for (int i = 0; i < candidates; ++i) total += room[i];
  __syncwarp();
  room[lane] = chance / total;
  __syncwarp();
  // A candidate is kept while what comes before it is below top_p.
  double before = 0, own = 0;
  int kept = 0;
  while (kept < candidates && (kept == 0 || before < static_cast<double>(draw.top_p))) {
    before += room[kept];
    if (kept++ == lane) own = before;
  }
  const double target = uniform_53(draw.seed, draw.offset) * before;
  const unsigned passed = __ballot_sync(0xffffffffu, lane + 1 < kept && own <= target);
  return __popc(passed);
}

__global__ void __launch_bounds__(kDrawThreads) draw_token(const __grid_constant__ Sample in) {
  constexpr int kWarps = kDrawThreads / kWarp;
  __shared__ uint64_t room[kWarps][kWarp];
  __shared__ double chances[kWarp];
  const int64_t row = blockIdx.x;
  // The kernel in front waits before it lets this one start: nothing in flight writes these.
  const Draw draw{in.temperature[row], in.top_p[row], in.top_k[row], in.seed[row], in.offset[row]};
  wait_for_previous_kernel();
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int parts = static_cast<int>(parts_of(in.count));
  const volatile uint64_t* lists = in.candidates + row * parts * kWarp;
  uint64_t best = 0;
  for (int part = warp; part < parts; part += kWarps) {
    best = merge_reversed(best, lists[part * kWarp + kWarp - 1 - lane]);
  }
  best = merge_warps<kWarps>(best, room);
  let_next_kernel_start();
  if (warp != 0) return;
  const int found = __popc(__ballot_sync(0xffffffffu, best != 0));
  const bool legal = draw.legal(in.most) && found > 0;
  int place = 0;
  if (legal && !draw.greedy()) {
    place = drawn_place(best, min(found, static_cast<int>(draw.top_k)), draw, chances);
  }
  if (lane == place) in.tokens[row] = legal ? static_cast<int64_t>(topk_index(best)) : -1;
}

}  // namespace

int64_t sample_words(int64_t rows, int64_t count, int64_t most) {
  const bool fits = 0 < rows && rows <= kMostGridRows && 0 < count &&
                    parts_of(count) <= kMostParts && 0 < most && most <= kMostCandidates;
  return fits ? rows * parts_of(count) * kWarp : 0;
}

cudaError_t sample(const Sample& in, const Launch& launch) {
  const auto parts = static_cast<unsigned>(parts_of(in.count));
  const auto rows = static_cast<unsigned>(in.rows);
  const cudaError_t error =
      launch_kernel(launch, Shape{dim3(parts, rows), dim3(kPartThreads)}, best_of_part, in);
  if (error != cudaSuccess) return error;
  return launch_kernel(launch, Shape{dim3(rows), dim3(kDrawThreads)}, draw_token, in);
}

}  // namespace flint::cuda
