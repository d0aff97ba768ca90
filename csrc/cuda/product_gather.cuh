// Rows of x brought into the order of tiles by the product that reads them, a tile ahead of it.
//
// An expert's tokens lie apart, and copies want them together. Bringing all of them together first
// takes as long as memory does, with the tensor cores idle; so each CTA of a product brings a share
// of the rows of its next tile to where the tile is read, by warps that have nothing else to do.
// All CTAs that have rows of weights for the same tokens do so together, and each waits until the
// others have, too. None waits for ever: a tile is brought when its CTA begins the tile before,
// which is one with a lower index than all that wait for it, if there are at least as many clusters
// as clusters that share a tile's tokens; and all CTAs of a product run at the same time.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device.cuh"
#include "cuda/product_plan.cuh"

namespace flint::cuda {

// The products that can: those of gate and up with a warpgroup for copies.
template <typename Plan, ProductOutput kOutput>
inline constexpr bool kGathers = Plan::kCtas == 1 && kOutput == ProductOutput::kSilu;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Plain writes of this thread, and copies that are started later, by it or by threads that it meets.
__device__ __forceinline__ void order_with_copies() {
  asm volatile("fence.proxy.async;" ::: "memory");
}

// The CTAs that bring a share of a tile's rows.
__device__ __forceinline__ int sharers(const ProductJob& job) { return job.row_tiles * kCluster; }

// This CTA's share of the rows of its tile: by warp `warp` of `warps`, its own ones.
template <int kAtOnce, typename Plan>
__device__ __forceinline__ void gather_share(const ProductJob& job, const Tiles<Plan>& tiles,
                                             int warp, int warps) {
  const TokenTile tokens = tiles.tokens();
  const int lane = static_cast<int>(threadIdx.x) % kWarp, step = sharers(job) * warps;
  const int rank = tiles.index % job.row_tiles * kCluster + static_cast<int>(cluster_rank());
  const int vectors = job.steps * (Plan::kColumns / 8);  // of a row
  for (int first = rank + sharers(job) * warp; first < tokens.count; first += kWarp * step) {
    // Each lane knows where one row is.
    const int mine = min(first + lane * step, tokens.count - 1);
    const int source = __ldcg(job.from_entry + tokens.first + mine) / job.from_share;
    for (int i = 0; i < kWarp && first + i * step < tokens.count; ++i) {
      const int64_t row = __shfl_sync(0xffffffffu, source, i);
      const auto* from = reinterpret_cast<const uint4*>(job.from + row * job.from_stride) + lane;
      auto* to = reinterpret_cast<uint4*>(job.gathered) +
                 int64_t{tokens.first + first + i * step} * vectors + lane;
      for (int at = lane; at < vectors; at += kAtOnce * kWarp) {
        uint4 pieces[kAtOnce];
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          if (at + k * kWarp < vectors) pieces[k] = load_once(from + k * kWarp);
        }
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          if (at + k * kWarp < vectors) to[k * kWarp] = pieces[k];
        }
        from += kAtOnce * kWarp;
        to += kAtOnce * kWarp;
      }
    }
  }
  order_with_copies();
}

// How many CTAs have brought their share stands in the lower half of a word of the tile, how many
// know that all have, in the upper one; the last to know sets it back.

// By one thread, after all that have brought rows.
template <typename Plan>
__device__ __forceinline__ void announce_share(const ProductJob& job, const Tiles<Plan>& tiles) {
  int32_t* word = &job.tiles[tiles.index / job.row_tiles].gathered;
  asm volatile("fence.acq_rel.gpu; red.release.gpu.global.add.s32 [%0], 1;" ::"l"(word)
               : "memory");
}

// By the thread that copies.
template <typename Plan>
__device__ __forceinline__ void await_gathered(const ProductJob& job, const Tiles<Plan>& tiles) {
  int32_t* word = &job.tiles[tiles.index / job.row_tiles].gathered;
  const int all = sharers(job);
  int seen;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(word) : "memory");
  } while ((seen & 0xffff) != all);
  order_with_copies();
  if (atomicAdd(word, 0x10000) >> 16 == all - 1) *static_cast<volatile int32_t*>(word) = 0;
}

// By the warps of the copying warpgroup that do not copy: every tile but the first.
template <typename Plan>
__device__ __forceinline__ void gather_ahead(const ProductJob& job, const Barriers<Plan>& barriers,
                                             int warp) {
  constexpr int kWarps = kWarpgroup / kWarp - 1;
  Tiles<Plan> tiles(job);
  if (tiles.done()) return;
  uint32_t parity = 0;
  for (tiles.advance(); !tiles.done(); tiles.advance()) {
    await_phase(barriers.begun(), parity);
    parity ^= 1;
    gather_share<4>(job, tiles, warp, kWarps);
    sync_threads<kWarps * kWarp>(3);
    if (warp == 0 && threadIdx.x % kWarp == 0) announce_share(job, tiles);
  }
}

// By all threads: the first tile.
template <typename Plan>
__device__ __forceinline__ void gather_first(const ProductJob& job) {
  const Tiles<Plan> tiles(job);
  if (tiles.done()) return;
  gather_share<8>(job, tiles, static_cast<int>(threadIdx.x) / kWarp, Plan::kThreads / kWarp);
  __syncthreads();
  if (threadIdx.x == 0) announce_share(job, tiles);
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace flint::cuda
