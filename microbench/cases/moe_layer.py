"""A Mixture-of-Experts layer at prefill, everything of it but attention, in NVFP4.

Both norms, qkv, q/k norm with RoPE and cache write, o, router, the shared expert, the routed ones
and their combination, each launch behind the one that makes its input. What o takes is q in
attention's place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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
    x: Tensor  # [M, H]
    residual: Tensor
    weights: dict[str, dict[str, Tensor]]
    cos_sin: Tensor
    positions: Tensor  # [M] int32, and the slots too
    k_cache: Tensor
    v_cache: Tensor


def layer(buffers: Layer) -> Outputs:
    m, weights = decode.MODEL, buffers.weights
    qkv, router, up, down = (weights[name] for name in ("qkv", "router", "gate_up", "down"))
    normed, residual = ops.fused_add_rms_norm(
        buffers.x, buffers.residual, weights["input_norm"]["weight"], decode.EPS
    )
    matrix = qkv["weight"], qkv["weight_scale"], qkv["weight_scale_2"]
    projected = ops.nvfp4_linear(normed, *matrix, [m.heads * m.dim, m.kv_rows, m.kv_rows])
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
    mixed = ops.nvfp4_linear(q.flatten(1), *weights["o"].values())
    normed, residual = ops.fused_add_rms_norm(mixed, residual, router["weight"], decode.EPS)
    chosen, ids = ops.router_topk(ops.bf16_linear(normed, router["router_weight"]), m.top_k)
    names = "weight", "weight_scale", "weight_scale_2"
    shared_up = {name: up[name.replace("weight", "shared_w13")] for name in names}
    shared_down = {name: down[name.replace("weight", "shared_w2")] for name in names}
    act = ops.nvfp4_linear_silu_and_mul(normed, *shared_up.values())
    shared = ops.nvfp4_linear(act, *shared_down.values())
    routed = up["w13"], up["w13_scale"], up["w13_scale_2"]
    back = down["w2"], down["w2_scale"], down["w2_scale_2"]
    out = ops.nvfp4_routed_experts(normed, chosen, ids, *routed, *back, shared)
    return out, residual


@bench("moe_layer", file="prefill_kernels")
def _(device: torch.device) -> Iterator[Group]:
    m = decode.MODEL
    pool = [layer_weights("nvfp4", device, 100 * index) for index in range(2)]
    cos_sin = cos_sin_table(m.positions, m.dim, theta=THETA).to(device)
    of_weights = sum(t.nbytes for part in pool[0].values() for t in part.values())
    routed = m.top_k * 3 * m.hidden * m.width
    products = m.hidden * (m.qkv_rows + m.heads * m.dim + m.experts + 3 * m.shared) + routed
    for rows in ROWS:

        def make(index: int, rows: int = rows) -> Layer:
            blocks = -(-rows // 16)
            return Layer(
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
            checkpoint="nvfp4",
        )
