"""Sink attention: `flint_kernels/ops/attention.py` says what it computes."""

from __future__ import annotations

import torch

from flint_kernels.reference.numerics import aligned

# Queries of one chunk that the oracle takes together; bounds the logits it holds.
_ORACLE_BLOCK = 128


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first_query: int,
    first_key: int,
    sinks: torch.Tensor | None,
    window: int,
    scale: float,
) -> torch.Tensor:
    """Queries at positions first_query ... over keys at positions first_key ..., causally.

    q [n, Hq, D], k and v [L, Hkv, D] fp32 -> [n, Hq, D] in the dtype of q. The keys are those
    that at least one of the queries sees, all of them where n is 1.
    """
    queries, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    grouped = q.to(torch.float32).reshape(queries, kv_heads, group, head_dim)
    grouped = grouped.transpose(0, 1).reshape(kv_heads, queries * group, head_dim)
    logits = torch.bmm(grouped, k.permute(1, 2, 0)) * scale
    if queries > 1:
        seen = _seen(first_query, queries, first_key, k.shape[0], window, q.device)
        logits = logits.reshape(kv_heads, queries, group, -1)
        logits = logits.masked_fill(~seen[None, :, None, :], -torch.inf)
        logits = logits.reshape(kv_heads, queries * group, -1)
    maximum = logits.amax(dim=-1, keepdim=True)
    p = torch.exp(logits - maximum)
    denominator = p.sum(dim=-1, keepdim=True)
    if sinks is not None:
        sink = sinks.reshape(kv_heads, group).repeat(1, queries).unsqueeze(-1)
        denominator = denominator + torch.exp(sink - maximum)
    # P is rounded before it is normalised; the row sum is not made of the rounded values.
    weighted = torch.bmm(p.to(q.dtype).to(torch.float32), v.permute(1, 0, 2))
    out = (weighted / denominator).to(q.dtype)
    return out.reshape(kv_heads, queries, group, head_dim).transpose(0, 1).reshape(q.shape)


def _seen(
    first_query: int, queries: int, first_key: int, keys: int, window: int, device: torch.device
) -> torch.Tensor:
    """[queries, keys] bool: causal, and within the window that counts the query itself."""
    position = torch.arange(first_query, first_query + queries, device=device)[:, None]
    key = torch.arange(first_key, first_key + keys, device=device)[None, :]
    seen = key <= position
    return seen & (key > position - window) if window > 0 else seen


def gather_pages(
    caches: tuple[torch.Tensor, torch.Tensor], table: torch.Tensor, first: int, last: int
) -> list[torch.Tensor]:
    """Positions first ... last - 1 of the paged K and V -> two [last - first, Hkv, D] fp32."""
    page = caches[0].shape[1]
    pages = table[first // page : (last - 1) // page + 1]
    start = first % page
    rows = [cache.index_select(0, pages).reshape(-1, *cache.shape[2:]) for cache in caches]
    # Contiguous and fresh, so that a BLAS sees the same alignment whatever the layout.
    return [
        row[start : start + last - first].to(
            torch.float32, memory_format=torch.contiguous_format, copy=True
        )
        for row in rows
    ]


def attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    sinks: torch.Tensor | None,
    window: int,
    scale: float | None,
    **_: object,
) -> torch.Tensor:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    rows = []
    for row, length in enumerate(seq_lens.tolist()):
        query = q[row : row + 1]
        if length == 0:
            rows.append(torch.zeros_like(query))
            continue
        first = max(0, length - window) if window > 0 else 0
        k, v = gather_pages((k_cache, v_cache), block_table[row], first, length)
        rows.append(attend(query, k, v, length - 1, first, sinks, window, scale))
    return torch.cat(rows) if rows else torch.zeros_like(q)


def attention_prefill(
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
    scale: float | None,
    **_: object,
) -> torch.Tensor:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out = q.new_zeros(q.shape)
    bounds = cu_seqlens.tolist()
    past = context_lens.tolist() if context_lens is not None else [0] * (len(bounds) - 1)
    for request, context in enumerate(past):
        begin, end = bounds[request], bounds[request + 1]
        if begin == end:
            continue
        oldest = max(0, context - window + 1) if window > 0 else 0
        keys, values = (rows[begin:end].to(torch.float32) for rows in (k, v))
        if context > oldest and k_cache is not None and v_cache is not None:
            assert block_table is not None  # the declaration has checked it
            past_k, past_v = gather_pages((k_cache, v_cache), block_table[request], oldest, context)
            keys, values = torch.cat([past_k, keys]), torch.cat([past_v, values])
        else:
            oldest = context
        # One query at a time in BF16: its sums are those of attention_decode, to the bit. So too
        # where a value is NaN or infinite: masked, it would still make its neighbours' sums NaN.
        together = q.dtype == torch.float32 and bool(torch.isfinite(values).all())
        block = _ORACLE_BLOCK if together else 1
        for start in range(begin, end, block):
            stop = min(start + block, end)
            position = context + start - begin
            first = max(oldest, position - window + 1) if window > 0 else oldest
            last = context + stop - begin
            out[start:stop] = attend(
                q[start:stop],
                aligned(keys[first - oldest : last - oldest]),
                aligned(values[first - oldest : last - oldest]),
                position,
                first,
                sinks,
                window,
                scale,
            )
    return out
