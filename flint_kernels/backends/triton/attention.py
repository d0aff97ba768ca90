"""Attention with sinks: one kernel for decode and prefill, and the merge of decode's splits.

A program has a tile of rows, one row a (query, query head) pair whose heads share a KV head, and
walks over the keys that at least one row sees: the paged past first, the chunk's own after it. The
softmax is the running one: maximum and sums are rescaled when a tile of keys raises the maximum.

A decode request's keys are split between programs by its own length alone, so that its result does
not depend on its batchmates, nor on how wide its block table is.

Keys that no row of a tile sees are never read. Of those that some rows see, the others' weights are
exact zeros; a NaN or an infinity among *values* still reaches them (0 * inf), as the op says.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flint_kernels.backends.triton.launch import emulating, launch
from flint_kernels.backends.triton.numerics import rounded

# A decode request is cut into up to _SPLITS pieces of at least _SPLIT_KEYS keys.
_SPLITS = 64
_SPLIT_KEYS = 256

_MOST_POSITIONS = (1 << 31) - 1  # of int32 lengths


@triton.jit
def _first_key(position, WINDOW: tl.constexpr):
    """The oldest position that a query at `position` sees."""
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(position - (WINDOW - 1), 0)
    return first


@triton.jit
def _split_keys(keys, SPLITS: tl.constexpr, SPLIT_KEYS: tl.constexpr):
    """Keys of one split of a request with `keys` keys: whole tiles, the same for all its heads."""
    return tl.maximum(tl.cdiv(tl.cdiv(keys, SPLITS), 64) * 64, SPLIT_KEYS)


@triton.jit
def _absorb(
    q, k, v, seen, poisoned, scale, total, maximum, weighted, DTYPE: tl.constexpr,
    EMULATE: tl.constexpr,
):  # fmt: skip
    """A tile of keys joins the running softmax. seen [M, N]; poisoned [N]: no such page."""
    logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    logits = tl.where(poisoned[None, :], float("nan"), logits)
    logits = tl.where(seen, logits, float("-inf"))
    raised = tl.maximum(maximum, tl.max(logits, 1))
    # A row that has seen no key yet has no maximum, and -inf - -inf would be NaN.
    base = tl.where(raised == float("-inf"), 0.0, raised)
    p = tl.exp(logits - base[:, None])
    rescale = tl.exp(maximum - base)
    total = total * rescale + tl.sum(p, 1)
    weighted = weighted * rescale[:, None]
    weighted = tl.dot(rounded(p, DTYPE, EMULATE), v, weighted, input_precision="ieee")
    return total, raised, weighted


@triton.jit(
    do_not_specialize=["rows", "row_tiles", "blocks", "page_size", "width", "capacity", "splits"]
)
def attention_kernel(
    q,
    k,
    v,
    cu_seqlens,
    k_cache,
    v_cache,
    block_table,
    past_lens,
    sinks,
    out,
    part_total,
    part_maximum,
    part_weighted,
    scale,
    rows,
    row_tiles,
    blocks,
    page_size,
    width,
    capacity,
    splits,
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
    DECODE: tl.constexpr,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    EMULATE: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """q, out: [rows, KV_HEADS * GROUP, HEAD_DIM], contiguous.

    DECODE: row b is request b, past_lens[b] its keys, its own among them. Writes a split's total,
    maximum [B, Hq, splits] and unnormalised output [B, Hq, splits, HEAD_DIM], all fp32.
    Otherwise: request b has the rows cu_seqlens[b] ... and past_lens[b] keys before them (without a
    cache: none). Writes out.
    """
    # Programs of one request and KV head stand together, as they read the same keys.
    pid = tl.program_id(0)
    split = pid % splits
    tile = (pid // splits) % row_tiles
    kv_head = ((pid // splits // row_tiles) % KV_HEADS).to(tl.int64)
    request = (pid // splits // row_tiles // KV_HEADS).to(tl.int64)
    dtype: tl.constexpr = q.dtype.element_ty

    if DECODE:
        begin = request
        queries = 1
        past = tl.load(past_lens + request)
        broken = (past < 0) | (past > capacity)
        past = tl.where(broken, 0, past)
        first_position = past - 1
    else:
        begin = tl.load(cu_seqlens + request)
        end = tl.load(cu_seqlens + request + 1)
        if (begin < 0) | (end > rows) | (begin > end):
            return
        queries = end - begin
        broken = queries < 0
        past = 0
        if k_cache is not None:
            past = tl.load(past_lens + request)
            broken = (past < 0) | (past > capacity)
            past = tl.where(broken, 0, past)
        first_position = past
        begin = begin.to(tl.int64)
    if tile * BLOCK_M >= queries * GROUP:
        return

    r = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    r_inside = r < queries * GROUP
    query, head = r // GROUP, kv_head * GROUP + r % GROUP
    position = first_position + query
    d = tl.arange(0, BLOCK_D)
    d_inside = d < HEAD_DIM
    q_at = ((begin + query) * (KV_HEADS * GROUP) + head) * HEAD_DIM
    q_mask = r_inside[:, None] & d_inside[None, :]
    q_tile = tl.load(q + q_at[:, None] + d[None, :], mask=q_mask, other=0)

    total = tl.where(broken, float("nan"), 0.0) + tl.zeros((BLOCK_M,), tl.float32)
    maximum = tl.zeros((BLOCK_M,), tl.float32) + float("-inf")
    weighted = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)

    first_query = tile * BLOCK_M // GROUP
    if k_cache is not None:
        low = _first_key(first_position + first_query, WINDOW)
        high = past
        if DECODE:
            size = _split_keys(past - low, SPLITS, SPLIT_KEYS)
            low = low + split * size
            if low >= past:  # merge_kernel knows that there is no such split
                return
            high = tl.minimum(low + size, past)
        for start in range(low, high, BLOCK_N):
            key = start + tl.arange(0, BLOCK_N)
            inside = key < high
            page = tl.load(
                block_table + request * width + key // page_size, mask=inside, other=0
            ).to(tl.int64)
            missing = (page < 0) | (page >= blocks)
            offset = (key % page_size).to(tl.int64)
            mask = (inside & (page >= 0) & (page < blocks))[:, None] & d_inside[None, :]
            k_at = page * k_cache_block + offset * k_cache_slot + kv_head * k_cache_head
            v_at = page * v_cache_block + offset * v_cache_slot + kv_head * v_cache_head
            k_tile = tl.load(k_cache + k_at[:, None] + d[None, :], mask=mask, other=0)
            v_tile = tl.load(v_cache + v_at[:, None] + d[None, :], mask=mask, other=0)
            seen = inside[None, :] & (key[None, :] <= position[:, None])
            if WINDOW > 0:
                seen = seen & (key[None, :] > position[:, None] - WINDOW)
            total, maximum, weighted = _absorb(
                q_tile, k_tile, v_tile, seen, missing, scale, total, maximum, weighted, dtype,
                EMULATE,
            )  # fmt: skip
    if not DECODE:
        last_query = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, queries - 1)
        low = _first_key(first_query, WINDOW)  # in rows of the chunk, of which it is the first
        for start in range(low, last_query + 1, BLOCK_N):
            key = start + tl.arange(0, BLOCK_N)
            inside = key <= last_query
            mask = inside[:, None] & d_inside[None, :]
            k_at = (begin + key) * k_row + kv_head * k_head
            v_at = (begin + key) * v_row + kv_head * v_head
            k_tile = tl.load(k + k_at[:, None] + d[None, :], mask=mask, other=0)
            v_tile = tl.load(v + v_at[:, None] + d[None, :], mask=mask, other=0)
            seen = inside[None, :] & (key[None, :] <= query[:, None])
            if WINDOW > 0:
                seen = seen & (key[None, :] > query[:, None] - WINDOW)
            total, maximum, weighted = _absorb(
                q_tile, k_tile, v_tile, seen, key < 0, scale, total, maximum, weighted, dtype,
                EMULATE,
            )  # fmt: skip

    if DECODE:
        part = (request * (KV_HEADS * GROUP) + head) * splits + split
        tl.store(part_total + part, total, mask=r_inside)
        tl.store(part_maximum + part, maximum, mask=r_inside)
        tl.store(part_weighted + part[:, None] * HEAD_DIM + d[None, :], weighted, mask=q_mask)
    else:
        if sinks is not None:
            sink = tl.load(sinks + head, mask=r_inside, other=0)
            total = total + tl.exp(sink - maximum)
        result = rounded(weighted / total[:, None], dtype, EMULATE)
        tl.store(out + q_at[:, None] + d[None, :], result, mask=q_mask)


@triton.jit(do_not_specialize=["capacity", "splits"])
def merge_kernel(
    part_total,
    part_maximum,
    part_weighted,
    seq_lens,
    sinks,
    out,
    capacity,
    splits,
    HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    EMULATE: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Decode's splits of one request and head a program -> out [B, HEADS, HEAD_DIM]."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    d_inside = d < HEAD_DIM
    length = tl.load(seq_lens + row // HEADS)
    broken = (length < 0) | (length > capacity)
    keys = length - _first_key(length - 1, WINDOW)
    used = tl.where(broken, 0, tl.cdiv(keys, _split_keys(keys, SPLITS, SPLIT_KEYS)))
    s = tl.arange(0, SPLITS)
    part = row * splits + s
    maxima = tl.load(part_maximum + part, mask=s < used, other=float("-inf"))
    maximum = tl.max(maxima, 0)
    factor = tl.exp(maxima - tl.where(maximum == float("-inf"), 0.0, maximum))
    total = tl.sum(tl.load(part_total + part, mask=s < used, other=0) * factor, 0)
    if sinks is not None:
        total += tl.exp(tl.load(sinks + row % HEADS) - maximum)
    weighted = tl.zeros((BLOCK_D,), tl.float32)
    for index in range(used):
        place = row * splits + index
        piece = tl.load(part_weighted + place * HEAD_DIM + d, mask=d_inside, other=0)
        own = tl.load(part_maximum + place)
        weighted += piece * tl.exp(own - tl.where(maximum == float("-inf"), 0.0, maximum))
    result = weighted / total
    result = tl.where(length == 0, 0.0, result)
    result = tl.where(broken, float("nan"), result)
    result = rounded(result, out.dtype.element_ty, EMULATE)
    tl.store(out + row * HEAD_DIM + d, result, mask=d_inside)


def _tile_sizes(rows: int, head_dim: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """BLOCK_M, BLOCK_N, BLOCK_D, warps; `rows` (query, head) pairs share their keys."""
    block_d = max(16, triton.next_power_of_2(head_dim))
    if dtype == torch.float32:
        return 16, 16, block_d, 4
    if rows <= 16 or block_d > 128:
        return 16, 64 if block_d <= 128 else 16, block_d, 4
    return 128, 64, block_d, 8


def _capacity(width: int, page_size: int) -> int:
    """Tokens that a row of the block table can name, as int32 lengths go."""
    return min(width * page_size, _MOST_POSITIONS)


def _window(window: int) -> int:
    """As the kernels take it, whose positions are int32: one that no position leaves is none."""
    return 0 if window >= _MOST_POSITIONS else window


def _cache_strides(name: str, cache: torch.Tensor | None) -> dict[str, int]:
    block, slot, head = (0, 0, 0) if cache is None else cache.stride()[:3]
    return {f"{name}_block": block, f"{name}_slot": slot, f"{name}_head": head}


def decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    sinks: torch.Tensor | None,
    window: int,
    scale: float,
) -> torch.Tensor:
    """As `flint::attention_decode` declares it."""
    requests, heads, head_dim = q.shape
    kv_heads, page_size = k_cache.shape[2], k_cache.shape[1]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    width = block_table.shape[1]
    longest = min(width * page_size, window) if window > 0 else width * page_size
    splits = max(1, min(_SPLITS, triton.cdiv(longest, _SPLIT_KEYS)))
    total, maximum = (q.new_empty(requests, heads, splits, dtype=torch.float32) for _ in "12")
    weighted = q.new_empty(requests, heads, splits, head_dim, dtype=torch.float32)
    group = heads // kv_heads
    block_m, block_n, block_d, warps = _tile_sizes(group, head_dim, q.dtype)
    row_tiles = triton.cdiv(group, block_m)
    shared: dict[str, object] = {
        "capacity": _capacity(width, page_size),
        "splits": splits,
        "WINDOW": _window(window),
        "HEAD_DIM": head_dim,
        "EMULATE": emulating(),
        "SPLITS": _SPLITS,
        "SPLIT_KEYS": _SPLIT_KEYS,
        "BLOCK_D": block_d,
    }
    lengths = seq_lens.contiguous()
    sinks = None if sinks is None else sinks.contiguous()
    pieces = {"part_total": total, "part_maximum": maximum, "part_weighted": weighted}
    launch(
        attention_kernel,
        requests * kv_heads * row_tiles * splits,
        {
            "q": q.contiguous(),
            "k": None,
            "v": None,
            "cu_seqlens": None,
            "k_cache": k_cache,
            "v_cache": v_cache,
            "block_table": block_table.contiguous(),
            "past_lens": lengths,
            "sinks": None,
            "out": None,
            **pieces,
            "scale": scale,
            "rows": requests,
            "row_tiles": row_tiles,
            "blocks": k_cache.shape[0],
            "page_size": page_size,
            "width": width,
            "k_row": 0,
            "k_head": 0,
            "v_row": 0,
            "v_head": 0,
            **_cache_strides("k_cache", k_cache),
            **_cache_strides("v_cache", v_cache),
            "DECODE": True,
            "GROUP": group,
            "KV_HEADS": kv_heads,
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            **shared,
        },
        warps=warps,
    )
    launch(
        merge_kernel,
        requests * heads,
        {**pieces, "seq_lens": lengths, "sinks": sinks, "out": out, "HEADS": heads, **shared},
    )
    return out


def prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    k_cache: torch.Tensor | None,
    v_cache: torch.Tensor | None,
    block_table: torch.Tensor | None,
    context_lens: torch.Tensor | None,
    sinks: torch.Tensor | None,
    window: int,
    scale: float,
    max_query_len: int | None,
) -> torch.Tensor:
    """As `flint::attention_prefill` declares it."""
    rows, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    # Rows that broken offsets leave to no request stay NaN.
    out = torch.full(q.shape, torch.nan, dtype=q.dtype, device=q.device)
    requests = cu_seqlens.shape[0] - 1
    page_size = 1 if k_cache is None else k_cache.shape[1]
    width = 0 if block_table is None else block_table.shape[1]
    longest = rows if max_query_len is None else min(max_query_len, rows)
    group = heads // kv_heads
    block_m, block_n, block_d, warps = _tile_sizes(longest * group, head_dim, q.dtype)
    row_tiles = triton.cdiv(longest * group, block_m)
    k, v = (t if t.stride(2) == 1 else t.contiguous() for t in (k, v))
    launch(
        attention_kernel,
        requests * kv_heads * row_tiles,
        {
            "q": q.contiguous(),
            "k": k,
            "v": v,
            "cu_seqlens": cu_seqlens.contiguous(),
            "k_cache": k_cache,
            "v_cache": v_cache,
            "block_table": None if block_table is None else block_table.contiguous(),
            "past_lens": None if context_lens is None else context_lens.contiguous(),
            "sinks": None if sinks is None else sinks.contiguous(),
            "out": out,
            "part_total": None,
            "part_maximum": None,
            "part_weighted": None,
            "scale": scale,
            "rows": rows,
            "row_tiles": row_tiles,
            "blocks": 0 if k_cache is None else k_cache.shape[0],
            "page_size": page_size,
            "width": width,
            "capacity": _capacity(width, page_size),
            "splits": 1,
            "k_row": k.stride(0),
            "k_head": k.stride(1),
            "v_row": v.stride(0),
            "v_head": v.stride(1),
            **_cache_strides("k_cache", k_cache),
            **_cache_strides("v_cache", v_cache),
            "DECODE": False,
            "WINDOW": _window(window),
            "GROUP": group,
            "KV_HEADS": kv_heads,
            "HEAD_DIM": head_dim,
            "EMULATE": emulating(),
            "SPLITS": 1,
            "SPLIT_KEYS": _SPLIT_KEYS,
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "BLOCK_D": block_d,
        },
        warps=warps,
    )
    return out
