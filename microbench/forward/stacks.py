"""Stacks of kernels that a forward can be run with: a stock one, and ours taking its place step by
step, in the order in which such kernels were published for another GPU.

The stock stack is what torch has, launched op by op: F.rms_norm and a separate addition, cuBLAS,
RoPE and cache writes by torch's operations, silu and mul, sigmoid, top-k and torch's grouped matrix
product for experts in BF16. For what torch has not it takes FlashAttention-3, where the environment
variable of `microbench.cases.attention` names its library, else this package's general attention in
Triton; and for products with NVFP4 weights, of experts too, this package's general kernels in
Triton, which expand the weights on the way. `description` says it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flint_kernels.backends import gpu_general
from flint_kernels.model import calls
from flint_kernels.model.mlp import MoE
from microbench.cases import attention

STEPS = ("stock", "qk-norm-rope-kv", "moe", "gemv", "norm-silu", "attention", "low-latency")


def description(checkpoint: str) -> str:
    """What the stock stack is made of here."""
    flash = attention.FA3_LIBRARY in os.environ
    attends = "FlashAttention-3" if flash else "this package's Triton attention"
    if checkpoint == "bf16":
        products = "cuBLAS, torch grouped_mm for experts"
    else:
        products = "this package's Triton W4A16 products, of experts too; cuBLAS for the router"
    return f"torch norms, RoPE, cache write, SiLU and routing; {products}; {attends}"


@contextmanager
def stack(step: int) -> Iterator[None]:
    """Within it, the model's layers call the kernels of a step of STEPS."""
    replaced: dict[str, Callable[..., Any]] = {}
    if step < 6:
        replaced |= COMPOSED
    if step < 5:
        replaced |= {"attention_decode": attend_decode, "attention_prefill": attend_prefill}
    if step < 4:
        replaced |= {"rms_norm": rms_norm, "fused_add_rms_norm": fused_add_rms_norm}
        replaced |= {name: silu_after(name) for name in LINEAR_SILU}
    if step < 3:
        replaced |= {"bf16_linear": bf16_linear, "nvfp4_linear": gpu_general.nvfp4_linear}
    if step < 2:
        replaced |= {
            "router_topk": router_topk,
            "bf16_routed_experts": bf16_routed_experts,
            "nvfp4_routed_experts": gpu_general.nvfp4_routed_experts,
        }
    if step < 1:
        replaced |= {"qk_norm_rope_kv_write": qk_norm_rope_kv_write, "kv_cache_write": write}
    held = {name: getattr(calls, name) for name in replaced}
    decode = MoE.decode
    try:
        for name, function in replaced.items():
            setattr(calls, name, function)
        if step < 2:  # experts as one op, after the shared one
            MoE.decode = MoE.prefill  # type: ignore[method-assign]
        yield
    finally:
        for name, function in held.items():
            setattr(calls, name, function)
        MoE.decode = decode  # type: ignore[method-assign]


# What is several of the other functions, until the low-latency path.


def nvfp4_qkv(
    x: Tensor, weight: Tensor, scale: Tensor, scale_2: Tensor, *rest: Any, **_: Any
) -> Tensor:
    k_cache = rest[5]
    kv_rows = k_cache.shape[2] * k_cache.shape[3]
    shards = [weight.shape[0] - 2 * kv_rows, kv_rows, kv_rows]
    qkv = calls.nvfp4_linear(x, weight, scale, scale_2, shards)
    return calls.qk_norm_rope_kv_write(qkv, *rest)[0]


def bf16_qkv(x: Tensor, weight: Tensor, *rest: Any, **_: Any) -> Tensor:
    return calls.qk_norm_rope_kv_write(calls.bf16_linear(x, weight), *rest)[0]


def norm_and_router(
    x: Tensor, residual: Tensor, weight: Tensor, router: Tensor, top_k: int, eps: float, **_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    normed, added = calls.fused_add_rms_norm(x, residual, weight, eps)
    return normed, added, *calls.router_topk(calls.bf16_linear(normed, router), top_k)


COMPOSED = {
    "nvfp4_qkv_norm_rope_kv_write": nvfp4_qkv,
    "bf16_qkv_norm_rope_kv_write": bf16_qkv,
    "fused_add_rms_norm_router_topk": norm_and_router,
}

LINEAR_SILU = ("nvfp4_linear_silu_and_mul", "bf16_linear_silu_and_mul")


def silu_after(name: str) -> Callable[..., Tensor]:
    """The projection `name`, and then SiLU and the product by torch."""

    def call(x: Tensor, weight: Tensor, *scales: Tensor, **_: Any) -> Tensor:
        if name.startswith("nvfp4"):
            gate_up = calls.nvfp4_linear(x, weight, *scales, [weight.shape[0] // 2] * 2)
        else:
            gate_up = calls.bf16_linear(x, weight)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    return call


# The stock parts.


def rms_norm(x: Tensor, weight: Tensor, eps: float, **_: Any) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, **_: Any
) -> tuple[Tensor, Tensor]:
    added = x + residual
    return rms_norm(added, weight, eps), added


def bf16_linear(x: Tensor, weight: Tensor, **_: Any) -> Tensor:
    return F.linear(x, weight)


def qk_norm_rope_kv_write(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos_sin: Tensor | None, positions: Tensor,
    slots: Tensor, k_cache: Tensor, v_cache: Tensor, eps: float, **_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    kv_heads, dim = k_cache.shape[2], k_cache.shape[3]
    heads = qkv.unflatten(-1, (-1, dim))
    q, k, v = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    if cos_sin is not None:
        cos, sin = cos_sin[positions].to(qkv.dtype)[:, None].chunk(2, dim=-1)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    if slots.shape[0] > 0:
        write(k, v, slots, k_cache, v_cache)
    return q, k


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, two = x.chunk(2, dim=-1)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], dim=-1)


def write(
    k: Tensor, v: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor, *_: Any, **__: Any
) -> None:
    """Rows that have no slot go where the cache's first token is, which nothing here reads."""
    page = k_cache.shape[1]
    place = slots.clamp(min=0)
    index = (torch.div(place, page, rounding_mode="floor").long(), (place % page).long())
    k_cache.index_put_(index, k)
    v_cache.index_put_(index, v)


def router_topk(logits: Tensor, top_k: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    scores, ids = torch.sigmoid(logits.float()).topk(top_k, dim=-1)
    weights = scores / scores.sum(dim=-1, keepdim=True)
    return weights.to(logits.dtype).float(), ids.int()


def bf16_routed_experts(
    x: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w2: Tensor, shared: Tensor, **_: Any
) -> Tensor:
    experts, top_k = w13.shape[0], ids.shape[1]
    flat = ids.flatten()
    order = flat.argsort()
    every = torch.arange(experts, device=ids.device, dtype=ids.dtype)
    ends = (flat[None] == every[:, None]).sum(dim=1).cumsum(0).int()
    rows = torch.div(order, top_k, rounding_mode="floor")
    gate, up = torch._grouped_mm(x[rows], w13.transpose(1, 2), ends).chunk(2, dim=-1)
    outputs = torch._grouped_mm(F.silu(gate) * up, w2.transpose(1, 2), ends)
    weighted = outputs * weights.flatten()[order, None].to(x.dtype)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    return weighted[back].view(*ids.shape, -1).sum(dim=1) + shared


# ------------------------------------------------------------------ attention


def attend_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lengths: Tensor, sinks: Tensor,
    window: int, **_: Any,
) -> Tensor:  # fmt: skip
    if attention.FA3_LIBRARY not in os.environ:
        call = (q, k_cache, v_cache, table, lengths, sinks, window)
        return gpu_general.attention_decode(*call, None)
    longest = table.shape[1] * k_cache.shape[1]
    pages = {"lengths": lengths, "longest_q": 1, "longest_k": longest, "table": table}
    return flash(q[:, None], k_cache, v_cache, sinks, window, **pages)[:, 0]


def attend_prefill(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, k_cache: Tensor, v_cache: Tensor,
    table: Tensor, context_lens: Tensor, sinks: Tensor, window: int, scale: None,
    max_query_len: int, **_: Any,
) -> Tensor:  # fmt: skip
    """Of prompts without a past."""
    if attention.FA3_LIBRARY not in os.environ:
        past = (k_cache, v_cache, table, context_lens)
        return gpu_general.attention_prefill(
            q, k, v, offsets, *past, sinks, window, scale, max_query_len
        )
    longest = {"longest_q": max_query_len, "longest_k": max_query_len}
    return flash(q, k, v, sinks, window, offsets=offsets, **longest)


def flash(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int, *, longest_q: int, longest_k: int,
    offsets: Tensor | None = None, lengths: Tensor | None = None, table: Tensor | None = None,
) -> Tensor:  # fmt: skip
    none = (None,) * 3
    sides = (window - 1, 0) if window else (-1, -1)
    out: Tensor = attention.fa3()(
        q, k, v, None, None, None, None, offsets, offsets, None, None, lengths,
        longest_q, longest_k, table, None, None, *none, *none, q.shape[-1] ** -0.5, True, *sides,
        0.0, True, None, 0, None, 0, in_bf16(sinks), 1, 0, None,
    )[0]  # fmt: skip
    return out


@cache
def _converted() -> dict[int, tuple[Tensor, Tensor]]:
    return {}


def in_bf16(sinks: Tensor) -> Tensor:
    """Converted once, as at loading."""
    held = _converted().setdefault(id(sinks), (sinks, sinks.bfloat16()))
    return held[1]
