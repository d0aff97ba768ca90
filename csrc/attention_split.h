// Which keys a decoding request attends to, and how they are split: for the host and the device.
// All of it follows from the request's own length, the window and numbers of the launch that no
// batch changes, so that neither batchmates nor the table's width change a bit of a result.
#pragma once

#include <cstdint>

#include "nvfp4_layout.h"  // FLINT_HD

namespace flint {

// Keys go to a warp in tiles of consecutive positions, the first of which is a multiple of this.
// Pages hold whole tiles.
inline constexpr int kAttentionTile = 16;
// A split of fewer tiles would take longer to merge than to compute.
inline constexpr int kLeastSplitTiles = 24;

// Of a request: keys [first, last), in tiles [tile, tile_end). Without keys the tiles are none too.
struct AttentionKeys {
  int first, last;
  int tile, tile_end;

  FLINT_HD constexpr int tiles() const { return tile_end - tile; }
};

// What a request of `length` keys sees through `window` (0: all); nothing where its length is not
// one that its table can name.
FLINT_HD constexpr AttentionKeys attention_keys(int length, int64_t capacity, int window) {
  if (length <= 0 || length > capacity) return {0, 0, 0, 0};
  const int first = window > 0 && length > window ? length - window : 0;
  return {first, length, first / kAttentionTile, (length - 1) / kAttentionTile + 1};
}

// A request's splits: each of `tiles` consecutive ones, the last of what is left; one where there
// are no tiles.
struct AttentionSplits {
  int count, tiles;
};

FLINT_HD constexpr AttentionSplits attention_splits(int tiles, int most) {
  if (tiles <= kLeastSplitTiles) return {1, tiles};
  const int even = (tiles + most - 1) / most;
  const int each = even > kLeastSplitTiles ? even : kLeastSplitTiles;
  return {(tiles + each - 1) / each, each};
}

static_assert(attention_keys(514, 1 << 20, 513).first == 1);
static_assert(attention_keys(513, 1 << 20, 513).first == 0);
static_assert(attention_keys(513, 512, 513).tiles() == 0);
static_assert(attention_keys(17, 32, 0).tiles() == 2);
static_assert(attention_splits(6250, 33).count == 33);
static_assert(attention_splits(0, 33).count == 1);

}  // namespace flint
