// A parallel loop over contiguous parts, on threads that live as long as the call.
//
// No pool: a call here works on megabytes, beside which starting a thread (tens of microseconds)
// is nothing, and a process that forks afterwards has no dead pool to inherit.
#pragma once

#include <algorithm>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

namespace flint::cpu {

// Calls body(begin, end) on disjoint parts that cover [0, count), each at least `grain` long
// except where count is less. `body` must not throw.
template <typename Body>
void parallel_for(int64_t count, int64_t grain, int threads, const Body& body) {
  const int64_t parts = std::clamp<int64_t>(count / grain, 1, std::max(threads, 1));
  // Boundaries by division of the index, which cannot overflow: parts is small.
  const auto boundary = [=](int64_t part) {
    return count / parts * part + std::min(part, count % parts);
  };
  std::vector<std::thread> workers;
  workers.reserve(static_cast<size_t>(parts - 1));
  int64_t started = 1;
  try {
    for (; started < parts; ++started) {
      workers.emplace_back(body, boundary(started), boundary(started + 1));
    }
  } catch (const std::system_error&) {
    // No more threads to be had: this one does the rest.
  }
  body(boundary(0), boundary(1));
  if (started < parts) body(boundary(started), count);
  for (std::thread& worker : workers) worker.join();
}

}  // namespace flint::cpu
