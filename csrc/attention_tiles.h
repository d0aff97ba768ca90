// How prefill attention is cut into tiles of queries and of keys: for the host and the device. What
// a tile has follows from the queries' place in their own chunk, the chunk's past and the window,
// so that batchmates change no bit of a result.
#pragma once

#include <cstdint>

#include "nvfp4_layout.h"  // FLINT_HD

namespace flint {

// Keys of a page that are copied together; pages hold whole groups.
inline constexpr int kPageGroup = 16;

// Keys in tiles of a fixed number, by position: those of the past, from a whole group on, and then
// those of the chunk. The first of `past` keys begins at `past_first`, the chunk's at
// `chunk_first`.
struct KeyTiles {
  int oldest;  // that any query sees
  int past_first, past_tiles;
  int chunk_first, tiles;  // of both
};

// Of queries at positions first ... last of a chunk that begins at position `context`.
FLINT_HD constexpr KeyTiles key_tiles(int context, int first, int last, int window, int keys) {
  const int oldest = window > 0 && first >= window ? first - window + 1 : 0;
  const int past_first = oldest / kPageGroup * kPageGroup;
  const int past_tiles = oldest < context ? (context - past_first + keys - 1) / keys : 0;
  const int chunk_first = oldest < context ? context : oldest;
  return {oldest, past_first, past_tiles, chunk_first,
          past_tiles + (last - chunk_first) / keys + 1};
}

// The first key of tile `tile`.
FLINT_HD constexpr int first_key(const KeyTiles& of, int tile, int keys) {
  return tile < of.past_tiles ? of.past_first + tile * keys
                              : of.chunk_first + (tile - of.past_tiles) * keys;
}

static_assert(key_tiles(0, 8160, 8183, 513, 112).tiles == 5);
static_assert(key_tiles(0, 8160, 8183, 513, 112).chunk_first == 7648);
static_assert(key_tiles(120, 120, 143, 0, 112).past_tiles == 2);
static_assert(key_tiles(120, 120, 143, 0, 112).tiles == 3);
static_assert(key_tiles(100, 100, 100, 1, 112).past_tiles == 0);
static_assert(key_tiles(513, 513, 528, 513, 112).past_first == 0);
static_assert(key_tiles(545, 545, 560, 513, 112).past_first == 32);

}  // namespace flint
