// See simt.h.
#pragma once

#include <cuda_runtime.h>

#include <map>

#include "cuda/async_copy.cuh"

namespace flint::cuda {

// Of all barriers: CTAs of a cluster are OS threads, and count for each other's.
inline std::mutex emulated_barriers;

// Of one arrival.
class alignas(8) Barrier {
 public:
  void init(uint32_t arrivals) {
    if (arrivals != 1) simt::fail("a barrier of several arrivals");
    *this = Barrier{};
  }

  void arrive_expecting(uint32_t bytes) {
    const std::lock_guard lock(emulated_barriers);
    if (arrived_) simt::fail("a barrier that nobody waited for");
    arrived_ = true;
    expected_ += static_cast<int32_t>(bytes);
  }

  void complete(int bytes) {
    const std::lock_guard lock(emulated_barriers);
    expected_ -= bytes;
  }

  // Copies that wait until they are waited for.
  void wait(uint32_t parity) const;

  uint32_t address() const { return shared_address(this); }

 private:
  int32_t expected_;
  mutable bool arrived_;
  mutable uint8_t phase_;
};
static_assert(sizeof(Barrier) == 8);

inline thread_local std::map<const Barrier*, std::vector<std::function<void()>>> emulated_boxes;

inline void Barrier::wait(uint32_t parity) const {
  simt::wait_until([this, parity] {
    {
      const std::lock_guard lock(emulated_barriers);
      if (phase_ != parity) return true;
      if (!arrived_) return false;
    }
    for (const auto& copy : emulated_boxes[this]) copy();
    emulated_boxes[this].clear();
    const std::lock_guard lock(emulated_barriers);
    if (expected_ != 0) return false;
    arrived_ = false;
    phase_ ^= 1;
    return true;
  });
}

inline void publish_barriers() {}

}  // namespace flint::cuda
