// See simt.h.
#pragma once

#include "cuda/async_copy.cuh"

namespace flint::cuda {

inline uint32_t cluster_rank() { return static_cast<uint32_t>(simt::current->cta->rank); }

inline uint32_t shared_of(uint32_t rank, const void* here) {
  return simt::shared_handle(here, static_cast<int>(rank), simt::anchor);
}

inline void store_cluster(uint32_t to, uint32_t value) {
  std::memcpy(simt::shared_pointer(to, 4), &value, 4);
}

inline void arrive_cluster() { simt::arrive_cluster(); }
inline void await_cluster() { simt::await_cluster(); }

}  // namespace flint::cuda
