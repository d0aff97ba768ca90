// Gate and up of one token: a CTA has one tile. The shared expert's weights are fetched ahead of
// the wait; a routed one's when its id has come, and the activations, which would wait behind them.
#include "cuda/experts.h"
#include "cuda/launch.cuh"
#include "cuda/moe_act.cuh"
#include "cuda/one_token.cuh"
#include "cuda/tile_stream.cuh"

namespace flint::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
constexpr int kChunks = 4;
// What Flint's 512 tiles are on an SM. The registers that this allows keep a fifth out, with which
// the next kernel's first CTAs come between: measured on an H200, 5.3 us with it, 4.8 without.
constexpr int kCtasAnSm = 4;

using Stream = TileStream<Nvfp4, kWarps, kChunks, 1, true>;

struct Job {
  MoeGateUp in;
  int shared_tiles, expert_tiles;
  int pieces;
};

// Dynamic shared memory: the stages, the activations, the warps' sums, zeros.
__global__ void __launch_bounds__(kThreads, kCtasAnSm)
    moe_gate_up_one_token(const __grid_constant__ Job job,
                          const __grid_constant__ Nvfp4::Matrix routed,
                          const __grid_constant__ Nvfp4::Matrix common) {
  extern __shared__ __align__(128) uint8_t shared[];
  const MoeGateUp& in = job.in;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp;
  uint8_t* staged = shared + Stream::kBytes;
  auto* sums = reinterpret_cast<float*>(staged + job.pieces * Stream::kPiece * 2);
  auto* zeros = reinterpret_cast<uint8_t*>(sums + kWarps * kTileRows);

  const int routed_tile = static_cast<int>(blockIdx.x) - job.shared_tiles;
  const bool is_shared = routed_tile < 0;
  const int entry = is_shared ? 0 : routed_tile / job.expert_tiles;
  const int tile = is_shared ? static_cast<int>(blockIdx.x) : routed_tile % job.expert_tiles;
  const int size = is_shared ? in.shared_size : in.routed_size;
  const int row = tile * kHalfTile;
  const TileRows rows{row, size + row, size, 2 * size};

  float gate_scale = 0.0f, up_scale = 0.0f;
  Nvfp4::Matrix weight = common;
  Stream stream(shared, warp);
  if (is_shared) {
    gate_scale = load_weight(in.shared_scale_2);
    up_scale = load_weight(in.shared_scale_2 + in.shared_shards - 1);
    stream.fetch(weight, rows, in.hidden, 0);
  }
  make_zeros<kChunks>(zeros);
  __syncthreads();
  wait_for_previous_kernel();
  let_next_kernel_start();
  int expert = 0;
  if (!is_shared) expert = *static_cast<const volatile int32_t*>(in.routing.ids + entry);
  unsigned shifts = 0;  // of a piece, a bit
  for (int piece = 0; piece < job.pieces; ++piece) {
    const bool shifted = stage_one<kChunks, true>(staged, static_cast<const uint16_t*>(in.x),
                                                  in.hidden, stream.chunk_of(piece));
    shifts |= shifted ? 1u << piece : 0u;
  }
  auto* to = static_cast<uint16_t*>(is_shared ? in.shared_act : in.routed_act) + entry * size + row;
  if (!is_shared) {
    if (expert < 0 || expert >= in.routing.experts) {  // what is skipped gives zeros
      if (thread < kHalfTile) to[thread] = 0;
      return;
    }
    weight = Nvfp4::from_row(routed, int64_t{expert} * 2 * size, in.hidden);
    stream.fetch(weight, rows, in.hidden, 0);
    gate_scale = load_weight(in.routed_scale_2 + 2 * expert);
    up_scale = load_weight(in.routed_scale_2 + 2 * expert + 1);
  }
  __syncwarp();
  OneTokenSums tile_sums;
#pragma unroll 1
  for (int piece = 0; piece < job.pieces; ++piece) {
    multiply_one<kChunks>(tile_sums, stream, staged + stream.chunk_of(piece) * Nvfp4::kChunk * 2,
                          zeros, (shifts >> piece & 1) != 0);
    if (piece + 1 < job.pieces) stream.fetch(weight, rows, in.hidden, piece + 1);
  }
  store_rows(tile_sums, sums + warp * kTileRows);
  __syncthreads();
  if (thread >= kHalfTile) return;
  const float gate = warps_total<kWarps, kTileRows>(sums, thread) * gate_scale;
  const float up = warps_total<kWarps, kTileRows>(sums, thread + kHalfTile) * up_scale;
  store_rounded(to + thread, is_shared ? shared_act(gate, up) : routed_act(gate, up));
}

}  // namespace

bool moe_gate_up_one_fits(const MoeGateUp& in) {
  return in.routing.tokens == 1 && in.routed.scales != nullptr && in.hidden % Stream::kPiece == 0 &&
         Stream::pieces(in.hidden) <= kMostPiecesOfOne;
}

cudaError_t moe_gate_up_one(const MoeGateUp& in, const Launch& launch) {
  const Job job{in, in.shared_size / kHalfTile, in.routed_size / kHalfTile,
                Stream::pieces(in.hidden)};
  Shape shape;
  shape.grid = static_cast<unsigned>(job.shared_tiles + in.routing.top_k * job.expert_tiles);
  shape.block = kThreads;
  shape.shared_bytes = Stream::kBytes + size_t(job.pieces) * Stream::kPiece * 2 +
                       kWarps * kTileRows * sizeof(float) + kZeroBytes<kChunks>;
  return launch_kernel(launch, shape, moe_gate_up_one_token, job,
                       Nvfp4::matrix(in.routed.elements, in.routed.scales),
                       Nvfp4::matrix(in.shared.elements, in.shared.scales));
}

}  // namespace flint::cuda
