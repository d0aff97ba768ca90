// Tiles of weights on their way through shared memory, in the order in which they are multiplied.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/tiles.h"
#include "cuda/weight_tiles.cuh"

namespace flint::cuda {

// A tile is multiplied by kWarps warps, kChunks chunks each at a time: together a piece. A warp has
// kStages pieces of its own in shared memory or on their way, each lane what it will multiply, and
// waits for no other warp.
//
// `kWhole`: pieces are whole, no row and no chunk of theirs is missing, which saves asking.
//
// Use: kStages times `fetch` (or `skip`, at the end of the work), then for each piece `front`,
// `load` for its chunks, `pop`, and again one of `fetch` and `skip`.
template <typename Format, int kWarps, int kChunks, int kStages, bool kWhole = false>
class TileStream {
 public:
  static constexpr int kPiece = kWarps * kChunks * Format::kChunk;  // elements of a row
  static constexpr int kStageBytes = Format::template kPieceBytes<kChunks>;
  static constexpr int kBytes = kWarps * kStages * kStageBytes;  // of all warps

  static __host__ __device__ constexpr int pieces(int width) {
    return static_cast<int>(ceil_div(width, kPiece));
  }

  __device__ __forceinline__ TileStream(uint8_t* stages, int warp)
      : stages_(stages + warp * kStages * kStageBytes), warp_(warp) {}

  using Lane = typename Format::template Lane<kChunks, kWhole>;

  // Piece `piece` of a tile is the next one.
  __device__ __forceinline__ void fetch(const typename Format::Matrix& matrix, const TileRows& rows,
                                        int width, int piece) {
    Lane from;
    from.find(matrix, rows, width);
    fetch(from, piece);
  }

  // The same of a tile that has been found.
  __device__ __forceinline__ void fetch(const Lane& from, int piece) {
    from.fetch(shared_address(stages_) + static_cast<uint32_t>(in_ * kStageBytes), chunk_of(piece));
    close_copies();
    in_ = in_ + 1 == kStages ? 0 : in_ + 1;
  }

  __device__ __forceinline__ void skip() const { close_copies(); }

  // The first chunk that this warp has of piece `piece`.
  __device__ __forceinline__ int chunk_of(int piece) const {
    return (piece * kWarps + warp_) * kChunks;
  }

  // The oldest piece is complete.
  __device__ __forceinline__ void front() const {
    await_copies<kStages - 1>();
    __syncwarp();  // lanes have copied scales for each other
  }

  // Chunk c of this warp's part of the oldest piece.
  __device__ __forceinline__ typename Format::Chunk load(int c) const {
    return Format::template load<kChunks>(stages_ + out_ * kStageBytes, c);
  }

  __device__ __forceinline__ void pop() {
    __syncwarp();
    out_ = out_ + 1 == kStages ? 0 : out_ + 1;
  }

 private:
  uint8_t* stages_;
  int warp_;
  int in_ = 0, out_ = 0;
};

// Adds the products of a warp's part of the oldest piece. `x`: the lane's first vector of the part,
// the others `step` bytes apart.
template <typename Format, int kChunks, typename Stream>
__device__ __forceinline__ void multiply_piece(TileSums& sums, Stream& stream, const uint8_t* x,
                                               int step) {
  stream.front();
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    Format::multiply_chunk(sums, stream.load(c), x + c * Format::kVectors * step, step);
  }
  stream.pop();
}

// Adds the warps' sums of one element in order; a warp's are `kSums` apart.
template <int kWarps, int kSums = kTileSums>
__device__ __forceinline__ float warps_total(const float* sums, int element) {
  float total = sums[element];
#pragma unroll
  for (int i = 1; i < kWarps; ++i) total += sums[i * kSums + element];
  return total;
}

}  // namespace flint::cuda
