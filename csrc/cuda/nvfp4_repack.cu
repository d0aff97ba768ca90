// A thread repacks blocks of 16 values, a CTA's width apart: 8 code bytes each. The thread of a
// super-block's first block has its four scales too. A super-block is 36 bytes, so its codes are
// words of 4 bytes at best.
#include "cuda/device.cuh"
#include "cuda/launch.cuh"
#include "cuda/nvfp4_repack.h"
#include "cuda/tiles.h"
#include "nvfp4_layout.h"

namespace flint::cuda {
namespace {

using namespace flint::nvfp4;

constexpr int kThreads = 256;
constexpr int kBlocksAThread = 4;  // loads in flight

// A word of 4 bytes; byte by byte where the tensors are not aligned to 4.
template <bool kAligned>
__device__ __forceinline__ uint32_t load_word(const uint8_t* from) {
  if constexpr (kAligned) return *reinterpret_cast<const uint32_t*>(from);
  return from[0] | from[1] << 8 | from[2] << 16 | static_cast<uint32_t>(from[3]) << 24;
}

template <bool kAligned>
__device__ __forceinline__ void store_word(uint8_t* to, uint32_t word) {
  if constexpr (kAligned) {
    *reinterpret_cast<uint32_t*>(to) = word;
  } else {
    for (int i = 0; i < 4; ++i) to[i] = static_cast<uint8_t>(word >> (8 * i));
  }
}

template <bool kAligned>
__device__ __forceinline__ uint64_t load_codes(const uint8_t* from) {
  return load_word<kAligned>(from) | uint64_t{load_word<kAligned>(from + 4)} << 32;
}

template <bool kAligned>
__device__ __forceinline__ void store_codes(uint8_t* to, uint64_t codes) {
  store_word<kAligned>(to, static_cast<uint32_t>(codes));
  store_word<kAligned>(to + 4, static_cast<uint32_t>(codes >> 32));
}

// The smallest index wins, whatever the order: integers, so the result is always the same.
__device__ __forceinline__ void report(unsigned long long* first_bad, int64_t superblock,
                                       uint32_t flags) {
  const int64_t index = superblock * kSuperblockScales + (__ffs(static_cast<int>(flags)) - 1) / 8;
  atomicMin(first_bad, static_cast<unsigned long long>(index));
}

template <bool kToModelopt, bool kAligned>
__global__ void __launch_bounds__(kThreads) repack(const __grid_constant__ Nvfp4Repack in) {
  const int64_t blocks = in.superblocks * kSuperblockScales;
  const int64_t first = int64_t{blockIdx.x} * (kThreads * kBlocksAThread) + threadIdx.x;
  uint64_t codes[kBlocksAThread];
  uint32_t scales[kBlocksAThread];
#pragma unroll
  for (int i = 0; i < kBlocksAThread; ++i) {
    const int64_t block = first + i * kThreads, superblock = block / kSuperblockScales;
    codes[i] = 0;
    scales[i] = 0;
    if (block >= blocks) continue;
    codes[i] = load_codes<kAligned>(in.from_codes +
                                    (kToModelopt ? gguf_codes_at(block) : block * kBlockBytes));
    if (block % kSuperblockScales != 0) continue;
    scales[i] = load_word<kAligned>(kToModelopt ? in.from_codes + gguf_scales_at(superblock)
                                                : in.from_scales + superblock * kSuperblockScales);
  }
#pragma unroll
  for (int i = 0; i < kBlocksAThread; ++i) {
    const int64_t block = first + i * kThreads, superblock = block / kSuperblockScales;
    if (block >= blocks) continue;
    if constexpr (kToModelopt) {
      store_codes<kAligned>(in.to_codes + block * kBlockBytes, block_gguf_to_modelopt(codes[i]));
    } else {
      store_codes<kAligned>(in.to_codes + gguf_codes_at(block), block_modelopt_to_gguf(codes[i]));
    }
    if (block % kSuperblockScales != 0) continue;
    const uint32_t bad = kToModelopt ? gguf_scales_bad(scales[i]) : modelopt_scales_bad(scales[i]);
    if (bad != 0) report(in.first_bad, superblock, bad);
    if constexpr (kToModelopt) {
      store_word<kAligned>(in.to_scales + superblock * kSuperblockScales,
                           scales_gguf_to_modelopt(scales[i]));
    } else {
      store_word<kAligned>(in.to_codes + gguf_scales_at(superblock), scales[i] & 0x7f7f7f7fu);
    }
  }
}

template <bool kToModelopt>
cudaError_t launch_repack(const Nvfp4Repack& in, const Launch& launch) {
  const int64_t blocks = in.superblocks * kSuperblockScales;
  if (blocks == 0) return cudaSuccess;
  bool aligned = true;
  const void* pointers[] = {in.from_codes, in.from_scales, in.to_codes, in.to_scales};
  for (const void* pointer : pointers) {
    aligned = aligned && reinterpret_cast<uint64_t>(pointer) % sizeof(uint32_t) == 0;
  }
  // 2^31 CTAs are 2^43 values: more than any memory holds.
  const auto ctas = static_cast<unsigned>(ceil_div(blocks, kThreads * kBlocksAThread));
  return launch_kernel(launch, ctas, kThreads,
                       aligned ? repack<kToModelopt, true> : repack<kToModelopt, false>, in);
}

}  // namespace

cudaError_t gguf_to_modelopt(const Nvfp4Repack& in, const Launch& launch) {
  return launch_repack<true>(in, launch);
}

cudaError_t modelopt_to_gguf(const Nvfp4Repack& in, const Launch& launch) {
  return launch_repack<false>(in, launch);
}

}  // namespace flint::cuda
