// See simt.h.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "cuda/barrier.cuh"

namespace flint::cuda {

inline void order_before_copies() {}
inline void order_with_copies() {}
inline void prefetch_map(const CUtensorMap&) {}

inline void copy_box(uint32_t to, const CUtensorMap& map, const int (&at)[5], Barrier& barrier) {
  char* target = simt::shared_pointer(to, 1024);
  const CUtensorMap source = map;
  const std::array<int, 5> first{at[0], at[1], at[2], at[3], at[4]};
  const auto copy = [=, &barrier] {
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
    barrier.complete(2 * 16 * 64 * 2);
  };
  if (!simt::options.late_copies) return copy();
  emulated_boxes[&barrier].push_back(copy);
}

}  // namespace flint::cuda
