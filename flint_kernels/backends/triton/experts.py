"""Routed experts: grouped products with NVFP4, BF16 or FP32 weights, and the combine.

An entry is one (token, choice) pair, entry = token * top_k + choice. The product kernel works on
blocks of entries that share an expert. Few entries are a block each, and need no grouping. Many
are sorted by expert on the device; how many blocks that makes is not known to the host, so the
grid has the most there can be, and those beyond the last find no expert and end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from flint_kernels.backends.triton.launch import emulating, launch
from flint_kernels.backends.triton.numerics import rounded, weight_tile

_DIRECT_ENTRIES = 64  # at most so many entries are not grouped
_COMBINE_COLUMNS = 1024


class Plan(NamedTuple):
    """Which entries each block has: `order[start]` ... `order[end - 1]`, at most BLOCK_M."""

    block_m: int
    blocks: int  # of the grid
    order: torch.Tensor | None  # [entries] int64; None: block b is entry b alone
    expert: torch.Tensor  # [blocks] int32; outside [0, E): nothing to do
    start: torch.Tensor | None  # [blocks] int64
    end: torch.Tensor | None  # [blocks] int64


def plan_blocks(topk_ids: torch.Tensor, experts: int) -> Plan:
    """Groups the entries of topk_ids [M, top_k] by expert; ids outside [0, E) are skipped."""
    ids = topk_ids.contiguous().view(-1)  # a reshape of [M, 1] may be a view with strides
    entries = ids.numel()
    if entries <= _DIRECT_ENTRIES:
        return Plan(16, entries, None, ids, None, None)
    block_m = 16 if entries <= 16 * experts else 64
    key = torch.where((ids < 0) | (ids >= experts), experts, ids)
    ranked, order = torch.sort(key, stable=True)
    ends = torch.searchsorted(
        ranked, torch.arange(experts, dtype=ranked.dtype, device=ids.device), right=True
    )
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    blocks_of = (ends - starts + block_m - 1) // block_m
    last = blocks_of.cumsum(0)  # the first block after each expert's
    blocks = min(entries, entries // block_m + experts)
    block = torch.arange(blocks, device=ids.device)
    expert = torch.searchsorted(last, block, right=True)
    known = expert.clamp_max(experts - 1)
    start = starts[known] + (block - (last - blocks_of)[known]) * block_m
    return Plan(block_m, blocks, order, expert.to(torch.int32), start, ends[known])


@triton.jit(do_not_specialize=["experts", "share"])
def expert_matmul_kernel(
    x,
    order,
    block_expert,
    block_start,
    block_end,
    weight,
    scales,
    scale_2,
    out,
    experts,
    share,
    out_features,
    in_features,
    GROUPED: tl.constexpr,
    NVFP4: tl.constexpr,
    GATED: tl.constexpr,
    EMULATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A block's entries times their expert's weight -> out [entries, out_features].

    Entry i reads row i // share of x. Plain: weight [E, N, K], scale_2 [E],
    `round(scale_2 * sum)`. GATED: weight [E, 2 * N, K], gate rows then up rows, scale_2 [E, 2],
    `round(g * sigmoid(g) * u)` of the unrounded gate and up.
    """
    tiles_n = tl.cdiv(out_features, BLOCK_N)
    block = tl.program_id(0) // tiles_n
    expert = tl.load(block_expert + block)
    if (expert < 0) | (expert >= experts):
        return
    if GROUPED:
        place = tl.load(block_start + block) + tl.arange(0, BLOCK_M)
        m_inside = place < tl.load(block_end + block)
        entry = tl.load(order + place, mask=m_inside, other=0)
    else:
        m_inside = tl.arange(0, BLOCK_M) < 1
        entry = block.to(tl.int64) + tl.zeros((BLOCK_M,), tl.int64)
    row = entry // share
    n = (tl.program_id(0) % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_inside = n < out_features
    dtype: tl.constexpr = x.dtype.element_ty
    parts: tl.constexpr = 2 if GATED else 1
    first = expert.to(tl.int64) * out_features * parts + n

    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(0, in_features, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        mask = (column < in_features)[:, None] & m_inside[None, :]
        vectors = tl.load(x + row[None, :] * in_features + column[:, None], mask=mask, other=0)
        matrix = weight_tile(
            weight, scales, first, n_inside, start, in_features, NVFP4, BLOCK_N, BLOCK_K, dtype
        )
        total = tl.dot(matrix, vectors, total, input_precision="ieee")
        if GATED:
            second = first + out_features
            matrix = weight_tile(
                weight, scales, second, n_inside, start, in_features, NVFP4, BLOCK_N, BLOCK_K, dtype
            )
            up = tl.dot(matrix, vectors, up, input_precision="ieee")

    if NVFP4:
        total = total * tl.load(scale_2 + expert * parts)
        if GATED:
            up = up * tl.load(scale_2 + expert * parts + 1)
    if GATED:
        total = total * (1.0 / (1.0 + tl.exp(-total))) * up
    result = rounded(total, out.dtype.element_ty, EMULATE)
    mask = n_inside[:, None] & m_inside[None, :]
    tl.store(out + entry[None, :] * out_features + n[:, None], result, mask=mask)


def expert_matmul(
    x: torch.Tensor,
    plan: Plan,
    out: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    scale_2: torch.Tensor | None,
    *,
    gated: bool,
) -> torch.Tensor:
    """x [rows, K], `rows` the entries or a divisor of them; fills out [entries, N], and returns it.

    weight: [E, N, K] ([E, 2 * N, K] gated), NVFP4 codes where there are scales. Skipped entries of
    `out` keep what they hold.
    """
    entries, out_features = out.shape
    if x.dtype == torch.float32:
        block_n, block_k, warps, stages = 32, 32, 4, 2
    elif plan.block_m > 16:
        block_n, block_k, warps, stages = 64, 64, 8 if gated else 4, 3
    else:
        block_n, block_k, warps, stages = 32, 128, 4, 3
    launch(
        expert_matmul_kernel,
        plan.blocks * triton.cdiv(out_features, block_n),
        {
            "x": x.contiguous(),
            "order": plan.order,
            "block_expert": plan.expert,
            "block_start": plan.start,
            "block_end": plan.end,
            "weight": weight.contiguous(),
            "scales": None if scales is None else scales.contiguous().view(torch.uint8),
            "scale_2": None if scale_2 is None else scale_2.contiguous(),
            "out": out,
            "experts": weight.shape[0],
            "share": max(entries // max(x.shape[0], 1), 1),
            "out_features": out_features,
            "in_features": x.shape[1],
            "GROUPED": plan.order is not None,
            "NVFP4": scales is not None,
            "GATED": gated,
            "EMULATE": emulating(),
            "BLOCK_M": plan.block_m,
            "BLOCK_N": block_n,
            "BLOCK_K": block_k,
        },
        warps=warps,
        stages=stages,
    )
    return out


@triton.jit(do_not_specialize=["experts", "top_k"])
def combine_kernel(
    outputs,
    weights,
    ids,
    shared,
    out,
    experts,
    top_k,
    hidden,
    EMULATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out [M, hidden] = round(round(sum of weight * output, in the order of choice) + shared)."""
    tiles = tl.cdiv(hidden, BLOCK)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    column = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in range(top_k):
        entry = row * top_k + choice
        expert = tl.load(ids + entry)
        output = tl.load(outputs + entry * hidden + column, mask=inside, other=0)
        part = tl.load(weights + entry) * output.to(tl.float32)
        # A skipped entry has no output, and its weight may be NaN: it is left out, not weighted 0.
        total += tl.where((expert >= 0) & (expert < experts), part, 0.0)
    dtype: tl.constexpr = out.dtype.element_ty
    result = rounded(total, dtype, EMULATE)
    if shared is not None:
        beside = tl.load(shared + row * hidden + column, mask=inside, other=0).to(tl.float32)
        result = rounded(result.to(tl.float32) + beside, dtype, EMULATE)
    tl.store(out + row * hidden + column, result, mask=inside)


def combine(
    outputs: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    experts: int,
    shared: torch.Tensor | None,
) -> torch.Tensor:
    """outputs [M * top_k, H], rounded; weights and ids [M, top_k]; shared [M, H] -> [M, H]."""
    rows, top_k = topk_ids.shape
    hidden = outputs.shape[1]
    out = torch.empty(rows, hidden, dtype=outputs.dtype, device=outputs.device)
    if hidden == 0:
        return out
    block = min(_COMBINE_COLUMNS, triton.next_power_of_2(hidden))
    launch(
        combine_kernel,
        rows * triton.cdiv(hidden, block),
        {
            "outputs": outputs,
            "weights": topk_weights.contiguous(),
            "ids": topk_ids.contiguous(),
            "shared": None if shared is None else shared.contiguous(),
            "out": out,
            "experts": experts,
            "top_k": top_k,
            "hidden": hidden,
            "EMULATE": emulating(),
            "BLOCK": block,
        },
    )
    return out
