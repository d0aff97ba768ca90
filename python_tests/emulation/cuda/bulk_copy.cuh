// See simt.h.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <map>

namespace flint::cuda {

// In the eight bytes of a barrier.
struct EmulatedBarrier {
  int32_t phase, arrived;
};
inline thread_local std::map<uint32_t, std::vector<std::function<void()>>> emulated_boxes;

inline EmulatedBarrier& emulated_barrier(uint32_t barrier) {
  return *reinterpret_cast<EmulatedBarrier*>(simt::shared_pointer(barrier, 8));
}

inline void make_barrier(uint32_t barrier) { emulated_barrier(barrier) = {0, 0}; }
inline void publish_barriers() {}
inline void order_before_copies() {}
inline void prefetch_map(const CUtensorMap&) {}

inline void arrive(uint32_t barrier) {
  if (emulated_barrier(barrier).arrived++ != 0) simt::fail("a barrier that nobody waited for");
}

inline void arrive_expecting(uint32_t barrier, uint32_t bytes) {
  if (bytes != 2 * 16 * 128) simt::fail("not the bytes of a box");
  arrive(barrier);
}

inline void await(uint32_t handle, uint32_t parity) {
  EmulatedBarrier& barrier = emulated_barrier(handle);
  simt::wait_until([&barrier, handle, parity] {
    if (barrier.phase != static_cast<int32_t>(parity)) return true;
    if (barrier.arrived == 0) return false;
    for (const auto& copy : emulated_boxes[handle]) copy();
    emulated_boxes[handle].clear();
    barrier = {barrier.phase ^ 1, 0};
    return true;
  });
}

inline void copy_box(uint32_t to, const CUtensorMap& map, const int (&at)[5], uint32_t barrier) {
  char* target = simt::shared_pointer(to, 1024);
  const CUtensorMap source = map;
  const std::array<int, 5> first{at[0], at[1], at[2], at[3], at[4]};
  const auto copy = [=] {
    for (uint64_t element = 0; element < 2 * 16 * 64; ++element) {
      const uint64_t inside[5] = {element % 64, element / 64 % 16, element / (64 * 16), 0, 0};
      const char* from = source.base;
      for (size_t i = 0; i < 5; ++i) {
        const uint64_t index = inside[i] + static_cast<uint64_t>(first[i]);
        if (index >= source.sizes[i]) simt::fail("a box outside of its tensor");
        from += index * source.steps[i];
      }
      const uint64_t place = element * 2;
      std::memcpy(target + (place ^ (place >> 7 & 7) << 4), from, 2);  // the swizzle of 128 bytes
    }
  };
  if (!simt::options.late_copies) return copy();
  emulated_boxes[barrier].push_back(copy);
}

}  // namespace flint::cuda
