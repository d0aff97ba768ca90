"""q/k norm, RoPE, cache write: `flint_kernels/ops/kv_write.py` says what they compute."""

from __future__ import annotations

import torch

from flint_kernels.reference.numerics import rms_normalise


def rotate(heads: torch.Tensor, cos_sin: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """NeoX halves: heads [M, H, D] in `dtype`'s values, cos_sin [M, D] fp32 -> [M, H, D]."""
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    first, second = heads.to(torch.float32).chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(dtype)


def qk_norm_rope_kv_write(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin: torch.Tensor | None,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    eps: float,
    **_: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    kv_heads, head_dim = k_cache.shape[2], k_cache.shape[3]
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    projected = qkv.reshape(qkv.shape[0], -1, head_dim)
    q, k, v = projected.split([heads, kv_heads, kv_heads], dim=1)
    q = rms_normalise(q.to(torch.float32), q_weight, eps).to(qkv.dtype)
    k = rms_normalise(k.to(torch.float32), k_weight, eps).to(qkv.dtype)
    if cos_sin is not None:
        # Only a row without a slot can have a position outside the table here: it is padding.
        inside = (positions >= 0) & (positions < cos_sin.shape[0])
        table = cos_sin[torch.where(inside, positions, 0)]
        padding = ~inside[:, None, None]
        q = rotate(q, table, qkv.dtype).masked_fill(padding, 0)
        k = rotate(k, table, qkv.dtype).masked_fill(padding, 0)
    kv_cache_write(k, v, slot_mapping, k_cache, v_cache)
    return q, k


def kv_cache_write(
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    **_: object,
) -> None:
    rows = torch.nonzero(slot_mapping >= 0).squeeze(1)
    slots = slot_mapping[rows]
    page = k_cache.shape[1]
    block, offset = slots // page, slots % page
    k_cache[block, offset] = k[rows]
    v_cache[block, offset] = v[rows]
