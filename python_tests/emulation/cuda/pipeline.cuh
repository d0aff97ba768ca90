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

inline void copy_late(uint32_t barrier, const std::function<void()>& copy) {
  if (!simt::options.late_copies) return copy();
  emulated_arrivals[barrier].push_back(copy);
}

// Whole rows, in blocks of 128 bytes across.
inline void copy_rows(uint32_t to, const CUtensorMap& map, int row, uint32_t barrier) {
  char* target = simt::shared_pointer(to, 1024);
  const CUtensorMap source = map;
  if (row < 0 || static_cast<uint64_t>(row) + source.box[1] > source.sizes[1]) {
    simt::fail("rows outside of their matrix");
  }
  copy_late(barrier, [=] {
    uint64_t place = 0;
    for (uint64_t block = 0; block < source.sizes[2]; ++block) {
      for (uint64_t i = 0; i < source.box[1]; ++i) {
        const char* from =
            source.base + (static_cast<uint64_t>(row) + i) * source.steps[1] + block * 128;
        for (uint64_t j = 0; j < 128; j += 16, place += 16) {
          std::memcpy(target + (place ^ (place >> 7 & 7) << 4), from + j, 16);
        }
      }
    }
    complete_bytes(barrier, static_cast<int>(place));
  });
}

inline void copy_bytes(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  char* target = simt::shared_pointer(to, 16);
  if (bytes % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0) {
    simt::fail("a copy of odd bytes");
  }
  copy_late(barrier, [=] {
    std::memcpy(target, from, bytes);
    complete_bytes(barrier, static_cast<int>(bytes));
  });
}

}  // namespace flint::cuda
