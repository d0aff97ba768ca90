// Gate and up of a dense layer, of two to eight tokens with NVFP4 weights of Flint's hidden size: a
// tile is eight gate rows and the eight up rows that go with them. A CTA's first tiles are fetched
// ahead of the wait.
#include "cuda/launch.cuh"
#include "cuda/linear.h"
#include "cuda/moe_act.cuh"
#include "cuda/several_tokens.cuh"
#include "cuda/tensor_map.h"
#include "cuda/tiles.h"

namespace flint::cuda {
namespace {

struct Job {
  CUtensorMap codes;  // in boxes of eight rows
  const uint8_t* scales;
  const float* scale_2;
  int shards;
  int shard_end[kMostShards];
  const uint16_t* x;
  int64_t x_stride;
  uint16_t* out;  // [tokens, size]
  int size;       // gate rows
  int tokens;
};

// The global scales, read ahead of the wait.
struct ShardScales {
  float scale[kMostShards];

  __device__ __forceinline__ explicit ShardScales(const Job& job) {
#pragma unroll
    for (int i = 0; i < kMostShards; ++i) {
      scale[i] = i < job.shards ? load_weight(job.scale_2 + i) : 0.0f;
    }
  }

  __device__ __forceinline__ float of_row(const Job& job, int row) const {
    float found = scale[0];
#pragma unroll
    for (int i = 1; i < kMostShards; ++i) {
      if (row >= job.shard_end[i - 1]) found = scale[i];
    }
    return found;
  }
};

__global__ void __launch_bounds__(kSeveralThreads, 1)
    linear_gate_several_tokens(const __grid_constant__ Job job) {
  extern __shared__ __align__(128) uint8_t shared[];
  const SeveralShared ring(shared);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp;
  const int element = thread - kProductWarps * kWarp;  // of those that do not multiply
  const bool copies = thread == kCopyWarp * kWarp;
  const TileMultiplier multiplier{ring, warp, lane};
  TileCopier copier{ring};
  const int step = static_cast<int>(gridDim.x), end = job.size / kHalfTile;
  int tile = static_cast<int>(blockIdx.x);
  // At most `most` of the tiles that are left.
  const auto copy = [&](int most) {
#pragma unroll 1
    for (; tile < end && most > 0; tile += step, --most) {
      const int low = tile * kHalfTile;
      copier.copy(job.codes, job.scales, low, job.size + low);
    }
  };
  const ShardScales scales(job);
  if (copies) {
    ring.init();
    copy(SeveralShared::kStages);
  }
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (element < 0) multiplier.stage(job.x, job.x_stride, job.tokens);
  __syncthreads();
  if (element < 0) {
    multiplier.multiply_all((end - tile + step - 1) / step, job.tokens);
  } else if (copies) {
    copy(end);
  } else if (element < kFinishThreads) {
    const int token = element % kMostTokens;
    TileFinisher finisher{ring, element};
#pragma unroll 1
    for (; tile < end; tile += step) {
      const int row = tile * kHalfTile + element / kMostTokens;
      const float gate_scale = scales.of_row(job, row);
      const float up_scale = scales.of_row(job, job.size + row);
      const float2 sums = finisher.take();
      if (token >= job.tokens) continue;
      store_rounded(job.out + int64_t{token} * job.size + row,
                    shared_act(sums.x * gate_scale, sums.y * up_scale));
    }
  }
}

}  // namespace

bool linear_gate_several_fits(const Linear& in) {
  return in.output == LinearOutput::kSiluAndMul && in.tokens > 1 && in.weight.scales != nullptr &&
         in.width == kSeveralWidth && in.rows % kTileRows == 0 &&
         SeveralShared::kBytes <= kMostSharedBytes;
}

cudaError_t linear_gate_several(const Linear& in, const Launch& launch) {
  Job job{};
  const RowsInMemory codes{in.weight.elements, in.rows, kSeveralWidth / 2, kHalfTile};
  if (const auto error = describe(codes, &job.codes); error != cudaSuccess) return error;
  job.scales = static_cast<const uint8_t*>(in.weight.scales);
  job.scale_2 = in.scale_2;
  job.shards = in.shards;
  for (int i = 0; i < kMostShards; ++i) {
    job.shard_end[i] = i + 1 < in.shards ? static_cast<int>(in.shard_end[i]) : 0x7fffffff;
  }
  job.x = static_cast<const uint16_t*>(in.x);
  job.x_stride = in.x_stride;
  job.out = static_cast<uint16_t*>(in.out);
  job.size = static_cast<int>(in.rows / 2);
  job.tokens = in.tokens;
  Shape shape;
  shape.grid = static_cast<unsigned>(least(job.size / kHalfTile, multiprocessors()));
  shape.block = kSeveralThreads;
  shape.shared_bytes = SeveralShared::kBytes;
  return launch_kernel(launch, shape, linear_gate_several_tokens, job);
}

}  // namespace flint::cuda
