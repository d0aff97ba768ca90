// Gate and up of two to eight tokens: a tile is eight gate rows and the eight up rows that go with
// them. The shared expert's tiles come first: their copies are started ahead of the wait.
#include "cuda/expert_groups.cuh"
#include "cuda/gate_up_tiles.cuh"
#include "cuda/launch.cuh"
#include "cuda/moe_act.cuh"
#include "cuda/several_tokens.cuh"
#include "cuda/tensor_map.h"

namespace flint::cuda {
namespace {

struct Job {
  CUtensorMap routed, shared;  // codes, in boxes of eight rows
  MoeGateUp in;
  GateUpTiles tiles;
};

// What becomes of an element of a tile.
struct Place {
  uint16_t* to;  // null: nothing
  bool is_shared;

  __device__ __forceinline__ Place(const Job& job, const ExpertGroups& groups, const GateUpWalk& at,
                                   int row, int token) {
    const MoeGateUp& in = job.in;
    is_shared = at.tile < job.tiles.shared_tiles;
    to = nullptr;
    if (is_shared) {
      if (token < in.routing.tokens) {
        to = static_cast<uint16_t*>(in.shared_act) + token * in.shared_size + at.tile * kHalfTile +
             row;
      }
    } else {
      const int place = groups.place[at.group][token];
      if (place >= 0) {
        const int entry = token * in.routing.top_k + place;
        to = static_cast<uint16_t*>(in.routed_act) + entry * in.routed_size + at.row * kHalfTile +
             row;
      }
    }
  }

  __device__ __forceinline__ void finish(float2 sums, float2 scales) const {
    if (to == nullptr) return;
    const float gate = sums.x * scales.x, up = sums.y * scales.y;
    store_rounded(to, is_shared ? shared_act(gate, up) : routed_act(gate, up));
  }
};

// Barrier of the warps that do not multiply.
constexpr int kGroupsThere = kGroupsBarrier + 1;

__global__ void __launch_bounds__(kSeveralThreads, 1)
    moe_gate_up_several_tokens(const __grid_constant__ Job job) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ ExpertGroups groups;
  __shared__ float2 scales[kMostEntries];  // of a group: gate's and up's
  const SeveralShared ring(shared);
  const MoeGateUp& in = job.in;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp;
  const int element = thread - kProductWarps * kWarp;  // of those that do not multiply
  const bool copies = thread == kCopyWarp * kWarp;
  const TileMultiplier multiplier{ring, warp, lane};
  TileCopier copier{ring};
  GateUpWalk at(job.tiles, static_cast<int>(blockIdx.x));
  // Of all tiles before `end`, at most `most`.
  const auto copy = [&](int end, int most) {
#pragma unroll 1
    for (; at.tile < end && most > 0; at.advance(job.tiles), --most) {
      const bool is_shared = at.tile < job.tiles.shared_tiles;
      const int size = is_shared ? in.shared_size : in.routed_size;
      const int first = is_shared ? 0 : groups.expert[at.group] * 2 * size;
      const int low = first + (is_shared ? at.tile : at.row) * kHalfTile;
      copier.copy(is_shared ? job.shared : job.routed,
                  static_cast<const uint8_t*>(is_shared ? in.shared.scales : in.routed.scales), low,
                  low + size);
    }
    return most;
  };
  const auto end_of_tiles = [&] {
    return job.tiles.shared_tiles + groups.count * job.tiles.expert_tiles;
  };

  // Ahead of the weights, or the wait would be late; nothing is computed of them before they are
  // used.
  const float2 shared_scales = make_float2(load_weight(in.shared_scale_2),
                                           load_weight(in.shared_scale_2 + in.shared_shards - 1));
  int free = SeveralShared::kStages;
  if (copies) {
    ring.init();
    free = copy(job.tiles.shared_tiles, free);
  }
  wait_for_previous_kernel();
  // Now: this kernel's experts' weights are on their way long before the next one's.
  let_next_kernel_start();
  if (element < 0) {
    multiplier.stage(static_cast<const uint16_t*>(in.x), in.x_stride, in.routing.tokens);
  } else {
    if (element < kFinishThreads) {
      groups.find(in.routing, element, groups.load(in.routing, element));
    }
    sync_threads<(kFinishWarps + 1) * kWarp>(kGroupsThere);
    if (copies) copy(end_of_tiles(), free);
  }
  __syncthreads();

  const int end = end_of_tiles();
  if (element < 0) {
    const int count = max(end - at.tile + job.tiles.step - 1, 0) / job.tiles.step;
    multiplier.multiply_all(count, in.routing.tokens);
  } else if (copies) {
    copy(end, end);
  } else if (element < kFinishThreads) {
    // Of all groups at once: each tile would wait for its own.
    static_assert(kFinishThreads == kMostEntries);
    if (element < groups.count) {
      const float* of_group = in.routed_scale_2 + 2 * groups.expert[element];
      scales[element] = make_float2(load_weight(of_group), load_weight(of_group + 1));
    }
    sync_threads<kFinishThreads>(kGroupsBarrier);
    TileFinisher finisher{ring, element};
#pragma unroll 1
    for (; at.tile < end; at.advance(job.tiles)) {
      const Place place(job, groups, at, element / kMostTokens, element % kMostTokens);
      const float2 sums = finisher.take();
      place.finish(sums, place.is_shared ? shared_scales : scales[at.group]);
    }
  }
  clear_skipped(in, groups.group_of);
}

}  // namespace

bool moe_gate_up_several_fits(const MoeGateUp& in) {
  return in.routing.tokens > 1 && in.routed.scales != nullptr && in.hidden == kSeveralWidth &&
         int64_t{in.routing.experts} * 2 * in.routed_size < (int64_t{1} << 31) &&
         SeveralShared::kBytes <= kMostSharedBytes;
}

cudaError_t moe_gate_up_several(const MoeGateUp& in, const Launch& launch) {
  Job job{{}, {}, in, GateUpTiles(in)};
  const auto codes = [](const WeightMatrix& weight, int64_t rows) {
    return RowsInMemory{weight.elements, rows, kSeveralWidth / 2, kHalfTile};
  };
  const RowsInMemory routed = codes(in.routed, int64_t{in.routing.experts} * 2 * in.routed_size);
  if (const auto error = describe(routed, &job.routed); error != cudaSuccess) return error;
  const RowsInMemory common = codes(in.shared, int64_t{2} * in.shared_size);
  if (const auto error = describe(common, &job.shared); error != cudaSuccess) return error;
  Shape shape;
  shape.grid = static_cast<unsigned>(least(job.tiles.most, multiprocessors()));
  shape.block = kSeveralThreads;
  shape.shared_bytes = SeveralShared::kBytes;
  job.tiles.walk_in_steps_of(static_cast<int>(shape.grid.x));
  return launch_kernel(launch, shape, moe_gate_up_several_tokens, job);
}

}  // namespace flint::cuda
