// Binds the CPU's NVFP4 conversions to torch as ops of the private namespace `flint_native`.
#include "cpu/nvfp4.h"

#include <optional>

#include "nvfp4_layout.h"
#include "torch/binding.h"

namespace flint {
namespace {

const uint8_t* bytes(const Tensor& tensor) { return data<uint8_t>(tensor); }

uint8_t* mutable_bytes(const Tensor& tensor) { return mutable_data<uint8_t>(tensor); }

// Returns the number of super-blocks after checking all three tensors of a repack.
int64_t check_repack(const Tensor& blocks, const Tensor& weight, const Tensor& scale) {
  const int64_t superblocks = blocks.numel() / nvfp4::kSuperblockBytes;
  check(blocks, "blocks", ScalarType::Byte, superblocks * nvfp4::kSuperblockBytes);
  check(weight, "weight", ScalarType::Byte, superblocks * nvfp4::kSuperblockCodeBytes);
  check(scale, "weight_scale", ScalarType::Float8_e4m3fn, superblocks * nvfp4::kSuperblockScales);
  return superblocks;
}

int64_t gguf_to_modelopt_out(const Tensor& blocks, Tensor weight, Tensor scale, int64_t threads) {
  const int64_t superblocks = check_repack(blocks, weight, scale);
  return cpu::nvfp4_gguf_to_modelopt(bytes(blocks), mutable_bytes(weight), mutable_bytes(scale),
                                     superblocks, static_cast<int>(threads));
}

int64_t modelopt_to_gguf_out(const Tensor& weight, const Tensor& scale, Tensor blocks,
                             int64_t threads) {
  const int64_t superblocks = check_repack(blocks, weight, scale);
  return cpu::nvfp4_modelopt_to_gguf(bytes(weight), bytes(scale), mutable_bytes(blocks),
                                     superblocks, static_cast<int>(threads));
}

void dequantize_out(const Tensor& weight, const Tensor& scale, std::optional<Tensor> globals,
                    Tensor out, int64_t threads) {
  const int64_t blocks = scale.numel();
  check(weight, "weight", ScalarType::Byte, blocks * nvfp4::kBlockBytes);
  check(scale, "weight_scale", ScalarType::Float8_e4m3fn, blocks);
  check(out, "out", ScalarType::Float, blocks * nvfp4::kBlockValues);
  if (blocks == 0) return;
  int64_t count = 0;
  const float* factors = nullptr;
  if (globals.has_value()) {
    count = globals->numel();
    check(*globals, "weight_scale_2", ScalarType::Float, count);
    STD_TORCH_CHECK(count > 0 && blocks % count == 0, "weight_scale_2: got ", count,
                    " values, want a divisor of the ", blocks, " blocks");
    factors = static_cast<const float*>(globals->const_data_ptr());
  }
  cpu::nvfp4_dequantize(bytes(weight), bytes(scale), factors, count,
                        static_cast<float*>(out.mutable_data_ptr()), blocks,
                        static_cast<int>(threads));
}

}  // namespace
}  // namespace flint

STABLE_TORCH_LIBRARY_FRAGMENT(flint_native, m) {
  m.def(
      "gguf_to_modelopt_out(Tensor blocks, Tensor(a!) weight, Tensor(b!) weight_scale, "
      "int num_threads) -> int");
  m.def(
      "modelopt_to_gguf_out(Tensor weight, Tensor weight_scale, Tensor(a!) blocks, "
      "int num_threads) -> int");
  m.def(
      "dequantize_out(Tensor weight, Tensor weight_scale, Tensor? weight_scale_2, Tensor(a!) out, "
      "int num_threads) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(flint_native, CPU, m) {
  m.impl("gguf_to_modelopt_out", TORCH_BOX(&flint::gguf_to_modelopt_out));
  m.impl("modelopt_to_gguf_out", TORCH_BOX(&flint::modelopt_to_gguf_out));
  m.impl("dequantize_out", TORCH_BOX(&flint::dequantize_out));
}
