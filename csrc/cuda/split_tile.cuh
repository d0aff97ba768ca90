// One tile of weights, shared along the width by all warps of a CTA.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/tiles.h"
#include "cuda/weight_tiles.cuh"

namespace flint::cuda {

template <typename Format, int kThreads, int kChunks, int kStages>
class SplitTile {
 public:
  static constexpr int kWarps = kThreads / kWarp;
  static constexpr int kStageBytes = Format::template kPieceBytes<kChunks>;
  static constexpr int kStagesBytes = kWarps * kStages * kStageBytes;  // of the CTA
  static constexpr int kSumsBytes = kWarps * kTileSums * static_cast<int>(sizeof(float));

  // Pieces of a warp, and chunks of all warps, for a row of `width` elements.
  static __host__ __device__ constexpr int pieces(int width) {
    return static_cast<int>(ceil_div(ceil_div(width, Format::kChunk), kChunks * kWarps));
  }
  static __host__ __device__ constexpr int chunks(int width) {
    return pieces(width) * kChunks * kWarps;
  }

  // Begins to fetch: ahead of the wait, since nothing in flight writes weights.
  __device__ __forceinline__ SplitTile(uint8_t* stages, const typename Format::Matrix& matrix,
                                       const TileRows& rows, int width)
      : warp_(static_cast<int>(threadIdx.x) / kWarp),
        pieces_(pieces(width)),
        width_(width),
        stages_(stages + warp_ * kStages * kStageBytes) {
    from_.find(matrix, rows, width);
#pragma unroll
    for (int i = 0; i < kStages; ++i) fetch_next(i);
  }

  // The warp's own part of `rows` rows of activations; __syncwarp is inside.
  __device__ __forceinline__ void stage(uint8_t* staged, const uint16_t* x, int64_t stride,
                                        int rows) const {
    for (int piece = 0; piece < pieces_; ++piece) {
      stage_piece<Format, kChunks>(staged, x, stride, rows, width_, chunk_of(piece));
    }
    __syncwarp();
  }

  // The warp's sums over its part of the width.
  __device__ __forceinline__ void multiply(TileSums& sums, const uint8_t* staged, int rows) {
    const int step = staged_step(rows);
    int stage = 0;
    sums.clear();
#pragma unroll 1
    for (int piece = 0; piece < pieces_; ++piece) {
      await_copies<kStages - 1>();
      __syncwarp();
      Format::template multiply<kChunks>(sums, stages_ + stage * kStageBytes,
                                         staged_chunk<Format>(staged, rows, chunk_of(piece)), step);
      __syncwarp();
      fetch_next(stage);
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
  }

 private:
  // Pieces of the warps lie in turn along the width.
  __device__ __forceinline__ int chunk_of(int piece) const {
    return (piece * kWarps + warp_) * kChunks;
  }

  __device__ __forceinline__ void fetch_next(int stage) {
    if (fetched_ < pieces_) {
      from_.fetch(shared_address(stages_) + static_cast<uint32_t>(stage * kStageBytes),
                  chunk_of(fetched_));
    }
    ++fetched_;
    close_copies();
  }

  int warp_, pieces_, width_;
  uint8_t* stages_;
  typename Format::template Lane<kChunks> from_;
  int fetched_ = 0;
};

// Adds the warps' sums of one element in order.
template <int kWarps>
__device__ __forceinline__ float warps_total(const float* sums, int element) {
  float total = sums[element];
#pragma unroll
  for (int i = 1; i < kWarps; ++i) total += sums[i * kTileSums + element];
  return total;
}

}  // namespace flint::cuda
