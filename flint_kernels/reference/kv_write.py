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
    projected = qkv.reshape(qkv.shape[0], qkv.shape[1] // head_dim, head_dim)
    heads = projected.shape[1] - 2 * kv_heads
    # The q and k heads go the same way, each with its weight: together, half the calls.
    qk, v = projected.split([heads + kv_heads, kv_heads], dim=1)
    weights = torch.cat([q_weight.expand(heads, -1), k_weight.expand(kv_heads, -1)])
    qk = rms_normalise(qk.to(torch.float32), weights, eps).to(qkv.dtype)
    if cos_sin is not None:
        qk = _rotate_inside(qk, cos_sin, positions)
    q, k = qk.split([heads, kv_heads], dim=1)
    kv_cache_write(k, v, slot_mapping, k_cache, v_cache)
    return q, k


def _rotate_inside(
    heads: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """`rotate` by position; zeros where the position is outside the table: the row is padding."""
    inside = [0 <= position < cos_sin.shape[0] for position in positions.tolist()]
    if all(inside):
        return rotate(heads, cos_sin.index_select(0, positions), heads.dtype)
    kept = torch.tensor(inside, device=heads.device)
    turned = rotate(heads, cos_sin[torch.where(kept, positions, 0)], heads.dtype)
    return turned.masked_fill(~kept[:, None, None], 0)


def kv_cache_write(
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    **_: object,
) -> None:
    # Row by row: for the few rows of a decode step a tenth of what an indexed write costs.
    for row, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, k_cache.shape[1])
            k_cache[block, offset] = k[row]
            v_cache[block, offset] = v[row]
