"""A Mixture-of-Experts layer at prefill, everything of it but attention.

Both norms, qkv, q/k norm with RoPE and cache write, o, router, the shared expert, the routed ones
and their combination, each launch behind the one that makes its input. What o takes is q in
attention's place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flint_kernels import ops
from flint_kernels.model import cos_sin_table
from microbench.cases import Group, Outputs, Subject, bench, decode, randn
from microbench.cases.kv_write import THETA, cache
from microbench.cases.moe_layer_chain import layer_weights

ROWS = (8192,)


@dataclass(frozen=True)
class Layer:
    checkpoint: str
    x: Tensor  # [M, H]
    residual: Tensor
    weights: dict[str, dict[str, Tensor]]
    cos_sin: Tensor
    positions: Tensor  # [M] int32, and the slots too
    k_cache: Tensor
    v_cache: Tensor


def layer(buffers: Layer) -> Outputs:
    m, weights = decode.MODEL, buffers.weights
    kind = buffers.checkpoint
    qkv, router, up, down = (weights[name] for name in ("qkv", "router", "gate_up", "down"))
    normed, residual = ops.fused_add_rms_norm(
        buffers.x, buffers.residual, weights["input_norm"]["weight"], decode.EPS
    )
    shards = ([m.heads * m.dim, m.kv_rows, m.kv_rows],) if kind == "nvfp4" else ()
    projected = op(kind, "linear")(normed, *of(qkv, "weight"), *shards)
    q, _ = ops.qk_norm_rope_kv_write(
        projected,
        qkv["q_weight"],
        qkv["k_weight"],
        buffers.cos_sin,
        buffers.positions,
        buffers.positions,
        buffers.k_cache,
        buffers.v_cache,
        decode.EPS,
    )
    mixed = op(kind, "linear")(q.flatten(1), *of(weights["o"], "weight"))
    normed, residual = ops.fused_add_rms_norm(mixed, residual, router["weight"], decode.EPS)
    chosen, ids = ops.router_topk(ops.bf16_linear(normed, router["router_weight"]), m.top_k)
    act = op(kind, "linear_silu_and_mul")(normed, *of(up, "shared_w13"))
    shared = op(kind, "linear")(act, *of(down, "shared_w2"))
    experts = *of(up, "w13"), *of(down, "w2")
    out = op(kind, "routed_experts")(normed, chosen, ids, *experts, shared)
    return out, residual


def op(checkpoint: str, name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(ops, f"{checkpoint}_{name}")
    return found


def of(tensors: dict[str, Tensor], name: str) -> list[Tensor]:
    """The weight of that name and its scales, if it has any."""
    return [tensors[n] for n in (name, f"{name}_scale", f"{name}_scale_2") if n in tensors]


@bench("moe_layer", file="prefill_kernels")
def _(device: torch.device) -> Iterator[Group]:
    for checkpoint in decode.CHECKPOINTS:
        yield from groups(checkpoint, device)


def groups(checkpoint: str, device: torch.device) -> Iterator[Group]:
    m = decode.MODEL
    pool = [layer_weights(checkpoint, device, 100 * index) for index in range(2)]
    cos_sin = cos_sin_table(m.positions, m.dim, theta=THETA).to(device)
    of_weights = sum(t.nbytes for part in pool[0].values() for t in part.values())
    routed = m.top_k * 3 * m.hidden * m.width
    products = m.hidden * (m.qkv_rows + m.heads * m.dim + m.experts + 3 * m.shared) + routed
    for rows in ROWS:

        def make(index: int, rows: int = rows) -> Layer:
            blocks = -(-rows // 16)
            return Layer(
                checkpoint,
                *(randn(device, 2 * index + i, rows, m.hidden) for i in range(2)),
                pool[index % len(pool)],
                cos_sin,
                torch.arange(rows, dtype=torch.int32, device=device) % cos_sin.shape[0],
                *(cache(blocks, device, m.kv_heads, m.dim) for _ in range(2)),
            )

        yield Group(
            "moe_layer",
            of_weights + rows * 2 * (4 * m.hidden + 2 * m.kv_rows),
            make,
            [Subject("flint", layer, f"M={rows}")],
            flop=2 * rows * products,
            checkpoint=checkpoint,
        )
