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

}  // namespace flint::cuda
