// The order of experts' entries, their combination, and the rows that a product brings together,
// compiled for simt.h, as functions that Python can call.
#include <cuda_runtime.h>

#include "cuda/expert_order.cu"
#include "cuda/product_gather.cuh"

namespace flint::cuda {
namespace {

using Plan = ProductPlan<WeightForm::kNvfp4, 256, 32, 1, 5, 2>;

// What a product's copying warpgroup does, and of its copies that the rows are as they have to be.
void gather_kernel(const ProductJob& job) {
  alignas(8) static thread_local uint64_t words[2 * Plan::kXStages + 2 * Plan::kWeightStages + 2];
  const Barriers<Plan> barriers{shared_address(words)};
  const int thread = static_cast<int>(threadIdx.x), first = kProducts * kWarpgroup;
  if (thread == 0) {
    init_barrier(barriers.begun(), 1);
    init_barrier(barriers.claimed(), 1);
  }
  __syncthreads();
  gather_first<Plan>(job);
  if (thread >= first + kWarp) gather_ahead<Plan>(job, barriers);
  if (thread != first) return;
  const size_t bytes = static_cast<size_t>(job.steps) * Plan::kColumns * 2;
  GatheredRows gathered;
  for (Tiles<Plan> tiles(job); !tiles.done(); tiles.advance()) {
    gathered.begin(job, tiles, barriers);
    const TokenTile tokens = tiles.tokens();
    for (int row = tokens.first; row < tokens.first + tokens.count; ++row) {
      const int64_t source = job.from_entry[row] / job.from_share;
      if (std::memcmp(job.gathered + row * static_cast<int64_t>(bytes / 2),
                      job.from + source * job.from_stride, bytes) != 0) {
        simt::fail("a row that is not there yet");
      }
    }
  }
}

}  // namespace
}  // namespace flint::cuda

using namespace flint::cuda;

extern "C" int64_t emulated_order_words(int64_t entries, int experts, int tile) {
  return words_of_order(entries, experts, tile);
}

extern "C" void emulated_order(const int32_t* ids, int tokens, int top_k, int experts, int tile,
                               int step, int32_t* memory, unsigned random) {
  simt::options = {random, false, {}};
  const ExpertOrder order = order_in(memory, int64_t{tokens} * top_k, experts, tile);
  order_entries({ids, tokens, top_k, experts}, tile, step, order, {nullptr, true});
}

extern "C" void emulated_combine(const int32_t* ids, int tokens, int top_k, int experts,
                                 const float* weights, const void* outputs, const void* shared,
                                 void* out, int hidden, unsigned random) {
  simt::options = {random, false, {}};
  combine_experts({{ids, tokens, top_k, experts}, weights, outputs, shared, out, hidden},
                  {nullptr, true});
}

// `together`: all CTAs run at the same time; else each pair of them alone, in any order.
extern "C" void emulated_gather(const uint16_t* x, int64_t stride, int width, int tokens, int top_k,
                                int experts, int32_t* memory, int row_tiles, int clusters,
                                int together, uint16_t* rows, unsigned random) {
  simt::options = {random, false, {}};
  const ExpertOrder order = order_in(memory, int64_t{tokens} * top_k, experts, Plan::kTokens);
  ProductJob job{};
  job.tiles = order.tiles;
  job.tile_count = order.tile_count;
  job.gathered = rows;
  job.from = x;
  job.from_stride = stride;
  job.from_entry = order.entry;
  job.from_share = top_k;
  job.row_tiles = row_tiles;
  job.steps = width / Plan::kColumns;
  const unsigned ctas = static_cast<unsigned>(clusters * kCluster);
  simt::run_grid({ctas, 1, 1}, {Plan::kThreads, 1, 1},
                 together != 0 ? clusters * kCluster : kCluster, [&] { gather_kernel(job); });
}
