// What the CUDA bindings share beside torch/binding.h: checks of a buffer on the GPU, the device
// and stream of a launch, and what a failed launch says.
#pragma once

#include <torch/csrc/stable/accelerator.h>

#include <cstddef>

#include "cuda/launch.h"
#include "torch/binding.h"
#include "torch/cuda_stream.h"

namespace flint {

// All tensors of a call are on one device, that of `reference`.
class CudaCall {
 public:
  CudaCall(const Tensor& reference, bool pdl)
      : device_(reference.get_device_index()),
        guard_(device_),
        launch_{current_cuda_stream(device_), pdl} {}

  const cuda::Launch& launch() const { return launch_; }

  // The most that a kernel may ask for.
  int shared_bytes_a_cta() const {
    int bytes = 0;
    cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device_);
    return bytes;
  }

  void check_on(const Tensor& tensor, const char* name) const {
    STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device_index() == device_, name,
                    ": want a tensor on cuda:", device_);
  }

  // BF16 or FP32 as `bf16` says; the last dimension contiguous.
  void check_rows(const Tensor& tensor, const char* name, bool bf16) const {
    check_on(tensor, name);
    const auto type = bf16 ? ScalarType::BFloat16 : ScalarType::Float;
    STD_TORCH_CHECK(tensor.scalar_type() == type, name, ": got scalar type ",
                    static_cast<int>(tensor.scalar_type()), ", want ", static_cast<int>(type));
    const int64_t last = tensor.dim() - 1;
    STD_TORCH_CHECK(tensor.dim() >= 1 && (tensor.stride(last) == 1 || tensor.size(last) <= 1), name,
                    ": want a contiguous last dimension");
  }

  void check_dense(const Tensor& tensor, const char* name, bool bf16, int64_t count) const {
    check_rows(tensor, name, bf16);
    check_count(tensor, name, count);
  }

  void check_dense(const Tensor& tensor, const char* name, ScalarType type, int64_t count) const {
    check_on(tensor, name);
    STD_TORCH_CHECK(tensor.scalar_type() == type, name, ": got scalar type ",
                    static_cast<int>(tensor.scalar_type()), ", want ", static_cast<int>(type));
    check_count(tensor, name, count);
  }

  static void check_launch(cudaError_t error, const char* op) {
    if (error == cudaSuccess) return;
    cudaGetLastError();  // not to be found again by the next launch
    STD_TORCH_CHECK(false, op, ": the kernel was not launched: ", cudaGetErrorString(error), " (",
                    cudaGetErrorName(error), ")");
  }

 private:
  static void check_count(const Tensor& tensor, const char* name, int64_t count) {
    STD_TORCH_CHECK(tensor.is_contiguous(), name, ": want a contiguous tensor");
    STD_TORCH_CHECK(tensor.numel() == count, name, ": got ", tensor.numel(), " elements, want ",
                    count);
  }

  int32_t device_;
  torch::stable::accelerator::DeviceGuard guard_;
  cuda::Launch launch_;
};

// A single row's stride is of no use and may be anything.
inline int64_t row_stride(const Tensor& rows) {
  return rows.size(0) > 1 ? rows.stride(0) : rows.size(1);
}

inline bool is_bf16(const Tensor& tensor) { return tensor.scalar_type() == ScalarType::BFloat16; }

}  // namespace flint
