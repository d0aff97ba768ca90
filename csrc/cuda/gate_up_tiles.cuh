// The tiles of gate and up: eight gate rows of an expert and the eight up rows that go with them.
// Those of the shared expert come first, since their weights are fetched before the experts are
// known; then those of each group of ExpertGroups.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/experts.h"
#include "cuda/tiles.h"
#include "cuda/weight_tiles.cuh"

namespace flint::cuda {

struct GateUpTiles {
  int shared_tiles, expert_tiles;  // of the shared expert, of a routed one
  int step;                        // tiles between one of a walker's and its next
  int step_groups, step_rows;      // the same in groups and tiles
  int64_t most;                    // if no two tokens choose the same expert

  explicit GateUpTiles(const MoeGateUp& in)
      : shared_tiles(in.shared_size / kHalfTile),
        expert_tiles(in.routed_size / kHalfTile),
        step(0),
        step_groups(0),
        step_rows(0),
        most(shared_tiles + int64_t{in.routing.tokens} * in.routing.top_k * expert_tiles) {}

  void walk_in_steps_of(int walkers) {
    step = walkers;
    step_groups = walkers / expert_tiles;
    step_rows = walkers % expert_tiles;
  }
};

// A walker's way over the tiles, without a division at each step: tile `tile` of all is the shared
// expert's, or tile `row` of group `group`.
struct GateUpWalk {
  int tile, group, row;

  __device__ __forceinline__ GateUpWalk(const GateUpTiles& tiles, int first)
      : tile(first),
        group((first - tiles.shared_tiles) / tiles.expert_tiles),
        row((first - tiles.shared_tiles) % tiles.expert_tiles) {
    if (row < 0) {
      row += tiles.expert_tiles;
      --group;
    }
  }

  __device__ __forceinline__ void advance(const GateUpTiles& tiles) {
    tile += tiles.step;
    group += tiles.step_groups;
    row += tiles.step_rows;
    if (row >= tiles.expert_tiles) {
      row -= tiles.expert_tiles;
      ++group;
    }
  }
};

// Entries that name no expert give zeros. By all CTAs, after ExpertGroups::find.
__device__ __forceinline__ void clear_skipped(const MoeGateUp& in, const int8_t* group_of) {
  const int entries = in.routing.tokens * in.routing.top_k;
  for (int entry = static_cast<int>(blockIdx.x); entry < entries;
       entry += static_cast<int>(gridDim.x)) {
    if (group_of[entry] >= 0) continue;
    for (int i = static_cast<int>(threadIdx.x); i < in.routed_size;
         i += static_cast<int>(blockDim.x)) {
      static_cast<uint16_t*>(in.routed_act)[entry * in.routed_size + i] = 0;
    }
  }
}

}  // namespace flint::cuda
