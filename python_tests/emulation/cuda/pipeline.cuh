// See simt.h.
#pragma once

#include "cuda/bulk_copy.cuh"
#include "cuda/ring.cuh"

namespace flint::cuda {

// A box of four dimensions; zeros for what is outside of the tensor.
inline void copy_box(uint32_t to, const CUtensorMap& map, const int (&at)[4], uint32_t barrier) {
  char* target = simt::shared_pointer(to, 1024);
  const CUtensorMap source = map;
  const std::array<int, 4> first{at[0], at[1], at[2], at[3]};
  const auto copy = [=] {
    uint64_t place = 0;
    std::array<uint64_t, 4> i{};
    for (i[3] = 0; i[3] < source.box[3]; ++i[3]) {
      for (i[2] = 0; i[2] < source.box[2]; ++i[2]) {
        for (i[1] = 0; i[1] < source.box[1]; ++i[1]) {
          for (i[0] = 0; i[0] < source.box[0]; i[0] += 8, place += 16) {
            const char* from = source.base;
            bool inside = true;
            for (size_t k = 0; k < 4; ++k) {
              const int64_t index = static_cast<int64_t>(i[k]) + first[k];
              inside = inside && 0 <= index && index < static_cast<int64_t>(source.sizes[k]);
              from += index * static_cast<int64_t>(source.steps[k]);
            }
            char* piece = target + (place ^ (place >> 7 & 7) << 4);
            inside ? std::memcpy(piece, from, 16) : std::memset(piece, 0, 16);
          }
        }
      }
    }
    complete_bytes(barrier, static_cast<int>(place));
  };
  if (!simt::options.late_copies) return copy();
  emulated_arrivals[barrier].push_back(copy);
}

}  // namespace flint::cuda
