"""q/k norm, RoPE and the write into the paged KV cache."""

from __future__ import annotations

from collections import Counter

import torch

from flint_kernels.ops._check import FLOAT, INDICES, Checker
from flint_kernels.ops._declare import Spec, op


def check_rope_and_slots(
    check: Checker,
    rows: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin: torch.Tensor | None,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    eps: float,
) -> None:
    """What the fused op and its low-latency twin ask of everything but the projection."""
    check.paged_cache(k_cache, v_cache, rows)
    head_dim = k_cache.shape[3]
    check.weight("q_weight", q_weight, rows, [head_dim])
    check.weight("k_weight", k_weight, rows, [head_dim])
    if cos_sin is not None:
        if head_dim % 2 != 0:
            check.fail("k_cache", f"head_dim {head_dim}", "an even head_dim", "RoPE turns pairs.")
        check.tensor(
            "cos_sin",
            cos_sin,
            FLOAT,
            [None, head_dim],
            "The table is fp32, cos then sin: flint_kernels.model.rope.cos_sin_table makes it.",
        )
    check.tensor("positions", positions, INDICES, [rows.shape[0]], "One position a row.")
    check.tensor("slot_mapping", slot_mapping, INDICES, [None], "One cache slot a row, -1: none.")
    if slot_mapping.shape[0] > rows.shape[0]:
        check.fail(
            "slot_mapping",
            f"{slot_mapping.shape[0]} slots",
            f"at most {rows.shape[0]}, the number of rows",
            "Rows beyond the last slot are padding; slots beyond the last row mean nothing.",
        )
    check.positive("eps", eps)


def check_slot_values(
    name: str,
    cos_sin: torch.Tensor | None,
    positions: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
) -> None:
    """Slots in the cache, each named once; positions in the table wherever a row has a slot."""
    slots = slot_mapping.tolist()
    if not slots:
        return
    total = k_cache.shape[0] * k_cache.shape[1]
    check = Checker(name, "slot_mapping", slot_mapping)
    low, high = min(slots), max(slots)
    if low < -1 or high >= total:
        check.fail(
            "slot_mapping",
            f"slots from {low} to {high}",
            f"slots in [0, {total}), or -1 for a row that is not to be cached",
            "A slot is block * page_size + offset.",
        )
    used_slots = [slot for slot in slots if slot >= 0]
    if len(set(used_slots)) < len(used_slots):
        twice = sorted(slot for slot, count in Counter(used_slots).items() if count > 1)
        check.fail(
            "slot_mapping",
            f"more than one row for {'slots' if len(twice) > 1 else 'slot'} "
            f"{', '.join(map(str, twice[:8]))}{', ...' if len(twice) > 8 else ''}",
            "each slot named once",
            "Which row a slot keeps would be chance; -1 skips the rows that are to be dropped.",
        )
    if cos_sin is None or positions is None or high < 0:
        return
    # Rows beyond the last slot are padding and may hold any position.
    named = zip(positions.tolist(), slots, strict=False)
    used = [position for position, slot in named if slot >= 0]
    low, high = min(used), max(used)
    if low < 0 or high >= cos_sin.shape[0]:
        check.fail(
            "positions",
            f"positions from {low} to {high}",
            f"positions in [0, {cos_sin.shape[0]}), the rows of cos_sin",
            "Build the table for as many positions as you serve.",
        )


def _values(
    name: str,
    cos_sin: torch.Tensor | None,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    **_: object,
) -> None:
    check_slot_values(name, cos_sin, positions, slot_mapping, k_cache)


def _write_values(
    name: str, slot_mapping: torch.Tensor, k_cache: torch.Tensor, **_: object
) -> None:
    check_slot_values(name, None, None, slot_mapping, k_cache)


@op(
    "qk_norm_rope_kv_write(Tensor qkv, Tensor q_weight, Tensor k_weight, Tensor? cos_sin, "
    "Tensor positions, Tensor slot_mapping, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "float eps=1e-6, *, bool enable_pdl=False) -> (Tensor, Tensor)",
    outputs=("q_out", "k_out"),
    values=_values,
)
def qk_norm_rope_kv_write(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin: torch.Tensor | None,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    eps: float = 1e-6,
    *,
    enable_pdl: bool = False,
) -> tuple[Spec, Spec]:
    """Norms q and k a head, turns them by RoPE (NeoX halves), writes K and V into the cache.

    Per head `n = round((x * rsqrt(mean(x^2) + eps)) * weight)`; with a table, dimension i pairs
    with i + D/2: `round(n1 * cos - n2 * sin)`, `round(n2 * cos + n1 * sin)`. V is copied as it is.

    Args:
        qkv: [M, (Hq + 2 * Hkv) * D], bfloat16 or float32: q heads, k heads, v heads; any strides.
        q_weight, k_weight: [D].
        cos_sin: [positions, D] float32, cos | sin; None for a layer without positional encoding.
        positions: [M], int32 or int64; read only where there is a table.
        slot_mapping: [at most M], int32 or int64: block * page_size + offset; -1 writes nothing,
            and neither does a row beyond the last slot. No two rows may name one slot.
        k_cache, v_cache: [blocks, page_size, Hkv, D], the dtype of qkv; any strides with a
            contiguous last dimension (NHD, HND, K|V interleaved). Written in place, so they share
            no memory with one another or with an input; interleaved views of one buffer do not.
        eps: added to the mean square.
        enable_pdl: launch with programmatic dependent launch (GPU only).

    Returns: (q, k): [M, Hq, D] and [M, Hkv, D], normed and turned, contiguous.

    Values: a slot outside the cache or named twice, or a position outside the table in a row that
    has a slot, is an error on the CPU and with FLINT_KERNELS_CHECK_VALUES; on a GPU without it a
    row outside writes nothing and returns NaN, and a slot named twice keeps parts of either row. In
    a row without a slot a position outside the table is taken for padding: q and k are zeros there.
    """
    check = Checker("qk_norm_rope_kv_write", "qkv", qkv)
    check.rows("qkv", qkv)
    check.tensor("qkv", qkv, (qkv.dtype,), [None, None])
    check_rope_and_slots(
        check, qkv, q_weight, k_weight, cos_sin, positions, slot_mapping, k_cache, v_cache, eps
    )
    kv_heads, head_dim = k_cache.shape[2], k_cache.shape[3]
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    if heads <= 0 or (heads + 2 * kv_heads) * head_dim != qkv.shape[1]:
        check.fail(
            "qkv",
            f"{qkv.shape[1]} columns",
            f"(Hq + 2 * {kv_heads}) * {head_dim} columns with at least one query head",
            "The cache's shape says how many KV heads there are and how wide a head is.",
        )
    return (
        Spec((qkv.shape[0], heads, head_dim), qkv.dtype),
        Spec((qkv.shape[0], kv_heads, head_dim), qkv.dtype),
    )


@op(
    "kv_cache_write(Tensor k, Tensor v, Tensor slot_mapping, Tensor(a!) k_cache, "
    "Tensor(b!) v_cache, Tensor? after=None, *, bool enable_pdl=False) -> ()",
    values=_write_values,
)
def kv_cache_write(
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    after: torch.Tensor | None = None,
    *,
    enable_pdl: bool = False,
) -> tuple[()]:
    """Copies rows of K and V into a paged cache.

    For a window layer's bounded cache: a chunk's queries still read what the chunk itself will
    overwrite, so the chunk is written after its attention.

    Args:
        k, v: [M, Hkv, D], bfloat16 or float32; any strides.
        slot_mapping: [at most M], int32 or int64; -1 and rows beyond the last slot are skipped. No
            two rows may name one slot.
        k_cache, v_cache: as in `qk_norm_rope_kv_write`. Written in place.
        after: any tensor on the same device, of which nothing is read: what has to be computed
            before. A compiler may move a read of the cache behind this write, for which it copies
            the cache; naming the read's result here keeps the order, and the copy away.
        enable_pdl: launch with programmatic dependent launch (GPU only).

    Values: a slot outside the cache or named twice is an error on the CPU and with
    FLINT_KERNELS_CHECK_VALUES; on a GPU without it a row outside is skipped, and a slot named twice
    keeps parts of either row.
    """
    check = Checker("kv_cache_write", "k", k)
    check.tensor("k", k, (torch.bfloat16, torch.float32), [None, None, None])
    check.tensor("v", v, (k.dtype,), list(k.shape))
    check.paged_cache(k_cache, v_cache, k)
    check.tensor("k", k, (k.dtype,), [None, k_cache.shape[2], k_cache.shape[3]])
    check.tensor("slot_mapping", slot_mapping, INDICES, [None])
    if slot_mapping.shape[0] > k.shape[0]:
        check.fail(
            "slot_mapping",
            f"{slot_mapping.shape[0]} slots",
            f"at most {k.shape[0]}, the number of rows",
            "Give one slot a row.",
        )
    if after is not None:
        check.tensor("after", after, (after.dtype,))
    return ()
