"""The CPU bodies of BF16 calls, by the C++ library: the arithmetic of `flint_kernels.reference`.

Each takes what the reference body of the same name takes. Those of one native call also take the
outputs' buffers, contiguous, and write in place; the others leave them alone (`implement` in
`flint_kernels/ops` then copies). Rows are summed in an order of their
own, so the bits differ from the reference's where a sum's order shows, and like its, they depend
on nothing but the row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_native = torch.ops.flint_native
_INT64 = torch.int64


def _empty(given: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The buffer that was given, or a new one."""
    return torch.empty(shape, dtype=dtype) if given is None else given


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None, **_: object
) -> Tensor:
    out = _empty(out, x.shape, x.dtype)
    threads = torch.get_num_threads()
    _native.rms_norm_out(x.contiguous(), None, weight.contiguous(), eps, out, None, threads)
    return out


def fused_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    normed_out: Tensor | None = None,
    residual_out: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, Tensor]:
    normed_out = _empty(normed_out, x.shape, x.dtype)
    residual_out = _empty(residual_out, x.shape, x.dtype)
    _native.rms_norm_out(
        x.contiguous(),
        residual.contiguous(),
        weight.contiguous(),
        eps,
        normed_out,
        residual_out,
        torch.get_num_threads(),
    )
    return normed_out, residual_out


def silu_and_mul(x: Tensor, out: Tensor | None = None, **_: object) -> Tensor:
    out = _empty(out, (*x.shape[:-1], x.shape[-1] // 2), x.dtype)
    _native.silu_and_mul_out(x.contiguous(), out, torch.get_num_threads())
    return out


def _matmul(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None,
    weight_scale_2: Tensor | None,
    shard_sizes: Sequence[int] | None,
    dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    out = _empty(out, (*x.shape[:-1], weight.shape[0]), dtype)
    _native.matmul_out(
        x.contiguous(),
        weight.contiguous(),
        None if weight_scale is None else weight_scale.contiguous(),
        None if weight_scale_2 is None else weight_scale_2.contiguous(),
        [] if shard_sizes is None else shard_sizes,
        out,
        torch.get_num_threads(),
    )
    return out


def nvfp4_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_scale_2: Tensor,
    shard_sizes: Sequence[int] | None,
    out: Tensor | None = None,
    **_: object,
) -> Tensor:
    return _matmul(x, weight, weight_scale, weight_scale_2, shard_sizes, x.dtype, out)


def bf16_linear(x: Tensor, weight: Tensor, out: Tensor | None = None, **_: object) -> Tensor:
    return _matmul(x, weight, None, None, None, x.dtype, out)


def nvfp4_linear_silu_and_mul(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_scale_2: Tensor,
    out: Tensor | None = None,
    **_: object,
) -> Tensor:
    halves = [weight.shape[0] // 2] * 2
    return silu_and_mul(_matmul(x, weight, weight_scale, weight_scale_2, halves, x.dtype), out)


def bf16_linear_silu_and_mul(
    x: Tensor, weight: Tensor, out: Tensor | None = None, **_: object
) -> Tensor:
    return silu_and_mul(bf16_linear(x, weight), out)


def nvfp4_lm_head(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_scale_2: Tensor,
    logits_out: Tensor | None = None,
    **_: object,
) -> Tensor:
    return _matmul(x, weight, weight_scale, weight_scale_2, None, torch.float32, logits_out)


def bf16_lm_head(
    x: Tensor, weight: Tensor, logits_out: Tensor | None = None, **_: object
) -> Tensor:
    return _matmul(x, weight, None, None, None, torch.float32, logits_out)


def qk_norm_rope_kv_write(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin: Tensor | None,
    positions: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    eps: float,
    q_out: Tensor | None = None,
    k_out: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, Tensor]:
    rows, kv_heads, dim = qkv.shape[0], k_cache.shape[2], k_cache.shape[3]
    q_out = _empty(q_out, (rows, qkv.shape[1] // dim - 2 * kv_heads, dim), qkv.dtype)
    k_out = _empty(k_out, (rows, kv_heads, dim), qkv.dtype)
    _native.qk_norm_rope_kv_write_out(
        qkv.contiguous(),
        q_weight.contiguous(),
        k_weight.contiguous(),
        None if cos_sin is None else cos_sin.contiguous(),
        positions.to(_INT64).contiguous(),
        slot_mapping.to(_INT64).contiguous(),
        k_cache,
        v_cache,
        eps,
        q_out,
        k_out,
    )
    return q_out, k_out


def nvfp4_qkv_norm_rope_kv_write(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_scale_2: Tensor,
    k_cache: Tensor,
    **rest: object,
) -> Tensor:
    kv_rows = k_cache.shape[2] * k_cache.shape[3]
    shards = [weight.shape[0] - 2 * kv_rows, kv_rows, kv_rows]
    qkv = _matmul(x, weight, weight_scale, weight_scale_2, shards, x.dtype)
    return qk_norm_rope_kv_write(qkv, k_cache=k_cache, **rest)[0]  # type: ignore[arg-type]


def bf16_qkv_norm_rope_kv_write(x: Tensor, weight: Tensor, **rest: object) -> Tensor:
    return qk_norm_rope_kv_write(bf16_linear(x, weight), **rest)[0]  # type: ignore[arg-type]


def attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    sinks: Tensor | None,
    window: int,
    scale: float | None,
    out: Tensor | None = None,
    **_: object,
) -> Tensor:
    out = _empty(out, q.shape, q.dtype)
    _native.attention_out(
        q.contiguous(),
        None,
        None,
        k_cache,
        v_cache,
        block_table.contiguous(),
        seq_lens.contiguous(),
        None,
        None if sinks is None else sinks.contiguous(),
        window,
        q.shape[-1] ** -0.5 if scale is None else scale,
        out,
        torch.get_num_threads(),
    )
    return out


def attention_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    k_cache: Tensor | None,
    v_cache: Tensor | None,
    block_table: Tensor | None,
    context_lens: Tensor | None,
    sinks: Tensor | None,
    window: int,
    scale: float | None,
    out: Tensor | None = None,
    **_: object,
) -> Tensor:
    out = _empty(out, q.shape, q.dtype)
    _native.attention_out(
        q.contiguous(),
        k if k.stride(-1) == 1 else k.contiguous(),
        v if v.stride(-1) == 1 else v.contiguous(),
        k_cache,
        v_cache,
        None if block_table is None else block_table.contiguous(),
        None if context_lens is None else context_lens.contiguous(),
        cu_seqlens.contiguous(),
        None if sinks is None else sinks.contiguous(),
        window,
        q.shape[-1] ** -0.5 if scale is None else scale,
        out,
        torch.get_num_threads(),
    )
    return out


def router_topk(
    logits: Tensor,
    top_k: int,
    renormalize: bool = True,
    topk_weights_out: Tensor | None = None,
    topk_ids_out: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], top_k)
    weights = _empty(topk_weights_out, shape, torch.float32)
    ids = _empty(topk_ids_out, shape, torch.int32)
    _native.router_topk_out(logits.contiguous(), top_k, renormalize, weights, ids)
    return weights, ids


def fused_add_rms_norm_router_topk(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    router_weight: Tensor,
    top_k: int,
    eps: float,
    **_: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    normed, residual_out = fused_add_rms_norm(x, residual, weight, eps)
    return normed, residual_out, *router_topk(bf16_linear(normed, router_weight), top_k)


def _expert_matmul(
    x: Tensor,
    topk_ids: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None,
    weight_scale_2: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Each entry of topk_ids times its row of x: a row has all its entries, or one of its own."""
    out = torch.empty(topk_ids.numel(), weight.shape[1], dtype=dtype)
    _native.expert_matmul_out(
        x.contiguous(),
        topk_ids.contiguous(),
        weight.contiguous(),
        None if weight_scale is None else weight_scale.contiguous(),
        None if weight_scale_2 is None else weight_scale_2.contiguous(),
        out,
        torch.get_num_threads(),
    )
    return out


def _routed_act(
    x: Tensor, topk_ids: Tensor, w13: Tensor, scale: Tensor | None, scale_2: Tensor | None
) -> Tensor:
    gate_up = _expert_matmul(x, topk_ids, w13, scale, scale_2, torch.float32)
    act = torch.empty(*topk_ids.shape, w13.shape[1] // 2, dtype=x.dtype)
    _native.routed_act_out(gate_up, act)
    return act


def _routed_down(
    act: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w2: Tensor,
    scale: Tensor | None,
    scale_2: Tensor | None,
    shared_output: Tensor | None,
) -> Tensor:
    rows = act.reshape(topk_ids.numel(), act.shape[-1])
    outputs = _expert_matmul(rows, topk_ids, w2, scale, scale_2, act.dtype)
    out = torch.empty(act.shape[0], w2.shape[1], dtype=act.dtype)
    _native.combine_out(
        outputs,
        topk_weights.contiguous(),
        topk_ids.contiguous(),
        None if shared_output is None else shared_output.contiguous(),
        w2.shape[0],
        out,
    )
    return out


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
    **_: object,
) -> Tensor:
    act = _routed_act(x, topk_ids, w13, w13_scale, w13_scale_2)
    return _routed_down(act, topk_weights, topk_ids, w2, w2_scale, w2_scale_2, shared_output)


def bf16_routed_experts(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w13: Tensor,
    w2: Tensor,
    shared_output: Tensor | None,
    **_: object,
) -> Tensor:
    act = _routed_act(x, topk_ids, w13, None, None)
    return _routed_down(act, topk_weights, topk_ids, w2, None, None, shared_output)


def nvfp4_moe_gate_up(
    x: Tensor,
    topk_ids: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w13_scale_2: Tensor,
    shared_w13: Tensor,
    shared_w13_scale: Tensor,
    shared_w13_scale_2: Tensor,
    **_: object,
) -> tuple[Tensor, Tensor]:
    shared = nvfp4_linear_silu_and_mul(x, shared_w13, shared_w13_scale, shared_w13_scale_2)
    return _routed_act(x, topk_ids, w13, w13_scale, w13_scale_2), shared


def bf16_moe_gate_up(
    x: Tensor, topk_ids: Tensor, w13: Tensor, shared_w13: Tensor, **_: object
) -> tuple[Tensor, Tensor]:
    return _routed_act(x, topk_ids, w13, None, None), bf16_linear_silu_and_mul(x, shared_w13)


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
    **_: object,
) -> Tensor:
    shared = nvfp4_linear(shared_act, shared_w2, shared_w2_scale, shared_w2_scale_2, None)
    return _routed_down(routed_act, topk_weights, topk_ids, w2, w2_scale, w2_scale_2, shared)


def bf16_moe_down(
    routed_act: Tensor,
    shared_act: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w2: Tensor,
    shared_w2: Tensor,
    **_: object,
) -> Tensor:
    shared = bf16_linear(shared_act, shared_w2)
    return _routed_down(routed_act, topk_weights, topk_ids, w2, None, None, shared)
