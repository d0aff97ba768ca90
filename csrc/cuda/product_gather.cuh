// Rows of x brought into the order of tiles by the product that reads them, a tile ahead of it.
//
// An expert's tokens lie apart, and copies want them together. Bringing all of them together first
// takes as long as memory does, with the tensor cores idle; so CTAs that have rows of weights for
// the same tokens bring those together while they multiply the tile before, by warps that have
// nothing else to do. Each warp claims a share of the rows at a time, as long as there is one; who
// needs the tile waits for shares that somebody has claimed, that is, for warps that run. So no CTA
// waits for one that has not started, however few there are room for.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/arrival.cuh"
#include "cuda/bulk_copy.cuh"
#include "cuda/device.cuh"
#include "cuda/product_plan.cuh"

namespace flint::cuda {

// The products that do: those of gate and up with a warpgroup for copies. BF16 weights leave memory
// no time for more: measured on an H200 for 8,192 tokens, 477 us so and 463 us with a kernel
// before.
template <typename Plan, ProductOutput kOutput>
inline constexpr bool kGathers =
    Plan::kCtas == 1 && !Plan::kBf16 && kOutput == ProductOutput::kSilu;

inline constexpr int kMostGathering = 64;  // CTAs with the same tokens: so far the counters reach

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDACC__)

// A tile's counter has three: how many shares have been claimed (or asked for in vain, once by each
// warp), how many have been brought, and who knows of it: of each CTA the thread that copies, and
// the warps that claim. The last to know sets it back.
inline constexpr int kRowShares = 64;  // of a tile's rows, every 64th
inline constexpr int kClaim = 1, kBrought = 1 << 11, kKnown = 1 << 18;

__device__ __forceinline__ int claimed(int counter) { return counter % kBrought; }
__device__ __forceinline__ int brought(int counter) { return counter % kKnown / kBrought; }

template <typename Plan>
__device__ __forceinline__ int32_t* gather_counter(const ProductJob& job,
                                                   const Tiles<Plan>& tiles) {
  return &job.tiles[tiles.index / job.row_tiles].gathered;
}

template <typename Plan>
__device__ __forceinline__ void know_gathered(const ProductJob& job, const Tiles<Plan>& tiles) {
  int32_t* counter = gather_counter(job, tiles);
  const int all = 2 * kCluster * job.row_tiles;
  if (add_to(counter, kKnown) / kKnown == all - 1) {
    *static_cast<volatile int32_t*>(counter) = 0;
  }
}

// Rows of x: `kAtOnce` times 16 bytes a thread are under way. By a warp.
template <int kAtOnce>
__device__ __forceinline__ void gather_row(const ProductJob& job, int64_t from_row, int64_t to_row,
                                           int vectors) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const auto* from = reinterpret_cast<const uint4*>(job.from + from_row * job.from_stride) + lane;
  auto* to = reinterpret_cast<uint4*>(job.gathered) + to_row * vectors + lane;
  for (int left = vectors - lane; left > 0; left -= kAtOnce * kWarp) {
    uint4 pieces[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (i * kWarp < left) pieces[i] = load_once(from + i * kWarp);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (i * kWarp < left) to[i * kWarp] = pieces[i];
    }
    from += kAtOnce * kWarp;
    to += kAtOnce * kWarp;
  }
}

// Shares of the tile's rows, until all are claimed. By a warp.
template <int kAtOnce, typename Plan>
__device__ __forceinline__ void gather_shares(const ProductJob& job, const Tiles<Plan>& tiles) {
  static_assert(Plan::kTokens <= kWarp * kRowShares);
  int32_t* counter = gather_counter(job, tiles);
  const TokenTile tokens = tiles.tokens();
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int vectors = job.steps * (Plan::kColumns / 8);  // of a row
  for (;;) {
    int share = 0;
    if (lane == 0) share = claimed(add_to(counter, kClaim));
    share = __shfl_sync(0xffffffffu, share, 0);
    if (share >= kRowShares) return;
    // Each lane knows where one row is.
    const int mine = min(share + lane * kRowShares, tokens.count - 1);
    const int source = __ldcg(job.from_entry + tokens.first + mine) / job.from_share;
    for (int row = share; row < tokens.count; row += kRowShares) {
      const int from = __shfl_sync(0xffffffffu, source, row / kRowShares);
      gather_row<kAtOnce>(job, from, tokens.first + row, vectors);
    }
    order_with_copies();
    __syncwarp();
    if (lane == 0) add_released(counter, kBrought);
  }
}

// Of the thread that copies: the rows of one tile after the other.
struct GatheredRows {
  bool first = true;
  uint32_t parity = 0;

  // The rows are there, and the next tile's may be brought. That this CTA's own warps have done
  // with these keeps them at most a tile behind, which is as far as a barrier can tell.
  template <typename Plan>
  __device__ __forceinline__ void begin(const ProductJob& job, const Tiles<Plan>& tiles,
                                        const Barriers<Plan>& barriers) {
    if (!first) {
      await_phase(barriers.claimed(), parity);
      parity ^= 1;
    }
    first = false;
    int32_t* counter = gather_counter(job, tiles);
    while (brought(load_acquired(counter)) < kRowShares) {
    }
    order_with_copies();
    know_gathered(job, tiles);
    arrive(barriers.begun());
  }
};

// By all threads: the first tile.
template <typename Plan>
__device__ __forceinline__ void gather_first(const ProductJob& job) {
  const Tiles<Plan> tiles(job);
  if (tiles.done()) return;
  gather_shares<8>(job, tiles);
  __syncthreads();
  if (threadIdx.x == 0) know_gathered(job, tiles);
}

// By the warps of the copying warpgroup that do not copy: every tile but the first.
template <typename Plan>
__device__ __forceinline__ void gather_ahead(const ProductJob& job,
                                             const Barriers<Plan>& barriers) {
  constexpr int kThreads = kWarpgroup - kWarp;
  Tiles<Plan> tiles(job);
  if (tiles.done()) return;
  uint32_t parity = 0;
  for (tiles.advance(); !tiles.done(); tiles.advance()) {
    await_phase(barriers.begun(), parity);
    parity ^= 1;
    gather_shares<4>(job, tiles);
    sync_threads<kThreads>(3);
    if (threadIdx.x == Plan::kThreads - 1) {
      know_gathered(job, tiles);
      arrive(barriers.claimed());
    }
  }
}

#endif

}  // namespace flint::cuda
