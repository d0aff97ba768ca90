// Which experts a few tokens chose, each once.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device.cuh"
#include "cuda/experts.h"
#include "cuda/weight_tiles.cuh"

namespace flint::cuda {

// Of the threads that look for groups.
inline constexpr int kGroupsBarrier = 1;

// An entry is a token's choice of an expert, `token * top_k + place`. Entries of the same expert
// are a group, at most one of each token: an expert that a token names twice is in two groups.
struct ExpertGroups {
  // Where a token chose a group's expert, or -1.
  alignas(kMostTokens) int8_t place[kMostEntries][kMostTokens];
  int expert[kMostEntries];  // of a group
  int count;
  int8_t group_of[kMostEntries];  // of an entry; -1: it is skipped

  // Thread number `entry`'s entry, -1 where it has none. On its way while other things are done.
  static __device__ __forceinline__ int load(const Routing& routing, int entry) {
    int id = -1;
    // Not by the read-only path: the kernel ahead may have written it.
    if (entry < routing.tokens * routing.top_k) {
      id = *static_cast<const volatile int32_t*>(routing.ids + entry);
    }
    return id;
  }

  // By kMostEntries threads, whole warps, with their number and what `load` gave. A barrier must
  // follow.
  __device__ __forceinline__ void find(const Routing& routing, int entry, int id) {
    if (id < 0 || id >= routing.experts) id = -1;
    if (routing.tokens == 1) {
      find_of_one(id, entry, routing.top_k);
    } else {
      find_of_several(routing, entry, id);
    }
  }

 private:
  // Every entry that is not skipped is a group.
  __device__ __forceinline__ void find_of_one(int id, int entry, int entries) {
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

  // A thread compares its entry with all others.
  __device__ __forceinline__ void find_of_several(const Routing& routing, int entry, int id) {
    const int top_k = routing.top_k, entries = routing.tokens * top_k;
    key[entry] = id;
    *reinterpret_cast<uint64_t*>(place[entry]) = ~uint64_t{0};
    sync_threads<kMostEntries>(kGroupsBarrier);
    uint64_t same = 0;  // entries of the same expert, a bit each
#pragma unroll 4
    for (int i = 0; i < entries; ++i) same |= uint64_t{key[i] == id} << i;
    const int lead = leader(same, entry, top_k);
    const bool leads = id >= 0 && lead == entry;
    const unsigned leaders = __ballot_sync(0xffffffffu, leads);
    if (entry % kWarp == 0) leaders_of[entry / kWarp] = leaders;
    sync_threads<kMostEntries>(kGroupsBarrier);
    const uint64_t all = uint64_t{leaders_of[1]} << kWarp | leaders_of[0];
    if (entry == 0) count = __popcll(all);
    if (entry >= entries) return;
    const int group = __popcll(all & ((uint64_t{1} << lead) - 1));
    group_of[entry] = static_cast<int8_t>(id >= 0 ? group : -1);
    if (leads) expert[group] = id;
    if (id >= 0) place[group][entry / top_k] = static_cast<int8_t>(entry % top_k);
  }

  // The first entry of the group of `entry`, whose expert the entries `same` name: that of the
  // first token that names the expert as often as this one does up to here.
  static __device__ __forceinline__ int leader(uint64_t same, int entry, int top_k) {
    const uint64_t token = (uint64_t{1} << top_k) - 1;
    int mention = __popcll(same >> entry / top_k * top_k & ((uint64_t{1} << entry % top_k) - 1));
    if (mention == 0) return __ffsll(static_cast<long long>(same)) - 1;
    for (int first = 0;; first += top_k) {
      uint64_t of_token = same >> first & token;
      if (__popcll(of_token) <= mention) continue;
      for (; mention > 0; --mention) of_token &= of_token - 1;
      return first + __ffsll(static_cast<long long>(of_token)) - 1;
    }
  }

  int key[kMostEntries];  // the expert; -1: skipped
  unsigned leaders_of[kMostEntries / kWarp];
};

static_assert(kMostEntries == 2 * kWarp);
static_assert(kMostTokens == sizeof(uint64_t), "a group's places are cleared at once");

}  // namespace flint::cuda
