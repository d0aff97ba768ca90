// Binds the GPU's kernels for many tokens to torch as ops of the private namespace `flint_native`.
// Each returns whether it has launched: false, with nothing done, where the kernel does not take
// these sizes or addresses, and a general body has to.
#include <algorithm>

#include "cuda/linear.h"
#include "torch/cuda_binding.h"
#include "torch/cuda_weights.h"

namespace flint {
namespace {

bool many_rows(const Tensor& x) {
  return is_bf16(x) && x.dim() == 2 && x.size(0) > 0 && x.size(0) < 1 << 30 && x.size(1) > 0 &&
         x.stride(1) == 1;
}

// x [rows, width]; `output` as in cuda::LinearOutput; shard_sizes of the first three shards.
bool linear_many_cuda_out(const Tensor& x, const Tensor& weight, const Tensor& scale,
                          const Tensor& scale_2, int64_t first, int64_t second, int64_t third,
                          int64_t output, Tensor out, bool enable_pdl) {
  const CudaCall call(x, enable_pdl);
  const Weights weights(call, weight, scale, scale_2);
  if (!many_rows(x) || !weights.readable || weights.scales > cuda::kMostShards) return false;
  cuda::Linear in{};
  in.weight = weights.matrix;
  in.scale_2 = weights.scale_2;
  in.shards = static_cast<int>(weights.scales);
  const int64_t sizes[cuda::kMostShards] = {first, second, third, 0};
  for (int i = 0; i < cuda::kMostShards; ++i) {
    in.shard_end[i] = sizes[i] + (i > 0 ? in.shard_end[i - 1] : 0);
  }
  in.x = data<void>(x);
  in.x_stride = row_stride(x);
  in.rows = weight.size(0);
  in.tokens = static_cast<int>(x.size(0));
  in.width = static_cast<int>(std::min<int64_t>(x.size(1), 1 << 30));
  in.output = static_cast<cuda::LinearOutput>(output);
  const bool halves = in.output == cuda::LinearOutput::kSiluAndMul;
  call.check_dense(out, "out", true, int64_t{in.tokens} * (halves ? in.rows / 2 : in.rows));
  in.out = mutable_data<void>(out);
  if (!cuda::linear_many_fits(in)) return false;
  CudaCall::check_launch(cuda::linear_many(in, call.launch()), "linear");
  return true;
}

}  // namespace
}  // namespace flint

STABLE_TORCH_LIBRARY_FRAGMENT(flint_native, m) {
  m.def(
      "linear_many_cuda_out(Tensor x, Tensor weight, Tensor scale, Tensor scale_2, int first, "
      "int second, int third, int output, Tensor(a!) out, bool enable_pdl) -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(flint_native, CUDA, m) {
  m.impl("linear_many_cuda_out", TORCH_BOX(&flint::linear_many_cuda_out));
}
