#include "cpu/matmul.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "bf16.h"
#include "cpu/clones.h"
#include "cpu/lanes.h"
#include "cpu/nvfp4.h"
#include "cpu/nvfp4_dot.h"
#include "cpu/parallel.h"
#include "nvfp4_layout.h"

namespace flint::cpu {
namespace {

using namespace flint::nvfp4;

static_assert(kLanes == kBlockValues, "a block of NVFP4 is a vector");

// Weight rows that share a load of x, and the latency of one another's sums.
constexpr int kTile = 4;

// Weight rows that are handed out together.
constexpr int kStrip = 16;

// A thread is worth starting for about a million multiply-adds.
constexpr int64_t kGrain = int64_t{1} << 20;

FLINT_CLONES void widen(const uint16_t* bf16, float* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = bf16_to_float(bf16[i]);
}

// sums[r] = weight row r times x. Every product of every call is summed here, in this one way.
FLINT_CLONES void dot_tile(const Block* weight, const Block* x, int64_t blocks, float* sums) {
  Lanes lanes[kTile] = {};
  for (int64_t i = 0; i < blocks; ++i) {
    for (int r = 0; r < kTile; ++r) lanes[r] += weight[r * blocks + i].values * x[i].values;
  }
  for (int r = 0; r < kTile; ++r) sums[r] = add_lanes(lanes[r]);
}

// rows x k BF16 values to fp32, each row from a block of its own; what lies behind a row's end is
// left as it is (zero).
void widen_rows(const uint16_t* bf16, int64_t rows, int64_t k, Block* out) {
  const int64_t blocks = (k + kLanes - 1) / kLanes;
  for (int64_t row = 0; row < rows; ++row) {
    widen(bf16 + row * k, reinterpret_cast<float*>(out + row * blocks), k);
  }
}

// `rows` rows of expert `expert` from row `first` on, in fp32.
void expand(const Weight& weight, int64_t expert, int64_t first, int64_t rows, Block* out) {
  const int64_t row = expert * weight.n + first;
  if (weight.bf16 != nullptr) return widen_rows(weight.bf16 + row * weight.k, rows, weight.k, out);
  const int64_t blocks = weight.k / kBlockValues;
  nvfp4_dequantize(weight.codes + row * blocks * kBlockBytes, weight.scales + row * blocks, nullptr,
                   0, reinterpret_cast<float*>(out), rows * blocks, 1);
}

// factors[c] = the global scale of column first + c, where there are any.
void find_factors(const GlobalScales& scales, int64_t expert, int64_t first, int64_t count,
                  float* factors) {
  const auto shards = static_cast<int64_t>(scales.sizes.size());
  int64_t shard = 0, end = scales.sizes[0];
  for (int64_t c = 0; c < count; ++c) {
    while (first + c >= end) end += scales.sizes[static_cast<size_t>(++shard)];
    factors[c] = scales.values[expert * shards + shard];
  }
}

void store(const Output& out, int64_t at, const float* sums, int64_t count) {
  if (out.bf16 != nullptr) {
    for (int64_t c = 0; c < count; ++c) out.bf16[at + c] = float_to_bf16(sums[c]);
  } else {
    std::copy_n(sums, count, out.fp32 + at);
  }
}

// An entry of the output and its row of x.
struct Entry {
  int64_t index, row;
};

// The entries of one expert.
struct Group {
  int64_t expert;
  const Entry* begin;
  const Entry* end;
};

// Entries by expert, so that each row of a weight is expanded once a call.
class Groups {
 public:
  Groups(const Entries& entries, int64_t experts, int64_t rows)
      : order_(static_cast<size_t>(entries.count)) {
    const auto expert_of = [&](int64_t i) -> int64_t {
      if (entries.experts == nullptr) return 0;
      const int64_t expert = entries.experts[i];
      return expert >= 0 && expert < experts ? expert : -1;
    };
    std::vector<int64_t> end(static_cast<size_t>(experts));
    for (int64_t i = 0; i < entries.count; ++i) {
      if (expert_of(i) >= 0) ++end[expert_of(i)];
    }
    int64_t total = 0;
    for (int64_t e = 0; e < experts; ++e) {
      const Entry* begin = order_.data() + total;
      total += std::exchange(end[e], total);
      if (order_.data() + total > begin) groups_.push_back({e, begin, order_.data() + total});
    }
    const int64_t entries_per_row = rows > 0 ? entries.count / rows : 1;
    for (int64_t i = 0; i < entries.count; ++i) {
      if (expert_of(i) < 0) {
        skipped_.push_back(i);
      } else {
        order_[end[expert_of(i)]++] = {i, i / entries_per_row};
      }
    }
  }

  const std::vector<Group>& used() const { return groups_; }
  const std::vector<int64_t>& skipped() const { return skipped_; }

 private:
  std::vector<Entry> order_;
  std::vector<Group> groups_;
  std::vector<int64_t> skipped_;
};

// One call: its rows in fp32, and what is the same for every tile.
struct Call {
  const Weight& weight;
  const GlobalScales& scales;
  const Output& out;
  const Block* x;
  int64_t blocks;  // of a row
  bool direct;     // NVFP4 that `nvfp4_dot` can take
};

// `count` sums of one row of x, from column `first` on.
void finish(const Call& call, const Entry& entry, int64_t first, int64_t count, float* sums,
            const float* factors) {
  if (call.scales.values != nullptr) {
    for (int64_t c = 0; c < count; ++c) sums[c] *= factors[c];
  }
  store(call.out, entry.index * call.weight.n + first, sums, count);
}

// Weight rows first ... first + kStrip of one expert times its entries. `rows` holds kTile rows.
void multiply_strip(const Call& call, const Group& group, int64_t first, Block* rows) {
  const int64_t count = std::min<int64_t>(kStrip, call.weight.n - first);
  float factors[kStrip], sums[kStrip];
  if (call.scales.values != nullptr) {
    find_factors(call.scales, group.expert, first, count, factors);
  }
  if (call.direct && group.end - group.begin == 1) {
    // Rows that are used once are not written out for it.
    const int64_t at = (group.expert * call.weight.n + first) * call.blocks;
    nvfp4_dot(call.weight.codes + at * kBlockBytes, call.weight.scales + at, count,
              call.x + group.begin->row * call.blocks, call.blocks, sums);
    finish(call, *group.begin, first, count, sums, factors);
    return;
  }
  for (int64_t tile = 0; tile < count; tile += kTile) {
    const int64_t used = std::min<int64_t>(kTile, count - tile);
    expand(call.weight, group.expert, first + tile, used, rows);
    for (const Entry* entry = group.begin; entry < group.end; ++entry) {
      // Rows behind the last are scratch from before: their sums are not used.
      dot_tile(rows, call.x + entry->row * call.blocks, call.blocks, sums);
      finish(call, *entry, first + tile, used, sums, factors + tile);
    }
  }
}

}  // namespace

void matmul(const Activations& x, const Weight& weight, const GlobalScales& scales,
            const Entries& entries, const Output& out, int threads) {
  const Groups groups(entries, weight.experts, x.rows);
  if (!groups.skipped().empty()) {
    const std::vector<float> zeros(static_cast<size_t>(weight.n));
    for (const int64_t i : groups.skipped()) store(out, i * weight.n, zeros.data(), weight.n);
  }

  const int64_t used = static_cast<int64_t>(groups.used().size());
  const int64_t strips = (weight.n + kStrip - 1) / kStrip;
  if (used * strips == 0) return;
  const int64_t blocks = (weight.k + kLanes - 1) / kLanes;
  std::vector<Block> wide(static_cast<size_t>(x.rows * blocks));
  widen_rows(x.bf16, x.rows, weight.k, wide.data());
  const bool direct = weight.bf16 == nullptr && has_nvfp4_dot();
  const Call call{weight, scales, out, wide.data(), blocks, direct};

  // Scratch for every thread is taken here: the threads themselves must not throw.
  const int64_t workers = std::clamp<int64_t>(threads, 1, used * strips);
  std::vector<Block> scratch(static_cast<size_t>(workers * kTile * blocks));
  std::atomic<int64_t> worker{0};
  const int64_t strip_work = std::max<int64_t>(kStrip * weight.k * entries.count / used, 1);
  parallel_for(used * strips, kGrain / strip_work + 1, static_cast<int>(workers),
               [&](int64_t begin, int64_t end) {
                 Block* rows = scratch.data() + worker.fetch_add(1) * kTile * blocks;
                 for (int64_t i = begin; i < end; ++i) {
                   multiply_strip(call, groups.used()[i / strips], i % strips * kStrip, rows);
                 }
               });
}

}  // namespace flint::cpu
