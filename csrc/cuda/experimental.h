// Kernels whose present form has not passed its tests on a GPU. No torch here.
#pragma once

#include <cstdlib>
#include <cstring>

namespace flint::cuda {

// Whether they are in use: FLINT_KERNELS_EXPERIMENTAL is set, to something else than 0.
inline bool experimental() {
  static const bool is_on = [] {
    const char* value = std::getenv("FLINT_KERNELS_EXPERIMENTAL");
    return value != nullptr && *value != '\0' && std::strcmp(value, "0") != 0;
  }();
  return is_on;
}

}  // namespace flint::cuda
