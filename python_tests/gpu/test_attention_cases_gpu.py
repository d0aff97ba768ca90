"""Rows A1 to A6 and A9 of the fault table on a GPU: windows, sinks, empty rows, what is not read.

The same inputs as in test_attention_ops.py. Whatever body takes them, the general one or a kernel,
the answers are those of the table, so nothing here depends on which it is. LOW_LATENCY_DEVICE=cpu
runs the tests against the CPU's bodies.
"""

from __future__ import annotations

import math

import op_samples
import pytest
import torch
from low_latency import BF16, DEVICE
from support import bits

from flint_kernels import ops

pytestmark = pytest.mark.gpu

Tensor = torch.Tensor
PAGE = 16
# head_dim 128 with 8 heads to a KV head is the model's; the others have the general path alone.
SHAPES = [(8, 1, 128), (1, 1, 16), (4, 2, 64)]
each_shape = pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> Tensor:
    return op_samples.randn(*shape, seed=seed, dtype=dtype).to(DEVICE)


def paged(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """K and V [L, Hkv, D] of one request in shuffled pages -> caches, and the table [1, n]."""
    pages = -(-k.shape[0] // PAGE)
    order = torch.randperm(pages + 2, generator=op_samples.rng(0))[:pages].to(DEVICE)
    positions = torch.arange(k.shape[0], device=DEVICE)
    slots = order[positions // PAGE] * PAGE + positions % PAGE
    caches = [torch.zeros(pages + 2, PAGE, *k.shape[1:], dtype=k.dtype, device=DEVICE)
              for _ in range(2)]  # fmt: skip
    ops.kv_cache_write(k, v, slots, *caches)
    return caches[0], caches[1], order.to(torch.int32)[None]


def each_way(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, window: int = 0
) -> list[Tensor]:
    """The query [Hq, D] at the last of the keys: by decode, in a chunk of all, behind a past."""
    length = k.shape[0]
    queries = torch.zeros(length, *q.shape, dtype=q.dtype, device=DEVICE)
    queries[-1] = q
    past = *paged(k[:-1], v[:-1]), int32(length - 1)
    return [
        ops.attention_decode(q[None], *paged(k, v), int32(length), sinks, window)[0],
        ops.attention_prefill(queries, k, v, int32(0, length), sinks=sinks, window=window)[-1],
        ops.attention_prefill(q[None], k[-1:], v[-1:], int32(0, 1), *past, sinks, window)[0],
    ]


@each_shape
@pytest.mark.parametrize(("key", "seen"), [(88, True), (87, False), (600, True)])
def test_A1_the_window_counts_the_current_token(
    heads: int, kv_heads: int, dim: int, key: int, seen: bool
) -> None:
    for dtype in (BF16, torch.float32):
        q = torch.zeros(heads, dim, dtype=dtype, device=DEVICE)
        k, v = randn(601, kv_heads, dim, dtype=dtype), torch.zeros(601, kv_heads, dim, dtype=dtype)
        v[key] = 1.0
        sinks = torch.full((heads,), -math.inf, device=DEVICE)
        for out in each_way(q, k, v.to(DEVICE), sinks, 513):
            if not seen:
                assert out.unique().tolist() == [0.0]
            elif dtype == BF16:
                assert out.unique().tolist() == [1 / 512]  # 1/513 in BF16
            else:
                assert 1 / out.mean().item() == pytest.approx(513, rel=1e-5)


@each_shape
def test_A2_very_negative_logits(heads: int, kv_heads: int, dim: int) -> None:
    """Four logits of about -6e4 each: the maximum is over the keys alone."""
    q = torch.zeros(heads, dim, dtype=BF16, device=DEVICE)
    k = torch.zeros(4, kv_heads, dim, dtype=BF16, device=DEVICE)
    q[:, 0], k[:, :, 0] = -128.0 * math.sqrt(dim), 480.0
    v = torch.arange(1.0, 5.0).view(4, 1, 1).expand(4, kv_heads, dim).to(BF16).to(DEVICE)
    for sinks in (torch.full((heads,), -math.inf, device=DEVICE), None):
        for out in each_way(q, k, v, sinks):
            assert out.unique().tolist() == [2.5]
    for out in each_way(q, k, v, torch.zeros(heads, device=DEVICE)):
        assert out.unique().tolist() == [0.0]  # any ordinary sink outweighs such keys


@each_shape
def test_A3_sinks(heads: int, kv_heads: int, dim: int) -> None:
    q = torch.zeros(heads, dim, dtype=BF16, device=DEVICE)
    k, v = (randn(3, kv_heads, dim, seed=s) for s in (1, 2))
    mean = v.double().mean(0).repeat_interleave(heads // kv_heads, dim=0)
    for value, share in ((100.0, 0.0), (1e30, 0.0), (-math.inf, 1.0), (math.log(3.0), 0.5)):
        for out in each_way(q, k, v, torch.full((heads,), value, device=DEVICE)):
            # Logits of 0: three keys of weight 1 beside a sink of weight exp(value). P is exact,
            # and one rounding is at most 2^-8 of the largest value, 2^-8 * 4.
            torch.testing.assert_close(out.double(), mean * share, rtol=0, atol=2**-6)
            assert share != 0.0 or bool((out.abs() < 1e-30).all())
    cache = torch.full((2, PAGE, kv_heads, dim), math.nan, dtype=BF16, device=DEVICE)
    nan = torch.full((1, heads, dim), math.nan, dtype=BF16, device=DEVICE)
    sinks = torch.full((heads,), 0.5, device=DEVICE)
    out = ops.attention_decode(nan, cache, cache, int32(-1)[None], int32(0), sinks)
    assert out.unique().tolist() == [0.0]


@each_shape
def test_A4_rows_without_keys_are_zeros(heads: int, kv_heads: int, dim: int) -> None:
    caches = randn(4, PAGE, kv_heads, dim, seed=1), randn(4, PAGE, kv_heads, dim, seed=2)
    q, sinks = randn(3, heads, dim), randn(heads, dtype=torch.float32)
    table, lengths = int32(2, -1, -1).view(3, 1), int32(7, 0, 0)
    out = torch.full((3, heads, dim), math.nan, dtype=BF16, device=DEVICE)
    ops.attention_decode(q, *caches, table, lengths, sinks, out=out)
    alone = ops.attention_decode(q[:1], *caches, table[:1], lengths[:1], sinks)
    assert torch.equal(bits(out[:1]), bits(alone))
    assert out[1:].unique().tolist() == [0.0]


@each_shape
@pytest.mark.parametrize("window", [0, 9, 1])
def test_A5_nan_where_nothing_is_read(heads: int, kv_heads: int, dim: int, window: int) -> None:
    """Page 0, slots past the length, slots before the window: NaN or zeros, the same bits."""
    length, context = 45, 40
    first = max(0, context - window) if window else 0
    pages = int32(3, 5, 1)
    positions = torch.arange(first, length, device=DEVICE)
    slots = pages.long()[positions // PAGE] * PAGE + positions % PAGE
    k, v = (randn(len(positions), kv_heads, dim, seed=s) for s in (1, 2))
    q, sinks = randn(5, heads, dim), randn(heads, dtype=torch.float32)
    results = []
    for fill in (0.0, math.nan):
        caches = [torch.full((6, PAGE, kv_heads, dim), fill, dtype=BF16, device=DEVICE)
                  for _ in range(2)]  # fmt: skip
        ops.kv_cache_write(k, v, slots, *caches)
        one = ops.attention_decode(q[:1], *caches, pages[None], int32(length), sinks, window)
        past = *caches, pages[None], int32(context), sinks, window
        results.append((one, ops.attention_prefill(q, k[-5:], v[-5:], int32(0, 5), *past)))
    for clean, dirty in zip(*results, strict=True):
        assert bool(clean.isfinite().all())
        assert torch.equal(bits(clean), bits(dirty))


@each_shape
@pytest.mark.parametrize("tail", [-1, 2**31 - 1])
@pytest.mark.parametrize("length", [1, 16, 17, 257])
def test_A6_the_tail_of_the_block_table_is_not_read(
    heads: int, kv_heads: int, dim: int, length: int, tail: int
) -> None:
    k, v = (randn(length, kv_heads, dim, seed=s) for s in (1, 2))
    q, chunk = randn(1, heads, dim), (randn(1, kv_heads, dim, seed=s) for s in (3, 4))
    new_k, new_v = chunk
    k_cache, v_cache, exact = paged(k, v)
    wide = torch.cat([exact, torch.full((1, 5), tail, dtype=torch.int32, device=DEVICE)], dim=1)
    for window in (0, 20):
        outs = []
        for table in (exact, wide):
            past = k_cache, v_cache, table, int32(length), None, window
            outs.append(ops.attention_decode(q, *past))
            outs.append(ops.attention_prefill(q, new_k, new_v, int32(0, 1), *past))
        # A kernel may split the keys by the table's width, and then sums them in another order.
        for narrow, padded in zip(outs[:2], outs[2:], strict=True):
            torch.testing.assert_close(narrow, padded, rtol=2**-7, atol=2**-8)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(4, 4, 32), (5, 1, 64), (6, 2, 20), (3, 3, 7), (34, 2, 128)]
)
def test_A9_any_ratio_and_head_dim(heads: int, kv_heads: int, dim: int) -> None:
    q = randn(heads, dim, dtype=torch.float32)
    k, v = (randn(9, kv_heads, dim, seed=s, dtype=torch.float32) for s in (1, 2))
    sinks = randn(heads, dtype=torch.float32, seed=3)
    group = heads // kv_heads
    keys, values = (t[-4:].double().repeat_interleave(group, dim=1) for t in (k, v))
    logits = torch.einsum("hd,lhd->hl", q.double(), keys) * dim**-0.5
    with_sink = torch.cat([logits, sinks.double()[:, None]], dim=1).softmax(dim=1)
    want = torch.einsum("hl,lhd->hd", with_sink[:, :-1], values)
    for out in each_way(q, k, v, sinks, 4):
        torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)


def test_A9_heads_that_do_not_divide_are_refused() -> None:
    q, k = randn(2, 5, 32), randn(2, 2, 32)
    with pytest.raises(ValueError, match=r"attention_prefill.*'q'.*5 query heads.*2 KV heads"):
        ops.attention_prefill(q, k, k, int32(0, 2))
