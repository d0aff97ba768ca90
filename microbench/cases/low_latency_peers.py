"""The decode steps in ops of torch, with BF16 weights: what the low-latency kernels are beside.

For an NVFP4 weight a peer takes its values in BF16, which is what torch has: four times the bytes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from microbench.cases import Outputs
from microbench.cases.decode import EPS, Buffers


def product(buffers: Buffers) -> Outputs:
    """The projection alone: cuBLAS."""
    return (torch.mm(buffers.arguments["x"], buffers.dense["weight"].T),)


def gated_product(buffers: Buffers) -> Outputs:
    return (gated(*product(buffers)),)


def gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def qkv(buffers: Buffers) -> Outputs:
    """Projection, q/k norm, RoPE and cache write."""
    a = buffers.arguments
    k_cache, v_cache = a["k_cache"], a["v_cache"]
    kv_heads, dim = k_cache.shape[2:]
    heads = product(buffers)[0].view(a["x"].shape[0], -1, dim)
    q, k, v = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    cos, sin = a["cos_sin"][a["positions"]][:, None].chunk(2, dim=-1)
    turned = []
    for x, weight in ((q, a["q_weight"]), (k, a["k_weight"])):
        first, second = F.rms_norm(x, (dim,), weight, EPS).float().chunk(2, dim=-1)
        halves = first * cos - second * sin, second * cos + first * sin
        turned.append(torch.cat(halves, dim=-1).to(x.dtype))
    page = k_cache.shape[1]
    block, offset = a["slot_mapping"] // page, a["slot_mapping"] % page
    k_cache[block, offset] = turned[1]
    v_cache[block, offset] = v
    return turned[0], k_cache, v_cache


def add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Outputs:
    added = x + residual
    return F.rms_norm(added, x.shape[-1:], weight, EPS), added


def add_norm_route(
    x: Tensor, residual: Tensor, weight: Tensor, router: Tensor, top_k: int
) -> Outputs:
    normed, added = add_norm(x, residual, weight)
    logits, ids = torch.topk(torch.mm(normed, router.T), top_k)
    scores = torch.sigmoid(logits.float())
    return normed, added, scores / scores.sum(1, keepdim=True), ids.int()


def grouped(rows: Tensor, weight: Tensor, buffers: Buffers) -> Tensor:
    """rows [entries, K], in the order of their experts, times weight [E, N, K] of each."""
    multiply = getattr(F, "grouped_mm", None) or torch._grouped_mm
    out: Tensor = multiply(rows, weight.transpose(1, 2), offs=buffers.dense["ends"])
    return out


def gate_up(buffers: Buffers) -> Outputs:
    """The entries stand in the order of their experts beforehand, and their counts are known."""
    x, ids, dense = buffers.arguments["x"], buffers.arguments["topk_ids"], buffers.dense
    rows = x.repeat_interleave(ids.shape[1], dim=0)
    routed = gated(grouped(rows, dense["w13"], buffers)).view(*ids.shape, -1)
    return routed, gated(torch.mm(x, dense["shared_w13"].T))


def down(buffers: Buffers) -> Outputs:
    a, dense = buffers.arguments, buffers.dense
    acts = a["routed_act"]
    entries = grouped(acts.view(-1, acts.shape[2]), dense["w2"], buffers)
    parts = entries.view(*acts.shape[:2], -1) * a["topk_weights"][..., None]
    return (parts.sum(1).to(acts.dtype) + torch.mm(a["shared_act"], dense["shared_w2"].T),)
