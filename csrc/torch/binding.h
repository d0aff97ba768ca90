// What the bindings share: checks of a buffer before its pointer is taken.
//
// Only the stable ABI is used (torch/csrc/stable, torch/headeronly), so one binary serves every
// torch from TORCH_TARGET_VERSION on, and any Python. The public ops, their schemas and their
// error messages are Python's: flint_kernels/ops. The checks here are the last line, against a
// wrong buffer.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <optional>

namespace flint {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline void check_type(const Tensor& tensor, const char* name, ScalarType type) {
  STD_TORCH_CHECK(tensor.is_cpu(), name, ": want a CPU tensor");
  STD_TORCH_CHECK(tensor.scalar_type() == type, name, ": got scalar type ",
                  static_cast<int>(tensor.scalar_type()), ", want ", static_cast<int>(type));
}

inline void check(const Tensor& tensor, const char* name, ScalarType type, int64_t count) {
  check_type(tensor, name, type);
  STD_TORCH_CHECK(tensor.is_contiguous(), name, ": want a contiguous tensor");
  STD_TORCH_CHECK(tensor.numel() == count, name, ": got ", tensor.numel(), " elements, want ",
                  count);
}

template <typename T>
const T* data(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

template <typename T>
T* mutable_data(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

template <typename T>
const T* data_or_null(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? data<T>(*tensor) : nullptr;
}

}  // namespace flint
