"""The GPU bodies of the library's kernels for many tokens in BF16: projections with NVFP4 weights,
routed experts with either kind. (BF16 projections are cuBLAS's, by the general bodies.)

They come after those for a few tokens (`native_decode`), and take what those leave. Each takes what
the reference body of the same name takes, and the outputs' buffers where there are any. It returns
NotImplemented, with nothing written, where its kernel does not take the call (FP32, widths that are
no multiple of 256, or 64 for BF16 weights, weights that are not dense, another GPU): a general body
has to. They read
nothing back, so a CUDA graph can hold them, and the bits are the same in every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

_native = torch.ops.flint_native
_flint: Any = torch.ops.flint

ARCHITECTURES = ("sm_90a",)
"""Where they run: their tensor cores' asynchronous products are Hopper's alone. The library's code
for the others is empty."""

ROUNDED, SILU_AND_MUL = range(2)  # cuda::LinearOutput


def _is_taken(x: Tensor) -> bool:
    """Whether x is of the kind, and on a GPU, that these kernels are made for."""
    return x.dtype == torch.bfloat16 and x.numel() > 0 and _runs_on(x.device.index)


@cache
def _runs_on(device: int) -> bool:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}a" in ARCHITECTURES


def _rows(x: Tensor) -> Tensor:
    """x [..., K] as [rows, K] that a description of a matrix can hold: contiguous elements, rows
    one behind the other that start at multiples of 16 bytes."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    stride = rows.stride(0) if rows.shape[0] > 1 else rows.shape[1]
    apart = stride >= rows.shape[1] and stride % 8 == 0
    if rows.stride(1) == 1 and apart and rows.data_ptr() % 16 == 0:
        return rows
    return rows.clone(memory_format=torch.contiguous_format)


def _empty(given: Tensor | None, shape: Sequence[int], like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device) if given is None else given


def linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    scale_2: Tensor,
    shards: Sequence[int],
    output: int,
    enable_pdl: bool = False,
    out: Tensor | None = None,
    plan: tuple[int, int] = (0, 0),
) -> Any:
    """`plan`: tokens of a tile and CTAs that share its columns; the best, if not given."""
    if not _is_taken(x) or weight.shape[0] == 0:
        return NotImplemented
    width = weight.shape[0] // 2 if output == SILU_AND_MUL else weight.shape[0]
    out = _empty(out, (*x.shape[:-1], width), x)
    first, second, third, *_ = (*shards, 0, 0, 0)
    launched = _native.linear_many_cuda_out(
        _rows(x), weight, scale, scale_2, first, second, third, output, *plan, out, enable_pdl
    )
    return out if launched else NotImplemented


def nvfp4_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_scale_2: Tensor,
    shard_sizes: Sequence[int] | None,
    enable_pdl: bool = False,
    out: Tensor | None = None,
) -> Any:
    shards = shard_sizes or ()
    return linear(x, weight, weight_scale, weight_scale_2, shards, ROUNDED, enable_pdl, out)


def nvfp4_linear_silu_and_mul(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_scale_2: Tensor,
    enable_pdl: bool = False,
    out: Tensor | None = None,
) -> Any:
    shards = (weight.shape[0] // 2,) * 2
    return linear(x, weight, weight_scale, weight_scale_2, shards, SILU_AND_MUL, enable_pdl, out)


def nvfp4_qkv_norm_rope_kv_write(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_scale_2: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin: Tensor | None,
    positions: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    eps: float,
    workspace: Tensor | None = None,
    enable_pdl: bool = False,
    q_out: Tensor | None = None,
) -> Any:
    kv_rows = k_cache.shape[2] * k_cache.shape[3]
    shards = (weight.shape[0] - 2 * kv_rows, kv_rows, kv_rows)
    qkv = nvfp4_linear(x, weight, weight_scale, weight_scale_2, shards, enable_pdl)
    if qkv is NotImplemented:
        return NotImplemented
    rest = (q_weight, k_weight, cos_sin, positions, slot_mapping, k_cache, v_cache, eps)
    q = _flint.qk_norm_rope_kv_write(qkv, *rest, enable_pdl=enable_pdl)[0]
    return q if q_out is None else q_out.copy_(q)


# cuda::ExpertSteps
ORDER, GATHER_TOKENS, GATE_UP, ACT_BY_ENTRY, GATHER_ACTS, DOWN, COMBINE = (1 << i for i in range(7))


def experts(
    steps: int,
    topk_ids: Tensor,
    shape: tuple[int, int, int],
    *,
    bf16: bool,
    enable_pdl: bool,
    gathers: bool = False,
    order: Tensor | None = None,
    rows: Tensor | None = None,
    act: Tensor | None = None,
    **tensors: Tensor | None,
) -> bool:
    """Steps of the routed experts; whether they were launched.

    topk_ids [M, top_k]; shape: E, H, I; bf16: the weights, which have no scales then; gathers: gate
    and up bring the rows of x into the order of experts themselves, where they have a way to, and
    GATHER_TOKENS does nothing (in no op's use: it has not run on a GPU in its present form). What a
    step reads and writes, where it is one of `steps`: x [M, H]; w13, scale, scale_2; w2, w2_scale,
    w2_scale_2; topk_weights; shared [M, H] or None; entry_act [M * top_k, I]; out [M, H]. Between
    the steps stand order, [words] int32, rows [M * top_k, H] and act [M * top_k, I], which are made
    where they are not given.
    """
    entries, (count, hidden, width), device = topk_ids.numel(), shape, topk_ids.device
    if order is None:
        words = _native.routed_experts_many_words(*topk_ids.shape, count)
        order = torch.empty(words, dtype=torch.int32, device=device)
    if rows is None:
        rows = torch.empty(entries, hidden, dtype=torch.bfloat16, device=device)
    if act is None:
        act = torch.empty(entries, width, dtype=torch.bfloat16, device=device)
    names = (
        *("x", "w13", "scale", "scale_2", "w2", "w2_scale", "w2_scale_2"),
        *("topk_weights", "shared", "entry_act"),
    )
    given = [tensors.get(name) for name in names]
    launched: bool = _native.routed_experts_many_cuda_out(
        topk_ids.contiguous(),
        *shape,
        bf16,
        gathers,
        steps,
        *given,
        order,
        rows,
        act,
        tensors.get("out"),
        enable_pdl,
    )
    return launched


class _Weight(NamedTuple):
    """Of one product; the scales are None for BF16."""

    weight: Tensor
    scale: Tensor | None = None
    scale_2: Tensor | None = None


def _takes(x: Tensor, topk_ids: Tensor, weight: Tensor) -> bool:
    return _is_taken(x) and topk_ids.numel() > 0 and 0 not in weight.shape


def _routed_experts(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w13: _Weight,
    w2: _Weight,
    shared_output: Tensor | None,
    enable_pdl: bool,
    out: Tensor | None,
) -> Any:
    if not _takes(x, topk_ids, w13.weight):
        return NotImplemented
    out = _empty(out, x.shape, x)
    launched = experts(
        ORDER | GATHER_TOKENS | GATE_UP | DOWN | COMBINE,
        topk_ids,
        (w13.weight.shape[0], x.shape[1], w13.weight.shape[1] // 2),
        bf16=w13.scale is None,
        enable_pdl=enable_pdl,
        x=_rows(x),
        w13=w13.weight,
        scale=w13.scale,
        scale_2=w13.scale_2,
        w2=w2.weight,
        w2_scale=w2.scale,
        w2_scale_2=w2.scale_2,
        topk_weights=topk_weights.contiguous(),
        shared=None if shared_output is None else _rows(shared_output.contiguous()),
        out=out,
    )
    return out if launched else NotImplemented


def _gate_up(
    x: Tensor, topk_ids: Tensor, w13: _Weight, enable_pdl: bool, routed_act_out: Tensor | None
) -> Any:
    if not _takes(x, topk_ids, w13.weight):
        return NotImplemented
    width = w13.weight.shape[1] // 2
    routed = _empty(routed_act_out, (*topk_ids.shape, width), x)
    launched = experts(
        ORDER | GATHER_TOKENS | GATE_UP | ACT_BY_ENTRY,
        topk_ids,
        (w13.weight.shape[0], x.shape[1], width),
        bf16=w13.scale is None,
        enable_pdl=enable_pdl,
        x=_rows(x),
        w13=w13.weight,
        scale=w13.scale,
        scale_2=w13.scale_2,
        act=routed.zero_().view(-1, width),  # what a skipped entry has
    )
    return routed if launched else NotImplemented


def _down(
    routed_act: Tensor,
    shared: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w2: _Weight,
    enable_pdl: bool,
    out: Tensor | None,
) -> Any:
    hidden, width = w2.weight.shape[1], routed_act.shape[2]
    out = _empty(out, (routed_act.shape[0], hidden), routed_act)
    launched = experts(
        ORDER | GATHER_ACTS | DOWN | COMBINE,
        topk_ids,
        (w2.weight.shape[0], hidden, width),
        bf16=w2.scale is None,
        enable_pdl=enable_pdl,
        entry_act=_rows(routed_act.contiguous()),
        w2=w2.weight,
        w2_scale=w2.scale,
        w2_scale_2=w2.scale_2,
        topk_weights=topk_weights.contiguous(),
        shared=shared,
        out=out,
    )
    return out if launched else NotImplemented


def nvfp4_routed_experts(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w13_scale_2: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    w2_scale_2: Tensor,
    shared_output: Tensor | None,
    workspace: Tensor | None = None,
    enable_pdl: bool = False,
    out: Tensor | None = None,
) -> Any:
    up, down = _Weight(w13, w13_scale, w13_scale_2), _Weight(w2, w2_scale, w2_scale_2)
    return _routed_experts(x, topk_weights, topk_ids, up, down, shared_output, enable_pdl, out)


def bf16_routed_experts(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w13: Tensor,
    w2: Tensor,
    shared_output: Tensor | None,
    workspace: Tensor | None = None,
    enable_pdl: bool = False,
    out: Tensor | None = None,
) -> Any:
    up, down = _Weight(w13), _Weight(w2)
    return _routed_experts(x, topk_weights, topk_ids, up, down, shared_output, enable_pdl, out)


def nvfp4_moe_gate_up(
    x: Tensor,
    topk_ids: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w13_scale_2: Tensor,
    shared_w13: Tensor,
    shared_w13_scale: Tensor,
    shared_w13_scale_2: Tensor,
    workspace: Tensor | None = None,
    enable_pdl: bool = False,
    routed_act_out: Tensor | None = None,
    shared_act_out: Tensor | None = None,
) -> Any:
    weight = _Weight(w13, w13_scale, w13_scale_2)
    routed = _gate_up(x, topk_ids, weight, enable_pdl, routed_act_out)
    if routed is NotImplemented:
        return NotImplemented
    shared = _empty(shared_act_out, (x.shape[0], shared_w13.shape[0] // 2), x)
    of_shared = shared_w13, shared_w13_scale, shared_w13_scale_2
    _flint.nvfp4_linear_silu_and_mul.out(x, *of_shared, enable_pdl=enable_pdl, out=shared)
    return routed, shared


def bf16_moe_gate_up(
    x: Tensor,
    topk_ids: Tensor,
    w13: Tensor,
    shared_w13: Tensor,
    workspace: Tensor | None = None,
    enable_pdl: bool = False,
    routed_act_out: Tensor | None = None,
    shared_act_out: Tensor | None = None,
) -> Any:
    routed = _gate_up(x, topk_ids, _Weight(w13), enable_pdl, routed_act_out)
    if routed is NotImplemented:
        return NotImplemented
    shared = _empty(shared_act_out, (x.shape[0], shared_w13.shape[0] // 2), x)
    _flint.bf16_linear_silu_and_mul.out(x, shared_w13, enable_pdl=enable_pdl, out=shared)
    return routed, shared


def nvfp4_moe_down(
    routed_act: Tensor,
    shared_act: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    w2_scale_2: Tensor,
    shared_w2: Tensor,
    shared_w2_scale: Tensor,
    shared_w2_scale_2: Tensor,
    workspace: Tensor | None = None,
    enable_pdl: bool = False,
    out: Tensor | None = None,
) -> Any:
    if not _takes(routed_act, topk_ids, w2):
        return NotImplemented
    of_shared = shared_w2, shared_w2_scale, shared_w2_scale_2
    shared = _flint.nvfp4_linear(shared_act, *of_shared, enable_pdl=enable_pdl)
    weight = _Weight(w2, w2_scale, w2_scale_2)
    return _down(routed_act, shared, topk_weights, topk_ids, weight, enable_pdl, out)


def bf16_moe_down(
    routed_act: Tensor,
    shared_act: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w2: Tensor,
    shared_w2: Tensor,
    workspace: Tensor | None = None,
    enable_pdl: bool = False,
    out: Tensor | None = None,
) -> Any:
    if not _takes(routed_act, topk_ids, w2):
        return NotImplemented
    shared = _flint.bf16_linear(shared_act, shared_w2, enable_pdl=enable_pdl)
    return _down(routed_act, shared, topk_weights, topk_ids, _Weight(w2), enable_pdl, out)
