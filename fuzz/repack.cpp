// The C++ conversions of NVFP4 under libFuzzer: any bytes, against a reader that takes one value at
// a time, in buffers of exactly the size that is needed (AddressSanitizer sees a byte beyond).
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cpu/nvfp4.h"
#include "nvfp4_layout.h"

namespace {

using namespace flint;
using namespace flint::nvfp4;
using Bytes = std::vector<uint8_t>;

void require(bool holds) {
  if (!holds) std::abort();
}

// Value `i` of GGUF's super-blocks, as a code.
int gguf_code(const Bytes& blocks, size_t i) {
  const size_t block = i / kSuperblockValues * kSuperblockBytes + kSuperblockScales +
                       i % kSuperblockValues / kBlockValues * kBlockBytes;
  const size_t at = i % kBlockValues;
  return at < kBlockBytes ? blocks[block + at] & 15 : blocks[block + at - kBlockBytes] >> 4;
}

int modelopt_code(const Bytes& weight, size_t i) { return weight[i / 2] >> i % 2 * 4 & 15; }

uint8_t gguf_scale(const Bytes& blocks, size_t i) {
  return blocks[i / kSuperblockScales * kSuperblockBytes + i % kSuperblockScales];
}

void to_modelopt_and_back(const Bytes& blocks, int threads) {
  const size_t superblocks = blocks.size() / kSuperblockBytes;
  const size_t scales = superblocks * kSuperblockScales;
  Bytes weight(superblocks * kSuperblockCodeBytes), scale(scales);
  const int64_t bad = cpu::nvfp4_gguf_to_modelopt(blocks.data(), weight.data(), scale.data(),
                                                  static_cast<int64_t>(superblocks), threads);
  size_t first = 0;
  while (first < scales && gguf_scale(blocks, first) != 0xff) ++first;
  require(bad == (first < scales ? static_cast<int64_t>(first) : -1));
  if (bad >= 0) return;
  for (size_t i = 0; i < superblocks * kSuperblockValues; ++i) {
    require(gguf_code(blocks, i) == modelopt_code(weight, i));
  }
  for (size_t i = 0; i < scales; ++i) {
    const int read = gguf_scale(blocks, i) & 0x7f;
    require(scale[i] == (read == 0x7f ? 0 : read));
  }
  Bytes back(blocks.size());
  require(cpu::nvfp4_modelopt_to_gguf(weight.data(), scale.data(), back.data(),
                                      static_cast<int64_t>(superblocks), threads) == -1);
  for (size_t i = 0; i < superblocks * kSuperblockValues; ++i) {
    require(gguf_code(back, i) == modelopt_code(weight, i));
  }
}

// codes [8 a block] and scales [1 a block] as they are in the input, any bytes.
void decode(const Bytes& input, int threads) {
  const size_t blocks = input.size() / (kBlockBytes + 1);
  const Bytes weight(input.begin(), input.begin() + static_cast<long>(blocks * kBlockBytes));
  const Bytes scale(input.begin() + static_cast<long>(blocks * kBlockBytes),
                    input.begin() + static_cast<long>(blocks * (kBlockBytes + 1)));
  std::vector<float> out(blocks * kBlockValues);
  cpu::nvfp4_dequantize(weight.data(), scale.data(), nullptr, 0, out.data(),
                        static_cast<int64_t>(blocks), threads);
  constexpr float kMagnitudes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  for (size_t i = 0; i < out.size(); ++i) {
    const int code = modelopt_code(weight, i);
    const float magnitude = kMagnitudes[code & 7], value = code & 8 ? -magnitude : magnitude;
    const float want = value * e4m3_value(scale[i / kBlockValues]);
    require(std::isnan(want) ? std::isnan(out[i]) : out[i] == want);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const int threads = data[0] >> 1 & 7;
  Bytes rest(data + 1, data + size);
  if (data[0] & 1) {
    decode(rest, threads);
  } else {
    rest.resize(rest.size() / kSuperblockBytes * kSuperblockBytes);
    to_modelopt_and_back(rest, threads);
  }
  return 0;
}
