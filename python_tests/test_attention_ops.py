"""Attention: rows A1-A7 and A9 at op level, and a second, float64 arithmetic."""

from __future__ import annotations

import math

import pytest
import torch
from op_samples import BF16, LAYOUTS, caches, int32, randn, strided
from spec_float64 import (
    assert_close,
    assert_rounds,
    attention_row,
    causal_attention,
    exact,
    f64,
    to_bf16,
)
from test_namespace import bits

from flint_kernels import ops

pytestmark = pytest.mark.usefixtures("_each_cpu_body")

PAGE = 16
FP32 = torch.float32
BOTH_MODES = pytest.mark.parametrize("dtype", [BF16, FP32])


def paged(
    k: torch.Tensor, v: torch.Tensor, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """K and V [L, Hkv, D] of one request, in pages in shuffled order -> caches and table [1, n]."""
    pages = -(-k.shape[0] // PAGE)
    order = torch.randperm(pages + 2, generator=torch.Generator().manual_seed(seed))[:pages]
    positions = torch.arange(k.shape[0])
    slots = order[positions // PAGE] * PAGE + positions % PAGE
    cache = tuple(torch.zeros(pages + 2, PAGE, *k.shape[1:], dtype=k.dtype) for _ in range(2))
    ops.kv_cache_write(k, v, slots, *cache)
    return cache[0], cache[1], order.to(torch.int32)[None]


def decode_one(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None = None,
    window: int = 0,
) -> torch.Tensor:
    """The query [Hq, D] at the last of the positions of k and v."""
    out = ops.attention_decode(q[None], *paged(k, v), int32(k.shape[0]), sinks, window)
    return out[0]


def prefill_last(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None = None,
    window: int = 0,
) -> torch.Tensor:
    """The same from prefill: a chunk of all positions whose last query is q."""
    queries = torch.zeros(k.shape[0], *q.shape, dtype=q.dtype)
    queries[-1] = q
    out = ops.attention_prefill(queries, k, v, int32(0, k.shape[0]), sinks=sinks, window=window)
    return out[-1]


def prefill_one(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None = None,
    window: int = 0,
) -> torch.Tensor:
    """And as a chunk of one token beside a paged past."""
    past = *paged(k[:-1], v[:-1]), int32(k.shape[0] - 1)
    return ops.attention_prefill(q[None], k[-1:], v[-1:], int32(0, 1), *past, sinks, window)[0]


WAYS = pytest.mark.parametrize("attend", [decode_one, prefill_last, prefill_one])


# ------------------------------------------------------------------ A1: the window


@WAYS
@BOTH_MODES
@pytest.mark.parametrize("key,seen", [(88, True), (87, False), (600, True)])
def test_A1_the_window_counts_the_current_token(attend, dtype, key: int, seen: bool) -> None:
    q = torch.zeros(1, 16, dtype=dtype)
    k = randn(601, 1, 16, dtype=dtype)
    v = torch.zeros(601, 1, 16, dtype=dtype)
    v[key] = 1.0
    out = attend(q, k, v, torch.tensor([-math.inf]), 513)
    if not seen:
        assert out.unique().tolist() == [0.0]
    elif dtype == BF16:
        assert out.unique().tolist() == [1 / 512]  # 1/513 in BF16
    else:
        assert 1 / out.mean().item() == pytest.approx(513, rel=1e-6)


# ------------------------------------------------------------------ A2, A3: softmax and sinks


@WAYS
@BOTH_MODES
def test_A2_very_negative_logits(attend, dtype) -> None:
    """Four logits of -6e4: the maximum is over the keys alone, so nothing underflows."""
    q, k = torch.zeros(1, 16, dtype=dtype), torch.zeros(4, 1, 16, dtype=dtype)
    q[0, 0], k[:, 0, 0] = -512.0, 480.0
    assert (-512.0 * 480.0) * 16**-0.5 == -61_440.0
    v = torch.arange(1.0, 5.0).view(4, 1, 1).expand(4, 1, 16).to(dtype)
    assert attend(q, k, v, torch.tensor([-math.inf])).unique().tolist() == [2.5]
    assert attend(q, k, v).unique().tolist() == [2.5]
    # Any ordinary sink outweighs such keys altogether: exp(0 + 6e4) is infinite, the result 0.
    assert attend(q, k, v, torch.tensor([0.0])).unique().tolist() == [0.0]


@WAYS
@BOTH_MODES
def test_A3_sinks(attend, dtype) -> None:
    q = torch.zeros(2, 16, dtype=dtype)
    k, v = (randn(3, 1, 16, seed=s, dtype=dtype) for s in (1, 2))
    huge = attend(q, k, v, torch.tensor([100.0, 1e30]))
    assert huge.isfinite().all()
    assert huge.abs().max() < 1e-30
    plain = attend(q, k, v)
    assert torch.equal(attend(q, k, v, torch.full((2,), -math.inf)), plain)
    mean = f64(v).mean(0).expand(2, -1)
    assert torch.allclose(f64(plain), mean, atol=2.0**-8 if dtype == BF16 else 1e-6)
    # Logits 0 and a sink of log 3: three keys and a sink of weight 3.
    half = attend(q, k, v, torch.full((2,), math.log(3.0)))
    assert torch.allclose(f64(half), mean / 2, atol=2.0**-9 if dtype == BF16 else 1e-6)
    # A sink a head, unscaled.
    one = attend(q, k, v, torch.tensor([-math.inf, 100.0]))
    assert torch.equal(one[0], plain[0])
    assert one[1].abs().max() < 1e-30


@BOTH_MODES
def test_A3_a_sink_and_no_keys(dtype) -> None:
    cache = torch.full((2, PAGE, 1, 16), math.nan, dtype=dtype)
    q = torch.full((1, 2, 16), math.nan, dtype=dtype)
    args = cache, cache, int32(-1).view(1, 1), int32(0), torch.full((2,), 0.5)
    out = torch.full((1, 2, 16), math.nan, dtype=dtype)
    ops.attention_decode(q, *args, out=out)
    assert out.unique().tolist() == [0.0]
    assert ops.attention_decode(q, *args).unique().tolist() == [0.0]
    empty = ops.attention_prefill(q[:0], cache[0, :0], cache[0, :0], int32(0, 0))
    assert empty.shape == (0, 2, 16)


# ------------------------------------------------------------------ A4-A6: what must not be read


@BOTH_MODES
def test_A4_rows_without_keys_are_zeros(dtype) -> None:
    cache = tuple(part.to(dtype) for part in caches("nhd", 4, PAGE, 2, 32))
    q, sinks = randn(3, 4, 32, dtype=dtype), randn(4, dtype=FP32)
    table = int32(2, -1, -1).view(3, 1)
    out = torch.full((3, 4, 32), math.nan, dtype=dtype)
    ops.attention_decode(q, *cache, table, int32(7, 0, 0), sinks, out=out)
    assert torch.equal(out[:1], ops.attention_decode(q[:1], *cache, table[:1], int32(7), sinks))
    assert out[1:].unique().tolist() == [0.0]


@BOTH_MODES
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [0, 9, 1])
def test_A5_nan_where_nothing_is_read(layout: str, window: int, dtype) -> None:
    """Page 0, slots past the length, slots before the window: NaN or zeros, the same bits."""
    length, context = 45, 40
    clean = [torch.zeros_like(part).to(dtype) for part in caches(layout, 6, PAGE, 2, 32)]
    dirty = [torch.full_like(part, math.nan) for part in clean]
    pages = int32(3, 5, 1)
    first = max(0, context - window) if window else 0
    positions = torch.arange(first, length)
    slots = pages.long()[positions // PAGE] * PAGE + positions % PAGE
    k, v = (randn(len(positions), 2, 32, seed=s, dtype=dtype) for s in (1, 2))
    for cache in (clean, dirty):
        ops.kv_cache_write(k, v, slots, *cache)
    q, sinks = randn(5, 4, 32, dtype=dtype), randn(4, dtype=FP32)
    results = []
    for cache in (clean, dirty):
        one = ops.attention_decode(q[:1], *cache, pages[None], int32(length), sinks, window)
        past = *cache, pages[None], int32(context), sinks, window
        chunk = ops.attention_prefill(q, k[-5:], v[-5:], int32(0, 5), *past)
        results.append((one, chunk))
    for a, b in zip(*results, strict=True):
        assert a.isfinite().all()
        assert torch.equal(bits(a), bits(b))


@BOTH_MODES
def test_A5_a_row_of_nan_stays_with_those_that_see_it(dtype) -> None:
    """Values of NaN in a chunk reach the later queries of its own request alone (row Q4)."""
    q, k, v = (randn(10, 2, 16, seed=s, dtype=dtype) for s in (1, 2, 3))
    bad_k, bad_v = k.clone(), v.clone()
    bad_v[4] = math.nan
    bad_k[7] = math.inf
    offsets = int32(0, 8, 10)
    want = ops.attention_prefill(q, k, v, offsets, window=2)
    got = ops.attention_prefill(q, bad_k, bad_v, offsets, window=2)
    sees = torch.tensor([False] * 4 + [True] * 2 + [False] + [True] + [False] * 2)
    assert got[sees].isnan().flatten(1).any(1).all()
    assert got[~sees].isfinite().all()
    if dtype == BF16:
        assert torch.equal(got[~sees], want[~sees])
    else:
        assert_close(got[~sees], f64(want[~sees]), 1e-6)


@BOTH_MODES
@pytest.mark.parametrize("length", [1, 16, 17, 257])
@pytest.mark.parametrize("tail", [-1, 2**31 - 1])
def test_A6_the_tail_of_the_block_table_is_not_read(length: int, tail: int, dtype) -> None:
    k, v = randn(length, 1, 32, dtype=dtype), randn(length, 1, 32, seed=1, dtype=dtype)
    q = randn(1, 4, 32, seed=2, dtype=dtype)
    k_cache, v_cache, exact_width = paged(k, v)
    wide = torch.cat([exact_width, torch.full((1, 5), tail, dtype=torch.int32)], dim=1)
    for window in (0, 20):
        want = ops.attention_decode(q, k_cache, v_cache, exact_width, int32(length), None, window)
        got = ops.attention_decode(q, k_cache, v_cache, wide, int32(length), None, window)
        assert torch.equal(got, want)
        chunk = q[:1], k[:1], v[:1], int32(0, 1), k_cache, v_cache
        want = ops.attention_prefill(*chunk, exact_width, int32(length), None, window)
        got = ops.attention_prefill(*chunk, wide, int32(length), None, window)
        assert torch.equal(got, want)
    # Nor what lies wholly before the window: with window 1 none of the past.
    gone = torch.full_like(wide, tail)
    gone[:, (length - 1) // PAGE] = exact_width[:, -1]
    one = ops.attention_decode(q, k_cache, v_cache, gone, int32(length), None, 1)
    assert torch.equal(one, v[-1].expand(4, -1)[None])
    one = ops.attention_prefill(*chunk, torch.full_like(wide, tail), int32(length), None, 1)
    assert torch.equal(one, v[0].expand(4, -1)[None])


def test_A6_lengths_and_pages_outside_are_errors() -> None:
    cache = caches("nhd", 4, PAGE, 1, 32)
    q, table = randn(2, 1, 32), int32(0, 1, 2, 3).view(2, 2)
    for lengths, got in ((int32(5, 33), "33 in row 1"), (int32(-1, 4), "-1 in row 0")):
        message = rf"attention_decode.*'seq_lens'.*{got}.*want 0 to 32"
        with pytest.raises(ValueError, match=message):
            ops.attention_decode(q, *cache, table, lengths)
    for page in (4, -1):
        bad = table.clone()
        bad[1, 0] = page
        message = rf"attention_decode.*'block_table'.*{page}.*row 1.*\[0, 4\)"
        with pytest.raises(ValueError, match=message):
            ops.attention_decode(q, *cache, bad, int32(1, 1))


# ------------------------------------------------------------------ A7: chunks


@BOTH_MODES
@pytest.mark.parametrize("window", [513, 0])
def test_A7_prefill_in_chunks_equals_one_shot(window: int, dtype) -> None:
    tokens, heads = 1100, 2
    q = randn(tokens, heads, 16, dtype=dtype)
    k, v = randn(tokens, 1, 16, seed=1, dtype=dtype), randn(tokens, 1, 16, seed=2, dtype=dtype)
    sinks = randn(heads, dtype=FP32)
    whole = ops.attention_prefill(q, k, v, int32(0, tokens), sinks=sinks, window=window)
    k_cache, v_cache, table = paged(k, v)
    for size in (1, 7, 512, 513):
        parts, begin = [], 0 if size > 1 else tokens - 30  # single tokens: the last 30
        for start in range(begin, tokens, size):
            end = min(start + size, tokens)
            rows = slice(start, end)
            offsets, context = int32(0, end - start), int32(start)
            chunk = q[rows], k[rows], v[rows], offsets, k_cache, v_cache, table, context
            parts.append(ops.attention_prefill(*chunk, sinks, window))
        chunked = torch.cat(parts)
        if dtype == BF16:
            assert torch.equal(chunked, whole[begin:])
        else:
            assert_close(chunked, f64(whole[begin:]), 2e-6)


@BOTH_MODES
def test_A7_decode_equals_prefill(dtype) -> None:
    tokens, window = 70, 33
    q = randn(tokens, 4, 32, dtype=dtype)
    k, v = randn(tokens, 2, 32, seed=1, dtype=dtype), randn(tokens, 2, 32, seed=2, dtype=dtype)
    sinks = randn(4, dtype=FP32)
    whole = ops.attention_prefill(q, k, v, int32(0, tokens), sinks=sinks, window=window)
    k_cache, v_cache, table = paged(k, v)
    lengths = torch.arange(1, tokens + 1, dtype=torch.int32)
    tables = table.expand(tokens, -1)
    one_by_one = ops.attention_decode(q, k_cache, v_cache, tables, lengths, sinks, window)
    if dtype == BF16:
        assert torch.equal(one_by_one, whole)
    else:
        assert_close(one_by_one, f64(whole), 2e-6)


# ------------------------------------------------------------------ A9: shapes


@pytest.mark.parametrize(
    "heads,kv_heads,dim", [(4, 4, 32), (5, 1, 64), (6, 2, 20), (3, 3, 7), (32, 4, 128), (1, 1, 1)]
)
def test_A9_any_ratio_and_head_dim(heads: int, kv_heads: int, dim: int) -> None:
    q = randn(9, heads, dim, dtype=FP32)
    k, v = (randn(9, kv_heads, dim, seed=s, dtype=FP32) for s in (1, 2))
    sinks = randn(heads, dtype=FP32)
    got = ops.attention_prefill(q, k, v, int32(0, 9), sinks=sinks, window=4)
    want, _ = causal_attention(f64(q), f64(k), f64(v), f64(sinks), 4, exact)
    assert_close(got, want, 2e-6)
    assert_close(decode_one(q[8], k, v, sinks, 4), want[8], 2e-6)


def test_A9_heads_that_do_not_divide_are_refused() -> None:
    q, k = randn(2, 5, 32), randn(2, 2, 32)
    with pytest.raises(ValueError, match=r"attention_prefill.*'q'.*5 query heads.*2 KV heads"):
        ops.attention_prefill(q, k, k, int32(0, 2))
    with pytest.raises(ValueError, match=r"attention_decode.*'q'.*5 query heads.*2 KV heads"):
        ops.attention_decode(q, *caches("nhd", 2, PAGE, 2, 32), int32(0, 1).view(2, 1), int32(1, 1))


# ------------------------------------------------------------------ the arithmetic


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("with_sinks", [True, False])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_decode_against_float64(window: int, with_sinks: bool, scale: float | None) -> None:
    heads, dim, length = 4, 32, 37
    sinks = randn(heads, dtype=FP32, scale=2.0) if with_sinks else None
    for dtype in (FP32, BF16):
        k, v = (randn(length, 2, dim, seed=s, dtype=dtype) for s in (1, 2))
        q = strided(randn(1, heads, dim, dtype=dtype, scale=2.0))
        cache = paged(k, v)
        got = ops.attention_decode(q, *cache, int32(length), sinks, window, scale)[0]
        keys = slice(length - window if window else 0, length)
        args = f64(q[0]), f64(k[keys]), f64(v[keys]), None if sinks is None else f64(sinks)
        if dtype == FP32:
            assert_close(got, attention_row(*args, exact, scale)[0], 2e-6)
            continue
        # P is rounded before it is normalised; the row sum is not made of the rounded values.
        rounded_p, slack = attention_row(*args, to_bf16_but_last(), scale)
        assert_rounds(got, rounded_p, slack)
        # STYLE of tolerance: against exact arithmetic at most twice plain PyTorch's error in BF16.
        truth = attention_row(*args, exact, scale)[0]
        plain = plain_bf16(q[0], k[keys], v[keys], sinks, scale)
        assert (f64(got) - truth).norm() <= 2 * (f64(plain) - truth).norm()


@WAYS
@BOTH_MODES
def test_the_row_sum_is_made_of_unrounded_terms(attend, dtype) -> None:
    """A thousand keys of p = 0.5017, which BF16 rounds to 0.5, and one of p = 1; all values 1."""
    q, k = torch.zeros(1, 16, dtype=dtype), torch.zeros(1001, 1, 16, dtype=dtype)
    # exp(-0.6897) = 0.50173: the logit of the largest key is 0.6897 above the others'.
    q[0, :2] = torch.tensor([2.0, 2.0**-6])
    k[500, 0, :2] = torch.tensor([1.375, 0.5])
    p = math.exp(-(2 * 1.375 + 2.0**-7) / 4)
    assert 0.5 < p < 0.5 + 2**-9
    out = attend(q, k, torch.ones_like(k))
    want = (1 + 1000 * 0.5) / (1 + 1000 * p) if dtype == BF16 else 1.0
    assert want < 1 - 2**-9 or dtype == FP32  # so BF16 cannot round it to 1
    tolerance = 2**-9 if dtype == BF16 else 1e-5
    assert out.flatten().tolist() == pytest.approx([want] * 16, rel=tolerance)
    assert bool((out < 1 - 2**-9).all()) == (dtype == BF16)


def to_bf16_but_last():
    """Rounds P (one-dimensional) and leaves the final output for `assert_rounds` to round."""
    return lambda value: to_bf16(value) if value.dim() == 1 else value


def plain_bf16(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    """As a PyTorch user would write it in BF16, softmax included (gpt-oss's eager form)."""
    group = q.shape[0] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    logits = torch.einsum("hd,lhd->hl", q, k) * (q.shape[1] ** -0.5 if scale is None else scale)
    if sinks is not None:
        logits = torch.cat([logits, sinks.to(q.dtype)[:, None]], dim=1)
    p = torch.softmax(logits, dim=-1)[:, : k.shape[0]]
    return torch.einsum("hl,lhd->hd", p, v)


@pytest.mark.parametrize("window", [0, 5])
def test_prefill_against_float64(window: int) -> None:
    """Three requests in one call: 12 tokens, none, 7 after a past of 30."""
    heads, dim, past = 4, 32, 30
    sinks = randn(heads, dtype=FP32)
    for dtype in (FP32, BF16):
        q = randn(19, heads, dim, dtype=dtype)
        k, v = (randn(19 + past, 2, dim, seed=s, dtype=dtype) for s in (1, 2))
        new_k, new_v = k[past:], v[past:]
        long_k, long_v = (torch.cat([t[:past], t[past + 12 :]]) for t in (k, v))
        k_cache, v_cache, table = paged(long_k[:past], long_v[:past])
        tables = torch.cat([torch.full_like(table, -1)] * 2 + [table])
        got = ops.attention_prefill(
            *(q, new_k, new_v, int32(0, 12, 12, 19), k_cache, v_cache, tables, int32(0, 0, past)),
            sinks=sinks, window=window, max_query_len=12,
        )  # fmt: skip
        rnd = exact if dtype == FP32 else to_bf16_but_last()
        short = causal_attention(
            f64(q[:12]), f64(new_k[:12]), f64(new_v[:12]), f64(sinks), window, rnd
        )
        rows = torch.zeros(past, heads, dim, dtype=torch.float64)
        queries = torch.cat([rows, f64(q[12:])])
        long = causal_attention(queries, f64(long_k), f64(long_v), f64(sinks), window, rnd)
        want = torch.cat([short[0], long[0][past:]])
        if dtype == FP32:
            assert_close(got, want, 2e-6)
        else:
            assert_rounds(got, want, torch.cat([short[1], long[1][past:]]))
