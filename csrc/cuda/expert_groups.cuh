// Which experts a few tokens chose, each once.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device.cuh"
#include "cuda/experts.h"
#include "cuda/weight_tiles.cuh"

namespace flint::cuda {

// An entry is a token's choice of an expert, `token * top_k + place`. Entries of the same expert
// are a group, at most one of each token: an expert that a token names twice is in two groups.
struct ExpertGroups {
  // Where a token chose a group's expert, or -1.
  alignas(kMostTokens) int8_t place[kMostEntries][kMostTokens];
  int expert[kMostEntries];  // of a group
  int count;
  int8_t group_of[kMostEntries];  // of an entry; -1: it is skipped

  // This thread's entry, -1 where it has none. On its way while other things are done.
  static __device__ __forceinline__ int load(const Routing& routing) {
    int id = -1;
    // Not by the read-only path: the kernel ahead may have written it.
    if (threadIdx.x < routing.tokens * routing.top_k) {
      id = *static_cast<const volatile int32_t*>(routing.ids + threadIdx.x);
    }
    return id;
  }

  // By the whole CTA of at least kMostEntries threads, with what `load` gave. A barrier must
  // follow; there are some inside where there are several tokens.
  __device__ __forceinline__ void find(const Routing& routing, int id) {
    const int entries = routing.tokens * routing.top_k;
    const int entry = static_cast<int>(threadIdx.x);
    if (id < 0 || id >= routing.experts) id = -1;
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

  // A warp compares an entry with all others at once.
  __device__ __forceinline__ void find_of_several(const Routing& routing, int entry, int entries,
                                                  int id) {
    const bool is_entry = entry < entries;
    if (is_entry) key[entry] = id;
    if (entry < kMostEntries) *reinterpret_cast<uint64_t*>(place[entry]) = ~uint64_t{0};
    __syncthreads();
    const int lane = entry % kWarp, warp = entry / kWarp,
              warps = static_cast<int>(blockDim.x) / kWarp;
    for (int i = warp; i < entries; i += warps) {
      const int mine = key[i];
      const uint64_t token_before = (uint64_t{1} << i) - (uint64_t{1} << (i - i % routing.top_k));
      const int mention = __popcll(equal_to(mine, key, entries, lane) & token_before);
      if (lane == 0) named[i] = mine < 0 ? mine : mine * kMostEntries + mention;
    }
    __syncthreads();
    for (int i = warp; i < entries; i += warps) {
      const int first = __ffsll(static_cast<long long>(equal_to(named[i], named, entries, lane)));
      if (lane == 0) leader[i] = first - 1;
    }
    __syncthreads();
    const bool leads = is_entry && id >= 0 && leader[entry] == entry;
    if (entry < kMostEntries) {
      const unsigned leaders = __ballot_sync(0xffffffffu, leads);
      if (entry % kWarp == 0) leaders_of[entry / kWarp] = leaders;
    }
    __syncthreads();
    if (is_entry) {
      const int of = leader[entry];
      int group = __popc(leaders_of[0] & (of < kWarp ? (1u << of) - 1u : ~0u));
      if (of >= kWarp) group += __popc(leaders_of[1] & ((1u << (of - kWarp)) - 1u));
      group_of[entry] = static_cast<int8_t>(id >= 0 ? group : -1);
      if (leads) expert[group] = id;
      if (id >= 0) {
        place[group][entry / routing.top_k] = static_cast<int8_t>(entry % routing.top_k);
      }
    }
    if (entry == 0) count = __popc(leaders_of[0]) + __popc(leaders_of[1]);
  }

  // The entries of `keys` that are equal to `mine`, a bit each.
  static __device__ __forceinline__ uint64_t equal_to(int mine, const int* keys, int entries,
                                                      int lane) {
    const unsigned low = __ballot_sync(0xffffffffu, lane < entries && keys[lane] == mine);
    const unsigned high =
        __ballot_sync(0xffffffffu, lane + kWarp < entries && keys[lane + kWarp] == mine);
    return uint64_t{high} << kWarp | low;
  }

  int key[kMostEntries];     // the expert; -1: skipped
  int named[kMostEntries];   // equal for the entries of a group: also how often the token has named
                             // the expert before
  int leader[kMostEntries];  // the first entry of the group
  unsigned leaders_of[kMostEntries / kWarp];
};

static_assert(kMostEntries == 2 * kWarp);
static_assert(kMostTokens == sizeof(uint64_t), "a group's places are cleared at once");

}  // namespace flint::cuda
