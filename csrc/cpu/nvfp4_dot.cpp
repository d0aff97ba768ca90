#include "cpu/nvfp4_dot.h"

#include <array>
#include <bit>
#include <cstring>

#include "cpu/clones.h"
#include "nvfp4_layout.h"

#if defined(FLINT_HAS_CLONES)
#include <immintrin.h>
#endif

namespace flint::cpu {

#if defined(FLINT_HAS_CLONES)
namespace {

using namespace flint::nvfp4;

#define FLINT_V4 __attribute__((target("arch=x86-64-v4")))

using Spread = uint64_t __attribute__((vector_size(sizeof(Lanes))));
using Indices = int32_t __attribute__((vector_size(sizeof(Lanes))));

alignas(sizeof(Lanes)) constexpr auto kE2M1Values = [] {
  std::array<float, 16> values{};
  for (int code = 0; code < 16; ++code) {
    values[code] = std::bit_cast<float>(uint32_t{kE2M1Bits[code]} << 16);
  }
  return values;
}();

constexpr auto kE4M3Values = [] {
  std::array<float, 256> values{};
  for (int byte = 0; byte < 256; ++byte) values[byte] = e4m3_value(static_cast<uint8_t>(byte));
  return values;
}();

template <int kRows>
FLINT_V4 void dot_rows(const uint8_t* codes, const uint8_t* scales, const Block* x, int64_t blocks,
                       float* sums) {
  Lanes e2m1, lanes[kRows] = {};
  std::memcpy(&e2m1, kE2M1Values.data(), sizeof(e2m1));
  for (int64_t i = 0; i < blocks; ++i) {
    for (int r = 0; r < kRows; ++r) {
      const int64_t at = r * blocks + i;
      const auto* bytes = reinterpret_cast<const __m128i*>(codes + at * kBlockBytes);
      // A byte to 64 bits: its low nibble to the lower 32, its high nibble to the upper ones. A
      // shuffle takes its indices modulo 16. (Unmasked, GCC 12 warns of what the mask leaves out.)
      const auto spread =
          reinterpret_cast<Spread>(_mm512_maskz_cvtepu8_epi64(0xff, _mm_loadl_epi64(bytes)));
      const auto indices = reinterpret_cast<Indices>(spread | spread << 28);
      lanes[r] += __builtin_shuffle(e2m1, indices) * kE4M3Values[scales[at]] * x[i].values;
    }
  }
  for (int r = 0; r < kRows; ++r) sums[r] = add_lanes(lanes[r]);
}

}  // namespace

bool has_nvfp4_dot() {
  static const bool has = __builtin_cpu_supports("x86-64-v4") != 0;
  return has;
}

FLINT_V4 void nvfp4_dot(const uint8_t* codes, const uint8_t* scales, int64_t rows, const Block* x,
                        int64_t blocks, float* sums) {
  int64_t row = 0;
  for (; row + 4 <= rows; row += 4) {
    const int64_t at = row * blocks;
    dot_rows<4>(codes + at * kBlockBytes, scales + at, x, blocks, sums + row);
  }
  for (; row < rows; ++row) {
    const int64_t at = row * blocks;
    dot_rows<1>(codes + at * kBlockBytes, scales + at, x, blocks, sums + row);
  }
}

#else

bool has_nvfp4_dot() { return false; }

void nvfp4_dot(const uint8_t*, const uint8_t*, int64_t, const Block*, int64_t, float*) {}

#endif

}  // namespace flint::cpu
