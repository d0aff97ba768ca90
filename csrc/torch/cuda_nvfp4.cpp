// Binds the GPU's NVFP4 repack to torch as ops of the private namespace `flint_native`.
#include "cuda/nvfp4_repack.h"
#include "nvfp4_layout.h"
#include "torch/cuda_binding.h"

namespace flint {
namespace {

// Returns the number of super-blocks after checking all four tensors of a repack.
int64_t check_repack(const CudaCall& call, const Tensor& blocks, const Tensor& weight,
                     const Tensor& scale, const Tensor& first_bad) {
  const int64_t superblocks = blocks.numel() / nvfp4::kSuperblockBytes;
  call.check_dense(blocks, "blocks", ScalarType::Byte, superblocks * nvfp4::kSuperblockBytes);
  call.check_dense(weight, "weight", ScalarType::Byte, superblocks * nvfp4::kSuperblockCodeBytes);
  call.check_dense(scale, "weight_scale", ScalarType::Float8_e4m3fn,
                   superblocks * nvfp4::kSuperblockScales);
  call.check_dense(first_bad, "first_bad", ScalarType::Long, 1);
  return superblocks;
}

void gguf_to_modelopt_cuda_out(const Tensor& blocks, Tensor weight, Tensor scale,
                               Tensor first_bad) {
  const CudaCall call(blocks, false);
  const int64_t superblocks = check_repack(call, blocks, weight, scale, first_bad);
  const cuda::Nvfp4Repack in{
      data<uint8_t>(blocks),        nullptr,     mutable_data<uint8_t>(weight),
      mutable_data<uint8_t>(scale), superblocks, mutable_data<unsigned long long>(first_bad)};
  CudaCall::check_launch(cuda::gguf_to_modelopt(in, call.launch()), "gguf_to_modelopt");
}

void modelopt_to_gguf_cuda_out(const Tensor& weight, const Tensor& scale, Tensor blocks,
                               Tensor first_bad) {
  const CudaCall call(weight, false);
  const int64_t superblocks = check_repack(call, blocks, weight, scale, first_bad);
  const cuda::Nvfp4Repack in{data<uint8_t>(weight),
                             data<uint8_t>(scale),
                             mutable_data<uint8_t>(blocks),
                             nullptr,
                             superblocks,
                             mutable_data<unsigned long long>(first_bad)};
  CudaCall::check_launch(cuda::modelopt_to_gguf(in, call.launch()), "modelopt_to_gguf");
}

}  // namespace
}  // namespace flint

STABLE_TORCH_LIBRARY_FRAGMENT(flint_native, m) {
  m.def(
      "gguf_to_modelopt_cuda_out(Tensor blocks, Tensor(a!) weight, Tensor(b!) weight_scale, "
      "Tensor(c!) first_bad) -> ()");
  m.def(
      "modelopt_to_gguf_cuda_out(Tensor weight, Tensor weight_scale, Tensor(a!) blocks, "
      "Tensor(b!) first_bad) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(flint_native, CUDA, m) {
  m.impl("gguf_to_modelopt_cuda_out", TORCH_BOX(&flint::gguf_to_modelopt_cuda_out));
  m.impl("modelopt_to_gguf_cuda_out", TORCH_BOX(&flint::modelopt_to_gguf_cuda_out));
}
