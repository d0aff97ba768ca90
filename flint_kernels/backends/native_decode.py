"""The GPU bodies of the library's kernels for a few tokens, BF16 with NVFP4 or BF16 weights.

Each takes what the reference body of the same name takes, and the outputs' buffers where there are
any. It returns NotImplemented, with nothing written, where its kernel does not take the call (more
than 8 rows, FP32, an odd width, weights that are not dense, a GPU that lacks what it needs): a
general body has to. They read nothing back, so a CUDA graph can hold them, and a row's bits are the
same in every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from flint_kernels.shapes import flat_rows

_native = torch.ops.flint_native

ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a")
"""Where they run: on GPUs with 227 KB of shared memory for a CTA and clusters of 16. sm_120 has
neither, so there the general bodies run, though the library holds code for it as well."""

_MOST_ROWS = 8
_ROUNDED, _SILU_AND_MUL, _LOGITS = range(3)  # cuda::LinearOutput


def _is_few(x: Tensor) -> bool:
    """Whether x [..., K] is of the kind, and on a GPU, that these kernels are made for."""
    few = x.dtype == torch.bfloat16 and 0 < x.numel() <= _MOST_ROWS * x.shape[-1]
    return few and _runs_on(x.device.index)


@cache
def _runs_on(device: int) -> bool:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}a" in ARCHITECTURES


def _rows(x: Tensor) -> Tensor:
    """x [..., K] as [rows, K] with contiguous elements."""
    rows = x if x.dim() == 2 else flat_rows(x)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _read_ahead(enable_pdl: bool, *tensors: Tensor | None) -> tuple[list[Tensor | None], bool]:
    """What a kernel reads before it waits for the one in front of it, dense; and whether it may
    start early: not where a tensor had to be copied, since the copy is what it would not wait for.
    """
    copied = not all(tensor is None or tensor.is_contiguous() for tensor in tensors)
    dense = [None if tensor is None else tensor.contiguous() for tensor in tensors]
    return dense, enable_pdl and not copied


def _empty(given: Tensor | None, shape: Sequence[int], dtype: torch.dtype, like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device) if given is None else given


def _linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    scale_2: Tensor | None,
    shards: Sequence[int],
    output: int,
    enable_pdl: bool,
    out: Tensor | None,
) -> Any:
    if not _is_few(x) or weight.shape[0] == 0:
        return NotImplemented
    width = weight.shape[0] // 2 if output == _SILU_AND_MUL else weight.shape[0]
    dtype = torch.float32 if output == _LOGITS else x.dtype
    out = _empty(out, (*x.shape[:-1], width), dtype, x)
    first, second, third, *_ = (*shards, 0, 0, 0)
    launched = _native.linear_cuda_out(
        _rows(x), weight, scale, scale_2, first, second, third, output, out, enable_pdl
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
    return _linear(x, weight, weight_scale, weight_scale_2, shards, _ROUNDED, enable_pdl, out)


def bf16_linear(
    x: Tensor, weight: Tensor, enable_pdl: bool = False, out: Tensor | None = None
) -> Any:
    return _linear(x, weight, None, None, (), _ROUNDED, enable_pdl, out)


def nvfp4_linear_silu_and_mul(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_scale_2: Tensor,
    enable_pdl: bool = False,
    out: Tensor | None = None,
) -> Any:
    shards = (weight.shape[0] // 2,) * 2
    return _linear(x, weight, weight_scale, weight_scale_2, shards, _SILU_AND_MUL, enable_pdl, out)


def bf16_linear_silu_and_mul(
    x: Tensor, weight: Tensor, enable_pdl: bool = False, out: Tensor | None = None
) -> Any:
    return _linear(x, weight, None, None, (), _SILU_AND_MUL, enable_pdl, out)


def nvfp4_lm_head(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_scale_2: Tensor,
    enable_pdl: bool = False,
    logits_out: Tensor | None = None,
) -> Any:
    return _linear(x, weight, weight_scale, weight_scale_2, (), _LOGITS, enable_pdl, logits_out)


def bf16_lm_head(
    x: Tensor, weight: Tensor, enable_pdl: bool = False, logits_out: Tensor | None = None
) -> Any:
    return _linear(x, weight, None, None, (), _LOGITS, enable_pdl, logits_out)


def _qkv(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    scale_2: Tensor | None,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin: Tensor | None,
    positions: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    eps: float,
    enable_pdl: bool,
    q_out: Tensor | None,
) -> Any:
    if not _is_few(x):
        return NotImplemented
    kv_heads, dim = k_cache.shape[2], k_cache.shape[3]
    ahead, enable_pdl = _read_ahead(
        enable_pdl, q_weight, k_weight, cos_sin, positions, slot_mapping
    )
    q_out = _empty(q_out, (x.shape[0], weight.shape[0] // dim - 2 * kv_heads, dim), x.dtype, x)
    launched = _native.qkv_linear_cuda_out(
        _rows(x), weight, scale, scale_2, *ahead, k_cache, v_cache, eps, q_out, enable_pdl
    )
    return q_out if launched else NotImplemented


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
    rest = (q_weight, k_weight, cos_sin, positions, slot_mapping, k_cache, v_cache, eps)
    return _qkv(x, weight, weight_scale, weight_scale_2, *rest, enable_pdl, q_out)


def bf16_qkv_norm_rope_kv_write(
    x: Tensor,
    weight: Tensor,
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
    rest = (q_weight, k_weight, cos_sin, positions, slot_mapping, k_cache, v_cache, eps)
    return _qkv(x, weight, None, None, *rest, enable_pdl, q_out)


def fused_add_rms_norm_router_topk(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    router_weight: Tensor,
    top_k: int,
    eps: float,
    workspace: Tensor | None = None,
    enable_pdl: bool = False,
    normed_out: Tensor | None = None,
    residual_out: Tensor | None = None,
    topk_weights_out: Tensor | None = None,
    topk_ids_out: Tensor | None = None,
) -> Any:
    if not _is_few(x):
        return NotImplemented
    chosen = (x.shape[0], top_k)
    outputs = (
        _empty(normed_out, x.shape, x.dtype, x),
        _empty(residual_out, x.shape, x.dtype, x),
        _empty(topk_weights_out, chosen, torch.float32, x),
        _empty(topk_ids_out, chosen, torch.int32, x),
    )
    launched = _native.norm_router_cuda_out(
        _rows(x), _rows(residual), weight, router_weight, top_k, eps, *outputs, enable_pdl
    )
    return outputs if launched else NotImplemented


def _gate_up(
    x: Tensor,
    topk_ids: Tensor,
    routed: tuple[Tensor, Tensor | None, Tensor | None],
    shared: tuple[Tensor, Tensor | None, Tensor | None],
    enable_pdl: bool,
    routed_act_out: Tensor | None,
    shared_act_out: Tensor | None,
) -> Any:
    if not _is_few(x):
        return NotImplemented
    outputs = (
        _empty(routed_act_out, (*topk_ids.shape, routed[0].shape[1] // 2), x.dtype, x),
        _empty(shared_act_out, (x.shape[0], shared[0].shape[0] // 2), x.dtype, x),
    )
    launched = _native.moe_gate_up_cuda_out(
        _rows(x), topk_ids.contiguous(), *routed, *shared, *outputs, enable_pdl
    )
    return outputs if launched else NotImplemented


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
    routed = (w13, w13_scale, w13_scale_2)
    shared = (shared_w13, shared_w13_scale, shared_w13_scale_2)
    return _gate_up(x, topk_ids, routed, shared, enable_pdl, routed_act_out, shared_act_out)


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
    routed, shared = (w13, None, None), (shared_w13, None, None)
    return _gate_up(x, topk_ids, routed, shared, enable_pdl, routed_act_out, shared_act_out)


def _down(
    routed_act: Tensor,
    shared_act: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    routed: tuple[Tensor, Tensor | None, Tensor | None],
    shared: tuple[Tensor, Tensor | None, Tensor | None],
    enable_pdl: bool,
    out: Tensor | None,
) -> Any:
    if not _is_few(shared_act):
        return NotImplemented
    ahead, enable_pdl = _read_ahead(enable_pdl, topk_weights, topk_ids)
    out = _empty(out, (routed_act.shape[0], routed[0].shape[1]), routed_act.dtype, routed_act)
    launched = _native.moe_down_cuda_out(
        routed_act.contiguous(),
        shared_act.contiguous(),
        *ahead,
        *routed,
        *shared,
        out,
        enable_pdl,
    )
    return out if launched else NotImplemented


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
    routed, shared = (w2, w2_scale, w2_scale_2), (shared_w2, shared_w2_scale, shared_w2_scale_2)
    return _down(routed_act, shared_act, topk_weights, topk_ids, routed, shared, enable_pdl, out)


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
    routed, shared = (w2, None, None), (shared_w2, None, None)
    return _down(routed_act, shared_act, topk_weights, topk_ids, routed, shared, enable_pdl, out)
