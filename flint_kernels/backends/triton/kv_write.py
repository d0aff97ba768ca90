"""Rows of K and V into a paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flint_kernels.backends.triton.launch import launch


@triton.jit(do_not_specialize=["blocks", "page_size"])
def kv_write_kernel(
    k,
    v,
    slots,
    k_cache,
    v_cache,
    blocks,
    page_size,
    k_row,
    k_head,
    v_row,
    v_head,
    k_cache_block,
    k_cache_slot,
    k_cache_head,
    v_cache_block,
    v_cache_slot,
    v_cache_head,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One row and head a program; a slot outside the cache is skipped.

    The numbers from k_row on are strides; the last dimension of all four is contiguous.
    """
    row, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    slot = tl.load(slots + row).to(tl.int64)
    if (slot < 0) | (slot >= blocks.to(tl.int64) * page_size):
        return
    row = row.to(tl.int64)
    block, offset = slot // page_size, slot % page_size
    d = tl.arange(0, BLOCK_D)
    inside = d < HEAD_DIM
    key = tl.load(k + row * k_row + head * k_head + d, mask=inside)
    value = tl.load(v + row * v_row + head * v_head + d, mask=inside)
    to_k = block * k_cache_block + offset * k_cache_slot + head * k_cache_head
    to_v = block * v_cache_block + offset * v_cache_slot + head * v_cache_head
    tl.store(k_cache + to_k + d, key, mask=inside)
    tl.store(v_cache + to_v + d, value, mask=inside)


def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> None:
    """k, v [M, Hkv, D]; slots [at most M]; caches [blocks, page, Hkv, D], written in place."""
    k, v = (rows if rows.stride(2) == 1 else rows.contiguous() for rows in (k, v))
    heads, head_dim = k.shape[1:]
    launch(
        kv_write_kernel,
        slots.shape[0] * heads,
        {
            "k": k,
            "v": v,
            "slots": slots.contiguous(),
            "k_cache": k_cache,
            "v_cache": v_cache,
            "blocks": k_cache.shape[0],
            "page_size": k_cache.shape[1],
            "k_row": k.stride(0),
            "k_head": k.stride(1),
            "v_row": v.stride(0),
            "v_head": v.stride(1),
            "k_cache_block": k_cache.stride(0),
            "k_cache_slot": k_cache.stride(1),
            "k_cache_head": k_cache.stride(2),
            "v_cache_block": v_cache.stride(0),
            "v_cache_slot": v_cache.stride(1),
            "v_cache_head": v_cache.stride(2),
            "HEADS": heads,
            "HEAD_DIM": head_dim,
            "BLOCK_D": triton.next_power_of_2(head_dim),
        },
        warps=1,
    )
