// Entries in the order of their experts, for products of each expert with its own tokens. An entry
// is a token's choice of an expert, `token * top_k + place`. No torch here.
#pragma once

#include <cstdint>

#include "cuda/experts.h"
#include "cuda/product.h"
#include "cuda/tiles.h"

namespace flint::cuda {

inline constexpr int kEntriesOfChunk = 1024;
inline constexpr int kMostExperts = 512;

// Everything lies in one piece of device memory, of `words_of_order` words and 16-byte aligned.
struct ExpertOrder {
  int32_t* entry;       // [entries]: the entry at each place; the same expert's in rising order
  int32_t* place;       // [entries]: the place of each entry, or -1
  int32_t* tile_count;  // [1]
  TokenTile* tiles;     // [tile_count]: places of one expert each
  int32_t* counts;      // scratch: [chunks, experts], then [experts]
};

// No expert has more than entries / tile + 1 tiles of at most `tile` places.
inline int64_t most_tiles(int64_t entries, int64_t experts, int64_t tile) {
  return least(entries, entries / tile + experts);
}

inline int64_t words_of_order(int64_t entries, int64_t experts, int64_t tile) {
  return 2 * round_up(entries, 4) + 4 + 4 * most_tiles(entries, experts, tile) +
         (ceil_div(entries, kEntriesOfChunk) + 1) * experts;
}

inline ExpertOrder order_in(int32_t* memory, int64_t entries, int64_t experts, int64_t tile) {
  int32_t* place = memory + round_up(entries, 4);
  int32_t* tile_count = place + round_up(entries, 4);
  int32_t* tiles = tile_count + 4;
  return {memory, place, tile_count, reinterpret_cast<TokenTile*>(tiles),
          tiles + 4 * most_tiles(entries, experts, tile)};
}

// Fills `order` for tiles of at most `tile` places: a multiple of `step`, which the size of every
// tile is too but that of an expert's last one. Stable, and on the device.
cudaError_t order_entries(const Routing& routing, int tile, int step, const ExpertOrder& order,
                          const Launch& launch);

// to[place] = from[entry at the place / share], rows of `width` BF16, a multiple of 8; `from` has
// rows from_stride elements apart. `share` is 1 or top_k. `arranged`: in the order of arranged.h,
// the width then a multiple of 256.
struct GatherRows {
  const void* from;
  int64_t from_stride;
  void* to;
  int width, share;
  bool arranged;
};

cudaError_t gather_rows(const GatherRows& rows, const Routing& routing, const ExpertOrder& order,
                        const Launch& launch);

// out = round(round(sum of weight * output, in the order of selection) + shared). Entries that name
// no expert are left out.
struct CombineExperts {
  Routing routing;
  const float* weights;  // [tokens, top_k]
  const void* outputs;   // [tokens, top_k, hidden] BF16
  const void* shared;    // [tokens, hidden] BF16, or null
  void* out;             // [tokens, hidden] BF16
  int hidden;            // a multiple of 8
};

cudaError_t combine_experts(const CombineExperts& in, const Launch& launch);

}  // namespace flint::cuda
