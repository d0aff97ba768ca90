#include <atomic>
#include <bit>
#include <cstring>

#include "cpu/nvfp4.h"
#include "cpu/parallel.h"
#include "nvfp4_layout.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace flint::cpu {
namespace {

using namespace flint::nvfp4;

static_assert(std::endian::native == std::endian::little, "blocks are read as 64-bit words");

// A thread is worth starting for about 1 MiB of codes.
constexpr int64_t kGrain = int64_t{1} << 15;

template <typename Word>
Word load(const uint8_t* from) {
  Word word;
  std::memcpy(&word, from, sizeof(word));
  return word;
}

template <typename Word>
void store(uint8_t* to, Word word) {
  std::memcpy(to, &word, sizeof(word));
}

// The 32 code bytes of a super-block from one layout to the other. Two blocks fill an SSE register;
// that is twice the speed of 64-bit words while the data is in cache.
#if defined(__SSE2__)

void codes_gguf_to_modelopt(const uint8_t* from, uint8_t* to) {
  const __m128i nibble = _mm_set1_epi8(0x0f);
  const __m128i byte = _mm_set1_epi16(0x00ff);
  // Joins the nibbles in each pair of bytes; the result is in 16-bit lanes.
  const auto join = [&](__m128i nibbles) {
    return _mm_and_si128(_mm_or_si128(nibbles, _mm_srli_epi16(nibbles, 4)), byte);
  };
  for (int i = 0; i < kSuperblockCodeBytes; i += 16) {
    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    const __m128i first = join(_mm_and_si128(codes, nibble));
    const __m128i second = join(_mm_and_si128(_mm_srli_epi16(codes, 4), nibble));
    // 32-bit lanes: first half of blocks 0 and 1, second half of blocks 0 and 1.
    const __m128i packed = _mm_packus_epi16(first, second);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm_shuffle_epi32(packed, _MM_SHUFFLE(3, 1, 2, 0)));
  }
}

void codes_modelopt_to_gguf(const uint8_t* from, uint8_t* to) {
  const __m128i nibble = _mm_set1_epi8(0x0f);
  for (int i = 0; i < kSuperblockCodeBytes; i += 16) {
    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    const __m128i even = _mm_and_si128(codes, nibble);
    const __m128i odd = _mm_and_si128(_mm_srli_epi16(codes, 4), nibble);
    const __m128i block0 = _mm_unpacklo_epi8(even, odd);
    const __m128i block1 = _mm_unpackhi_epi8(even, odd);
    const __m128i first = _mm_unpacklo_epi64(block0, block1);
    const __m128i second = _mm_unpackhi_epi64(block0, block1);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm_or_si128(first, _mm_slli_epi16(second, 4)));
  }
}

#else

void codes_gguf_to_modelopt(const uint8_t* from, uint8_t* to) {
  for (int i = 0; i < kSuperblockCodeBytes; i += kBlockBytes) {
    store(to + i, block_gguf_to_modelopt(load<uint64_t>(from + i)));
  }
}

void codes_modelopt_to_gguf(const uint8_t* from, uint8_t* to) {
  for (int i = 0; i < kSuperblockCodeBytes; i += kBlockBytes) {
    store(to + i, block_modelopt_to_gguf(load<uint64_t>(from + i)));
  }
}

#endif

// The smallest index that any thread reports: the same one however the work was split.
class FirstBad {
 public:
  void report(int64_t superblock, uint32_t flags) {
    const int64_t index = superblock * kSuperblockScales + std::countr_zero(flags) / 8;
    int64_t seen = first_.load(std::memory_order_relaxed);
    while ((seen < 0 || index < seen) &&
           !first_.compare_exchange_weak(seen, index, std::memory_order_relaxed)) {
    }
  }
  int64_t index() const { return first_.load(std::memory_order_relaxed); }

 private:
  std::atomic<int64_t> first_{-1};
};

}  // namespace

int64_t nvfp4_gguf_to_modelopt(const uint8_t* blocks, uint8_t* weight, uint8_t* scale,
                               int64_t superblocks, int threads) {
  FirstBad bad;
  parallel_for(superblocks, kGrain, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const uint8_t* from = blocks + i * kSuperblockBytes;
      const auto scales = load<uint32_t>(from);
      if (const uint32_t flags = gguf_scales_bad(scales)) return bad.report(i, flags);
      store(scale + i * kSuperblockScales, scales_gguf_to_modelopt(scales));
      codes_gguf_to_modelopt(from + kSuperblockScales, weight + i * kSuperblockCodeBytes);
    }
  });
  return bad.index();
}

int64_t nvfp4_modelopt_to_gguf(const uint8_t* weight, const uint8_t* scale, uint8_t* blocks,
                               int64_t superblocks, int threads) {
  FirstBad bad;
  parallel_for(superblocks, kGrain, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      uint8_t* to = blocks + i * kSuperblockBytes;
      const auto scales = load<uint32_t>(scale + i * kSuperblockScales);
      if (const uint32_t flags = modelopt_scales_bad(scales)) return bad.report(i, flags);
      store(to, scales & 0x7f7f7f7fu);
      codes_modelopt_to_gguf(weight + i * kSuperblockCodeBytes, to + kSuperblockScales);
    }
  });
  return bad.index();
}

}  // namespace flint::cpu
