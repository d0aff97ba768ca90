// See simt.h.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

namespace flint::cuda {

inline uint32_t arrive_at(uint32_t* counter, uint32_t last) {
  const uint32_t before = *counter;  // CTAs of a grid run one after the other
  *counter = before >= last ? 0 : before + 1;
  return before;
}

// CTAs may run at the same time here.
inline int add_to(int32_t* counter, int value) {
  return std::atomic_ref<int32_t>(*counter).fetch_add(value);
}
inline void add_released(int32_t* counter, int value) { add_to(counter, value); }
inline int load_acquired(const int32_t* counter) {
  bool asked = false;  // others go on before it is asked again
  simt::wait_until([&asked] { return std::exchange(asked, true); });
  return std::atomic_ref<int32_t>(*const_cast<int32_t*>(counter)).load();
}

}  // namespace flint::cuda
