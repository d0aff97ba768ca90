// Prefill attention on Hopper: tiles of 24 queries with the eight heads that share a KV head, 192
// rows of one product, over tiles of 112 keys.
//
// A CTA is four warpgroups. One copies: a warp q, and three the keys and values, which go round a
// ring (from the chunk's tensors in boxes of a whole tile, from the cache's pages in groups of 16
// rows). The other three multiply, 64 rows each. They take turns: in a turn a warpgroup hands in
// the product of its weights with their values and, as soon as that is done, that of q with the
// next keys. While its softmax goes on, the two others have their turns; since the next one's
// values follow on this one's keys, there is always something to multiply. Weights stand in the
// registers of their logits, so that tiles can be that large. CTAs are persistent, and take one
// tile of queries after the other by a counter: the next one's copies begin while the one before it
// is computed.
//
// A row sees its keys in tiles that begin at the same positions whatever else is in the batch.
#include <initializer_list>

#include "attention_tiles.h"
#include "cuda/arrival.cuh"
#include "cuda/attention_prefill.h"
#include "cuda/attention_rows.cuh"
#include "cuda/bulk_copy.cuh"
#include "cuda/launch.cuh"
#include "cuda/matrices.cuh"
#include "cuda/pipeline.cuh"
#include "cuda/tensor_map.h"
#include "cuda/tiles.h"
#include "cuda/warpgroup.cuh"

namespace flint::cuda {
namespace {

constexpr float kLog2e = 1.44269504f;
constexpr int kHalf = 64;  // elements of a row that stand together in shared memory
constexpr uint32_t kHalfRowBytes = kHalf * 2;
static_assert(kPrefillHeadDim == 2 * kHalf);

constexpr int kMultiplying = 3;  // warpgroups
constexpr int kThreads = (kMultiplying + 1) * kWarpgroup;
constexpr int kRows = 64;  // of each
constexpr int kQueries = kMultiplying * kRows / kPrefillGroup;
constexpr int kKeys = 112;
constexpr int kStages = 6;     // tiles of keys in shared memory, on one side (K or V) each
constexpr uint32_t kTold = 4;  // numbers of tiles of queries in shared memory
// Registers of a thread.
constexpr int kToMultiply = 152, kToCopy = 56;
static_assert(kMultiplying * kToMultiply + kToCopy <= 512 && kKeys % kPageGroup == 0);

// The places in shared memory, in bytes.
constexpr uint32_t kGroupBytes = kRows * kHalfRowBytes;  // half of a warpgroup's rows
constexpr uint32_t kQueryHalf = kMultiplying * kGroupBytes;
constexpr uint32_t kSideHalf = kKeys * kHalfRowBytes, kSideBytes = 2 * kSideHalf;
constexpr uint32_t kQueryPlace = 0;
constexpr uint32_t kRingPlace = kQueryPlace + 2 * kQueryHalf;
constexpr uint32_t kBarriersPlace = kRingPlace + kStages * kSideBytes;
constexpr uint32_t kEndsPlace = kBarriersPlace + 8 * (2 + kTold + 2 * kStages);
constexpr uint32_t kEnd = kEndsPlace + 4 * (kMostPrefillRequests + 1);
constexpr uint32_t kSharedBytes = kEnd + 1024;  // the start is moved to 1024 bytes
static_assert(kSideHalf % 1024 == 0 && kSharedBytes <= 227 * 1024);

// Addresses of the barriers and of a side, where a CTA's shared memory begins at `shared`.
__device__ __forceinline__ uint32_t query_full_at(uint32_t shared) {
  return shared + kBarriersPlace;
}
__device__ __forceinline__ uint32_t query_empty_at(uint32_t shared) {
  return shared + kBarriersPlace + 8;
}
__device__ __forceinline__ uint32_t told_at(uint32_t shared, uint32_t round) {
  return shared + kBarriersPlace + 16 + 8 * (round % kTold);
}
__device__ __forceinline__ uint32_t full_at(uint32_t shared, int stage) {
  return shared + kBarriersPlace + 16 + 8 * (kTold + stage);
}
__device__ __forceinline__ uint32_t empty_at(uint32_t shared, int stage) {
  return shared + kBarriersPlace + 16 + 8 * (kTold + kStages + stage);
}
__device__ __forceinline__ uint32_t side_at(uint32_t shared, int stage) {
  return shared + kRingPlace + stage * kSideBytes;
}

struct Job {
  CUtensorMap q, k, v, k_pages, v_pages;
  AttentionPrefill in;
  int64_t capacity;  // keys that the table can name
  int blocks;
  float scale;  // of logits, in units of log2(e)
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDACC__)

// A tile of queries of one request and KV head.
struct QueryTile {
  int request, kv_head;
  int row, queries;          // in q and out
  int context, first, last;  // positions: the chunk's first, and the tile's
  bool broken;               // the request's past is none that its table can name
};

// All tiles, in the order in which CTAs take them. In shared memory `ends[b]` is how many tiles of
// queries the requests before b have.
class Schedule {
 public:
  // By all threads. False where the offsets are broken.
  static __device__ __forceinline__ bool prepare(const Job& job, int* ends, int* broken) {
    const int requests = job.in.requests;
    if (threadIdx.x == 0) {
      ends[0] = 0;
      *broken = job.in.cu_seqlens[0] != 0 || job.in.cu_seqlens[requests] != job.in.rows;
    }
    __syncthreads();
    for (int b = static_cast<int>(threadIdx.x); b < requests; b += kThreads) {
      const int begin = job.in.cu_seqlens[b], end = job.in.cu_seqlens[b + 1];
      const bool rises = 0 <= begin && begin <= end && end <= job.in.rows;
      if (!rises) *broken = 1;
      ends[b + 1] = rises ? (end - begin + kQueries - 1) / kQueries : 0;
    }
    __syncthreads();
    if (threadIdx.x < kWarp) {
      const int lane = static_cast<int>(threadIdx.x);
      int before = 0;
      for (int first = 0; first < requests; first += kWarp) {
        int sum = first + lane < requests ? ends[first + lane + 1] : 0;
#pragma unroll
        for (int step = 1; step < kWarp; step *= 2) {
          const int other = __shfl_up_sync(0xffffffffu, sum, step);
          if (lane >= step) sum += other;
        }
        if (first + lane < requests) ends[first + lane + 1] = before + sum;
        before += __shfl_sync(0xffffffffu, sum, kWarp - 1);
      }
    }
    __syncthreads();
    return *broken == 0;
  }

  __device__ __forceinline__ Schedule(const Job& job, const int* ends, volatile int* told,
                                      uint32_t shared)
      : job_(job), ends_(ends), told_(told), shared_(shared) {}

  __device__ __forceinline__ int count() const {
    return ends_[job_.in.requests] * job_.in.kv_heads;
  }

  // By one thread: one more tile for this CTA; there is none from count() on. Called once for each
  // tile that there is, so that at the end the counter is back to zero.
  __device__ __forceinline__ int take() const {
    const auto last = static_cast<uint32_t>(count() - 1);
    return static_cast<int>(gridDim.x + arrive_at(job_.in.counter, last));
  }

  // By one thread: tells the others of the CTA of tile number `round`.
  __device__ __forceinline__ void tell(uint32_t round, int index) const {
    told_[round % kTold] = index;
    arrive(told_at(shared_, round));
  }
  __device__ __forceinline__ int wait(uint32_t round) const {
    await_phase(told_at(shared_, round), round / kTold % 2);
    return told(round);
  }
  // Once more. It is there until all are behind the tile after the next one, since q is not copied
  // before.
  __device__ __forceinline__ int told(uint32_t round) const { return told_[round % kTold]; }

  __device__ __forceinline__ QueryTile tile(int index) const {
    const int kv_heads = job_.in.kv_heads;
    const int at = count() - 1 - index;  // the later ones of a chunk see more keys: first
    int request = 0;
    for (int end = job_.in.requests; end - request > 1;) {
      const int middle = (request + end) / 2;
      (ends_[middle] * kv_heads <= at ? request : end) = middle;
    }
    const int begin = job_.in.cu_seqlens[request], end = job_.in.cu_seqlens[request + 1];
    QueryTile tile;
    tile.context = job_.in.has_past ? job_.in.context_lens[request] : 0;
    tile.broken = tile.context < 0 || tile.context > job_.capacity ||
                  tile.context > 0x7fffffff - 4096 - (end - begin);
    if (tile.broken) tile.context = 0;
    // KV heads together, or one after the other where the L2 does not hold all of their keys.
    const int own = at - ends_[request] * kv_heads, tiles = ends_[request + 1] - ends_[request];
    const bool together =
        job_.in.window > 0 || (int64_t{tile.context} + (end - begin)) * kv_heads <= kKeysInL2;
    const int place = together ? own / kv_heads : own % tiles;
    const int query = place * kQueries;
    tile.kv_head = together ? own - place * kv_heads : own / tiles;
    tile.request = request;
    tile.row = begin + query;
    tile.queries = min(kQueries, end - begin - query);
    tile.first = tile.context + query;
    tile.last = tile.first + tile.queries - 1;
    return tile;
  }

 private:
  static constexpr int64_t kKeysInL2 = (24 << 20) / (4 * kPrefillHeadDim);

  const Job& job_;
  const int* ends_;
  volatile int* told_;
  uint32_t shared_;
};

// ------------------------------------------------------------------------------ copies

// The warps of a warpgroup that copy. The first one takes tiles of queries and copies q; the others
// keep keys and values on their way, each every third side, in the order in which they are read.
class PrefillCopier {
 public:
  static constexpr uint32_t kWarps = 3;

  __device__ __forceinline__ PrefillCopier(const Job& job, uint32_t shared)
      : job_(job), shared_(shared), lane_(static_cast<int>(threadIdx.x) % kWarp) {}

  __device__ __forceinline__ void run(const Schedule& schedule) {
    // By a shuffle, so that it is seen to be the same in all lanes.
    const uint32_t warp = __shfl_sync(0xffffffffu, threadIdx.x % kWarpgroup / kWarp, 0);
    if (warp > 0) return copy_sides(schedule, warp - 1);
    if (lane_ == 0) take_tiles(schedule);
  }

 private:
  // By one thread. What comes next is told while q of the tile before is still in use.
  __device__ __forceinline__ void take_tiles(const Schedule& schedule) const {
    auto index = static_cast<int>(blockIdx.x);
    schedule.tell(0, index);
    for (uint32_t round = 0; index < schedule.count(); ++round) {
      const int following = schedule.take();
      const QueryTile tile = schedule.tile(index);
      await_phase(query_empty_at(shared_), round % 2 ^ 1);
      copy_queries(tile);
      schedule.tell(round + 1, following);
      index = following;
    }
  }

  __device__ __forceinline__ void copy_sides(const Schedule& schedule, uint32_t warp) const {
    uint32_t before = 0;  // sides of the tiles of queries before
    for (uint32_t round = 0;; ++round) {
      const int index = schedule.wait(round);
      if (index >= schedule.count()) return;
      const QueryTile tile = schedule.tile(index);
      const KeyTiles keys = key_tiles(tile.context, tile.first, tile.last, job_.in.window, kKeys);
      const uint32_t sides = 2 * keys.tiles;
#pragma unroll 1
      for (uint32_t i = (warp + kWarps - before % kWarps) % kWarps; i < sides; i += kWarps) {
        copy_side(tile, keys, static_cast<int>(i / 2), i % 2 != 0, before + i);
      }
      before += sides;
    }
  }

  __device__ __forceinline__ void copy_queries(const QueryTile& tile) const {
    const uint32_t barrier = query_full_at(shared_), to = shared_ + kQueryPlace;
    expect_bytes(barrier, 2 * kQueryHalf);
    const int head = tile.kv_head * kPrefillGroup;
    copy_box(to, job_.q, {0, head, tile.row, 0}, barrier);
    copy_box(to + kQueryHalf, job_.q, {kHalf, head, tile.row, 0}, barrier);
  }

  // `side`: of all that this CTA copies.
  __device__ __forceinline__ void copy_side(const QueryTile& tile, const KeyTiles& keys, int index,
                                            bool is_v, uint32_t side) const {
    const int first = first_key(keys, index, kKeys);
    const auto stage = static_cast<int>(side % kStages);
    const Place place{side_at(shared_, stage), full_at(shared_, stage), empty_at(shared_, stage),
                      side / kStages % 2 ^ 1};
    if (index < keys.past_tiles) return copy_pages(tile, keys, first, place, is_v);
    await_phase(place.empty, place.parity);
    if (lane_ != 0) return;
    const CUtensorMap& map = is_v ? job_.v : job_.k;
    const int row = tile.row - tile.first + first;
    expect_bytes(place.full, kSideBytes);
    copy_box(place.to, map, {0, row, tile.kv_head, 0}, place.full);
    copy_box(place.to + kSideHalf, map, {kHalf, row, tile.kv_head, 0}, place.full);
  }

  struct Place {
    uint32_t to, full, empty, parity;
  };

  // A lane has a group of 16 keys, at position `first` and on. Groups that no query sees are left
  // as they are; what stands for a page that is not there is NaN.
  __device__ __forceinline__ void copy_pages(const QueryTile& tile, const KeyTiles& keys, int first,
                                             const Place& place, bool is_v) const {
    constexpr int kGroups = kKeys / kPageGroup;
    constexpr uint32_t kPagesBytes = kPageGroup * kHalfRowBytes;  // of each half
    const int key = first + lane_ * kPageGroup;
    const bool wanted = lane_ < kGroups && key < keys.chunk_first && key + kPageGroup > keys.oldest;
    const auto page_size = static_cast<int>(job_.in.cache.page_size);
    int page = -1;
    if (wanted) page = job_.in.block_table[tile.request * job_.in.width + key / page_size];
    const bool there = wanted && page >= 0 && page < job_.blocks;
    const uint32_t own = place.to + lane_ * kPagesBytes;
    await_phase(place.empty, place.parity);
    if (wanted && !there) put_nan(own, kPagesBytes);
    const unsigned groups = __popc(__ballot_sync(0xffffffffu, there));
    if (lane_ == 0) expect_bytes(place.full, groups * 2 * kPagesBytes);
    __syncwarp();
    if (there) {
      const CUtensorMap& map = is_v ? job_.v_pages : job_.k_pages;
      const int row = key % page_size;
      copy_box(own, map, {0, row, tile.kv_head, page}, place.full);
      copy_box(own + kSideHalf, map, {kHalf, row, tile.kv_head, page}, place.full);
    }
  }

  static __device__ __forceinline__ void put_nan(uint32_t to, uint32_t bytes) {
    constexpr uint32_t kNans = 0x7fc07fc0;
#pragma unroll 1
    for (uint32_t at = 0; at < bytes; at += 16) {
      store_shared(to + at, make_uint4(kNans, kNans, kNans, kNans));
      store_shared(to + kSideHalf + at, make_uint4(kNans, kNans, kNans, kNans));
    }
    order_before_copies();
  }

  const Job& job_;
  uint32_t shared_;
  int lane_;
};

// ------------------------------------------------------------------------------ products

constexpr int kFirstTurn = 1;   // named barriers: a warpgroup's turn to hand in products,
constexpr int kFirstAlone = 4;  // and its own threads alone

class PrefillMultiplier {
 public:
  using Side = Ring<kStages>;

  __device__ __forceinline__ PrefillMultiplier(const Job& job, uint32_t shared) : job_(job) {
    // By shuffles, so that they are seen to be the same in all lanes, and are not found again.
    shared_ = __shfl_sync(0xffffffffu, shared, 0);
    warp_ = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarp, 0);
  }

  __device__ __forceinline__ void run(const Schedule& schedule) {
    if (group() == kMultiplying - 1) pass_turn();  // the first one is that of warpgroup 0
    for (uint32_t round = 0;; ++round) {
      const int index = schedule.wait(round);
      if (index >= schedule.count()) break;
      const QueryTile tile = schedule.tile(index);
      const KeyTiles keys = key_tiles(tile.context, tile.first, tile.last, job_.in.window, kKeys);
      await_phase(query_full_at(shared_), round % 2);
      attend(tile, keys);
      // Found again, which takes no registers meanwhile.
      write(schedule.tile(schedule.told(round)));
    }
    if (group() == 0) await_turn();  // what was passed on last
  }

 private:
  __device__ __forceinline__ int group() const { return warp_ / 4; }
  // Of the warp's two queries the first, in the tile.
  __device__ __forceinline__ int query() const { return warp_ * 2; }
  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % kWarp; }

  __device__ __forceinline__ void await_turn() const {
    sync_threads<2 * kWarpgroup>(kFirstTurn + group());
  }
  __device__ __forceinline__ void pass_turn() const {
    arrive_at_threads<2 * kWarpgroup>(kFirstTurn + (group() + 1) % kMultiplying);
  }

  __device__ __forceinline__ void release(uint32_t barrier) const {
    if (lane() == 0) arrive(barrier);
  }

  // `position`: of the first of the warp's queries. A turn ends with a product with keys, but for
  // the tile's last one.
  __device__ __forceinline__ void attend(const QueryTile& tile, const KeyTiles& keys) {
    const int position = tile.first + query(), last = tile.last;
    const int first_masked = keys.past_tiles + (tile.first + 1 - keys.chunk_first) / kKeys;
    rows_.clear();
    Side side = ring_;
    await(side);
    await_turn();
    begin_products();
    hand_in_logits(side.stage);
    close_products();
    pass_turn();
#pragma unroll 1
    for (int i = 0;; ++i) {
      const bool is_last = i + 1 == keys.tiles, ends_past = i + 1 == keys.past_tiles;
      await_products<0>();
      settle(rows_.logits);
      release(empty_at(shared_, side.stage));
      if (is_last) release(query_empty_at(shared_));
      if (job_.in.window > 0 || ends_past || i >= first_masked) mask(keys, i, position, last);
      rows_.weigh(job_.scale, i > 0);
      rows_.round_weights();
      side.advance();
      await(side);
      await_turn();
      if (i == 0 || ends_past || is_last) clear_values(keys, i, last, side.stage);
      begin_products();
      hand_in_values(side.stage, i > 0);
      close_products();
      if (is_last) break;
      const int values = side.stage;
      side.advance();
      await(side);
      await_products<0>();
      settle(rows_.out);
      release(empty_at(shared_, values));
      begin_products();
      hand_in_logits(side.stage);
      close_products();
      pass_turn();
    }
    pass_turn();
    await_products<0>();
    settle(rows_.out);
    release(empty_at(shared_, side.stage));
    side.advance();
    ring_ = side;
  }

  __device__ __forceinline__ void await(const Side& side) const {
    await_phase(full_at(shared_, side.stage), side.parity);
  }

  __device__ __forceinline__ void hand_in_logits(int stage) {
    const uint64_t a = right_operand(shared_ + kQueryPlace + group() * kGroupBytes);
    const uint64_t b = right_operand(side_at(shared_, stage));
#pragma unroll
    for (int i = 0; i < kPrefillHeadDim / 16; ++i) {
      const int half = i / 4;
      multiply_shared(rows_.logits, a + half * (kQueryHalf >> 4) + i % 4 * kNextColumns,
                      b + half * (kSideHalf >> 4) + i % 4 * kNextColumns, i > 0);
    }
  }

  __device__ __forceinline__ void hand_in_values(int stage, bool add) {
    const uint64_t b = upright_operand(side_at(shared_, stage), kSideHalf);
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) {
      multiply_upright(rows_.out, rows_.weights[i], b + i * kNextRows, i > 0 || add);
    }
  }

  // Where the keys of a tile end that are the request's and that some query of the tile sees.
  static __device__ __forceinline__ int end_of(const KeyTiles& keys, int index, int last) {
    return index < keys.past_tiles ? keys.chunk_first : last + 1;
  }

  __device__ __forceinline__ void mask(const KeyTiles& keys, int index, int position, int last) {
    const int first = first_key(keys, index, kKeys), end = end_of(keys, index, last);
    SeenKeys seen;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int oldest = job_.in.window > 0 ? position + i - job_.in.window + 1 : 0;
      seen.low[i] = oldest - first;
      seen.high[i] = min(position + i, end - 1) - first;
    }
    if (seen.low[1] <= 0 && seen.high[0] >= kKeys - 1) return;
    const int column = lane() % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      seen.low[i] -= column;
      seen.high[i] -= column;
    }
    rows_.mask(seen);
  }

  // Zeros for values that no query of the tile sees: their weights are zero, but what is there may
  // be no number. Each warpgroup does so for itself, and so all write the same.
  __device__ __forceinline__ void clear_values(const KeyTiles& keys, int index, int last,
                                               int stage) const {
    const int first = first_key(keys, index, kKeys);
    const int low = keys.oldest - first, high = end_of(keys, index, last) - first;
    if (low <= 0 && high >= kKeys) return;
    const uint32_t side = side_at(shared_, stage);
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup, piece = thread % 16;
    const uint32_t column = piece / 8 * kSideHalf + piece % 8 * 16;
#pragma unroll 1
    for (int row = thread / 16; row < kKeys; row += kWarpgroup / 16) {
      if (row >= low && row < high) continue;
      store_shared(side + column + row * kHalfRowBytes, make_uint4(0, 0, 0, 0));
    }
    order_before_copies();
    sync_threads<kWarpgroup>(kFirstAlone + group());
  }

  __device__ __forceinline__ void write(const QueryTile& tile) {
    rows_.collect();
    const int head = tile.kv_head * kPrefillGroup + lane() / 4;
    const float sink = job_.in.sinks == nullptr ? -INFINITY : load_weight(job_.in.sinks + head);
    float shares[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float of_sink = exp2_approx(fmaf(sink, kLog2e, -rows_.maximum[i] * job_.scale));
      shares[i] = tile.broken ? NAN : __frcp_rn(rows_.total[i] + of_sink);
    }
    auto* out =
        static_cast<uint16_t*>(job_.in.out) +
        ((int64_t{tile.row} + query()) * job_.in.kv_heads * kPrefillGroup + head) * kPrefillHeadDim;
    const int64_t next = int64_t{job_.in.kv_heads} * kPrefillGroup * kPrefillHeadDim;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int piece = 0; piece < kPrefillHeadDim / 8; piece += 4) {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float* pair = rows_.out + (piece + j) * 4 + i * 2;
          words[j] = pack_bf16(pair[0] * shares[i], pair[1] * shares[i]);
        }
        const uint4 value = gather_kinds(words, lane() % 4);
        if (query() + i < tile.queries) {
          *reinterpret_cast<uint4*>(out + i * next + (piece + lane() % 4) * 8) = value;
        }
      }
    }
  }

  const Job& job_;
  uint32_t shared_;
  int warp_;
  Side ring_;
  RowAttention<kKeys> rows_;
};

// Where the offsets are broken no row is known to be anybody's.
__device__ __forceinline__ void fill_with_nan(const Job& job) {
  const int64_t pieces = int64_t{job.in.rows} * job.in.kv_heads * kPrefillGroup * 16;
  const uint4 nans = make_uint4(0x7fc07fc0u, 0x7fc07fc0u, 0x7fc07fc0u, 0x7fc07fc0u);
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < pieces;
       i += int64_t{gridDim.x} * blockDim.x) {
    static_cast<uint4*>(job.in.out)[i] = nans;
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

__global__ void __launch_bounds__(kThreads, 1) attention_chunks(const __grid_constant__ Job job) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDACC__)
  extern __shared__ uint8_t dynamic[];
  __shared__ int broken;
  __shared__ int told[kTold];
  const uint32_t shared = (shared_address(dynamic) + 1023) & ~1023u;
  int* ends = reinterpret_cast<int*>(dynamic + (shared - shared_address(dynamic)) + kEndsPlace);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    prefetch_map(job.q);
    prefetch_map(job.k);
    prefetch_map(job.v);
    init_barrier(query_full_at(shared), 1);
    init_barrier(query_empty_at(shared), kMultiplying * 4);
    for (uint32_t i = 0; i < kTold; ++i) init_barrier(told_at(shared, i), 1);
    for (int i = 0; i < kStages; ++i) {
      init_barrier(full_at(shared, i), 1);
      init_barrier(empty_at(shared, i), kMultiplying * 4);
    }
    publish_barriers();
  }
  wait_for_previous_kernel();
  if (!Schedule::prepare(job, ends, &broken)) return fill_with_nan(job);
  const Schedule schedule(job, ends, told, shared);
  if (thread >= kMultiplying * kWarpgroup) {
    give_registers<kToCopy>();
    PrefillCopier(job, shared).run(schedule);
  } else {
    take_registers<kToMultiply>();
    PrefillMultiplier(job, shared).run(schedule);
  }
#endif
}

// ------------------------------------------------------------------------------ launch

cudaError_t describe_job(const AttentionPrefill& in, Job* job) {
  const int heads = in.kv_heads * kPrefillGroup;
  const TensorInMemory q{in.q.elements,
                         {kPrefillHeadDim, heads, in.rows, 1},
                         {in.q.head_stride * 2, in.q.row_stride * 2, 16},
                         {kHalf, kPrefillGroup, kQueries, 1}};
  const auto chunk = [&](const HeadRows& rows) {
    return TensorInMemory{rows.elements,
                          {kPrefillHeadDim, in.rows, in.kv_heads, 1},
                          {rows.row_stride * 2, rows.head_stride * 2, 16},
                          {kHalf, kKeys, 1, 1}};
  };
  const auto pages = [&](const void* elements, const PageStrides& strides) {
    return TensorInMemory{elements,
                          {kPrefillHeadDim, in.cache.page_size, in.kv_heads, job->blocks},
                          {strides.row * 2, strides.head * 2, strides.block * 2},
                          {kHalf, kPageGroup, 1, 1}};
  };
  if (const auto error = describe(q, &job->q); error != cudaSuccess) return error;
  if (const auto error = describe(chunk(in.k), &job->k); error != cudaSuccess) return error;
  if (const auto error = describe(chunk(in.v), &job->v); error != cudaSuccess) return error;
  if (!in.has_past) return cudaSuccess;
  if (const auto error = describe(pages(in.cache.k, in.cache.k_strides), &job->k_pages);
      error != cudaSuccess) {
    return error;
  }
  return describe(pages(in.cache.v, in.cache.v_strides), &job->v_pages);
}

// The most tiles of queries that there can be.
int64_t most_tiles(const AttentionPrefill& in) {
  return (ceil_div(in.rows, kQueries) + in.requests) * in.kv_heads;
}

}  // namespace

bool attention_prefill_fits(const AttentionPrefill& in) {
  const auto fits = [](const void* pointer, std::initializer_list<int64_t> strides) {
    bool aligned = reinterpret_cast<uint64_t>(pointer) % 16 == 0;
    for (const int64_t stride : strides) aligned = aligned && stride >= 0 && stride % 8 == 0;
    return aligned;
  };
  const auto rows = [&](const HeadRows& of) {
    return fits(of.elements, {in.rows > 1 ? of.row_stride : 0, of.head_stride});
  };
  const auto cached = [&](const void* elements, const PageStrides& strides) {
    return fits(elements, {strides.block, strides.row, strides.head});
  };
  const KvCache& cache = in.cache;
  const bool past =
      !in.has_past || (cache.slots > 0 && cache.page_size % kPageGroup == 0 &&
                       cache.page_size <= 1 << 20 && cache.slots / cache.page_size <= 0x7fffffff &&
                       cached(cache.k, cache.k_strides) && cached(cache.v, cache.v_strides));
  return 0 < in.rows && in.rows < 1 << 30 && 0 <= in.requests &&
         in.requests <= kMostPrefillRequests && 0 < in.kv_heads && in.kv_heads <= 1 << 12 && past &&
         rows(in.q) && rows(in.k) && rows(in.v) && fits(in.out, {}) && most_tiles(in) < 1 << 30;
}

cudaError_t attention_prefill(const AttentionPrefill& in, const Launch& launch) {
  Job job{};
  job.in = in;
  job.scale = in.scale * kLog2e;
  if (in.has_past) {
    job.capacity = in.width * in.cache.page_size;
    job.blocks = static_cast<int>(in.cache.slots / in.cache.page_size);
  }
  if (const auto error = describe_job(in, &job); error != cudaSuccess) return error;
  const auto ctas = static_cast<unsigned>(least(most_tiles(in), multiprocessors()));
  const Shape shape{dim3(ctas), dim3(kThreads), kSharedBytes};
  return launch_kernel(launch, shape, attention_chunks, job);
}

}  // namespace flint::cuda
