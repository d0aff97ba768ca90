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

// By their addresses, of several arrivals, in one CTA.
struct EmulatedPhase {
  int32_t bytes;  // announced and not yet come
  uint8_t arrivals, missing, parity, unused;

  void check() {
    if (missing != 0 || bytes != 0) return;
    missing = arrivals;
    parity ^= 1;
  }
};
static_assert(sizeof(EmulatedPhase) == 8);

inline EmulatedPhase& emulated_phase(uint32_t barrier) {
  return *reinterpret_cast<EmulatedPhase*>(simt::shared_pointer(barrier, 8));
}

inline thread_local std::map<uint32_t, std::vector<std::function<void()>>> emulated_arrivals;

inline void init_barrier(uint32_t barrier, unsigned arrivals) {
  const auto count = static_cast<uint8_t>(arrivals);
  emulated_phase(barrier) = {0, count, count, 0, 0};
}

inline void arrive(uint32_t barrier) {
  EmulatedPhase& phase = emulated_phase(barrier);
  if (phase.missing == 0) simt::fail("more arrivals than a barrier counts");
  --phase.missing;
  phase.check();
}

inline void expect_bytes(uint32_t barrier, uint32_t bytes) {
  emulated_phase(barrier).bytes += static_cast<int32_t>(bytes);
  arrive(barrier);
}

inline void complete_bytes(uint32_t barrier, int bytes) {
  EmulatedPhase& phase = emulated_phase(barrier);
  phase.bytes -= bytes;
  phase.check();
}

inline void await_phase(uint32_t barrier, uint32_t parity) {
  simt::wait_until([barrier, parity] {
    auto copies = std::move(emulated_arrivals[barrier]);
    emulated_arrivals[barrier].clear();
    for (const auto& copy : copies) copy();
    return emulated_phase(barrier).parity != parity;
  });
}

}  // namespace flint::cuda
