"""Router and experts: `flint_kernels/ops/experts.py` and `low_latency.py` say what they compute."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flint_kernels.formats.repack import dequantize
from flint_kernels.reference.numerics import aligned, matmul_rows, sigmoid

# Experts expanded to fp32 at a time: bounds the scratch of a prefill that selects all of them.
_EXPERTS_AT_A_TIME = 8

# Ids of at most _EXPERTS_AT_A_TIME experts -> their weights [n, N, K].
Expand = Callable[[list[int]], torch.Tensor]


def router_topk(
    logits: torch.Tensor, top_k: int, renormalize: bool, **_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    # A stable sort settles ties by index; sort ranks NaN above everything, as the op promises.
    ranked, ids = torch.sort(logits.to(torch.float32), dim=1, descending=True, stable=True)
    scores = sigmoid(ranked[:, :top_k])
    if renormalize:
        scores = scores / (_sum_in_order(scores) + 1e-20)
    weights = scores.to(logits.dtype).to(torch.float32)
    return weights, ids[:, :top_k].to(torch.int32)


def _sum_in_order(columns: torch.Tensor) -> torch.Tensor:
    """[M, k] -> [M, 1], added from left to right."""
    total = columns[:, 0:1]
    for index in range(1, columns.shape[1]):
        total = total + columns[:, index : index + 1]
    return total


def expand_nvfp4(weight: torch.Tensor, scale: torch.Tensor) -> Expand:
    """Without the global scales, which belong to the sums."""

    def expand(experts: list[int]) -> torch.Tensor:
        chosen = torch.tensor(experts, device=weight.device)
        return dequantize(weight[chosen], scale.view(torch.uint8)[chosen].view(scale.dtype))

    return expand


def expand_bf16(weight: torch.Tensor) -> Expand:
    def expand(experts: list[int]) -> torch.Tensor:
        chosen = weight[torch.tensor(experts, device=weight.device)]
        return chosen.to(torch.float32, memory_format=torch.contiguous_format)

    return expand


def _entry_sums(
    rows: torch.Tensor, row_of_entry: torch.Tensor, topk_ids: torch.Tensor, expand: Expand, out: int
) -> torch.Tensor:
    """`rows[row_of_entry[i]] x weight of expert topk_ids[i]` for each entry i -> [entries, out].

    fp32 sums without global scales; zeros for a skipped entry.
    """
    ids = topk_ids.flatten()
    experts = [expert for expert in ids.unique().tolist() if expert >= 0]
    sums = rows.new_zeros(ids.shape[0], out, dtype=torch.float32)
    for start in range(0, len(experts), _EXPERTS_AT_A_TIME):
        batch = experts[start : start + _EXPERTS_AT_A_TIME]
        for expert, weight in zip(batch, expand(batch), strict=True):
            entries = torch.nonzero(ids == expert).squeeze(1)
            sums[entries] = matmul_rows(rows[row_of_entry[entries]], aligned(weight))
    return sums


def _entry_scales(scale_2: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
    """Global scales [E, ...] of each entry's expert; 1 for a skipped one, which has no expert:
    another's may be NaN, and would make NaN of the zeros."""
    ids = topk_ids.flatten()
    scales = scale_2[ids.clamp_min(0)]
    scales[ids < 0] = 1.0
    return scales


def routed_gate_up(
    x: torch.Tensor, topk_ids: torch.Tensor, expand: Expand, scale_2: torch.Tensor | None, out: int
) -> torch.Tensor:
    """`round(g * sigmoid(g) * u)` for every entry of topk_ids -> [M, top_k, out / 2]."""
    top_k = topk_ids.shape[1]
    row_of_entry = torch.arange(topk_ids.numel(), device=x.device) // top_k
    gate, up = _entry_sums(x, row_of_entry, topk_ids, expand, out).chunk(2, dim=1)
    if scale_2 is not None:
        scales = _entry_scales(scale_2, topk_ids)
        gate, up = gate * scales[:, 0:1], up * scales[:, 1:2]
    acts = (gate * sigmoid(gate) * up).to(x.dtype)
    return acts.reshape(x.shape[0], top_k, out // 2)


def routed_down(
    acts: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expand: Expand,
    scale_2: torch.Tensor | None,
    hidden: int,
) -> torch.Tensor:
    """`round(sum(weight * round(scale * sum(act * w))))` in the order of selection -> [M, H]."""
    entries = torch.arange(topk_ids.numel(), device=acts.device)
    rows = acts.reshape(entries.shape[0], acts.shape[-1])
    sums = _entry_sums(rows, entries, topk_ids, expand, hidden)
    if scale_2 is not None:
        sums = sums * _entry_scales(scale_2, topk_ids).unsqueeze(1)
    outputs = sums.to(acts.dtype).to(torch.float32).reshape(*topk_ids.shape, hidden)
    # A skipped entry must not contribute, whatever its weight is: 0 * NaN would be NaN.
    skipped = (topk_ids < 0).unsqueeze(-1)
    parts = (outputs * topk_weights.unsqueeze(-1)).masked_fill(skipped, 0)
    routed = acts.new_zeros(topk_ids.shape[0], hidden, dtype=torch.float32)
    for part in parts.unbind(1):
        routed = routed + part
    return routed.to(acts.dtype)


def add_shared(routed: torch.Tensor, shared: torch.Tensor | None) -> torch.Tensor:
    if shared is None:
        return routed
    return (routed.to(torch.float32) + shared.to(torch.float32)).to(routed.dtype)


def nvfp4_routed_experts(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w13_scale_2: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    w2_scale_2: torch.Tensor,
    shared_output: torch.Tensor | None,
    **_: object,
) -> torch.Tensor:
    acts = routed_gate_up(x, topk_ids, expand_nvfp4(w13, w13_scale), w13_scale_2, w13.shape[1])
    down = expand_nvfp4(w2, w2_scale)
    routed = routed_down(acts, topk_weights, topk_ids, down, w2_scale_2, w2.shape[1])
    return add_shared(routed, shared_output)


def bf16_routed_experts(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    shared_output: torch.Tensor | None,
    **_: object,
) -> torch.Tensor:
    acts = routed_gate_up(x, topk_ids, expand_bf16(w13), None, w13.shape[1])
    routed = routed_down(acts, topk_weights, topk_ids, expand_bf16(w2), None, w2.shape[1])
    return add_shared(routed, shared_output)
