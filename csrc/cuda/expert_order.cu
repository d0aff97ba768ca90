#include "cuda/arranged.h"
#include "cuda/device.cuh"
#include "cuda/expert_order.h"
#include "cuda/launch.cuh"

namespace flint::cuda {
namespace {

constexpr int kWarps = kEntriesOfChunk / kWarp;
constexpr int kRowThreads = 256, kCombineThreads = 128;

struct OrderJob {
  Routing routing;
  ExpertOrder order;
  int64_t entries;
  int chunks, tile, step;
};

// The expert of this thread's entry, or -1.
__device__ __forceinline__ int expert_of(const OrderJob& job, int64_t entry) {
  if (entry >= job.entries) return -1;
  const int id = *static_cast<const volatile int32_t*>(job.routing.ids + entry);
  return 0 <= id && id < job.routing.experts ? id : -1;
}

// How many entries of each chunk name each expert.
__global__ void __launch_bounds__(kEntriesOfChunk)
    count_entries(const __grid_constant__ OrderJob job) {
  __shared__ int counts[kMostExperts];
  const int thread = static_cast<int>(threadIdx.x), experts = job.routing.experts;
  wait_for_previous_kernel();
  if (thread < experts) counts[thread] = 0;
  __syncthreads();
  const int id = expert_of(job, int64_t{blockIdx.x} * kEntriesOfChunk + thread);
  if (id >= 0) atomicAdd(counts + id, 1);
  __syncthreads();
  if (thread < experts) job.order.counts[blockIdx.x * experts + thread] = counts[thread];
}

// The sum of the values of the threads before this one, and of all. By kThreads threads.
template <int kThreads>
__device__ __forceinline__ int2 sums_before(int value, int (&of_warp)[kThreads / kWarp]) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp;
  int sum = value;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, sum, step);
    if (lane >= step) sum += other;
  }
  __syncthreads();
  if (lane == kWarp - 1) of_warp[thread / kWarp] = sum;
  __syncthreads();
  int before = 0, all = 0;
#pragma unroll
  for (int warp = 0; warp < kThreads / kWarp; ++warp) {
    if (warp < thread / kWarp) before += of_warp[warp];
    all += of_warp[warp];
  }
  return {before + sum - value, all};
}

// The tiles of expert `thread`, which has `total` entries: of equal size but for what is left over.
// The place of its first entry.
template <int kThreads>
__device__ __forceinline__ int plan_tiles(const OrderJob& job, int total,
                                          int (&of_warp)[kThreads / kWarp]) {
  const int expert = static_cast<int>(threadIdx.x);
  const int tiles = (total + job.tile - 1) / job.tile;
  const int2 place = sums_before<kThreads>(total, of_warp);
  const int2 tile = sums_before<kThreads>(tiles, of_warp);
  const int each = tiles > 0 ? (total + tiles - 1) / tiles : 0;
  const int size = (each + job.step - 1) / job.step * job.step;
  for (int i = 0; i < tiles; ++i) {
    const int first = min(i * size, total);
    job.order.tiles[tile.x + i] = {expert, place.x + first, min(size, total - first), 0};
  }
  if (expert == 0) *job.order.tile_count = tile.y;
  return place.x;
}

// Counts become first places: of an expert's entries in each chunk, and of the expert.
__global__ void __launch_bounds__(kMostExperts) plan_experts(const __grid_constant__ OrderJob job) {
  __shared__ int of_warp[kMostExperts / kWarp];
  const int expert = static_cast<int>(threadIdx.x), experts = job.routing.experts;
  wait_for_previous_kernel();
  int total = 0;
  if (expert < experts) {
#pragma unroll 8
    for (int chunk = 0; chunk < job.chunks; ++chunk) {
      int32_t* count = job.order.counts + chunk * experts + expert;
      const int here = __ldcg(count);
      *count = total;
      total += here;
    }
  }
  const int place = plan_tiles<kMostExperts>(job, total, of_warp);
  if (expert < experts) job.order.counts[job.chunks * experts + expert] = place;
}

// The entries of a chunk by their warps: before an entry's own, how many of its warp name the same
// expert, and, as `counts`, how many of the warps before.
using WarpCounts = uint16_t[kWarps][kMostExperts];

// Returns how many of expert `thread`'s entries the chunk has.
__device__ __forceinline__ int rank_entries(int id, int experts, WarpCounts& counts,
                                            unsigned* before) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp;
  for (int expert = lane; expert < experts; expert += kWarp) counts[warp][expert] = 0;
  __syncwarp();
  const unsigned same = __match_any_sync(0xffffffffu, id);
  *before = same & ((1u << lane) - 1u);
  if (id >= 0 && *before == 0) counts[warp][id] = static_cast<uint16_t>(__popc(same));
  __syncthreads();
  int sum = 0;
  if (thread < experts) {
    for (int i = 0; i < kWarps; ++i) {
      const int here = counts[i][thread];
      counts[i][thread] = static_cast<uint16_t>(sum);
      sum += here;
    }
  }
  __syncthreads();
  return sum;
}

__device__ __forceinline__ void put_entry(const OrderJob& job, int64_t entry, int id, int place) {
  if (entry >= job.entries) return;
  job.order.place[entry] = id >= 0 ? place : -1;
  if (id >= 0) job.order.entry[place] = static_cast<int32_t>(entry);
}

// Each entry to its place: behind those of its expert in chunks and warps before, and of its warp.
__global__ void __launch_bounds__(kEntriesOfChunk)
    place_entries(const __grid_constant__ OrderJob job) {
  __shared__ WarpCounts counts;
  const int experts = job.routing.experts;
  wait_for_previous_kernel();
  const int64_t entry = int64_t{blockIdx.x} * kEntriesOfChunk + threadIdx.x;
  const int id = expert_of(job, entry);
  unsigned before;
  rank_entries(id, experts, counts, &before);
  int place = 0;
  if (id >= 0) {
    const int32_t* first = job.order.counts + id;
    place = __ldcg(first + job.chunks * experts) + __ldcg(first + blockIdx.x * experts) +
            counts[threadIdx.x / kWarp][id] + __popc(before);
  }
  put_entry(job, entry, id, place);
}

// All of it for the entries of one chunk.
__global__ void __launch_bounds__(kEntriesOfChunk)
    order_chunk(const __grid_constant__ OrderJob job) {
  __shared__ WarpCounts counts;
  __shared__ int of_warp[kWarps], first[kMostExperts];
  const int thread = static_cast<int>(threadIdx.x);
  wait_for_previous_kernel();
  const int id = expert_of(job, thread);
  unsigned before;
  const int total = rank_entries(id, job.routing.experts, counts, &before);
  const int place = plan_tiles<kEntriesOfChunk>(job, total, of_warp);
  if (thread < job.routing.experts) first[thread] = place;
  __syncthreads();
  const int rank = id >= 0 ? first[id] + counts[thread / kWarp][id] + __popc(before) : 0;
  put_entry(job, thread, id, rank);
}

// Eight columns of a row a thread, which reads them once and writes them to each place of the row.
__global__ void __launch_bounds__(kRowThreads)
    gather(const __grid_constant__ GatherRows rows, const __grid_constant__ ExpertOrder order,
           const __grid_constant__ int64_t from_rows) {
  wait_for_previous_kernel();
  const int vectors = rows.width / 8;
  const int64_t at = int64_t{blockIdx.x} * kRowThreads + threadIdx.x, row = at / vectors;
  if (row >= from_rows) return;
  const int column = static_cast<int>(at % vectors) * 8;
  const auto* from = static_cast<const uint16_t*>(rows.from) + row * rows.from_stride + column;
  const uint4 value = load_activation(reinterpret_cast<const uint4*>(from));
  const int32_t* places = order.place + row * rows.share;
#pragma unroll 6
  for (int i = 0; i < rows.share; ++i) {
    const int64_t place = __ldcg(places + i);
    if (place < 0) continue;
    uint16_t* to = static_cast<uint16_t*>(rows.to) + place * rows.width;
    if (rows.arranged) {
      store_arranged(to, column, value);
    } else {
      *reinterpret_cast<uint4*>(to + column) = value;
    }
  }
}

// Eight columns of a token a thread. Everything is asked for at once, and what a skipped entry has
// is read and left out: ids first would be one way to memory more.
__global__ void __launch_bounds__(kCombineThreads)
    combine(const __grid_constant__ CombineExperts in) {
  constexpr int kAtOnce = 6;
  wait_for_previous_kernel();
  const int vectors = in.hidden / 8, top_k = in.routing.top_k;
  const int64_t at = int64_t{blockIdx.x} * kCombineThreads + threadIdx.x;
  const int64_t token = at / vectors;
  if (token >= in.routing.tokens) return;
  const int column = static_cast<int>(at % vectors);
  const int32_t* ids = in.routing.ids + token * top_k;
  const float* weights = in.weights + token * top_k;
  const auto* outputs = static_cast<const uint4*>(in.outputs) + token * top_k * vectors + column;
  uint4 beside = make_uint4(0, 0, 0, 0);
  if (in.shared != nullptr) beside = load_once(static_cast<const uint4*>(in.shared) + at);
  float sum[8] = {};
  for (int first = 0; first < top_k; first += kAtOnce) {
    uint4 output[kAtOnce];
    int id[kAtOnce];
    float weight[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i < top_k) output[i] = load_once(outputs + int64_t{first + i} * vectors);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const bool there = first + i < top_k;
      id[i] = there ? __ldcg(ids + first + i) : -1;
      weight[i] = there ? __ldcg(weights + first + i) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (id[i] < 0 || id[i] >= in.routing.experts) continue;
      const uint32_t pairs[4] = {output[i].x, output[i].y, output[i].z, output[i].w};
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        sum[2 * pair] += weight[i] * low_half(pairs[pair]);
        sum[2 * pair + 1] += weight[i] * high_half(pairs[pair]);
      }
    }
  }
  uint32_t result[4];
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) result[pair] = pack_bf16(sum[2 * pair], sum[2 * pair + 1]);
  if (in.shared != nullptr) {
    const uint32_t other[4] = {beside.x, beside.y, beside.z, beside.w};
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      result[pair] = pack_bf16(low_half(result[pair]) + low_half(other[pair]),
                               high_half(result[pair]) + high_half(other[pair]));
    }
  }
  static_cast<uint4*>(in.out)[at] = make_uint4(result[0], result[1], result[2], result[3]);
}

}  // namespace

cudaError_t order_entries(const Routing& routing, int tile, int step, const ExpertOrder& order,
                          const Launch& launch) {
  OrderJob job{routing, order, int64_t{routing.tokens} * routing.top_k, 0, tile, step};
  job.chunks = static_cast<int>(ceil_div(job.entries, kEntriesOfChunk));
  const Launch next{launch.stream, true};
  const dim3 chunks(static_cast<unsigned>(job.chunks));
  if (job.chunks == 1) {
    return launch_kernel(launch, chunks, dim3(kEntriesOfChunk), order_chunk, job);
  }
  auto error = launch_kernel(launch, chunks, dim3(kEntriesOfChunk), count_entries, job);
  if (error != cudaSuccess) return error;
  error = launch_kernel(next, dim3(1), dim3(kMostExperts), plan_experts, job);
  if (error != cudaSuccess) return error;
  return launch_kernel(next, chunks, dim3(kEntriesOfChunk), place_entries, job);
}

cudaError_t gather_rows(const GatherRows& rows, const Routing& routing, const ExpertOrder& order,
                        const Launch& launch) {
  const int64_t from_rows = int64_t{routing.tokens} * routing.top_k / rows.share;
  const int64_t threads = from_rows * (rows.width / 8);
  const dim3 grid(static_cast<unsigned>(ceil_div(threads, kRowThreads)));
  return launch_kernel(launch, grid, dim3(kRowThreads), gather, rows, order, from_rows);
}

cudaError_t combine_experts(const CombineExperts& in, const Launch& launch) {
  const int64_t threads = int64_t{in.routing.tokens} * (in.hidden / 8);
  const dim3 grid(static_cast<unsigned>(ceil_div(threads, kCombineThreads)));
  return launch_kernel(launch, grid, dim3(kCombineThreads), combine, in);
}

}  // namespace flint::cuda
