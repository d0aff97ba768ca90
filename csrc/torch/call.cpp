#include "torch/call.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <bit>

namespace flint {
namespace {

// Of an op: serving has a few shapes, a sweep over sizes has many.
constexpr size_t kMostRemembered = 1024;

struct Span {
  int64_t begin, end;  // addresses
};

Span span_of(const Tensor& tensor) {
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  int64_t elements = 1;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) elements = 0;
    if (elements > 0) elements += (sizes[i] - 1) * strides[i];
  }
  int32_t type = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &type));
  const auto begin = static_cast<int64_t>(std::bit_cast<intptr_t>(tensor.const_data_ptr()));
  return {begin, begin + elements * static_cast<int64_t>(aoti_torch_dtype_element_size(type))};
}

int32_t type_code(ScalarType type) {
  switch (type) {
    case ScalarType::BFloat16:
      return aoti_torch_dtype_bfloat16();
    case ScalarType::Float:
      return aoti_torch_dtype_float32();
    case ScalarType::Int:
      return aoti_torch_dtype_int32();
    default:
      return aoti_torch_dtype_int64();
  }
}

// What `get` says of a tensor; kUnknown where torch's C shim has no code for it (the meta device).
// The checks refuse such a tensor beside one of the CPU: no call that has passed looks like that.
constexpr int64_t kUnknown = -2;

int64_t code_of(AtenTensorHandle tensor, AOTITorchError (*get)(AtenTensorHandle, int32_t*)) {
  int32_t code = 0;
  return get(tensor, &code) == AOTI_TORCH_SUCCESS ? code : kUnknown;
}

}  // namespace

size_t Admitted::Hash::operator()(const std::vector<int64_t>& words) const {
  uint64_t hash = words.size();
  for (const int64_t word : words) {
    hash = (std::rotl(hash, 23) ^ static_cast<uint64_t>(word)) * 0x9e3779b97f4a7c15u;
  }
  return hash ^ (hash >> 32);
}

void Signature::add(double value) { words_.push_back(std::bit_cast<int64_t>(value)); }

void Signature::add(const std::vector<int64_t>& values) {
  words_.push_back(static_cast<int64_t>(values.size()));
  words_.insert(words_.end(), values.begin(), values.end());
}

void Signature::add_tensor(const Tensor& tensor, bool written) {
  // None where a tensor is wanted: the dispatcher lets it through, and the checks refuse it.
  if (!tensor.defined()) return words_.push_back(kUnknown);
  const AtenTensorHandle handle = tensor.get();
  const int64_t type = code_of(handle, aoti_torch_get_dtype);
  const int64_t device = code_of(handle, aoti_torch_get_device_type);
  const int64_t index = code_of(handle, aoti_torch_get_device_index);
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  words_.insert(words_.end(), {type, device, index, static_cast<int64_t>(sizes.size())});
  words_.insert(words_.end(), sizes.begin(), sizes.end());
  words_.insert(words_.end(), strides.begin(), strides.end());
  tensors_.push_back({&tensor, written});
  writes_ = writes_ || written;
}

void Signature::add_meetings() {
  if (!writes_) return;
  std::vector<Span> spans;
  spans.reserve(tensors_.size());
  for (const Argument& argument : tensors_) spans.push_back(span_of(*argument.tensor));
  for (size_t i = 0; i < spans.size(); ++i) {
    if (!tensors_[i].written) continue;
    for (size_t j = 0; j < spans.size(); ++j) {
      if (i == j || spans[i].begin >= spans[j].end || spans[j].begin >= spans[i].end) continue;
      words_.insert(words_.end(), {static_cast<int64_t>(i), static_cast<int64_t>(j),
                                   spans[j].begin - spans[i].begin});
    }
  }
}

bool Admitted::admits(bool checked, std::vector<int64_t>&& words) {
  if (!checked) return passed_.contains(words);
  if (passed_.size() >= kMostRemembered) passed_.clear();
  passed_.insert(std::move(words));
  return true;
}

Tensor given_or_new(const std::optional<Tensor>& given, const std::vector<int64_t>& sizes,
                    ScalarType type) {
  if (given.has_value()) return *given;
  std::vector<int64_t> strides(sizes.size());
  int64_t step = 1;
  for (size_t i = sizes.size(); i-- > 0; step *= std::max<int64_t>(sizes[i], 1)) strides[i] = step;
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                               type_code(type), aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

Tensor dense(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

std::optional<Tensor> dense(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? std::optional(dense(*tensor)) : std::nullopt;
}

std::vector<int64_t> with_last(const Tensor& tensor, int64_t last) {
  const auto sizes = tensor.sizes();
  std::vector<int64_t> out(sizes.begin(), sizes.end());
  out.back() = last;
  return out;
}

int threads() { return static_cast<int>(torch::stable::get_num_threads()); }

}  // namespace flint
