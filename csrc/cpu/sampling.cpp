#include "cpu/sampling.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "philox.h"
#include "topk_key.h"

namespace flint::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// NaN counts as -inf, +inf as the largest finite value.
float readable(float logit) {
  if (std::isnan(logit)) return -kInfinity;
  return logit == kInfinity ? std::numeric_limits<float>::max() : logit;
}

int64_t largest(const float* logits, int64_t count) {
  int64_t best = 0;
  float value = -kInfinity;
  for (int64_t i = 0; i < count; ++i) {
    const float logit = readable(logits[i]);
    if (logit > value) {
      value = logit;
      best = i;
    }
  }
  return best;
}

// The top_k logits above -inf (all where it is 0), falling, ties by rising token, as keys.
void rank(const float* logits, int64_t count, int64_t top_k, std::vector<uint64_t>& keys) {
  keys.clear();
  for (int64_t i = 0; i < count; ++i) {
    const float logit = readable(logits[i]);
    if (logit > -kInfinity) keys.push_back(topk_key(logit, static_cast<uint32_t>(i)));
  }
  const auto most = static_cast<int64_t>(keys.size());
  const int64_t kept = top_k > 0 ? std::min(top_k, most) : most;
  if (kept == most) return std::sort(keys.begin(), keys.end(), std::greater<>());
  std::partial_sort(keys.begin(), keys.begin() + kept, keys.end(), std::greater<>());
  keys.resize(static_cast<size_t>(kept));
}

int64_t draw(const float* logits, const std::vector<uint64_t>& keys, double temperature,
             double top_p, double u, std::vector<double>& chances) {
  const auto scaled = [&](uint64_t key) {
    return static_cast<double>(readable(logits[topk_index(key)])) / temperature;
  };
  const double first = scaled(keys[0]);
  double total = 0.0;
  chances.clear();
  for (const uint64_t key : keys) {
    chances.push_back(std::exp(scaled(key) - first));
    total += chances.back();
  }
  // To cumulative probabilities. A candidate is kept while what comes before it is below top_p.
  double before = 0.0;
  size_t kept = 0;
  for (double& chance : chances) {
    if (kept > 0 && !(before < top_p)) break;
    chance = before += chance / total;
    ++kept;
  }
  const double target = u * before;
  size_t chosen = 0;
  while (chosen + 1 < kept && chances[chosen] <= target) ++chosen;
  return topk_index(keys[chosen]);
}

}  // namespace

bool can_sample(const float* logits, int64_t rows, int64_t count, const Draws& draws) {
  for (int64_t row = 0; row < rows; ++row) {
    const float temperature = draws.temperature[row], top_p = draws.top_p[row];
    if (!(temperature >= 0 && temperature < kInfinity)) return false;
    const int64_t top_k = draws.top_k[row];
    const bool promised = 1 <= top_k && top_k <= draws.max_top_k;
    if (draws.max_top_k > 0 && temperature != 0 && !promised) return false;
    if (top_k < 0 || !(top_p > 0 && top_p <= 1)) return false;
    const float* first = logits + row * count;
    if (std::none_of(first, first + count, [](float x) { return x > -kInfinity; })) return false;
  }
  return true;
}

void sample(const float* logits, int64_t rows, int64_t count, const Draws& draws, int64_t* tokens) {
  std::vector<uint64_t> keys;
  std::vector<double> chances;
  for (int64_t row = 0; row < rows; ++row) {
    const float* x = logits + row * count;
    if (draws.temperature[row] == 0) {
      tokens[row] = largest(x, count);
      continue;
    }
    rank(x, count, draws.top_k[row], keys);
    const double u = uniform_53(draws.seed[row], draws.offset[row]);
    tokens[row] = draw(x, keys, draws.temperature[row], draws.top_p[row], u, chances);
  }
}

}  // namespace flint::cpu
