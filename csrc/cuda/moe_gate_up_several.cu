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

constexpr int kStages = 4, kCtasAnSm = 2;
using Tiles = TileRing<kStages>;

struct Job {
  CUtensorMap routed, shared;  // codes, in boxes of eight rows
  MoeGateUp in;
  GateUpTiles tiles;
};

// What a thread of the finishing warps has of a tile.
struct Place {
  uint16_t* to;
  float gate_scale, up_scale;
  bool is_shared;

  __device__ __forceinline__ void find(const Job& job, const ExpertGroups& groups,
                                       const GateUpWalk& at, int row, int token) {
    const MoeGateUp& in = job.in;
    is_shared = at.tile < job.tiles.shared_tiles;
    const float *gate = in.shared_scale_2, *up = gate + in.shared_shards - 1;
    to = nullptr;
    if (is_shared) {
      if (token < in.routing.tokens) {
        to = static_cast<uint16_t*>(in.shared_act) + token * in.shared_size + at.tile * kHalfTile +
             row;
      }
    } else {
      gate = in.routed_scale_2 + 2 * groups.expert[at.group];
      up = gate + 1;
      const int place = token < in.routing.tokens ? groups.place[at.group][token] : -1;
      if (place >= 0) {
        const int entry = token * in.routing.top_k + place;
        to = static_cast<uint16_t*>(in.routed_act) + entry * in.routed_size + at.row * kHalfTile +
             row;
      }
    }
    gate_scale = load_weight(gate);
    up_scale = load_weight(up);
  }

  __device__ __forceinline__ void finish(float2 sums) const {
    if (to == nullptr) return;
    const float gate = sums.x * gate_scale, up = sums.y * up_scale;
    store_rounded(to, is_shared ? shared_act(gate, up) : routed_act(gate, up));
  }
};

__global__ void __launch_bounds__(kSeveralThreads, kCtasAnSm)
    moe_gate_up_several_tokens(const __grid_constant__ Job job) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ ExpertGroups groups;
  __shared__ Tiles::Barriers barriers;
  const MoeGateUp& in = job.in;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp;
  const Tiles tiles(shared, barriers);
  GateUpWalk at(job.tiles, static_cast<int>(blockIdx.x));
  TileCopier<kStages> copier{tiles, {}};
  const bool copies = thread == kCopyWarp * kWarp;
  const auto copy_until = [&](int end) {
#pragma unroll 1
    for (; at.tile < end; at.advance(job.tiles)) {
      const bool is_shared = at.tile < job.tiles.shared_tiles;
      const int size = is_shared ? in.shared_size : in.routed_size;
      const int first = is_shared ? 0 : groups.expert[at.group] * 2 * size;
      const int low = first + (is_shared ? at.tile : at.row) * kHalfTile;
      copier.copy(is_shared ? job.shared : job.routed,
                  static_cast<const uint8_t*>(is_shared ? in.shared.scales : in.routed.scales), low,
                  low + size);
    }
  };
  if (copies) {
    tiles.init();
    order_before_copies();
    // As many as there are stages.
    copy_until(least(job.tiles.shared_tiles, at.tile + (kStages - 1) * job.tiles.step + 1));
  }
  wait_for_previous_kernel();
  // Now: this kernel's experts' weights are on their way long before the next one's.
  let_next_kernel_start();
  const int id = groups.load(in.routing);
  TileMultiplier<kStages> multiplier{tiles, {}, {}, {}};
  if (warp < kProductWarps) {
    multiplier.load(static_cast<const uint16_t*>(in.x), in.x_stride, in.routing.tokens);
  }
  groups.find(in.routing, id);
  __syncthreads();
  const int end = job.tiles.shared_tiles + groups.count * job.tiles.expert_tiles;
  if (copies) {
    copy_until(end);
  } else if (warp < kProductWarps) {
    multiplier.arrange();
#pragma unroll 1
    for (; at.tile < end; at.advance(job.tiles)) multiplier.multiply();
  } else if (warp < kCopyWarp) {
    const int element = thread - kProductWarps * kWarp;
    TileFinisher<kStages> finisher{tiles, {}};
    Place place;
#pragma unroll 1
    for (; at.tile < end; at.advance(job.tiles)) {
      place.find(job, groups, at, element / kMostTokens, element % kMostTokens);
      place.finish(finisher.take(element));
    }
  }
  clear_skipped(in, groups.group_of);
}

}  // namespace

bool moe_gate_up_several_fits(const MoeGateUp& in) {
  return in.routing.tokens > 1 && in.routed.scales != nullptr && in.hidden == kSeveralWidth &&
         int64_t{in.routing.experts} * 2 * in.routed_size < (int64_t{1} << 31);
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
  shape.grid = static_cast<unsigned>(least(job.tiles.most, kCtasAnSm * multiprocessors()));
  shape.block = kSeveralThreads;
  shape.shared_bytes = Tiles::kBytes;
  job.tiles.walk_in_steps_of(static_cast<int>(shape.grid.x));
  return launch_kernel(launch, shape, moe_gate_up_several_tokens, job);
}

}  // namespace flint::cuda
