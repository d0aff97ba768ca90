"""Attention with learned sinks over a paged KV cache: decode, and varlen prefill."""

from __future__ import annotations

from itertools import pairwise

import torch

from flint_kernels.ops._check import ACTIVATIONS, FLOAT, INT32, Checker
from flint_kernels.ops._declare import Spec, op
from flint_kernels.ops.workspace import check_workspace


def _check_heads(check: Checker, q: torch.Tensor, kv_heads: int) -> None:
    heads = q.shape[1]
    if q.shape[2] == 0:
        check.fail(
            "q", f"shape {list(q.shape)}", "a head_dim of 1 or more", "Nothing to attend by."
        )
    if kv_heads == 0 or heads % kv_heads != 0:
        check.fail(
            "q",
            f"{heads} query heads",
            f"a multiple of the {kv_heads} KV heads",
            "Query head h reads KV head h // (Hq / Hkv).",
        )


def _check_options(
    check: Checker, heads: int, sinks: torch.Tensor | None, window: int, scale: float | None
) -> None:
    if sinks is not None:
        check.tensor("sinks", sinks, FLOAT, [heads], "One fp32 logit for each query head.")
    if window < 0:
        check.fail(
            "window", window, "0 (no window) or more", "It counts the current token, as 513 does."
        )
    if scale is not None:
        check.positive("scale", scale)


def check_table_values(
    name: str,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    lengths_name: str,
    cache: torch.Tensor,
    seen: int | None,
) -> None:
    """Lengths within the table, and every page that will be read within the cache.

    Of a request's tokens the last `seen` are read, or all where it is None.
    """
    check = Checker(name, lengths_name, lengths)
    blocks, page = cache.shape[0], cache.shape[1]
    rows = lengths.tolist()
    for row, length in enumerate(rows):
        if length < 0 or length > block_table.shape[1] * page:
            check.fail(
                lengths_name,
                f"{length} in row {row}",
                f"0 to {block_table.shape[1] * page} (table width x page size)",
                "Widen block_table, or shorten the request.",
            )
        if length == 0 or seen == 0:
            continue
        first = max(0, length - seen) // page if seen is not None else 0
        used = block_table[row, first : (length - 1) // page + 1].tolist()
        low, high = min(used), max(used)
        if low < 0 or high >= blocks:
            check.fail(
                "block_table",
                f"pages from {low} to {high} in row {row}",
                f"pages in [0, {blocks}) up to the row's length",
                "Entries past the length (or before the window) are never read.",
            )


def _decode_values(
    name: str,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    window: int,
    **_: object,
) -> None:
    check_table_values(name, block_table, seq_lens, "seq_lens", k_cache, window or None)


@op(
    "attention_decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, "
    "Tensor seq_lens, Tensor? sinks=None, int window=0, float? scale=None, *, "
    "Tensor? workspace=None, bool enable_pdl=False) -> Tensor",
    outputs=("out",),
    values=_decode_values,
)
def attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    sinks: torch.Tensor | None = None,
    window: int = 0,
    scale: float | None = None,
    *,
    workspace: torch.Tensor | None = None,
    enable_pdl: bool = False,
) -> Spec:
    """One query token a request against its paged keys and values.

    Logits `q . k * scale` in fp32, softmax in fp32 with the maximum over the attended keys alone;
    the unnormalised `p = exp(logit - max)` is rounded for P.V, the row sum takes the fp32 ones;
    the sink adds `exp(sink - max)` to the denominator; one final rounding.

    Args:
        q: [B, Hq, D], bfloat16 or float32, normed and turned; any strides.
        k_cache, v_cache: [blocks, page_size, Hkv, D], the dtype of q, any strides with a
            contiguous last dimension. Hq a multiple of Hkv.
        block_table: [B, width] int32: entry j names the page of positions j * page_size and on.
            Entries past the length, or wholly before the window, are never read.
        seq_lens: [B] int32: keys of the request, the query's own (written before) among them.
            0 gives zeros.
        sinks: [Hq] float32, a logit a head that joins the denominator; None for none.
        window: the query sees its last `window` keys, itself included; 0 for all.
        scale: of the logits; None for D ** -0.5.
        workspace: scratch as `make_workspace` gives it; without one the op takes its own.
        enable_pdl: launch with programmatic dependent launch (GPU only). block_table, seq_lens and
            every cached row but that of a request's last key are read before the kernel in front
            has ended: they must be complete when that one starts.

    Returns: [B, Hq, D], the dtype of q, contiguous.

    Values: a length outside the table or a page outside the cache is an error on the CPU and with
    FLINT_KERNELS_CHECK_VALUES; on a GPU without it nothing faults and that request's row is NaN.
    """
    check = Checker("attention_decode", "q", q)
    check.tensor("q", q, ACTIVATIONS, [None, None, None])
    check.paged_cache(k_cache, v_cache, q)
    check.tensor("q", q, ACTIVATIONS, [None, None, k_cache.shape[3]])
    _check_heads(check, q, k_cache.shape[2])
    check.tensor("block_table", block_table, INT32, [q.shape[0], None])
    check.tensor("seq_lens", seq_lens, INT32, [q.shape[0]])
    _check_options(check, q.shape[1], sinks, window, scale)
    check_workspace(check, workspace)
    return Spec(tuple(q.shape), q.dtype)


def _prefill_values(
    name: str,
    q: torch.Tensor,
    cu_seqlens: torch.Tensor,
    k_cache: torch.Tensor | None,
    block_table: torch.Tensor | None,
    context_lens: torch.Tensor | None,
    window: int,
    max_query_len: int | None,
    **_: object,
) -> None:
    check = Checker(name, "q", q)
    bounds = cu_seqlens.tolist()
    lengths = [after - before for before, after in pairwise(bounds)]
    if bounds[0] != 0 or bounds[-1] != q.shape[0] or any(length < 0 for length in lengths):
        check.fail(
            "cu_seqlens",
            bounds if len(bounds) <= 9 else f"{bounds[:4]} ... {bounds[-4:]}",
            f"rising offsets from 0 to {q.shape[0]}, the rows of q",
            "Request b has the rows cu_seqlens[b] to cu_seqlens[b + 1].",
        )
    if max_query_len is not None and lengths and max(lengths) > max_query_len:
        check.fail(
            "max_query_len",
            max_query_len,
            f"at least {max(lengths)}, the longest chunk",
            "It is a bound: pass a larger one, or None.",
        )
    if k_cache is not None and block_table is not None and context_lens is not None:
        # The first query of a chunk sees window - 1 tokens of the past.
        seen = window - 1 if window > 0 else None
        check_table_values(name, block_table, context_lens, "context_lens", k_cache, seen)


@op(
    "attention_prefill(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, Tensor? k_cache=None, "
    "Tensor? v_cache=None, Tensor? block_table=None, Tensor? context_lens=None, "
    "Tensor? sinks=None, int window=0, float? scale=None, int? max_query_len=None, *, "
    "Tensor? workspace=None, bool enable_pdl=False) -> Tensor",
    outputs=("out",),
    values=_prefill_values,
)
def attention_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    k_cache: torch.Tensor | None = None,
    v_cache: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    context_lens: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    window: int = 0,
    scale: float | None = None,
    max_query_len: int | None = None,
    *,
    workspace: torch.Tensor | None = None,
    enable_pdl: bool = False,
) -> Spec:
    """Causal attention of chunks of new tokens, each over its paged past and itself.

    The arithmetic of `attention_decode`. The chunk's own K and V are taken from k and v, the past
    (context_lens tokens) from the cache; so a chunk may be longer than a window layer's cache.

    Args:
        q: [T, Hq, D], bfloat16 or float32: the rows of all chunks, one request after the other.
        k, v: [T, Hkv, D], the dtype of q: the same rows' keys (normed and turned) and values.
        cu_seqlens: [B + 1] int32: request b has the rows cu_seqlens[b] ... cu_seqlens[b + 1] - 1.
        k_cache, v_cache, block_table, context_lens: the past: caches and table [B, width] as in
            `attention_decode`, context_lens [B] int32 the tokens before the chunk. All four, or
            none where no request has a past.
        sinks, window, scale: as in `attention_decode`.
        max_query_len: a bound on the longest chunk, known to the host; None: T.
        workspace: scratch as `make_workspace` gives it; without one the op takes its own.
        enable_pdl: launch with programmatic dependent launch (GPU only).

    Returns: [T, Hq, D], the dtype of q, contiguous.

    Values: as in `attention_decode`; offsets that do not rise from 0 to T are an error likewise. On
    a GPU a NaN or an infinity in V, of the chunk or of the past that it sees, may make NaN of the
    same column in the other rows of its chunk too, those before it and those whose window has left
    it behind; it never reaches another request.
    """
    check = Checker("attention_prefill", "q", q)
    check.tensor("q", q, ACTIVATIONS, [None, None, None])
    check.tensor("k", k, (q.dtype,), [q.shape[0], None, q.shape[2]])
    check.tensor("v", v, (q.dtype,), list(k.shape))
    _check_heads(check, q, k.shape[1])
    check.tensor("cu_seqlens", cu_seqlens, INT32, [None])
    if cu_seqlens.shape[0] < 1:
        check.fail("cu_seqlens", "no offsets", "B + 1 offsets", "Without requests pass [0].")
    past = {
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_table": block_table,
        "context_lens": context_lens,
    }
    missing = [name for name, tensor in past.items() if tensor is None]
    if missing and len(missing) < len(past):
        check.fail(
            missing[0],
            "None",
            "all of k_cache, v_cache, block_table, context_lens, or none of them",
            "The past of a chunk is described by the four together.",
        )
    if k_cache is not None and v_cache is not None:
        check.paged_cache(k_cache, v_cache, q)
        check.tensor("k_cache", k_cache, ACTIVATIONS, [None, None, k.shape[1], q.shape[2]])
        requests = cu_seqlens.shape[0] - 1
        check.tensor("block_table", block_table, INT32, [requests, None])  # type: ignore[arg-type]
        check.tensor("context_lens", context_lens, INT32, [requests])  # type: ignore[arg-type]
    _check_options(check, q.shape[1], sinks, window, scale)
    if max_query_len is not None and max_query_len < 0:
        check.fail("max_query_len", max_query_len, "0 or more, or None", "None bounds it by T.")
    check_workspace(check, workspace)
    return Spec(tuple(q.shape), q.dtype)
