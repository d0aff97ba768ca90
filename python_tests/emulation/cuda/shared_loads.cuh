// See simt.h.
#pragma once

#include <cuda_runtime.h>

namespace flint::cuda {

template <typename T>
T load_shared_as(uint32_t from) {
  T value;
  std::memcpy(&value, simt::shared_pointer(from, sizeof(T)), sizeof(T));
  return value;
}

inline uint4 load_shared(uint32_t from) { return load_shared_as<uint4>(from); }
inline uint32_t load_shared_word(uint32_t from) { return load_shared_as<uint32_t>(from); }

inline void store_shared(uint32_t to, float one, float two) {
  const float both[2] = {one, two};
  std::memcpy(simt::shared_pointer(to, 8), both, 8);
}

}  // namespace flint::cuda
