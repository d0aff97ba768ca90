// The router's choice, the routed experts' gate and their combination on the CPU. No torch here.
#pragma once

#include <cstdint>

namespace flint::cpu {

// Of each row of logits [rows, experts] (BF16) the top_k by logit, NaN above +inf, ties to the
// lower index; weights [rows, top_k]: their sigmoids, renormalised on request, rounded to BF16.
void router_topk(const uint16_t* logits, int64_t rows, int64_t experts, int64_t top_k,
                 bool renormalize, float* weights, int32_t* ids);

// act [rows, width] = round(g * sigmoid(g) * u) of fp32 gate_up [rows, 2 * width], gate first.
void routed_act(const float* gate_up, int64_t rows, int64_t width, uint16_t* act);

// out [rows, width] = round(round(sum over j of weights[j] * y[j]) + shared), in order; y
// [rows, top_k, width]; entries whose id is not in [0, experts) are left out; shared may be null.
void combine(const uint16_t* y, const float* weights, const int32_t* ids, const uint16_t* shared,
             int64_t rows, int64_t top_k, int64_t experts, int64_t width, uint16_t* out);

}  // namespace flint::cpu
