// Decode attention's keys and values in memory and in shared memory: a tile of 16 rows of one KV
// head, K on one side and V on the other.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "attention_split.h"
#include "cuda/async_copy.cuh"
#include "cuda/attention.h"
#include "cuda/bulk_copy.cuh"
#include "cuda/device.cuh"
#include "cuda/matrices.cuh"

namespace flint::cuda {

// A side is two boxes of 16 rows of 64 elements, one behind the other. In a row of 128 bytes the
// eight pieces of 16 bytes stand in an order that the row decides, so that lanes that read one
// piece of eight rows meet different banks: the swizzle that bulk copies apply.
inline constexpr int kBoxElements = 64;
inline constexpr int kBoxRowBytes = kBoxElements * 2;
inline constexpr int kBoxBytes = kAttentionTile * kBoxRowBytes;
inline constexpr int kSideBytes = 2 * kBoxBytes;
inline constexpr int kSideAlignment = 1024;  // after which the swizzle repeats
inline constexpr int kRowPieces = 2 * kBoxRowBytes / 16;

// Where piece `piece` (0 to 15) of a row stands in a side.
__device__ __forceinline__ uint32_t piece_place(int row, int piece) {
  return piece / 8 * kBoxBytes + row * kBoxRowBytes + (piece % 8 ^ row % 8) * 16;
}

// The first place in dynamic shared memory at which a side may begin.
__device__ __forceinline__ uint8_t* aligned_side(uint8_t* shared) {
  return shared + (-shared_address(shared) & (kSideAlignment - 1));
}

__device__ __forceinline__ int lane_index() { return static_cast<int>(threadIdx.x) % kWarp; }

// K or V of the cache; `map` for bulk copies: [blocks][kv_heads][box][row][element].
struct Side {
  CUtensorMap map;
  const char* base;
  int64_t block, row, head;  // strides in bytes
};

struct Pages {
  Side k, v;
  int blocks;
  int tiles_log2;  // of a page

  __device__ __forceinline__ bool has(int page) const { return page >= 0 && page < blocks; }
};

// A tile in the cache; its page may not be there.
struct TilePlace {
  int page, row, kv_head;

  __device__ __forceinline__ TilePlace(const Pages& pages, int tile, int page, int kv_head)
      : page(page),
        row((tile & ((1 << pages.tiles_log2) - 1)) * kAttentionTile),
        kv_head(kv_head) {}

  __device__ __forceinline__ const char* row_of(const Side& side, int index) const {
    return side.base + page * side.block + (row + index) * side.row + kv_head * side.head;
  }
};

// What stands for keys and values of a page that is not there: NaN.
__device__ __forceinline__ void put_broken_side(uint32_t to) {
  constexpr uint32_t kNans = 0x7fc07fc0;
#pragma unroll 1
  for (int at = lane_index() * 16; at < kSideBytes; at += kWarp * 16) {
    store_shared(to + at, make_uint4(kNans, kNans, kNans, kNans));
  }
}

// By a warp: a side on its way by a bulk copy, whose arrival ends a phase of `barrier`.
__device__ __forceinline__ void fetch_side(uint32_t to, Barrier& barrier, const Pages& pages,
                                           const TilePlace& place, bool is_v) {
  if (!pages.has(place.page)) {
    put_broken_side(to);
    __syncwarp();
    if (lane_index() == 0) barrier.arrive_expecting(0);
  } else if (lane_index() == 0) {
    barrier.arrive_expecting(kSideBytes);
    copy_box(to, (is_v ? pages.v : pages.k).map, {0, place.row, 0, place.kv_head, place.page},
             barrier);
  }
}

// The same by copies of the lanes, which are quicker where there is one tile; the caller closes
// the group. Zeros in the rows outside [first, last): what they hold may be no number.
__device__ __forceinline__ void fetch_side(uint32_t to, const Pages& pages, const TilePlace& place,
                                           bool is_v, int first, int last) {
  if (!pages.has(place.page)) return put_broken_side(to);
  const Side& side = is_v ? pages.v : pages.k;
  const int piece = lane_index() % kRowPieces, odd = lane_index() / kRowPieces;
  const char* from = place.row_of(side, odd) + piece * 16;
#pragma unroll
  for (int i = 0; i < kAttentionTile / 2; ++i) {
    const int row = 2 * i + odd;
    copy_16_async(to + piece_place(row, piece), from, row >= first && row < last);
    from += 2 * side.row;
  }
}

// The row of a request's newest key, which the kernel in front may have been writing when its tile
// was fetched: read again after the wait, by half of the warp K and by the other V.
class NewestRow {
 public:
  __device__ __forceinline__ void load(const Pages& pages, const TilePlace& place, int row) {
    row_ = row;
    if (!pages.has(place.page)) return;
    const char* from = place.row_of(is_v() ? pages.v : pages.k, row);
    value_ = load_activation(reinterpret_cast<const uint4*>(from) + piece());
  }

  __device__ __forceinline__ void put(uint32_t side, bool into_v) const {
    if (is_v() == into_v) store_shared(side + piece_place(row_, piece()), value_);
  }

 private:
  static __device__ __forceinline__ bool is_v() { return lane_index() >= kRowPieces; }
  static __device__ __forceinline__ int piece() { return lane_index() % kRowPieces; }

  uint4 value_ = {0x7fc07fc0u, 0x7fc07fc0u, 0x7fc07fc0u, 0x7fc07fc0u};
  int row_ = 0;
};

// Zeros in the rows of V outside [first, last): their weights are zero, but what they hold may be
// no number.
__device__ __forceinline__ void clear_values(uint32_t side, int first, int last) {
#pragma unroll 1
  for (int row = lane_index() / kRowPieces; row < kAttentionTile; row += kWarp / kRowPieces) {
    if (row >= first && row < last) continue;
    store_shared(side + piece_place(row, lane_index() % kRowPieces), make_uint4(0, 0, 0, 0));
  }
}

}  // namespace flint::cuda
