#include <algorithm>
#include <array>
#include <bit>

#include "cpu/nvfp4.h"
#include "cpu/parallel.h"
#include "nvfp4_layout.h"

#if defined(__SSSE3__)
#include <tmmintrin.h>
#endif

namespace flint::cpu {
namespace {

using namespace flint::nvfp4;

// A thread is worth starting for about 0.1 ms of work.
constexpr int64_t kGrain = int64_t{1} << 15;

constexpr auto kE4M3Values = [] {
  std::array<float, 256> values{};
  for (int byte = 0; byte < 256; ++byte) values[byte] = e4m3_value(static_cast<uint8_t>(byte));
  return values;
}();

#if defined(__SSSE3__)

// Byte shuffles look the two bytes of 16 values up at once; out of cache this runs as fast as
// memcpy.
class Decoder {
 public:
  Decoder() {
    alignas(16) uint8_t low[16], high[16];
    for (int code = 0; code < 16; ++code) {
      low[code] = static_cast<uint8_t>(kE2M1Bits[code]);
      high[code] = static_cast<uint8_t>(kE2M1Bits[code] >> 8);
    }
    low_ = _mm_load_si128(reinterpret_cast<const __m128i*>(low));
    high_ = _mm_load_si128(reinterpret_cast<const __m128i*>(high));
  }

  template <typename Finish>
  void block(const uint8_t* weight, float scale, float* out, Finish finish) const {
    const __m128i nibble = _mm_set1_epi8(0x0f);
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(weight));
    const __m128i codes = _mm_unpacklo_epi8(_mm_and_si128(bytes, nibble),
                                            _mm_and_si128(_mm_srli_epi16(bytes, 4), nibble));
    const __m128i low = _mm_shuffle_epi8(low_, codes);
    const __m128i high = _mm_shuffle_epi8(high_, codes);
    const __m128i zero = _mm_setzero_si128();
    const __m128i halves[2] = {_mm_unpacklo_epi8(low, high), _mm_unpackhi_epi8(low, high)};
    const __m128 factor = _mm_set1_ps(scale);
    for (int i = 0; i < 2; ++i) {
      const __m128 first = _mm_castsi128_ps(_mm_unpacklo_epi16(zero, halves[i]));
      const __m128 second = _mm_castsi128_ps(_mm_unpackhi_epi16(zero, halves[i]));
      _mm_storeu_ps(out + 8 * i, finish(_mm_mul_ps(first, factor)));
      _mm_storeu_ps(out + 8 * i + 4, finish(_mm_mul_ps(second, factor)));
    }
  }

  static auto keep() {
    return [](__m128 values) { return values; };
  }
  static auto times(float global) {
    return [factor = _mm_set1_ps(global)](__m128 values) { return _mm_mul_ps(values, factor); };
  }

 private:
  __m128i low_, high_;
};

#else

class Decoder {
 public:
  template <typename Finish>
  void block(const uint8_t* weight, float scale, float* out, Finish finish) const {
    for (int i = 0; i < kBlockBytes; ++i) {
      out[2 * i] = finish(value(weight[i] & 15) * scale);
      out[2 * i + 1] = finish(value(weight[i] >> 4) * scale);
    }
  }

  static auto keep() {
    return [](float value) { return value; };
  }
  static auto times(float global) {
    return [global](float value) { return value * global; };
  }

 private:
  static float value(int code) { return std::bit_cast<float>(uint32_t{kE2M1Bits[code]} << 16); }
};

#endif

template <typename Finish>
void decode(const uint8_t* weight, const uint8_t* scale, float* out, int64_t begin, int64_t end,
            Finish finish) {
  const Decoder decoder;
  for (int64_t i = begin; i < end; ++i) {
    decoder.block(weight + i * kBlockBytes, kE4M3Values[scale[i]], out + i * kBlockValues, finish);
  }
}

}  // namespace

void nvfp4_dequantize(const uint8_t* weight, const uint8_t* scale, const float* globals,
                      int64_t global_count, float* out, int64_t blocks, int threads) {
  parallel_for(blocks, kGrain, threads, [=](int64_t begin, int64_t end) {
    if (globals == nullptr) return decode(weight, scale, out, begin, end, Decoder::keep());
    const int64_t each = blocks / global_count;
    while (begin < end) {
      const int64_t owner = begin / each;
      const int64_t stop = std::min(end, (owner + 1) * each);
      decode(weight, scale, out, begin, stop, Decoder::times(globals[owner]));
      begin = stop;
    }
  });
}

}  // namespace flint::cpu
