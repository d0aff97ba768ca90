// The helpers that kernels and host share, as a Python module over numpy arrays: for the tests
// alone, which so check, without a GPU, the very code that the kernels are compiled from.
// `python setup.py build_test_module` builds it; it is in no wheel.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <iterator>
#include <stdexcept>
#include <vector>

#include "attention_split.h"
#include "attention_tiles.h"
#include "bf16.h"
#include "cuda/arranged.h"
#include "cuda/tiles.h"
#include "nvfp4_layout.h"
#include "paging.h"
#include "philox.h"
#include "topk_key.h"

namespace py = pybind11;
using py::vectorize;

namespace {

int32_t e2m1_bits(uint8_t code) {
  if (code >= std::size(flint::nvfp4::kE2M1Bits)) throw std::out_of_range("code: want 0 to 15");
  return flint::nvfp4::kE2M1Bits[code];
}

void add_values(py::module_& m) {
  m.def("bf16_to_float", vectorize(flint::bf16_to_float));
  m.def("float_to_bf16", vectorize(flint::float_to_bf16));
  m.def("round_to_bf16", vectorize(flint::round_to_bf16));
  m.def("e2m1_bits", vectorize(e2m1_bits));
  m.def("e4m3_value", vectorize(flint::nvfp4::e4m3_value));
}

void add_layout(py::module_& m) {
  using namespace flint::nvfp4;
  m.attr("SUPERBLOCK_BYTES") = kSuperblockBytes;
  m.def("swap_bits", vectorize(swap_bits));
  m.def("block_gguf_to_modelopt", vectorize(block_gguf_to_modelopt));
  m.def("block_modelopt_to_gguf", vectorize(block_modelopt_to_gguf));
  m.def("nan_scales", vectorize(nan_scales));
  m.def("scales_gguf_to_modelopt", vectorize(scales_gguf_to_modelopt));
  m.def("gguf_scales_bad", vectorize(gguf_scales_bad));
  m.def("modelopt_scales_bad", vectorize(modelopt_scales_bad));
  m.def("gguf_codes_at", vectorize(gguf_codes_at));
  m.def("gguf_scales_at", vectorize(gguf_scales_at));
}

void add_paging(py::module_& m) {
  m.def("slot_offset", vectorize([](int64_t block, int64_t row, int64_t head_stride,
                                    int64_t page_size, int64_t slot, int64_t head) {
          return flint::slot_offset({block, row, head_stride}, page_size, slot, head);
        }));
  m.def("slot_offset_32",
        vectorize([](int64_t block, int64_t row, uint32_t page_size, uint32_t slot) {
          return flint::slot_offset_32({block, row, 0}, page_size, slot);
        }));
  m.def("position_slot", [](const py::array_t<int32_t, py::array::c_style>& table,
                            int64_t page_size, const py::array_t<int64_t>& positions) {
    const int32_t* pages = table.data();
    return vectorize([=](int64_t position) {
      return flint::position_slot(pages, page_size, position);
    })(positions);
  });
  m.attr("COMPUTE") = static_cast<int>(flint::RowOutcome::kCompute);
  m.attr("ZEROS") = static_cast<int>(flint::RowOutcome::kZeros);
  m.attr("NAN") = static_cast<int>(flint::RowOutcome::kNaN);
  m.def("row_outcome", vectorize([](int64_t slot, int64_t slots, bool inside) {
          return static_cast<int>(flint::row_outcome(slot, slots, inside));
        }));
}

void add_tiles(py::module_& m) {
  m.attr("MOST_CTAS") = flint::kMostCtas;
  m.attr("MOST_GRID_ROWS") = flint::kMostGridRows;
  m.def("ceil_div", vectorize(flint::ceil_div));
  m.def("least", vectorize(flint::least));
  m.def("round_up", vectorize(flint::round_up));
  m.def("keeps_alignment", vectorize(flint::keeps_alignment));
  m.def("element_tiles", [](int64_t columns, int64_t rows, int64_t threads) {
    const auto tiles = flint::element_tiles(columns, rows, threads);
    return py::make_tuple(tiles.across, tiles.down, tiles.ctas_across, tiles.ctas_down);
  });
}

void add_arranged(py::module_& m) {
  m.attr("PAIR_DISTANCE") = flint::cuda::kPairDistance;
  m.def("arranged_pair", vectorize(flint::cuda::arranged_pair));
}

void add_attention(py::module_& m) {
  m.attr("ATTENTION_TILE") = flint::kAttentionTile;
  m.attr("LEAST_SPLIT_TILES") = flint::kLeastSplitTiles;
  m.def("attention_keys", [](int length, int64_t capacity, int window) {
    const auto keys = flint::attention_keys(length, capacity, window);
    return py::make_tuple(keys.first, keys.last, keys.tile, keys.tile_end);
  });
  m.def("attention_splits", [](int tiles, int most) {
    const auto splits = flint::attention_splits(tiles, most);
    return py::make_tuple(splits.count, splits.tiles);
  });
  m.attr("PAGE_GROUP") = flint::kPageGroup;
  // The first key of each tile, and of how many tiles they are those of the past.
  m.def("key_tiles", [](int context, int first, int last, int window, int keys) {
    const auto found = flint::key_tiles(context, first, last, window, keys);
    std::vector<int> starts;
    for (int i = 0; i < found.tiles; ++i) starts.push_back(flint::first_key(found, i, keys));
    return py::make_tuple(found.oldest, found.past_tiles, starts);
  });
}

void add_topk(py::module_& m) {
  m.def("topk_rank", vectorize(flint::topk_rank));
  m.def("topk_key", vectorize(flint::topk_key));
  m.def("topk_index", vectorize(flint::topk_index));
  m.def("topk_key_bf16", vectorize(flint::topk_key_bf16));
  m.def("topk_index_bf16", vectorize(flint::topk_index_bf16));
}

void add_sampling(py::module_& m) { m.def("uniform_53", vectorize(flint::uniform_53)); }

}  // namespace

PYBIND11_MODULE(flint_device_helpers, m) {
  m.doc() = "The __host__ __device__ helpers of csrc/, element by element over numpy arrays.";
  add_values(m);
  add_layout(m);
  add_paging(m);
  add_tiles(m);
  add_arranged(m);
  add_attention(m);
  add_topk(m);
  add_sampling(m);
}
