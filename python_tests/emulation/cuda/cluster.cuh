// See simt.h.
#pragma once

#include "cuda/barrier.cuh"

namespace flint::cuda {

inline uint32_t cluster_rank() { return static_cast<uint32_t>(simt::current->cta->rank); }

inline uint32_t cluster_size() { return static_cast<uint32_t>(simt::current->cta->cluster->size); }

inline uint32_t shared_of(uint32_t rank, const void* here) {
  return simt::shared_handle(here, static_cast<int>(rank), simt::anchor);
}

inline void send_cluster(uint32_t to, uint32_t value, uint32_t barrier) {
  std::memcpy(simt::shared_pointer(to, 4), &value, 4);
  reinterpret_cast<Barrier*>(simt::shared_pointer(barrier, 8))->complete(4);
}

inline void send_cluster(uint32_t to, const float2& value, uint32_t barrier) {
  std::memcpy(simt::shared_pointer(to, 8), &value, 8);
  reinterpret_cast<Barrier*>(simt::shared_pointer(barrier, 8))->complete(8);
}

inline void announce_cluster() { simt::arrive_cluster(); }
inline void await_cluster() { simt::await_cluster(); }

}  // namespace flint::cuda
