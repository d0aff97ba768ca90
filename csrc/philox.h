// Philox4x32-10 (Salmon et al., SC11), for the host and for the device, and the uniform number that
// `sample` makes of it.
#pragma once

#include <cstdint>

#include "nvfp4_layout.h"  // FLINT_HD

namespace flint {

struct Philox {
  uint32_t words[4];
};

FLINT_HD constexpr Philox philox_4x32_10(uint64_t key, uint64_t counter_low,
                                         uint64_t counter_high) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  uint32_t c0 = static_cast<uint32_t>(counter_low), c1 = static_cast<uint32_t>(counter_low >> 32);
  uint32_t c2 = static_cast<uint32_t>(counter_high), c3 = static_cast<uint32_t>(counter_high >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t low = uint64_t{c0} * 0xD2511F53u, high = uint64_t{c2} * 0xCD9E8D57u;
    c0 = static_cast<uint32_t>(high >> 32) ^ c1 ^ k0;
    c2 = static_cast<uint32_t>(low >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(high);
    c3 = static_cast<uint32_t>(low);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// 53 random bits in [0, 1).
FLINT_HD constexpr double uniform_53(int64_t seed, int64_t offset) {
  const Philox drawn =
      philox_4x32_10(static_cast<uint64_t>(seed), static_cast<uint64_t>(offset), 0);
  return (static_cast<double>(drawn.words[0] >> 5) * 0x1p26 +
          static_cast<double>(drawn.words[1] >> 6)) *
         0x1p-53;
}

// Random123's known answers (kat_vectors).
static_assert(philox_4x32_10(0, 0, 0).words[0] == 0x6627e8d5u);
static_assert(philox_4x32_10(0, 0, 0).words[3] == 0x9b00dbd8u);
static_assert(philox_4x32_10(~uint64_t{0}, ~uint64_t{0}, ~uint64_t{0}).words[1] == 0x41c83b0eu);
static_assert(philox_4x32_10(0x299f31d0a4093822u, 0x85a308d3243f6a88u, 0x0370734413198a2eu)
                  .words[2] == 0x5001e420u);

}  // namespace flint
