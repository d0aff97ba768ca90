// What the bodies of the public ops share: whether a call may run at all, and its outputs.
//
// The checks of an op are Python's, once, in its declaration (flint_kernels/ops). They see shapes,
// strides, types, devices, host values and which memory is shared, and of data nothing; so what
// they found of one call holds for every call that looks the same. Each op here remembers what the
// calls that passed looked like, and runs another of them without going back to Python. A call that
// looks new, and one whose values are not plainly good, it leaves alone: Python then checks it, and
// either raises or calls again with `checked`. Nothing is taken for sound here that Python has not
// found so.
#pragma once

#include <memory>
#include <unordered_set>
#include <utility>
#include <vector>

#include "torch/binding.h"

namespace flint {

// An op's outputs; empty where the call was left to Python.
using Results = std::vector<Tensor>;

// A tensor that the op writes in place.
struct Written {
  const Tensor& tensor;
};

// All that the checks of a call can see of it, values in tensors aside, as one row of integers.
class Signature {
 public:
  // Everything that the schema has, in its order.
  template <typename... Arguments>
  explicit Signature(const Arguments&... arguments) {
    words_.reserve(12 * sizeof...(arguments));
    (add(arguments), ...);
    add_meetings();
  }

  std::vector<int64_t>&& words() && { return std::move(words_); }

 private:
  struct Argument {
    const Tensor* tensor;
    bool written;
  };

  void add(bool value) { words_.push_back(value ? 1 : 0); }
  void add(int64_t value) { words_.push_back(value); }
  void add(double value);
  void add(const std::vector<int64_t>& values);
  void add(const Tensor& tensor) { add_tensor(tensor, false); }
  void add(const Written& written) { add_tensor(written.tensor, true); }

  template <typename T>
  void add(const std::optional<T>& value) {
    words_.push_back(value.has_value() ? 1 : 0);
    if (value.has_value()) add(*value);
  }

  void add_tensor(const Tensor& tensor, bool written);

  // Where the memory of a written tensor and another's may meet: how far apart the two begin.
  // Whether they share an element follows from that and from their shapes and strides.
  void add_meetings();

  std::vector<int64_t> words_;
  std::vector<Argument> tensors_;
  bool writes_ = false;
};

// The calls of one op that have passed Python's checks. Each thread has its own: so there is no
// lock, and none that a fork could leave locked.
class Admitted {
 public:
  // Whether the call may run: it was `checked` just now, or one that looks the same was before.
  template <typename... Arguments>
  bool operator()(bool checked, const Arguments&... arguments) {
    return admits(checked, Signature(arguments...).words());
  }

 private:
  struct Hash {
    size_t operator()(const std::vector<int64_t>& words) const;
  };

  bool admits(bool checked, std::vector<int64_t>&& words);

  std::unordered_set<std::vector<int64_t>, Hash> passed_;
};

// `given`, or a new contiguous tensor on the CPU.
Tensor given_or_new(const std::optional<Tensor>& given, const std::vector<int64_t>& sizes,
                    ScalarType type);

// `tensor`, or a contiguous copy of it.
Tensor dense(const Tensor& tensor);
std::optional<Tensor> dense(const std::optional<Tensor>& tensor);

// The sizes of `tensor`, the last one replaced.
std::vector<int64_t> with_last(const Tensor& tensor, int64_t last);

// The threads that a call may use: torch's setting.
int threads();

// Memory for `count` intermediate values.
template <typename T>
std::unique_ptr<T[]> scratch(int64_t count) {
  return std::make_unique_for_overwrite<T[]>(static_cast<size_t>(count));
}

}  // namespace flint
