// Decode attention. Keys are split between CTAs, and in a CTA between warps, tile by tile; every
// warp keeps a running softmax of its own (attention_tile.cuh), and the results are merged in a
// fixed order. Two kernels:
//
//   attention_window   short windows: a cluster of eight CTAs for a request and KV head, a tile for
//                      a warp, merged through the cluster's shared memory
//   attention_long     everything else: CTAs that stay take split after split, each warp with a
//                      ring of tiles under way; the last CTA of a request and KV head that has
//                      written its partial result merges them all
//
// Which one it is follows from the window alone.
#include "cuda/attention.h"
#include "cuda/attention_tile.cuh"
#include "cuda/cluster.cuh"
#include "cuda/launch.cuh"
#include "cuda/tiles.h"

#include <algorithm>
#include <cstdlib>
#include <initializer_list>

namespace flint::cuda {
namespace {

constexpr int kSlices = WarpAttention::kSlices;
constexpr int kSliceBytes = kWarp * 16;
constexpr int kOutBytes = kSlices * kSliceBytes;  // of a warp's output
constexpr float kLog2e = 1.44269504f;

struct Job {
  AttentionDecode in;
  Pages pages;
  int64_t capacity;  // keys that the table can name
  float scale;       // of logits in units of log2(e)
  int most_splits;   // of any request
  int record_splits;  // of which there is room for partial results
};

// ------------------------------------------------------------------------------ results of a CTA

// Of the lane's two heads.
struct HeadPair {
  float maximum[2], total[2];
};
static_assert(sizeof(HeadPair) == 16);

__device__ __forceinline__ int lane_index() { return static_cast<int>(threadIdx.x) % kWarp; }

// What the warps of a CTA have found, in shared memory: outputs a slice after the other as the
// lanes hold them, and the heads' maxima and totals.
struct WarpResults {
  uint8_t* out;  // kOutBytes a warp, `out_step` apart
  int out_step;
  HeadPair* stats;  // four a warp

  __device__ __forceinline__ void put(int warp, WarpAttention& found) const {
    found.collect();
    auto* to = reinterpret_cast<float4*>(out + warp * out_step) + lane_index();
#pragma unroll
    for (int i = 0; i < kSlices; ++i) {
      to[i * kWarp] =
          make_float4(found.out[i][0], found.out[i][1], found.out[i][2], found.out[i][3]);
    }
    if (lane_index() < 4) {
      stats[warp * 4 + lane_index()] = {{found.maximum[0], found.maximum[1]},
                                        {found.total[0], found.total[1]}};
    }
  }
};

// The first `count` of kMost results, merged in their order: of one slice the lane's four elements.
struct Merged {
  HeadPair heads;
  float weighted[4];

  template <int kMost>
  __device__ __forceinline__ void merge(const WarpResults& results, int count, int slice) {
    HeadPair each[kMost];
    heads = {{-INFINITY, -INFINITY}, {0.0f, 0.0f}};
    weighted[0] = weighted[1] = weighted[2] = weighted[3] = 0.0f;
#pragma unroll
    for (int w = 0; w < kMost; ++w) {
      if (w >= count) continue;
      each[w] = results.stats[w * 4 + lane_index() % 4];
      heads.maximum[0] = fmaxf(heads.maximum[0], each[w].maximum[0]);
      heads.maximum[1] = fmaxf(heads.maximum[1], each[w].maximum[1]);
    }
#pragma unroll
    for (int w = 0; w < kMost; ++w) {
      if (w >= count) continue;
      const float4 part = reinterpret_cast<const float4*>(
          results.out + w * results.out_step)[slice * kWarp + lane_index()];
      const float f0 = exp2_approx(each[w].maximum[0] - base_of(heads.maximum[0]));
      const float f1 = exp2_approx(each[w].maximum[1] - base_of(heads.maximum[1]));
      heads.total[0] = fmaf(each[w].total[0], f0, heads.total[0]);
      heads.total[1] = fmaf(each[w].total[1], f1, heads.total[1]);
      weighted[0] = fmaf(part.x, f0, weighted[0]);
      weighted[1] = fmaf(part.y, f1, weighted[1]);
      weighted[2] = fmaf(part.z, f0, weighted[2]);
      weighted[3] = fmaf(part.w, f1, weighted[3]);
    }
  }
};

// The total of a head with its sink; `maximum` is that of the keys alone.
__device__ __forceinline__ float denominator(const AttentionDecode& in, int head, float maximum,
                                             float total) {
  if (in.sinks == nullptr) return total;
  return total + exp2_approx(in.sinks[head] * kLog2e - maximum);
}

// What a request without tiles gets: zeros without keys, NaN where its length is none.
__device__ __forceinline__ float without_tiles(int length) { return length == 0 ? 0.0f : NAN; }

__device__ __forceinline__ uint16_t* out_of_head(const AttentionDecode& in, int request,
                                                 int head) {
  const int64_t row = int64_t{request} * in.cache.kv_heads * kAttentionGroup + head;
  return static_cast<uint16_t*>(in.out) + row * kAttentionHeadDim;
}

// ------------------------------------------------------------------------------ long

// A split of one request and KV head.
struct Item {
  int request, kv_head, split, splits;
  int length;
  AttentionKeys keys;  // the request's, and of its tiles those of the split
};

// `ends[r]`: the splits of all requests before r.
__device__ __forceinline__ Item item_of(const Job& job, const uint16_t* ends, int index) {
  const int kv_heads = job.in.cache.kv_heads;
  int low = 0, high = job.in.requests;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (ends[middle] * kv_heads <= index) {
      low = middle;
    } else {
      high = middle;
    }
  }
  Item item;
  item.request = low;
  item.length = job.in.lengths[low];
  item.keys = attention_keys(item.length, job.capacity, job.in.window);
  const AttentionSplits splits = attention_splits(item.keys.tiles(), job.most_splits);
  const int local = index - ends[low] * kv_heads;
  item.splits = splits.count;
  item.kv_head = local / splits.count;
  item.split = local - item.kv_head * splits.count;
  item.keys.tile += item.split * splits.tiles;
  item.keys.tile_end = min(item.keys.tile_end, item.keys.tile + splits.tiles);
  return item;
}

// By one warp.
__device__ __forceinline__ void count_splits(const Job& job, uint16_t* ends) {
  constexpr int kRounds = kMostAttentionRequests / kWarp;
  const int lane = lane_index();
  int lengths[kRounds];
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int request = i * kWarp + lane;
    lengths[i] = request < job.in.requests ? job.in.lengths[request] : 0;
  }
  int before = 0;
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    if (i * kWarp >= job.in.requests) break;
    const AttentionKeys keys = attention_keys(lengths[i], job.capacity, job.in.window);
    int sum = attention_splits(keys.tiles(), job.most_splits).count;
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += other;
    }
    ends[i * kWarp + lane + 1] = static_cast<uint16_t>(before + sum);
    before += __shfl_sync(0xffffffffu, sum, kWarp - 1);
  }
  if (lane == 0) ends[0] = 0;
}

// A warp's tiles of one item after the other, brought into its ring of kStages.
template <int kWarps, int kStages>
class Fetcher {
 public:
  __device__ __forceinline__ Fetcher(const Job& job, const uint16_t* ends, uint32_t ring)
      : job_(job),
        ends_(ends),
        ring_(ring),
        items_(ends[job.in.requests] * job.in.cache.kv_heads),
        index_(static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x)) {
    item_.keys = {0, 0, 0, 0};
  }

  __device__ __forceinline__ int items() const { return items_; }

  // Closes a group of copies: the next tile's, or none where there are no more. `early`: ahead of
  // the wait, and so without the newest key's row.
  __device__ __forceinline__ void fetch(bool early) {
    while (tile_ >= item_.keys.tile_end) {
      if (index_ >= items_) return close_copies();
      index_ += static_cast<int>(gridDim.x);
      if (index_ >= items_) return close_copies();
      item_ = item_of(job_, ends_, index_);
      tile_ = item_.keys.tile + static_cast<int>(threadIdx.x) / kWarp;
      taken_ = 0;
    }
    if (taken_ % kWarp == 0) {
      const int tile = tile_ + lane_index() * kWarps;
      const int32_t* row = job_.in.block_table + item_.request * job_.in.width;
      page_ = -1;
      if (tile < item_.keys.tile_end) page_ = row[static_cast<uint32_t>(tile) / job_.pages.tiles];
    }
    const int page = __shfl_sync(0xffffffffu, page_, taken_ % kWarp);
    ++taken_;
    const TileSource source = tile_source(job_.pages, tile_, page, item_.kv_head);
    const int base = tile_ * kAttentionTile, newest = item_.keys.last - 1 - base;
    const bool waits = early && newest < kAttentionTile;
    const uint32_t to = ring_ + slot_ * kTileBytes;
    copy_tile(to, source, job_.pages, item_.keys.first - base, item_.keys.last - base,
              waits ? newest : -1);
    close_copies();
    if (waits) late_ = {source, to, newest};
    tile_ += kWarps;
    slot_ = slot_ + 1 == kStages ? 0 : slot_ + 1;
  }

  // Whether a row was left out.
  __device__ __forceinline__ bool has_late_row() const { return late_.row >= 0; }

  __device__ __forceinline__ void fetch_late_row() {
    copy_row(late_.to, late_.source, job_.pages, late_.row);
    close_copies();
  }

 private:
  struct Late {
    TileSource source;
    uint32_t to;
    int row;
  };

  const Job& job_;
  const uint16_t* ends_;
  uint32_t ring_;
  int items_, index_;
  Item item_;
  int tile_ = 0, taken_ = 0, slot_ = 0;
  int page_ = -1;  // of the lane-th tile out of kWarp
  Late late_{{nullptr, nullptr}, 0, -1};
};

// A split's result in memory: kOutBytes, then the four pairs of heads.
constexpr int kRecordBytes = kOutBytes + 4 * static_cast<int>(sizeof(HeadPair));

__device__ __forceinline__ char* record_of(const Job& job, const Item& item, int split) {
  const int64_t pair = int64_t{item.request} * job.in.cache.kv_heads + item.kv_head;
  return reinterpret_cast<char*>(job.in.partials) +
         (pair * job.record_splits + split) * kRecordBytes;
}

// Of a slice the lane's four elements: their total and maximum in `heads`.
__device__ __forceinline__ void write_slice(const Job& job, const Item& item, int slice,
                                            const float (&weighted)[4], const HeadPair& heads) {
  const int g = lane_index() / 4, t = lane_index() % 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int head = item.kv_head * kAttentionGroup + 2 * t + i;
    const float below = denominator(job.in, head, heads.maximum[i], heads.total[i]);
    uint16_t* to = out_of_head(job.in, item.request, head) + slice * 16 + g;
    const bool none = item.length <= 0 || item.keys.last == 0;
    store_rounded(to, none ? without_tiles(item.length) : weighted[i] / below);
    store_rounded(to + 8, none ? without_tiles(item.length) : weighted[2 + i] / below);
  }
}

// What the last CTA needs of the splits: each one's share of a head, and the heads' whole.
struct SplitShares {
  static constexpr int kMost = 64;

  float share[kMost][kAttentionGroup];
  float maximum[kAttentionGroup], total[kAttentionGroup];
};

// By the CTA whose split was the last to be written.
template <int kWarps>
__device__ __forceinline__ void merge_splits(const Job& job, const Item& item,
                                             SplitShares& shares) {
  constexpr int kOwn = kSlices / kWarps, kBatch = 24 / kOwn;
  const int lane = lane_index(), warp = static_cast<int>(threadIdx.x) / kWarp;
  const char* records = record_of(job, item, 0);
  const auto load = [&](float4(&parts)[kBatch][kOwn], int first) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
#pragma unroll
      for (int j = 0; j < kOwn; ++j) {
        const auto* from = reinterpret_cast<const float4*>(records + (first + i) * kRecordBytes) +
                           (warp + j * kWarps) * kWarp + lane;
        parts[i][j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (first + i < item.splits) parts[i][j] = __ldcg(from);
      }
    }
  };
  float4 parts[kBatch][kOwn];
  load(parts, 0);  // under way while the shares are found
  for (int head = warp; head < kAttentionGroup; head += kWarps) {
    float maximum[2], total[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int split = i * kWarp + lane;
      maximum[i] = -INFINITY;
      total[i] = 0.0f;
      if (split < item.splits) {
        const auto* stats = reinterpret_cast<const float*>(records + split * kRecordBytes +
                                                           kOutBytes) + head / 2 * 4 + head % 2;
        maximum[i] = __ldcg(stats);
        total[i] = __ldcg(stats + 2);
      }
    }
    float all = fmaxf(maximum[0], maximum[1]);
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      all = fmaxf(all, __shfl_xor_sync(0xffffffffu, all, step));
    }
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float share = exp2_approx(maximum[i] - base_of(all));
      shares.share[i * kWarp + lane][head] = share;
      sum = fmaf(total[i], share, sum);
    }
    sum = lane_sum<kWarp>(sum);
    if (lane == 0) {
      shares.maximum[head] = all;
      shares.total[head] = sum;
    }
  }
  __syncthreads();
  const int t = lane % 4;
  float weighted[kOwn][4] = {};
#pragma unroll 1
  for (int first = 0; first < item.splits; first += kBatch) {
    if (first > 0) load(parts, first);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i >= item.splits) break;
      const float2 share = *reinterpret_cast<const float2*>(&shares.share[first + i][2 * t]);
#pragma unroll
      for (int j = 0; j < kOwn; ++j) {
        weighted[j][0] = fmaf(parts[i][j].x, share.x, weighted[j][0]);
        weighted[j][1] = fmaf(parts[i][j].y, share.y, weighted[j][1]);
        weighted[j][2] = fmaf(parts[i][j].z, share.x, weighted[j][2]);
        weighted[j][3] = fmaf(parts[i][j].w, share.y, weighted[j][3]);
      }
    }
  }
  const HeadPair heads{{shares.maximum[2 * t], shares.maximum[2 * t + 1]},
                       {shares.total[2 * t], shares.total[2 * t + 1]}};
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    write_slice(job, item, warp + j * kWarps, weighted[j], heads);
  }
}

// Dynamic shared memory: the warps' rings, then their results.
template <int kWarps, int kStages, int kCtas>
__global__ void __launch_bounds__(kWarps* kWarp, kCtas)
    attention_long(const __grid_constant__ Job job) {
  static_assert(kSlices % kWarps == 0 && sizeof(SplitShares) <= kWarps * kOutBytes);
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ HeadPair stats[kWarps * 4];
  __shared__ uint16_t ends[kMostAttentionRequests + 1];
  __shared__ bool is_last;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  uint8_t* outs = shared + kWarps * kStages * kTileBytes;
  const WarpResults results{outs, kOutBytes, stats};

  if (warp == 0) count_splits(job, ends);
  __syncthreads();
  const uint32_t ring = shared_address(shared) + warp * kStages * kTileBytes;
  Fetcher<kWarps, kStages> fetcher(job, ends, ring);
  int fetched = 0;
#pragma unroll 1
  for (; fetched < kStages && !fetcher.has_late_row(); ++fetched) fetcher.fetch(true);
  wait_for_previous_kernel();
  let_next_kernel_start();
  const bool late = fetcher.has_late_row();
  if (late) fetcher.fetch_late_row();
#pragma unroll 1
  for (; fetched < kStages; ++fetched) fetcher.fetch(false);

  const TileReads reads;
  int slot = 0, absorbed = 0;
#pragma unroll 1
  for (int index = static_cast<int>(blockIdx.x); index < fetcher.items();
       index += static_cast<int>(gridDim.x)) {
    const Item item = item_of(job, ends, index);
    Queries queries;
    queries.load(job.in, item.request, item.kv_head);
    WarpAttention found;
    found.clear();
#pragma unroll 1
    for (int tile = item.keys.tile + warp; tile < item.keys.tile_end; tile += kWarps) {
      // The late row came as a group of its own, between those of the first tiles.
      if (late && absorbed < kStages) {
        await_copies<0>();
      } else {
        await_copies<kStages - 1>();
      }
      __syncwarp();
      const int base = tile * kAttentionTile;
      found.absorb(ring + slot * kTileBytes, reads, queries, job.scale, item.keys.first - base,
                   item.keys.last - base);
      __syncwarp();
      fetcher.fetch(false);
      slot = slot + 1 == kStages ? 0 : slot + 1;
      ++absorbed;
    }
    results.put(warp, found);
    __syncthreads();
#pragma unroll
    for (int slice = warp; slice < kSlices; slice += kWarps) {
      Merged merged;
      merged.merge<kWarps>(results, kWarps, slice);
      if (item.splits == 1) {
        write_slice(job, item, slice, merged.weighted, merged.heads);
      } else {
        char* record = record_of(job, item, item.split);
        const float(&w)[4] = merged.weighted;
        reinterpret_cast<float4*>(record)[slice * kWarp + lane_index()] =
            make_float4(w[0], w[1], w[2], w[3]);
        if (slice == 0 && lane_index() < 4) {
          reinterpret_cast<HeadPair*>(record + kOutBytes)[lane_index()] = merged.heads;
        }
      }
    }
    __syncthreads();
    if (item.splits == 1) continue;
    if (threadIdx.x == 0) {
      __threadfence();
      uint32_t* counter =
          job.in.counters + int64_t{item.request} * job.in.cache.kv_heads + item.kv_head;
      // Back to zero with the last arrival.
      const auto last = static_cast<uint32_t>(item.splits - 1);
      is_last = atomicInc(counter, last) == last;
      __threadfence();
    }
    __syncthreads();
    if (!is_last) continue;
    merge_splits<kWarps>(job, item, *reinterpret_cast<SplitShares*>(outs));
    __syncthreads();
  }
}

// ------------------------------------------------------------------------------ window

constexpr int kWindowCtas = 8;  // of a cluster; CTA i writes query head i
constexpr int kWindowWarps = 8;
constexpr int kMostWindowTiles = kWindowCtas * kWindowWarps;
static_assert(kWindowCtas == kAttentionGroup && kWindowWarps == kSlices);

// Dynamic shared memory: a tile a warp, in whose place the warp's result comes.
__global__ void __launch_bounds__(kWindowWarps* kWarp, 3)
    attention_window(const __grid_constant__ Job job) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ HeadPair stats[kWindowWarps * 4];
  __shared__ float cta_out[kWindowCtas][kAttentionHeadDim];  // of this CTA's head, from all CTAs
  __shared__ float2 cta_stats[kWindowCtas];                  // maximum and total
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = lane_index();
  const auto rank = static_cast<int>(cluster_rank());
  const auto kv_head = static_cast<int>(blockIdx.y), request = static_cast<int>(blockIdx.z);

  const int length = job.in.lengths[request];
  const AttentionKeys keys = attention_keys(length, job.capacity, job.in.window);
  const int tile = keys.tile + rank + warp * kWindowCtas;
  const bool has_tile = tile < keys.tile_end;
  const int first = keys.first - tile * kAttentionTile, last = keys.last - tile * kAttentionTile;
  const uint32_t place = shared_address(shared) + warp * kTileBytes;
  TileSource source{nullptr, nullptr};
  if (has_tile) {
    const int32_t* row = job.in.block_table + request * job.in.width;
    const int page = row[static_cast<uint32_t>(tile) / job.pages.tiles];
    source = tile_source(job.pages, tile, page, kv_head);
    copy_tile(place, source, job.pages, first, last, last <= kAttentionTile ? last - 1 : -1);
  }
  __syncwarp();
  arrive_cluster();  // this CTA's shared memory is there
  wait_for_previous_kernel();
  let_next_kernel_start();
  WarpAttention found;
  if (has_tile) {
    if (last <= kAttentionTile) copy_row(place, source, job.pages, last - 1);
    close_copies();
    Queries queries;
    queries.load(job.in, request, kv_head);
    found.clear();
    await_copies<0>();
    __syncwarp();
    found.absorb(place, TileReads(), queries, job.scale, first, last);
    __syncwarp();
    WarpResults{shared, kTileBytes, stats}.put(warp, found);
  }
  __syncthreads();
  await_cluster();

  // Each warp merges a slice, whose eight heads go to eight CTAs.
  const int tiles = keys.tiles() - rank;
  const int warps = tiles <= 0 ? 0 : (tiles + kWindowCtas - 1) / kWindowCtas;
  Merged merged;
  merged.merge<kWindowWarps>({shared, kTileBytes, stats}, warps, warp);
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const auto to = static_cast<uint32_t>(2 * t + i);
    float* element = &cta_out[rank][warp * 16 + g];
    store_cluster(shared_of(to, element), __float_as_uint(merged.weighted[i]));
    store_cluster(shared_of(to, element + 8), __float_as_uint(merged.weighted[2 + i]));
    if (warp == 0 && g == 0) {
      store_cluster(shared_of(to, &cta_stats[rank].x), __float_as_uint(merged.heads.maximum[i]));
      store_cluster(shared_of(to, &cta_stats[rank].y), __float_as_uint(merged.heads.total[i]));
    }
  }
  __syncwarp();
  arrive_cluster();
  await_cluster();
  const int element = static_cast<int>(threadIdx.x) * 2;
  if (element >= kAttentionHeadDim) return;
  float maximum = -INFINITY;
#pragma unroll
  for (int i = 0; i < kWindowCtas; ++i) maximum = fmaxf(maximum, cta_stats[i].x);
  float total = 0.0f, low = 0.0f, high = 0.0f;
#pragma unroll
  for (int i = 0; i < kWindowCtas; ++i) {
    const float share = exp2_approx(cta_stats[i].x - base_of(maximum));
    const float2 part = *reinterpret_cast<const float2*>(&cta_out[i][element]);
    total = fmaf(cta_stats[i].y, share, total);
    low = fmaf(part.x, share, low);
    high = fmaf(part.y, share, high);
  }
  const int head = kv_head * kAttentionGroup + rank;
  const float below = denominator(job.in, head, maximum, total);
  const bool none = keys.tiles() == 0;
  *reinterpret_cast<uint32_t*>(out_of_head(job.in, request, head) + element) =
      none ? pack_bf16(without_tiles(length), without_tiles(length))
           : pack_bf16(low / below, high / below);
}

// ------------------------------------------------------------------------------ launches

// Of any alignment a window of this many keys lies in at most kMostWindowTiles tiles.
constexpr int kMostWindow = (kMostWindowTiles - 1) * kAttentionTile + 1;

bool is_short(const AttentionDecode& in) { return 0 < in.window && in.window <= kMostWindow; }

int64_t capacity_of(const AttentionDecode& in) { return in.width * in.cache.page_size; }

int most_splits(const AttentionDecode& in) {
  return static_cast<int>(
      least(ceil_div(multiprocessors(), in.cache.kv_heads), SplitShares::kMost));
}

// The most splits that a request of this table's width can have.
int record_splits(const AttentionDecode& in) {
  const int64_t tiles = ceil_div(least(capacity_of(in), int64_t{1} << 31), kAttentionTile);
  return std::max(1, static_cast<int>(least(ceil_div(tiles, kLeastSplitTiles), most_splits(in))));
}

Job job_of(const AttentionDecode& in) {
  Job job{};
  job.in = in;
  const auto bytes = [](int64_t elements) { return elements * 2; };
  const KvCache& cache = in.cache;
  job.pages = {static_cast<const char*>(cache.k),
               static_cast<const char*>(cache.v),
               bytes(cache.k_strides.block),
               bytes(cache.k_strides.row),
               bytes(cache.k_strides.head),
               bytes(cache.v_strides.block),
               bytes(cache.v_strides.row),
               bytes(cache.v_strides.head),
               cache.slots / cache.page_size,
               static_cast<uint32_t>(cache.page_size / kAttentionTile)};
  job.capacity = capacity_of(in);
  job.scale = in.scale * kLog2e;
  job.most_splits = most_splits(in);
  job.record_splits = record_splits(in);
  return job;
}

template <int kWarps, int kStages, int kCtas>
cudaError_t launch_long(const Job& job, const Launch& launch) {
  Shape shape;
  const int64_t items = int64_t{job.in.requests} * job.in.cache.kv_heads * job.record_splits;
  shape.grid = static_cast<unsigned>(least(items, int64_t{kCtas} * multiprocessors()));
  shape.block = kWarps * kWarp;
  shape.shared_bytes = size_t{kWarps} * (kStages * kTileBytes + kOutBytes);
  return launch_kernel(launch, shape, attention_long<kWarps, kStages, kCtas>, job);
}

cudaError_t launch_window(const Job& job, const Launch& launch) {
  Shape shape;
  shape.grid = dim3(kWindowCtas, static_cast<unsigned>(job.in.cache.kv_heads),
                    static_cast<unsigned>(job.in.requests));
  shape.block = kWindowWarps * kWarp;
  shape.shared_bytes = kWindowWarps * kTileBytes;
  shape.cluster = kWindowCtas;
  return launch_kernel(launch, shape, attention_window, job);
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
         cache.head_dim == kAttentionHeadDim && cache.page_size % kAttentionTile == 0 &&
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
  const Job job = job_of(in);
  if (is_short(in)) return launch_window(job, launch);
  const int plan = std::getenv("FLINT_PLAN") ? std::atoi(std::getenv("FLINT_PLAN")) : 0;
  if (plan == 1) return launch_long<8, 2, 1>(job, launch);
  if (plan == 2) return launch_long<8, 3, 1>(job, launch);
  if (plan == 3) return launch_long<4, 6, 1>(job, launch);
  return launch_long<4, 3, 2>(job, launch);
}

}  // namespace flint::cuda
