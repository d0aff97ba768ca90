// Sampling on the CPU: the op of flint_kernels/ops/sampling.py.
#include "cpu/sampling.h"

#include "torch/call.h"

namespace flint {
namespace {

Results sample(const Tensor& logits, const Tensor& temperature, const Tensor& top_k,
               const Tensor& top_p, const Tensor& seed, const Tensor& offset, bool enable_pdl,
               int64_t max_top_k, std::optional<Tensor> tokens_out, bool checked) {
  static thread_local Admitted admitted;
  if (!admitted(checked, logits, temperature, top_k, top_p, seed, offset, enable_pdl, max_top_k)) {
    return {};
  }
  const Tensor x = dense(logits);
  const Tensor settings[] = {dense(temperature), dense(top_k), dense(top_p), dense(seed),
                             dense(offset)};
  const int64_t rows = logits.size(0), count = logits.size(1);
  check(x, "logits", ScalarType::Float, rows * count);
  check(settings[0], "temperature", ScalarType::Float, rows);
  check(settings[1], "top_k", ScalarType::Int, rows);
  check(settings[2], "top_p", ScalarType::Float, rows);
  check(settings[3], "seed", ScalarType::Long, rows);
  check(settings[4], "offset", ScalarType::Long, rows);
  const cpu::Draws draws{data<float>(settings[0]),   data<int32_t>(settings[1]),
                         data<float>(settings[2]),   data<int64_t>(settings[3]),
                         data<int64_t>(settings[4]), max_top_k};
  if (!checked && !cpu::can_sample(data<float>(x), rows, count, draws)) return {};
  const Tensor tokens = given_or_new(tokens_out, {rows}, ScalarType::Long);
  check(tokens, "tokens_out", ScalarType::Long, rows);
  cpu::sample(data<float>(x), rows, count, draws, mutable_data<int64_t>(tokens));
  return {tokens};
}

}  // namespace
}  // namespace flint

STABLE_TORCH_LIBRARY_FRAGMENT(flint_native, m) {
  m.def(
      "sample(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor seed, "
      "Tensor offset, *, bool enable_pdl=False, int max_top_k=0, Tensor(p!)? tokens_out=None, "
      "bool checked=False) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(flint_native, CPU, m) { m.impl("sample", TORCH_BOX(&flint::sample)); }
