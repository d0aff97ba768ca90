// See simt.h.
#pragma once

#include <cuda_runtime.h>

namespace flint::cuda {

inline uint32_t shared_address(const void* pointer) {
  return simt::shared_handle(pointer, simt::current->cta->rank, simt::anchor);
}

inline void copy_16_async(uint32_t to, const void* from, bool there) {
  char* target = simt::shared_pointer(to, 16);
  if (reinterpret_cast<uintptr_t>(from) % 16 != 0) simt::fail("misaligned copy");
  const auto copy = [=] { there ? std::memcpy(target, from, 16) : std::memset(target, 0, 16); };
  if (!simt::options.late_copies) return static_cast<void>(copy());
  simt::current->copies.back().push_back(copy);
}

inline void copy_16_async(uint32_t to, const void* from) { copy_16_async(to, from, true); }

inline void copy_4_async(uint32_t to, const void* from, bool there) {
  char* target = simt::shared_pointer(to, 4);
  if (reinterpret_cast<uintptr_t>(from) % 4 != 0) simt::fail("misaligned copy");
  const auto copy = [=] { there ? std::memcpy(target, from, 4) : std::memset(target, 0, 4); };
  if (!simt::options.late_copies) return static_cast<void>(copy());
  simt::current->copies.back().push_back(copy);
}

inline void close_copies() { simt::current->copies.emplace_back(); }

template <int kOpen>
void await_copies() {
  auto& groups = simt::current->copies;
  while (static_cast<int>(groups.size()) - 1 > kOpen) {
    for (const auto& copy : groups.front()) copy();
    groups.erase(groups.begin());
  }
}

}  // namespace flint::cuda
