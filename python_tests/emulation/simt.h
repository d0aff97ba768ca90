// A GPU's threads on the CPU, as far as the kernels that run here use them. The kernels' own
// sources are compiled with the headers of this folder in place of those that hold instructions.
//
// A CTA is an OS thread, so that what is `__shared__` is thread_local; its threads are fibers,
// which run until they have to wait for others. Warps are let run in a random order, so that they
// drift apart as they may on a GPU.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

namespace simt {

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "emulated kernel: %s\n", what);
  std::abort();
}

inline constexpr int kLanes = 32;
inline constexpr size_t kStackBytes = 64 * 1024;

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

struct Cta;

struct Thread {
  Index index;
  Cta* cta = nullptr;
  ucontext_t context{};
  std::vector<char> stack;
  bool done = false;
  std::function<bool()> ready;  // to go on, where it waits
  int cluster_waits = 0;
  std::vector<std::vector<std::function<void()>>> copies{1};  // groups; the last one is open

  int lane() const { return static_cast<int>(index.x) % kLanes; }
};

struct Warp {
  static constexpr size_t kMostBytes = 48;
  std::array<std::array<char, kMostBytes>, kLanes> given, taken;
  int arrived = 0;
  uint64_t meetings = 0;
};

struct Cluster {
  std::mutex mutex;
  int size = 1, arrived = 0, generation = 0;
  std::vector<char*> anchors;
};

struct Cta {
  Index index;
  struct Barrier {
    int arrived = 0;
    uint64_t passed = 0;
  };

  int rank = 0, threads = 0, cluster_arrived = 0;
  std::array<Barrier, 16> barriers;  // 0: __syncthreads
  Cluster* cluster = nullptr;
  std::vector<Warp> warps;
  ucontext_t scheduler{};
};

// How a grid is run.
struct Options {
  unsigned seed = 1;
  bool late_copies = false;               // asynchronous copies happen when they are waited for
  std::function<void()> previous_kernel;  // what the kernel in front writes, done at the first wait
};

inline Options options;
inline std::once_flag* previous_kernel_once;
inline Index grid_size, block_size;
inline thread_local Thread* current;

// Shared memory's 32-bit addresses: the CTA's rank in its cluster, and the distance from an anchor
// that every OS thread has at the same place of its own memory.
inline constexpr uint32_t kRankShift = 24, kBias = 1u << 23;
alignas(1024) inline thread_local char anchor[1024];

inline uint32_t shared_handle(const void* pointer, int rank, const char* base) {
  const auto distance = static_cast<const char*>(pointer) - base;
  if (distance <= -int64_t{kBias} || distance >= int64_t{kBias}) fail("not in shared memory");
  return static_cast<uint32_t>(rank) << kRankShift |
         static_cast<uint32_t>(distance + int64_t{kBias});
}

inline char* shared_pointer(uint32_t handle, size_t alignment) {
  char* base = current->cta->cluster->anchors.at(handle >> kRankShift);
  char* pointer = base + int64_t{handle & ((1u << kRankShift) - 1)} - int64_t{kBias};
  if (reinterpret_cast<uintptr_t>(pointer) % alignment != 0) fail("misaligned shared address");
  return pointer;
}

inline void wait_until(std::function<bool()> ready) {
  while (!ready()) {
    current->ready = ready;
    swapcontext(&current->context, &current->cta->scheduler);
  }
  current->ready = nullptr;
}

// What each lane of the warp gives, once all have come.
template <typename T>
std::array<T, kLanes> gather(const T& value) {
  static_assert(sizeof(T) <= Warp::kMostBytes);
  Warp& warp = current->cta->warps[current->index.x / kLanes];
  std::memcpy(warp.given[current->lane()].data(), &value, sizeof(T));
  const uint64_t meeting = warp.meetings;
  if (++warp.arrived == kLanes) {
    warp.taken = warp.given;
    warp.arrived = 0;
    ++warp.meetings;
  } else {
    wait_until([&warp, meeting] { return warp.meetings != meeting; });
  }
  std::array<T, kLanes> all;
  for (int i = 0; i < kLanes; ++i) std::memcpy(&all[i], warp.taken[i].data(), sizeof(T));
  return all;
}

inline void sync_warp() { gather(0); }

// Comes to a barrier of `threads` threads; returns how often it had been passed.
inline uint64_t arrive_at_barrier(int index, int threads) {
  Cta::Barrier& barrier = current->cta->barriers.at(static_cast<size_t>(index));
  const uint64_t passed = barrier.passed;
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    ++barrier.passed;
  }
  return passed;
}

inline void sync_threads(int index, int threads) {
  const uint64_t passed = arrive_at_barrier(index, threads);
  const Cta::Barrier& barrier = current->cta->barriers[static_cast<size_t>(index)];
  wait_until([&barrier, passed] { return barrier.passed != passed; });
}

inline void sync_cta() { sync_threads(0, current->cta->threads); }

inline void arrive_cluster() {
  Cta& cta = *current->cta;
  if (++cta.cluster_arrived < cta.threads) return;
  cta.cluster_arrived = 0;
  const std::lock_guard lock(cta.cluster->mutex);
  if (++cta.cluster->arrived < cta.cluster->size) return;
  cta.cluster->arrived = 0;
  ++cta.cluster->generation;
}

inline void await_cluster() {
  const int generation = ++current->cluster_waits;
  Cluster& cluster = *current->cta->cluster;
  wait_until([&cluster, generation] {
    const std::lock_guard lock(cluster.mutex);
    return cluster.generation >= generation;
  });
}

inline void run_threads(Cta& cta, const std::function<void()>& kernel) {
  static thread_local const std::function<void()>* body;
  body = &kernel;
  cta.threads = static_cast<int>(block_size.x);
  cta.warps.resize(block_size.x / kLanes);
  std::vector<Thread> threads(block_size.x);
  for (unsigned i = 0; i < block_size.x; ++i) {
    Thread& thread = threads[i];
    thread.index.x = i;
    thread.cta = &cta;
    thread.stack.resize(kStackBytes);
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.data();
    thread.context.uc_stack.ss_size = thread.stack.size();
    makecontext(
        &thread.context,
        +[] {
          (*body)();
          current->done = true;
          swapcontext(&current->context, &current->cta->scheduler);
        },
        0);
  }
  std::mt19937 random(options.seed * 7919u + cta.index.x * 31 + cta.index.y * 17 + cta.index.z);
  std::vector<size_t> order(cta.warps.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  size_t left = threads.size();
  for (int idle = 0; left > 0; ++idle) {
    std::shuffle(order.begin(), order.end(), random);
    for (const size_t warp : order) {
      if (random() % 3 == 0) continue;
      for (int lane = 0; lane < kLanes; ++lane) {
        Thread& thread = threads[warp * kLanes + static_cast<size_t>(lane)];
        current = &thread;
        if (thread.done || (thread.ready && !thread.ready())) continue;
        swapcontext(&cta.scheduler, &thread.context);
        if (thread.done) --left;
        idle = 0;
      }
    }
    if (idle > 100) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // for other CTAs
    if (idle > 20000) fail("threads wait for each other");
  }
  for (const Thread& thread : threads) {
    for (const auto& group : thread.copies) {
      if (!group.empty()) fail("copies that nobody waited for");
    }
  }
}

// CTAs in random order: those of a cluster at the same time, else one after the other.
inline void run_grid(Index grid, Index block, int cluster_size,
                     const std::function<void()>& kernel) {
  grid_size = grid;
  block_size = block;
  std::once_flag once;
  previous_kernel_once = &once;
  std::vector<Index> firsts;
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; x += static_cast<unsigned>(cluster_size)) {
        firsts.push_back({x, y, z});
      }
    }
  }
  std::mt19937 random(options.seed);
  std::shuffle(firsts.begin(), firsts.end(), random);
  for (const Index& first : firsts) {
    Cluster cluster;
    cluster.size = cluster_size;
    cluster.anchors.resize(static_cast<size_t>(cluster_size));
    std::atomic<int> started{0}, ended{0};
    const auto all = [cluster_size](std::atomic<int>& count) {
      ++count;
      while (count < cluster_size) std::this_thread::yield();
    };
    std::vector<std::thread> ctas;
    for (int rank = 0; rank < cluster_size; ++rank) {
      ctas.emplace_back([&, rank] {
        Cta cta;
        cta.index = {first.x + static_cast<unsigned>(rank), first.y, first.z};
        cta.rank = rank;
        cta.cluster = &cluster;
        cluster.anchors[static_cast<size_t>(rank)] = anchor;
        all(started);
        run_threads(cta, kernel);
        all(ended);  // others may still write here
      });
    }
    for (auto& cta : ctas) cta.join();
  }
}

}  // namespace simt
