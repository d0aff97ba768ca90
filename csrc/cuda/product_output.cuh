// What a product makes of its sums: scales, gates and rounding, and the way out to memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/arranged.h"
#include "cuda/async_copy.cuh"
#include "cuda/device.cuh"
#include "cuda/nvfp4_decode.cuh"
#include "cuda/product_plan.cuh"
#include "cuda/shared_loads.cuh"
#include "cuda/silu.cuh"

namespace flint::cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Four 8 x 8 matrices of BF16, each stored with its columns as rows of 16 bytes; lanes 8m ... 8m +
// 7 name where those of matrix m go.
__device__ __forceinline__ void store_transposed(uint32_t to, const uint32_t (&matrix)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
               "r"(matrix[0]), "r"(matrix[1]), "r"(matrix[2]), "r"(matrix[3])
               : "memory");
}

// What is left of gate and up. Dense layers round both first.
template <ProductOutput kOutput>
__device__ __forceinline__ float gated(float gate, float up) {
  if constexpr (kOutput == ProductOutput::kSiluOfRounded) {
    return fast_silu(rounded(uint16_t{}, gate)) * rounded(uint16_t{}, up);
  } else {
    return gate * __fdividef(1.0f, 1.0f + __expf(-gate)) * up;
  }
}

// The output of a warpgroup that multiplies. Of eight tokens 8i, 8i + 1, ... a thread's sums 4i ...
// 4i + 3 are those of two tokens in its lower row and in its upper one.
template <typename Plan, ProductOutput kOutput>
struct Output {
  static constexpr bool kGated = kOutput != ProductOutput::kRounded;
  static constexpr int kApart = kGated ? kHalfRows : 8;  // a thread's two rows, among the weights'

  const ProductJob& job;
  uint32_t shared;
  int group, warp, lane;  // of the warpgroups, in it, of the warp
  int low;                // of the thread's two rows in the CTA's tile
  int odd = 0;

  __device__ __forceinline__ Output(const ProductJob& job, uint32_t shared)
      : job(job), shared(shared) {
    const int thread = static_cast<int>(threadIdx.x);
    group = thread / kWarpgroup;
    warp = thread % kWarpgroup / kWarp;
    lane = thread % kWarp;
    low = (kGated ? group * 32 + warp * 8 : group * 64 + warp * 16) + lane / 4;
  }

  __device__ __forceinline__ float low_scale(int expert, int row) const {
    return scale_of(expert, row + low);
  }

  __device__ __forceinline__ float high_scale(int expert, int row) const {
    return scale_of(expert, row + low + (kGated ? job.features : kApart));
  }

  // Where the rows of a tile go.
  __device__ __forceinline__ void fetch_rows(const TokenTile& tokens) const {
    if (job.out_row == nullptr) return;
    meet();  // those of the tile before have been read
    for (int i = warp * kWarp + lane; i < tokens.count; i += kWarpgroup) {
      copy_4_async(row_place(i), job.out_row + tokens.first + i, true);
    }
  }

  __device__ __forceinline__ uint32_t row_place(int token) const {
    return shared + Plan::kRows + (group * Plan::kTokens + token) * 4;
  }

  __device__ __forceinline__ void write(const float (&sums)[Plan::kTokens / 2],
                                        const TokenTile& tokens, int row, float low_scale,
                                        float high_scale) {
    if (job.out_row != nullptr) {
      close_copies();
      await_copies<0>();  // seen by all of the warpgroup after the next barrier
    }
#pragma unroll
    for (int first = 0; first < Plan::kTokens; first += kRowGroup) {
      if (first >= tokens.count) break;
      // Of two buffers: who comes to the barrier has read what was in the other one.
      const uint32_t buffer = shared + Plan::kOut + (2 * group + odd) * kOutBytes;
      stage_out(buffer, sums + first / 2, low_scale, high_scale);
      meet();
      send_out(buffer, tokens, first, row);
      odd ^= 1;
    }
  }

  // The warps of this warpgroup.
  __device__ __forceinline__ void meet() const {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "n"(kWarpgroup) : "memory");
  }

  // 32 tokens; in the buffer a token's rows of the warpgroup stand together, their chunks of 16
  // bytes exchanged so that no two lanes want the same bank.
  __device__ __forceinline__ void stage_out(uint32_t buffer, const float* sums, float low_scale,
                                            float high_scale) const {
    const int matrix = lane / 8, row = lane % 8;
    if constexpr (kGated) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* s = sums + 4 * i;
        pairs[i] = pack_bf16(gated<kOutput>(s[0] * low_scale, s[2] * high_scale),
                             gated<kOutput>(s[1] * low_scale, s[3] * high_scale));
      }
      store_transposed(buffer + place(8 * matrix + row, warp), pairs);
    } else {
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const float *s = sums + 4 * i, *n = s + 4;
        const uint32_t pairs[4] = {pack_bf16(s[0] * low_scale, s[1] * low_scale),
                                   pack_bf16(s[2] * high_scale, s[3] * high_scale),
                                   pack_bf16(n[0] * low_scale, n[1] * low_scale),
                                   pack_bf16(n[2] * high_scale, n[3] * high_scale)};
        store_transposed(buffer + place(8 * (i + matrix / 2) + row, 2 * warp + matrix % 2), pairs);
      }
    }
  }

  static constexpr int kChunks = kGated ? 4 : 8;  // of 8 rows, in a warpgroup's output

  static __device__ __forceinline__ uint32_t place(int token, int chunk) {
    const int exchanged = kGated ? chunk ^ (token / 2 % 4) : chunk ^ (token % 8);
    return static_cast<uint32_t>((token * kChunks + exchanged) * 16);
  }

  __device__ __forceinline__ void send_out(uint32_t buffer, const TokenTile& tokens, int first,
                                           int row) const {
    const int thread = warp * kWarp + lane, chunk = thread % kChunks;
    const int column = row + (group * kChunks + chunk) * 8;
    if (column >= job.features) return;
#pragma unroll
    for (int token = thread / kChunks; token < kRowGroup; token += kWarpgroup / kChunks) {
      if (first + token >= tokens.count) break;
      const uint4 value = load_shared(buffer + place(token, chunk));
      int64_t to = tokens.first + first + token;
      if (job.out_row != nullptr) {
        to = load_shared_word(row_place(first + token));
      }
      uint16_t* out = job.out + to * job.features;
      if (Plan::kArranged && kGated && job.arranged_out) {
        store_arranged(out, column, value);
      } else {
        *reinterpret_cast<uint4*>(out + column) = value;
      }
    }
  }

  // ------------------------------------------------------------------ sums of shares of columns

  static constexpr int kGroups = Plan::kTokens / 8;

  __device__ __forceinline__ uint32_t part_place(int tokens) const {
    return shared + Plan::kX +
           ((group * kGroups + tokens / 8) * kWarpgroup + warp * kWarp + lane) *
               static_cast<uint32_t>(sizeof(float4));
  }

  // For the CTAs of the cluster to read, when no copy nor product needs this memory any more.
  __device__ __forceinline__ void leave(const float (&sums)[Plan::kTokens / 2], int count) const {
#pragma unroll
    for (int first = 0; first < Plan::kTokens; first += 8) {
      if (first >= count) break;
      const float* s = sums + first / 2;
      asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(part_place(first)), "f"(s[0]),
                   "f"(s[1]), "f"(s[2]), "f"(s[3])
                   : "memory");
    }
  }

  // Every so many eight tokens, the sums of all CTAs in their order.
  __device__ __forceinline__ void add_and_write(const TokenTile& tokens, int row, float low_scale,
                                                float high_scale) const {
    const int parts = static_cast<int>(cluster_size());
    for (int first = 8 * static_cast<int>(cluster_rank()); first < tokens.count;
         first += 8 * parts) {
      float4 sum = load_cluster(shared_of(0, part_place(first)));
#pragma unroll 4
      for (int part = 1; part < parts; ++part) {
        const float4 more = load_cluster(shared_of(part, part_place(first)));
        sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
      }
      write_eight(sum, tokens, first, row, low_scale, high_scale);
    }
  }

  // By each warp its own rows: 16 of each token, or 8 where gate and up are one.
  __device__ __forceinline__ void write_eight(const float4& sum, const TokenTile& tokens, int first,
                                              int row, float low_scale, float high_scale) const {
    const uint32_t buffer = shared + Plan::kOut + (group * 4 + warp) * 256;
    constexpr int kPieces = kGated ? 1 : 2;  // of 16 bytes, of a token
    const uint32_t place = buffer + (lane % 8 * kPieces + (kGated ? 0 : lane / 8 % 2)) * 16;
    __syncwarp();  // the buffer has been read
    if constexpr (kGated) {
      const uint32_t pair = pack_bf16(gated<kOutput>(sum.x * low_scale, sum.z * high_scale),
                                      gated<kOutput>(sum.y * low_scale, sum.w * high_scale));
      asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(place),
                   "r"(pair)
                   : "memory");
    } else {
      asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(place),
                   "r"(pack_bf16(sum.x * low_scale, sum.y * low_scale)),
                   "r"(pack_bf16(sum.z * high_scale, sum.w * high_scale))
                   : "memory");
    }
    __syncwarp();
    const int token = first + lane / kPieces;
    const int column = row + (group * 4 + warp) * 8 * kPieces + lane % kPieces * 8;
    if (lane >= 8 * kPieces || token >= tokens.count || column >= job.features) return;
    uint16_t* out = job.out + int64_t{tokens.first + token} * job.features + column;
    *reinterpret_cast<uint4*>(out) = load_shared(buffer + lane * 16);
  }

 private:
  __device__ __forceinline__ float scale_of(int expert, int row) const {
    if constexpr (Plan::kBf16) return 1.0f;
    int shard = 0;
#pragma unroll
    for (int i = 0; i < kMostShards - 1; ++i) shard += row >= job.shard_end[i];
    shard = min(shard, job.shards - 1);
    return load_weight(job.scale_2 + int64_t{expert} * job.shards + shard) * kNvfp4SumScale;
  }
};

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace flint::cuda
