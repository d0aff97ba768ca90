// The order of activations' columns in which the codes of a word are the cheapest to decode.
//
// decode_codes makes pairs of codes i and i + 4, and a lane that decodes whole words has
// neighbouring columns where the tensor core wants those of four lanes side by side. So x is
// brought into the order that the lanes have: of each 256 columns, column 64t + 16p + 8e + 4b + s
// stands at place 64p + 16s + 8e + 2t + b (t, p, s: 0 to 3; e, b: 0 or 1).
#pragma once

#include <cstdint>

#include "nvfp4_layout.h"  // FLINT_HD

namespace flint::cuda {

// Where of eight columns from `column` (a multiple of 8) the first pair stands; the others follow
// at a distance of kPairDistance: columns 0 and 4, 1 and 5, 2 and 6, 3 and 7.
inline constexpr int kPairDistance = 16;

FLINT_HD constexpr int arranged_pair(int column) {
  const int e = column / 8 % 2, p = column / 16 % 4, t = column / 64 % 4;
  return column / 256 * 256 + 64 * p + 8 * e + 2 * t;
}

#if defined(__CUDACC__) || defined(FLINT_EMULATED)

// Eight BF16 of columns `column`, ... of a row that begins at `row`, to their places.
__device__ __forceinline__ void store_arranged(uint16_t* row, int column, const uint4& eight) {
  const uint32_t pairs[4] = {
      __byte_perm(eight.x, eight.z, 0x5410), __byte_perm(eight.x, eight.z, 0x7632),
      __byte_perm(eight.y, eight.w, 0x5410), __byte_perm(eight.y, eight.w, 0x7632)};
  auto* to = reinterpret_cast<uint32_t*>(row + arranged_pair(column));
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i * kPairDistance / 2] = pairs[i];
}

#endif

}  // namespace flint::cuda
