// Decode attention. Keys are split between CTAs, and in a CTA between warps, tile by tile; every
// warp keeps a running softmax of its own (attention_tile.cuh), and the parts are merged in a fixed
// order. Two kernels:
//
//   attention_window   short windows: a cluster of CTAs for a request and KV head, a tile for a
//                      warp, merged through the cluster's shared memory
//   attention_long     everything else: a CTA for a split, each warp with a ring of tiles under
//                      way; the last CTA of a request and KV head that has written its part merges
//                      them
//
// Which one it is follows from the window alone.
#include <cudaTypedefs.h>

#include <algorithm>
#include <initializer_list>

#include "cuda/arrival.cuh"
#include "cuda/attention.h"
#include "cuda/attention_merge.cuh"
#include "cuda/cluster.cuh"
#include "cuda/launch.cuh"
#include "cuda/tiles.h"

namespace flint::cuda {
namespace {

struct Job {
  Pages pages;
  AttentionDecode in;
  int64_t capacity;   // keys that the table can name
  float scale;        // of logits in units of log2(e)
  int most_splits;    // of any request
  int record_splits;  // of which there is room for parts
};

// ------------------------------------------------------------------------------ long

constexpr int kMostSplits = 64;  // of a request
constexpr int kWarps = 8;        // of a CTA: to each a slice, when parts are merged
static_assert(kWarps == kSlices && kMostSplits * 4 <= kWarps * kWarp);

// A split of one request and KV head.
struct Item {
  int request, kv_head, split, splits;
  int length;
  AttentionKeys keys;  // the request's, and of its tiles those of the split
  int newest_tile;     // the request's last
};

// By all warps: `ends[r]` becomes the splits of all requests before r.
__device__ __forceinline__ void count_splits(const Job& job, uint16_t* ends) {
  __shared__ int totals[kMostAttentionRequests / kWarp];
  const int lane = lane_index(), warp = static_cast<int>(threadIdx.x) / kWarp;
  static_assert(kMostAttentionRequests == kWarps * kWarp);
  if (warp * kWarp < job.in.requests) {
    const int request = warp * kWarp + lane;
    const int length = request < job.in.requests ? job.in.lengths[request] : 0;
    const AttentionKeys keys = attention_keys(length, job.capacity, job.in.window);
    int sum = attention_splits(keys.tiles(), job.most_splits).count;
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += other;
    }
    ends[request + 1] = static_cast<uint16_t>(sum);
    if (lane == kWarp - 1) totals[warp] = sum;
  }
  if (threadIdx.x == 0) ends[0] = 0;
  __syncthreads();
  if (job.in.requests <= kWarp) return;
  int before = 0;
#pragma unroll 1
  for (int i = 0; i < warp && i * kWarp < job.in.requests; ++i) before += totals[i];
  ends[threadIdx.x + 1] += static_cast<uint16_t>(before);
  __syncthreads();
}

// The `index`-th of all requests' items, of which there are more. A single request has no `ends`.
__device__ __forceinline__ Item item_of(const Job& job, const uint16_t* ends, int index) {
  const int kv_heads = job.in.cache.kv_heads;
  Item item;
  item.request = 0;
  if (job.in.requests > 1) {
    int end = job.in.requests;
    while (end - item.request > 1) {
      const int middle = (item.request + end) / 2;
      (ends[middle] * kv_heads <= index ? item.request : end) = middle;
    }
    index -= ends[item.request] * kv_heads;
  }
  item.length = job.in.lengths[item.request];
  item.keys = attention_keys(item.length, job.capacity, job.in.window);
  item.newest_tile = item.keys.tile_end - 1;
  const AttentionSplits splits = attention_splits(item.keys.tiles(), job.most_splits);
  item.splits = splits.count;
  item.kv_head = index / splits.count;
  item.split = index - item.kv_head * splits.count;
  item.keys.tile += item.split * splits.tiles;
  item.keys.tile_end = min(item.keys.tile_end, item.keys.tile + splits.tiles);
  return item;
}

// A warp's tiles of an item, every kWarps-th, brought a side after the other into its ring of
// kSides.
template <int kSides>
class TileRing {
 public:
  __device__ __forceinline__ TileRing(const Job& job, uint32_t ring, Barrier* barriers)
      : job_(job), ring_(ring), barriers_(barriers) {
    if (lane_index() == 0) {
      for (int i = 0; i < kSides; ++i) barriers[i].init(1);
      publish_barriers();
    }
    __syncwarp();
  }

  __device__ __forceinline__ void start(const Item& item, int first_tile) {
    row_ = job_.in.block_table + item.request * job_.in.width;
    kv_head_ = item.kv_head;
    tile_ = first_tile;
    tile_end_ = item.keys.tile_end;
    count_ = 0;
  }

  // The next side, where there is one.
  __device__ __forceinline__ void fetch() {
    if (tile_ >= tile_end_) return;
    if (count_ % (2 * kWarp) == 0) {
      const int tile = tile_ + lane_index() * kWarps;
      page_ = -1;
      if (tile < tile_end_) page_ = row_[tile >> job_.pages.tiles_log2];
    }
    const int page = __shfl_sync(0xffffffffu, page_, count_ / 2 % kWarp);
    const bool is_v = count_ % 2 != 0;
    fetch_side(ring_ + fetch_slot_ * kSideBytes, barriers_[fetch_slot_], job_.pages,
               TilePlace(job_.pages, tile_, page, kv_head_), is_v);
    fetch_slot_ = fetch_slot_ + 1 == kSides ? 0 : fetch_slot_ + 1;
    ++count_;
    if (is_v) tile_ += kWarps;
  }

  // The oldest side, once it is there.
  __device__ __forceinline__ uint32_t take() {
    barriers_[take_slot_].wait(phase_);
    const uint32_t side = ring_ + take_slot_ * kSideBytes;
    if (++take_slot_ == kSides) {
      take_slot_ = 0;
      phase_ ^= 1;
    }
    return side;
  }

 private:
  const Job& job_;
  uint32_t ring_;
  Barrier* barriers_;
  const int32_t* row_ = nullptr;
  int kv_head_ = 0, tile_ = 0, tile_end_ = 0;
  int count_ = 0;  // of sides
  int fetch_slot_ = 0, take_slot_ = 0;
  uint32_t phase_ = 0;
  int page_ = -1;  // of the lane-th tile out of kWarp
};

// A split's part in memory: kOutBytes, then the four pairs of heads.
constexpr int kRecordBytes = kOutBytes + 4 * static_cast<int>(sizeof(HeadPair));

__device__ __forceinline__ char* record_of(const Job& job, const Item& item, int split) {
  const int64_t pair = int64_t{item.request} * job.in.cache.kv_heads + item.kv_head;
  return reinterpret_cast<char*>(job.in.partials) +
         (pair * job.record_splits + split) * kRecordBytes;
}

// By a warp: its slice of a CTA's part.
__device__ __forceinline__ void write_record(char* record, int warp, const Merged<>& merged) {
  const float (&w)[4] = merged.weighted;
  reinterpret_cast<float4*>(record + warp * kSliceBytes)[lane_index()] =
      make_float4(w[0], w[1], w[2], w[3]);
  if (warp == 0 && lane_index() < 4) {
    reinterpret_cast<HeadPair*>(record + kOutBytes)[lane_index()] = merged.heads;
  }
}

// By a warp: its slice of the result.
__device__ __forceinline__ void write_slice(const Job& job, const Item& item, int warp,
                                            const Merged<>& merged, const float (&sinks)[2]) {
  const int g = lane_index() / 4, t = lane_index() % 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int head = item.kv_head * kAttentionGroup + 2 * t + i;
    const HeadPair& heads = merged.heads;
    const float share = __frcp_rn(denominator(sinks[i], heads.maximum[i], heads.total[i]));
    const bool none = item.keys.last == 0;
    uint16_t* to = out_of_head(job.in, item.request, head) + warp * 16 + g;
    store_rounded(to, none ? without_tiles(item.length) : merged.weighted[i] * share);
    store_rounded(to + 8, none ? without_tiles(item.length) : merged.weighted[2 + i] * share);
  }
}

// By the CTA whose split was the last to be written: all of them, a slice a warp. `own` is the
// warp's ring, `pairs` room for all pairs of heads.
template <int kRingBytes>
__device__ __forceinline__ Merged<> merge_splits(const char* records, int splits, uint8_t* own,
                                                 HeadPair* pairs) {
  constexpr int kChunk = kRingBytes / kSliceBytes;
  const int lane = lane_index(), thread = static_cast<int>(threadIdx.x);
  const char* slice = records + thread / kWarp * kSliceBytes + lane * 16;
  const uint32_t to = shared_address(own) + lane * 16;
  if (thread / 4 < splits) {
    copy_16_async(shared_address(pairs + thread),
                  records + thread / 4 * kRecordBytes + kOutBytes + thread % 4 * 16, true);
  }
  Merged<> merged;
#pragma unroll 1
  for (int first = 0; first < splits; first += kChunk) {
    const int count = min(kChunk, splits - first);
#pragma unroll 2
    for (int i = 0; i < count; ++i) {
      copy_16_async(to + i * kSliceBytes, slice + (first + i) * kRecordBytes, true);
    }
    close_copies();
    await_copies<0>();
    __syncthreads();
    if (first == 0) merged.find_maximum(splits, pairs);
    merged.add(count, own, kSliceBytes, pairs + first * 4);
  }
  return merged;
}

// Dynamic shared memory: the warps' rings, in which their results come too.
template <int kSides, int kCtas>
__global__ void __launch_bounds__(kWarps* kWarp, kCtas)
    attention_long(const __grid_constant__ Job job) {
  constexpr int kRingBytes = kSides * kSideBytes;
  extern __shared__ uint8_t dynamic[];
  __shared__ HeadPair pairs[kMostSplits * 4];
  __shared__ Barrier barriers[kWarps * kSides];
  __shared__ uint16_t ends[kMostAttentionRequests + 1];
  __shared__ bool is_last;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  uint8_t* rings = aligned_side(dynamic);
  uint8_t* own = rings + warp * kRingBytes;

  if (threadIdx.x == 0) {
    prefetch_map(job.pages.k.map);
    prefetch_map(job.pages.v.map);
  }
  TileRing<kSides> ring(job, shared_address(own), barriers + warp * kSides);
  int items = 0;
  if (job.in.requests == 1) {
    const AttentionKeys keys = attention_keys(job.in.lengths[0], job.capacity, job.in.window);
    items = attention_splits(keys.tiles(), job.most_splits).count;
  } else {
    count_splits(job, ends);
    items = ends[job.in.requests];
  }
  items *= job.in.cache.kv_heads;
  WarpAttention found;
  bool waited = false;
#pragma unroll 1
  for (int index = static_cast<int>(blockIdx.x); index < items;
       index += static_cast<int>(gridDim.x)) {
    const Item item = item_of(job, ends, index);
    float sinks[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sinks[i] = sink_of(job.in, item.kv_head * kAttentionGroup + lane_index() % 4 * 2 + i);
    }
    char* record = record_of(job, item, item.split);
    uint32_t* counter =
        job.in.counters + int64_t{item.request} * job.in.cache.kv_heads + item.kv_head;
    keep(record);
    keep(counter);
    const int first_tile = item.keys.tile + warp;
    ring.start(item, first_tile);
#pragma unroll 1
    for (int i = 0; i < kSides; ++i) ring.fetch();
    // What of the first item comes ahead of the wait lacks the newest key.
    const bool has_newest = !waited && first_tile <= item.newest_tile &&
                            item.newest_tile < item.keys.tile_end &&
                            (item.newest_tile - first_tile) % kWarps == 0;
    if (!waited) {
      wait_for_previous_kernel();
      let_next_kernel_start();
      waited = true;
    }
    Queries queries;
    queries.load(job.in, item.request, item.kv_head);
    NewestRow newest;
    if (has_newest) {
      const int32_t* row = job.in.block_table + item.request * job.in.width;
      const int page = row[item.newest_tile >> job.pages.tiles_log2];
      newest.load(job.pages, TilePlace(job.pages, item.newest_tile, page, item.kv_head),
                  (item.keys.last - 1) % kAttentionTile);
    }
    found.clear();
#pragma unroll 1
    for (int tile = first_tile; tile < item.keys.tile_end; tile += kWarps) {
      const int first = item.keys.first - tile * kAttentionTile;
      const int last = item.keys.last - tile * kAttentionTile;
      const bool whole = first <= 0 && last >= kAttentionTile;
      const bool has_row = has_newest && tile == item.newest_tile;
      const uint32_t k_side = ring.take();
      if (has_row) {
        newest.put(k_side, false);
        order_before_copies();
        __syncwarp();
      }
      found.weigh(k_side, queries, job.scale, first, last);
      __syncwarp();
      ring.fetch();
      const uint32_t v_side = ring.take();
      if (has_row || !whole) {
        if (has_row) newest.put(v_side, true);
        clear_values(v_side, first, last);
        order_before_copies();
        __syncwarp();
      }
      found.add_values(v_side);
      __syncwarp();
      ring.fetch();
    }
    put_result(found, own, pairs + warp * 4);
    __syncthreads();
    Merged<> merged;
    merged.find_maximum(kWarps, pairs);
    merged.add(kWarps, rings + warp * kSliceBytes, kRingBytes, pairs);
    if (item.splits > 1) {
      write_record(record, warp, merged);
      order_before_copies();
      __syncthreads();
      if (threadIdx.x == 0) {
        const auto last = static_cast<uint32_t>(item.splits - 1);
        is_last = arrive_at(counter, last) == last;
      }
      __syncthreads();
      if (!is_last) continue;
      merged =
          merge_splits<kRingBytes>(record - item.split * kRecordBytes, item.splits, own, pairs);
    }
    write_slice(job, item, warp, merged, sinks);
    order_before_copies();
    __syncthreads();
  }
  if (!waited) {
    wait_for_previous_kernel();
    let_next_kernel_start();
  }
}

// ------------------------------------------------------------------------------ window

// A window's tiles are merged in eight parts, every eighth tile in one, and those in their order.
// So it does not show in a result how many CTAs a cluster has.
constexpr int kWindowParts = 8;
constexpr int kMostPartTiles = 8;
constexpr int kMostWindowTiles = kWindowParts * kMostPartTiles;
static_assert(kMostPartTiles == kWarps);

// Eight CTAs, where each has an SM to itself, are quicker at fetching. Of a larger batch the SMs
// would get one to four of them, while the kernel ahead is still there: there are four then, which
// take two parts and are too large to be four to an SM.
constexpr int kManyWindowCtas = 8, kFewWindowCtas = 4;

// Of one head, a part: slices as the lanes hold them, of lane 4 g + t number g.
struct WindowPart {
  float2 slices[kSlices][8];  // elements g and g + 8
  float2 stats;               // maximum and total
};

// CTA i of kCtas has every kCtas-th tile from the i-th on, and writes kHeads query heads.
// Dynamic shared memory: a tile for each warp that may have one, in whose place its result comes.
template <int kCtas>
__global__ void __launch_bounds__(kMostWindowTiles / kCtas * kWarp, kCtas / 2)
    attention_window(const __grid_constant__ Job job) {
  constexpr int kHeads = kAttentionGroup / kCtas, kOwnParts = kWindowParts / kCtas;
  extern __shared__ uint8_t dynamic[];
  __shared__ HeadPair pairs[kMostWindowTiles / kCtas * 4];
  __shared__ WindowPart parts[kHeads][kWindowParts];  // of this CTA's heads, from all CTAs
  __shared__ Barrier complete;                        // when all of them have come
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = lane_index();
  const auto rank = static_cast<int>(cluster_rank());
  const auto kv_head = static_cast<int>(blockIdx.y), request = static_cast<int>(blockIdx.z);
  uint8_t* tiles = aligned_side(dynamic);
  uint8_t* own = tiles + warp * 2 * kSideBytes;
  const uint32_t k_side = shared_address(own), v_side = k_side + kSideBytes;

  const int length = job.in.lengths[request];
  // What the thread writes at the end: of one head two elements.
  constexpr int kWriters = kAttentionHeadDim / 2;  // of a head
  const int written = static_cast<int>(threadIdx.x) / kWriters % kHeads;
  const int head = kv_head * kAttentionGroup + rank * kHeads + written;
  const float sink = sink_of(job.in, head);
  const AttentionKeys keys = attention_keys(length, job.capacity, job.in.window);
  const int tile = keys.tile + rank + warp * kCtas;
  const int first = keys.first - tile * kAttentionTile, last = keys.last - tile * kAttentionTile;
  const bool has_tile = tile < keys.tile_end;
  int page = -1;
  if (has_tile) {
    page = job.in.block_table[request * job.in.width + (tile >> job.pages.tiles_log2)];
  }
  const TilePlace place(job.pages, tile, page, kv_head);
  if (has_tile) {
    fetch_side(k_side, job.pages, place, false, first, last);
    close_copies();
    fetch_side(v_side, job.pages, place, true, first, last);
    close_copies();
  }
  if (threadIdx.x == 0) {
    complete.init(1);
    publish_barriers();
    complete.arrive_expecting(sizeof(parts));
  }
  __syncwarp();
  announce_cluster();
  await_cluster();
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (has_tile) {
    Queries queries;
    queries.load(job.in, request, kv_head);
    NewestRow newest;
    const bool has_row = last <= kAttentionTile;
    if (has_row) newest.load(job.pages, place, last - 1);
    WarpAttention found;
    found.clear();
    await_copies<1>();
    __syncwarp();  // every lane's copies, before the row comes over one of them
    if (has_row) newest.put(k_side, false);
    __syncwarp();
    found.weigh(k_side, queries, job.scale, first, last);
    await_copies<0>();
    __syncwarp();
    if (has_row) newest.put(v_side, true);
    __syncwarp();
    found.add_values(v_side);
    put_result(found, own, pairs + warp * 4);
  }
  __syncthreads();

  // A warp merges a slice of each of the CTA's parts, whose eight heads go to all CTAs.
  if (warp < kSlices) {
#pragma unroll
    for (int i = 0; i < kOwnParts; ++i) {
      const int part = rank + i * kCtas;
      const int count = (keys.tiles() - part + kWindowParts - 1) / kWindowParts;
      Merged<4 * kOwnParts> merged;
      merged.find_maximum(count, pairs + i * 4);
      merged.add(count, tiles + i * 2 * kSideBytes + warp * kSliceBytes, kOwnParts * 2 * kSideBytes,
                 pairs + i * 4);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int to_head = lane % 4 * 2 + j;
        const auto to = static_cast<uint32_t>(to_head / kHeads);
        WindowPart& there = parts[to_head % kHeads][part];
        const uint32_t barrier = shared_of(to, &complete);
        send_cluster(shared_of(to, &there.slices[warp][lane / 4]),
                     make_float2(merged.weighted[j], merged.weighted[2 + j]), barrier);
        if (warp == 0 && lane / 4 == 0) {
          send_cluster(shared_of(to, &there.stats),
                       make_float2(merged.heads.maximum[j], merged.heads.total[j]), barrier);
        }
      }
    }
  }
  if (threadIdx.x >= kHeads * kWriters) return;
  const int slice = static_cast<int>(threadIdx.x) / 8 % kSlices;
  const int g = static_cast<int>(threadIdx.x) % 8;
  const WindowPart* of_head = parts[written];
  complete.wait(0);
  float maximum = -INFINITY;
#pragma unroll
  for (int i = 0; i < kWindowParts; ++i) maximum = fmaxf(maximum, of_head[i].stats.x);
  float total = 0.0f, low = 0.0f, high = 0.0f;
#pragma unroll
  for (int i = 0; i < kWindowParts; ++i) {
    const float2 stats = of_head[i].stats, elements = of_head[i].slices[slice][g];
    const float share = exp2_approx(stats.x - base_of(maximum));
    total = fmaf(stats.y, share, total);
    low = fmaf(elements.x, share, low);
    high = fmaf(elements.y, share, high);
  }
  const float inverse = __frcp_rn(denominator(sink, maximum, total));
  const bool none = keys.tiles() == 0, is_odd = g % 2 != 0;
  low = none ? without_tiles(length) : low * inverse;
  high = none ? without_tiles(length) : high * inverse;
  // Elements g and g + 8 of two neighbours become neighbours.
  const float taken = __shfl_xor_sync(0xffffffffu, is_odd ? low : high, 1);
  uint16_t* to = out_of_head(job.in, request, head) + slice * 16 + (is_odd ? g + 7 : g);
  *reinterpret_cast<uint32_t*>(to) = is_odd ? pack_bf16(taken, high) : pack_bf16(low, taken);
}

// ------------------------------------------------------------------------------ launches

// Of any alignment a window of this many keys lies in at most kMostWindowTiles tiles.
constexpr int kMostWindow = (kMostWindowTiles - 1) * kAttentionTile + 1;

bool is_short(const AttentionDecode& in) { return 0 < in.window && in.window <= kMostWindow; }

int64_t capacity_of(const AttentionDecode& in) { return in.width * in.cache.page_size; }

int most_splits(const AttentionDecode& in) {
  return static_cast<int>(least(ceil_div(multiprocessors(), in.cache.kv_heads), kMostSplits));
}

// The most splits that a request of this table's width can have.
int record_splits(const AttentionDecode& in) {
  const int64_t tiles = ceil_div(least(capacity_of(in), int64_t{1} << 31), kAttentionTile);
  return std::max(1, static_cast<int>(least(ceil_div(tiles, kLeastSplitTiles), most_splits(in))));
}

int log2_of(int64_t power) { return power > 1 ? 1 + log2_of(power / 2) : 0; }

Side side_of(const void* base, const PageStrides& strides) {
  return {{}, static_cast<const char*>(base), strides.block * 2, strides.row * 2, strides.head * 2};
}

Job job_of(const AttentionDecode& in) {
  const KvCache& cache = in.cache;
  return {
      {side_of(cache.k, cache.k_strides), side_of(cache.v, cache.v_strides),
       static_cast<int>(cache.slots / cache.page_size), log2_of(cache.page_size / kAttentionTile)},
      in,
      capacity_of(in),
      in.scale * kLog2e,
      most_splits(in),
      record_splits(in)};
}

// Found once, in the driver that the runtime has loaded; null where it has none.
PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
  static const auto encoder = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    const auto error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                                        cudaEnableDefault, &result);
    const bool there = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
    return there ? reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found) : nullptr;
  }();
  return encoder;
}

// False where the driver makes no such map. No hint for the L2: an H200 streamed more slowly where
// it was asked to fetch more than is read, or to let the lines go first.
bool make_map(Side& side, const KvCache& cache, int blocks) {
  const auto encode = tensor_map_encoder();
  if (encode == nullptr) return false;
  const auto size = [](int64_t count) { return static_cast<cuuint64_t>(count); };
  const cuuint64_t sizes[5] = {kBoxElements, size(cache.page_size), 2, size(cache.kv_heads),
                               size(blocks)};
  // The stride of a dimension of one is never used, and may be any.
  const auto bytes = [&](int64_t stride, int64_t count) {
    return size(count > 1 ? stride : kBoxRowBytes);
  };
  const cuuint64_t steps[4] = {size(side.row), kBoxRowBytes, bytes(side.head, cache.kv_heads),
                               bytes(side.block, blocks)};
  const cuuint32_t box[5] = {kBoxElements, kAttentionTile, 2, 1, 1};
  const cuuint32_t every[5] = {1, 1, 1, 1, 1};
  return encode(&side.map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 5, const_cast<char*>(side.base), sizes,
                steps, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// At most eight CTAs in turn for each that there is room for; those that come first take more.
constexpr int kTurns = 8;

template <int kSides, int kCtas>
cudaError_t launch_long(const Job& job, int64_t items, const Launch& launch) {
  Shape shape;
  shape.grid = static_cast<unsigned>(least(items, int64_t{kTurns} * kCtas * multiprocessors()));
  shape.block = kWarps * kWarp;
  shape.shared_bytes = size_t{kWarps} * kSides * kSideBytes + kSideAlignment;
  return launch_kernel(launch, shape, attention_long<kSides, kCtas>, job);
}

template <int kCtas>
cudaError_t launch_window(const Job& job, const Launch& launch) {
  // The most tiles that the window's keys lie in, whatever the last one's position.
  const int tiles = (job.in.window + kAttentionTile - 2) / kAttentionTile + 1;
  const auto warps = static_cast<int>(ceil_div(tiles, kCtas));
  Shape shape;
  shape.grid = dim3(kCtas, static_cast<unsigned>(job.in.cache.kv_heads),
                    static_cast<unsigned>(job.in.requests));
  shape.block = static_cast<unsigned>(std::max(warps, kSlices)) * kWarp;
  shape.shared_bytes = size_t{2} * warps * kSideBytes + kSideAlignment;
  shape.cluster = kCtas;
  return launch_kernel(launch, shape, attention_window<kCtas>, job);
}

}  // namespace

bool attention_decode_fits(const AttentionDecode& in) {
  const KvCache& cache = in.cache;
  const auto fits = [](const void* pointer, std::initializer_list<int64_t> strides) {
    bool aligned = reinterpret_cast<uint64_t>(pointer) % 16 == 0;
    for (const int64_t stride : strides) aligned = aligned && stride % 8 == 0;
    return aligned;
  };
  return 0 < in.requests && in.requests <= kMostAttentionRequests && cache.kv_heads > 0 &&
         int64_t{in.requests} * cache.kv_heads <= kMostAttentionPairs &&
         cache.head_dim == kAttentionHeadDim && cache.page_size >= kAttentionTile &&
         (cache.page_size & (cache.page_size - 1)) == 0 &&
         fits(cache.k, {cache.k_strides.block, cache.k_strides.row, cache.k_strides.head}) &&
         fits(cache.v, {cache.v_strides.block, cache.v_strides.row, cache.v_strides.head}) &&
         fits(in.q, {in.q_row_stride, in.q_head_stride}) &&
         reinterpret_cast<uint64_t>(in.counters) % alignof(uint32_t) == 0;
}

int64_t attention_partials(const AttentionDecode& in) {
  if (is_short(in)) return 0;
  return int64_t{in.requests} * in.cache.kv_heads * record_splits(in) * kRecordBytes / 4;
}

cudaError_t attention_decode(const AttentionDecode& in, const Launch& launch) {
  Job job = job_of(in);
  if (is_short(in)) {
    const int64_t clusters = int64_t{in.requests} * in.cache.kv_heads;
    return clusters * kManyWindowCtas <= multiprocessors()
               ? launch_window<kManyWindowCtas>(job, launch)
               : launch_window<kFewWindowCtas>(job, launch);
  }
  if (!make_map(job.pages.k, in.cache, job.pages.blocks) ||
      !make_map(job.pages.v, in.cache, job.pages.blocks)) {
    return cudaErrorNotSupported;
  }
  // Deep rings where there is a CTA for each multiprocessor at most, else two beside each other.
  const int64_t items = int64_t{in.requests} * in.cache.kv_heads * job.record_splits;
  return items <= multiprocessors() ? launch_long<5, 1>(job, items, launch)
                                    : launch_long<3, 2>(job, items, launch);
}

}  // namespace flint::cuda
