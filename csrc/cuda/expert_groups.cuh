// Which experts a few tokens chose, each once.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device.cuh"
#include "cuda/experts.h"
#include "cuda/weight_tiles.cuh"

namespace flint::cuda {

// An entry is a token's choice of an expert, `token * top_k + place`. Entries of the same expert are
// a group, at most one of each token: an expert that a token names twice is in two groups.
struct ExpertGroups {
  int count;
  int expert[kMostEntries];               // of a group
  int8_t place[kMostEntries][kMostTokens];  // where a token chose a group's expert, or -1
  int8_t group_of[kMostEntries];          // of an entry; -1: it is skipped
  int key[kMostEntries];                  // equal for the entries of a group; -1: skipped
  bool leads[kMostEntries];               // whether an entry is the first of its group

  // By the whole CTA of at least kMostEntries threads. A barrier must follow; there are some inside
  // where there are several tokens.
  __device__ __forceinline__ void find(const Routing& routing) {
    const int entries = routing.tokens * routing.top_k;
    const int entry = static_cast<int>(threadIdx.x);
    int id = -1;
    if (entry < entries) {
      // Not by the read-only path: the kernel ahead may have written it.
      id = *static_cast<const volatile int32_t*>(routing.ids + entry);
      if (id >= routing.experts) id = -1;
    }
    if (routing.tokens == 1) {
      find_of_one(id, entries);
    } else {
      find_of_several(routing, entry, entries, id);
    }
  }

 private:
  // Every entry that is not skipped is a group.
  __device__ __forceinline__ void find_of_one(int id, int entries) {
    const int entry = static_cast<int>(threadIdx.x);
    if (entry >= kMostEntries) return;
    const unsigned named = __ballot_sync(0xffffffffu, id >= 0);
    if (entry >= kWarp) return;  // top_k is at most a warp's lanes
    const int group = __popc(named & ((1u << entry) - 1u));
    if (entry < entries) group_of[entry] = static_cast<int8_t>(id >= 0 ? group : -1);
    if (id >= 0) {
      expert[group] = id;
      place[group][0] = static_cast<int8_t>(entry);
    }
    if (entry == 0) count = __popc(named);
  }

  __device__ __forceinline__ void find_of_several(const Routing& routing, int entry, int entries,
                                                  int id) {
    const int token = entry / routing.top_k, first = token * routing.top_k;
    const bool is_entry = entry < entries;
    if (is_entry) expert[entry] = id;
    if (entry < kMostEntries) *reinterpret_cast<uint64_t*>(place[entry]) = ~uint64_t{0};
    __syncthreads();
    if (is_entry) {
      int mention = 0;
      for (int i = first; i < entry; ++i) mention += expert[i] == id ? 1 : 0;
      key[entry] = id < 0 ? -1 : id * kMostEntries + mention;
    }
    __syncthreads();
    int leader = entry;
    if (is_entry) {
      for (int i = 0; i < entry; ++i) leader = min(leader, key[i] == key[entry] ? i : leader);
      leads[entry] = id >= 0 && leader == entry;
    }
    __syncthreads();
    int group = 0;
    if (is_entry) {
      for (int i = 0; i < leader; ++i) group += leads[i] ? 1 : 0;
      group_of[entry] = static_cast<int8_t>(id >= 0 ? group : -1);
      if (leads[entry]) expert[group] = id;
      if (id >= 0) place[group][token] = static_cast<int8_t>(entry - first);
      if (entry == entries - 1) {
        int all = 0;
        for (int i = 0; i < entries; ++i) all += leads[i] ? 1 : 0;
        count = all;
      }
    }
  }
};

static_assert(kMostTokens == sizeof(uint64_t), "a group's places are cleared at once");

}  // namespace flint::cuda
