// What the GEMVs of a few tokens share: how a warp walks over tiles of weights.
//
// A tile is 16 rows of a matrix [rows, width], an operand of the tensor core: 8 low rows and 8 high
// ones, which need not be neighbours (gate and up, say). Along the width it is cut into chunks. A
// warp fetches a chunk into a slot of shared memory, each lane exactly the bytes that it will
// multiply, and multiplies it with the activations, which lie in shared memory in the order of the
// lanes.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/async_copy.cuh"
#include "cuda/device.cuh"
#include "cuda/mma.cuh"
#include "cuda/nvfp4_decode.cuh"

namespace flint::cuda {

inline constexpr int kTileRows = 16;
inline constexpr int kHalfTile = 8;
inline constexpr int kMostTokens = 8;                      // columns of the tensor core's tile
inline constexpr int kTileSums = kTileRows * kMostTokens;  // of a warp
inline constexpr int kVectorElements = 8;                  // BF16 in 16 bytes
inline constexpr int kVectorBytes = 16;

// The 16 rows as their first rows. Rows from `end_*` on do not exist and count as zeros.
struct TileRows {
  int low, high;
  int end_low, end_high;
};

// Four partial sums, added in one order: an element's sum does not wait for the one before it.
struct TileSums {
  float part[4][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (auto& four : part) {
#pragma unroll
      for (float& value : four) value = 0.0f;
    }
  }

  __device__ __forceinline__ float total(int i) const {
    return (part[0][i] + part[1][i]) + (part[2][i] + part[3][i]);
  }

  // As [16 rows][8 columns].
  __device__ __forceinline__ void store(float* to) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    auto* at = reinterpret_cast<float2*>(to + lane / 4 * kMostTokens + lane % 4 * 2);
    at[0] = make_float2(total(0), total(1));
    at[kHalfTile * kMostTokens / 2] = make_float2(total(2), total(3));
  }
};

__device__ __forceinline__ uint4 load_shared(const uint8_t* from) {
  return *reinterpret_cast<const uint4*>(from);
}

// ------------------------------------------------------------------------------ NVFP4

// A chunk is 128 elements: 64 bytes of codes and 8 of scales a row. Lane 4g + t has the 16 bytes t
// of rows g of both halves.
struct Nvfp4 {
  static constexpr bool kNvfp4 = true;
  static constexpr int kChunk = 128;  // elements of a row
  static constexpr int kVectors = 4;  // of activations, for a lane and a chunk
  static constexpr float kSumScale = kNvfp4SumScale;
  static constexpr int kLaneElements = 32;
  static constexpr int kCodeBytes = 2 * kWarp * kVectorBytes;  // of a chunk
  static constexpr int kScaleBytes = 8;                        // of a row and a chunk

  template <int kChunks>
  static constexpr int kPieceBytes = kChunks * (kCodeBytes + kTileRows * kScaleBytes);

  struct Matrix {
    const uint8_t* codes;   // [rows, width / 2]
    const uint8_t* scales;  // [rows, width / 16]
  };

  static __host__ __device__ Matrix matrix(const void* elements, const void* scales) {
    return {static_cast<const uint8_t*>(elements), static_cast<const uint8_t*>(scales)};
  }

  static __device__ __forceinline__ Matrix from_row(const Matrix& matrix, int64_t row, int width) {
    return {matrix.codes + row * (width / 2), matrix.scales + row * (width / 16)};
  }

  // A lane's part of a tile: where its rows begin, and the elements they have (0: no such row).
  // `kWhole`: all rows and all chunks are there.
  template <int kChunks, bool kWhole>
  struct Lane {
    static_assert(!kWhole || kChunks % 2 == 0, "scales are copied 16 bytes at a time");
    // Two lanes copy a row's scales.
    static constexpr int kLanes = 2;
    static constexpr int kCopyBytes = kWhole ? 16 : 4;
    static constexpr int kCopies = kChunks * kScaleBytes / kCopyBytes;
    const uint8_t* low;
    const uint8_t* high;
    const uint8_t* scales;
    int low_width, high_width, scales_width;

    __device__ __forceinline__ void find(const Matrix& matrix, const TileRows& rows, int width) {
      const int lane = static_cast<int>(threadIdx.x) % kWarp;
      const int low_row = rows.low + lane / 4, high_row = rows.high + lane / 4;
      const int row = lane / kLanes;
      const bool in_low = row < kHalfTile;
      const int scale_row = (in_low ? rows.low : rows.high) + row % kHalfTile;
      low = matrix.codes + int64_t{low_row} * (width / 2) + lane % 4 * kVectorBytes;
      high = matrix.codes + int64_t{high_row} * (width / 2) + lane % 4 * kVectorBytes;
      scales = matrix.scales + int64_t{scale_row} * (width / 16);
      low_width = low_row < rows.end_low ? width : 0;
      high_width = high_row < rows.end_high ? width : 0;
      scales_width = scale_row < (in_low ? rows.end_low : rows.end_high) ? width : 0;
    }

    __device__ __forceinline__ void fetch(uint32_t stage, int first_chunk) const {
      const int lane = static_cast<int>(threadIdx.x) % kWarp;
      if constexpr (kWhole) {
        fetch_whole(stage, first_chunk, lane);
      } else {
        fetch_part(stage, first_chunk, lane);
      }
    }

   private:
    __device__ __forceinline__ void fetch_part(uint32_t stage, int first_chunk, int lane) const {
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        const int element = (first_chunk + i) * kChunk;
        const uint32_t to = stage + static_cast<uint32_t>(i * kCodeBytes + lane * kVectorBytes);
        const int mine = element + lane % 4 * kLaneElements;
        copy_16_async(to, low + element / 2, mine < low_width);
        copy_16_async(to + kWarp * kVectorBytes, high + element / 2, mine < high_width);
      }
      // Lane l copies for row l / kLanes, one copy after another.
      const uint32_t row = stage + static_cast<uint32_t>(kChunks * kCodeBytes +
                                                         lane / kLanes * kChunks * kScaleBytes);
#pragma unroll
      for (int i = lane % kLanes; i < kCopies; i += kLanes) {
        const int byte = i * kCopyBytes;
        const bool there = first_chunk * kChunk + byte * 16 < scales_width;
        const uint8_t* from = scales + first_chunk * kScaleBytes + byte;
        copy_4_async(row + static_cast<uint32_t>(byte), from, there);
      }
    }

    __device__ __forceinline__ void fetch_whole(uint32_t stage, int first_chunk, int lane) const {
      constexpr int kChunkBytes = kChunk / 2;  // of a row's codes
      const uint32_t to = stage + static_cast<uint32_t>(lane * kVectorBytes);
      const uint8_t* low_codes = low + first_chunk * kChunkBytes;
      const uint8_t* high_codes = high + first_chunk * kChunkBytes;
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        copy_16_async(to + i * kCodeBytes, low_codes + i * kChunkBytes);
        copy_16_async(to + i * kCodeBytes + kWarp * kVectorBytes, high_codes + i * kChunkBytes);
      }
      const uint32_t row = stage + static_cast<uint32_t>(kChunks * kCodeBytes +
                                                         lane / kLanes * kChunks * kScaleBytes);
      const uint8_t* from = scales + first_chunk * kScaleBytes;
#pragma unroll
      for (int i = 0; i < kCopies; i += kLanes) {
        const int copy = i + lane % kLanes;
        if (i + kLanes <= kCopies || copy < kCopies) {
          copy_16_async(row + static_cast<uint32_t>(copy * 16), from + copy * 16);
        }
      }
    }
  };

  // What a lane has of chunk c of a piece.
  struct Chunk {
    uint32_t low[4], high[4];  // codes, eight to a word
    uint16_t low_scales, high_scales;
  };

  template <int kChunks>
  static __device__ __forceinline__ Chunk load(const uint8_t* stage, int c) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const uint8_t* codes = stage + c * kCodeBytes + lane * kVectorBytes;
    const uint4 low = load_shared(codes), high = load_shared(codes + kWarp * kVectorBytes);
    const auto* scales = reinterpret_cast<const uint16_t*>(stage + kChunks * kCodeBytes +
                                                           lane / 4 * (kChunks * kScaleBytes) +
                                                           c * kScaleBytes + lane % 4 * 2);
    return {{low.x, low.y, low.z, low.w},
            {high.x, high.y, high.z, high.w},
            scales[0],
            scales[kHalfTile * kChunks * kScaleBytes / sizeof(uint16_t)]};
  }

  static __device__ __forceinline__ void multiply_chunk(TileSums& sums, const Chunk& chunk,
                                                        const uint8_t* x, int step) {
    const ScalePairs low_scales = decode_scales(chunk.low_scales);
    const ScalePairs high_scales = decode_scales(chunk.high_scales);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const uint4 b = load_shared(x + i * step);
      const uint32_t low_scale = i < 2 ? low_scales.first : low_scales.second;
      const uint32_t high_scale = i < 2 ? high_scales.first : high_scales.second;
      CodePairs l = decode_codes(chunk.low[i]), h = decode_codes(chunk.high[i]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        l.pair[j] = multiply_bf16_pairs(l.pair[j], low_scale);
        h.pair[j] = multiply_bf16_pairs(h.pair[j], high_scale);
      }
      multiply_add(sums.part[i % 2 * 2], l.pair[0], h.pair[0], l.pair[1], h.pair[1], b.x, b.y);
      multiply_add(sums.part[i % 2 * 2 + 1], l.pair[2], h.pair[2], l.pair[3], h.pair[3], b.z, b.w);
    }
  }

  // Vector `v` of a row of activations among the vectors of all rows, in the order of the lanes:
  // codes 32t ... 32t + 31 of a chunk are lane t's, eight to a word.
  static __device__ __forceinline__ int place(int v, int row, int rows) {
    return ((v / 16 * 4 + v % 4) * rows + row) * 4 + v / 4 % 4;
  }

  // Eight activations as the pairs that the codes of a word make.
  static __device__ __forceinline__ uint4 arrange(const uint4& x) {
    return make_uint4(__byte_perm(x.x, x.z, 0x5410), __byte_perm(x.x, x.z, 0x7632),
                      __byte_perm(x.y, x.w, 0x5410), __byte_perm(x.y, x.w, 0x7632));
  }
};

// ------------------------------------------------------------------------------ BF16

// A chunk is 64 elements, 128 bytes a row. Lane 4g + t has the 16 bytes t and 4 + t of rows g of
// both halves.
struct Bf16 {
  static constexpr bool kNvfp4 = false;
  static constexpr int kChunk = 64;
  static constexpr int kVectors = 2;
  static constexpr float kSumScale = 1.0f;
  static constexpr int kChunkBytes = 2 * kVectors * kWarp * kVectorBytes;

  template <int kChunks>
  static constexpr int kPieceBytes = kChunks * kChunkBytes;

  struct Matrix {
    const uint16_t* elements;  // [rows, width]
  };

  static __host__ __device__ Matrix matrix(const void* elements, const void*) {
    return {static_cast<const uint16_t*>(elements)};
  }

  static __device__ __forceinline__ Matrix from_row(const Matrix& matrix, int64_t row, int width) {
    return {matrix.elements + row * width};
  }

  template <int kChunks, bool kWhole>
  struct Lane {
    const uint16_t* low;
    const uint16_t* high;
    int low_width, high_width;

    __device__ __forceinline__ void find(const Matrix& matrix, const TileRows& rows, int width) {
      const int lane = static_cast<int>(threadIdx.x) % kWarp;
      const int low_row = rows.low + lane / 4, high_row = rows.high + lane / 4;
      const int piece = lane % 4 * kVectorElements;
      low = matrix.elements + int64_t{low_row} * width + piece;
      high = matrix.elements + int64_t{high_row} * width + piece;
      low_width = low_row < rows.end_low ? width : 0;
      high_width = high_row < rows.end_high ? width : 0;
    }

    __device__ __forceinline__ void fetch(uint32_t stage, int first_chunk) const {
      const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
      for (int i = 0; i < kChunks * kVectors; ++i) {
        const int element = first_chunk * kChunk + i * (kChunk / kVectors);
        const uint32_t to = stage + static_cast<uint32_t>((2 * i * kWarp + lane) * kVectorBytes);
        if constexpr (kWhole) {
          copy_16_async(to, low + element);
          copy_16_async(to + kWarp * kVectorBytes, high + element);
        } else {
          const int mine = element + lane % 4 * kVectorElements;
          copy_16_async(to, low + element, mine < low_width);
          copy_16_async(to + kWarp * kVectorBytes, high + element, mine < high_width);
        }
      }
    }
  };

  // What a lane has of a chunk.
  struct Chunk {
    uint4 low[kVectors], high[kVectors];
  };

  template <int kChunks>
  static __device__ __forceinline__ Chunk load(const uint8_t* stage, int c) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    Chunk chunk;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const uint8_t* at = stage + (2 * (c * kVectors + i) * kWarp + lane) * kVectorBytes;
      chunk.low[i] = load_shared(at);
      chunk.high[i] = load_shared(at + kWarp * kVectorBytes);
    }
    return chunk;
  }

  static __device__ __forceinline__ void multiply_chunk(TileSums& sums, const Chunk& chunk,
                                                        const uint8_t* x, int step) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const uint4 b = load_shared(x + i * step), low = chunk.low[i], high = chunk.high[i];
      multiply_add(sums.part[i % 2 * 2], low.x, high.x, low.y, high.y, b.x, b.y);
      multiply_add(sums.part[i % 2 * 2 + 1], low.z, high.z, low.w, high.w, b.z, b.w);
    }
  }

  static __device__ __forceinline__ int place(int v, int row, int rows) {
    return (v / 4 * rows + row) * 4 + v % 4;
  }

  static __device__ __forceinline__ uint4 arrange(const uint4& x) { return x; }
};

// ------------------------------------------------------------------------------ activations

// Copies the part that chunks first ... first + kChunks - 1 have of `rows` rows of activations,
// `stride` elements apart, to shared memory in the order of the lanes; zeros beyond `width`, since
// weights there are zeros too, and zero times NaN is not. By one warp; a barrier must follow. width
// is a multiple of 8, the rows 16-byte aligned. `to` is chunk 0's place.
template <typename Format, int kChunks, int kRows>
__device__ __forceinline__ void stage_rows_of(uint8_t* to, const uint16_t* x, int64_t stride,
                                              int first_row, int rows, int width, int first_chunk) {
  constexpr int kVectors = kChunks * Format::kChunk / kVectorElements;  // of a row
  constexpr int kLoads = (kVectors + kWarp - 1) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int first = first_chunk * (Format::kChunk / kVectorElements) + lane;
  const int vectors = width / kVectorElements;
  uint4 value[kRows][kLoads];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int v = first + i * kWarp;
      value[r][i] = make_uint4(0, 0, 0, 0);
      if (v < vectors && (kRows == 1 || first_row + r < rows)) {
        value[r][i] =
            load_activation(reinterpret_cast<const uint4*>(x + (first_row + r) * stride) + v);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const bool mine = kVectors % kWarp == 0 || lane + i * kWarp < kVectors;
      if (mine && (kRows == 1 || first_row + r < rows)) {
        reinterpret_cast<uint4*>(to)[Format::place(first + i * kWarp, first_row + r, rows)] =
            Format::arrange(value[r][i]);
      }
    }
  }
}

template <typename Format, int kChunks>
__device__ __forceinline__ void stage_chunks(uint8_t* to, const uint16_t* x, int64_t stride,
                                             int rows, int width, int first_chunk) {
  if (rows == 1) {
    stage_rows_of<Format, kChunks, 1>(to, x, stride, 0, 1, width, first_chunk);
    return;
  }
  // As many rows at once as there are loads worth waiting for together.
  constexpr int kLoads = (kChunks * Format::kChunk / kVectorElements + kWarp - 1) / kWarp;
  constexpr int kRows = kLoads == 1 ? 8 : kLoads == 2 ? 4 : 2;
  for (int row = 0; row < rows; row += kRows) {
    stage_rows_of<Format, kChunks, kRows>(to, x, stride, row, rows, width, first_chunk);
  }
}

// Bytes of `rows` staged rows of `chunks` chunks.
template <typename Format>
__host__ __device__ constexpr int staged_bytes(int rows, int chunks) {
  return chunks * Format::kChunk * 2 * rows;
}

// A lane's first vector of a chunk: column g of the product is row g, and the last row again where
// there are fewer (nobody reads those columns).
template <typename Format>
__device__ __forceinline__ const uint8_t* staged_chunk(const uint8_t* staged, int rows, int chunk) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int row = min(lane / 4, rows - 1);
  return staged + ((chunk * Format::kVectors * rows + row) * 4 + lane % 4) * kVectorBytes;
}

// Between the vectors of a chunk.
__device__ __forceinline__ int staged_step(int rows) { return rows * 4 * kVectorBytes; }

}  // namespace flint::cuda
