"""The library's decode attention: against the oracle, bit by bit, in graphs, behind other kernels.

With ATTENTION_DEVICE=cpu the tests run against the CPU's bodies at small sizes, which finds their
own mistakes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import attention_case
import op_samples
import pytest
import torch
from attention_case import relative_error
from op_samples import BF16, LAYOUTS, int32
from support import bits, captured
from torch import Tensor

from flint_kernels import ops
from flint_kernels.backends import native_attention
from flint_kernels.reference import attention as reference

pytestmark = pytest.mark.gpu

DEVICE = os.environ.get("ATTENTION_DEVICE", "cuda")
ON_GPU = DEVICE == "cuda"
HEADS, KV_HEADS, DIM = 32, 4, 128
LONGEST = 3000 if ON_GPU else 300
WINDOWS = (0, 1, 16, 513, 1009, 1010, 2000)  # up to 1009 keys a cluster takes a window
# Tiles of 16, pages, windows, splits of at least 128 keys, each with what lies beside it.
EDGES = sorted({max(0, n + d) for n in (0, 16, 64, 128, 256, 513, 1009, 1024) for d in (-1, 0, 1)})
REPLAYS = 1000 if ON_GPU else 3


@pytest.fixture(autouse=True)
def _errors_belong_to_their_test() -> Iterator[None]:
    yield
    if ON_GPU:
        torch.cuda.synchronize()


def randn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return attention_case.randn(DEVICE, *shape, seed=seed, scale=scale)


def Case(lengths: list[int], **options: Any) -> attention_case.Case:
    return attention_case.Case(lengths, DEVICE, **options)


def some_lengths(count: int, seed: int, most: int = LONGEST) -> list[int]:
    return torch.randint(0, most, (count,), generator=op_samples.rng(seed)).tolist()


def assert_near_the_oracle(case: attention_case.Case) -> None:
    case.assert_near_the_oracle(case.run())


# ------------------------------------------------------------------------------------- its values


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("page", [16, 32, 64, 128])
def test_edges(page: int, window: int) -> None:
    lengths = sorted({*EDGES, *(n for w in (window - 1, window, window + 1, window + 16)
                                for n in (w,) if n >= 0)})  # fmt: skip
    assert_near_the_oracle(Case(lengths, page=page, window=window, seed=page + window))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [0, 513, 1500])
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_random_lengths_and_layouts(layout: str, window: int, kv_heads: int) -> None:
    lengths = some_lengths(9, seed=window + kv_heads)
    assert_near_the_oracle(
        Case(lengths, layout=layout, window=window, kv_heads=kv_heads, seed=kv_heads)
    )


@pytest.mark.parametrize("window", [0, 513])
def test_a_full_batch(window: int) -> None:
    lengths = some_lengths(native_attention.MOST_REQUESTS, seed=3, most=700 if ON_GPU else 20)
    assert_near_the_oracle(Case(lengths, page=32, layout="nhd", window=window))


@pytest.mark.parametrize("length", [8192, 100_000, 262_144] if ON_GPU else [400])
def test_long_requests(length: int) -> None:
    assert_near_the_oracle(Case([length], page=64, layout="interleaved"))


def test_large_and_small_logits() -> None:
    """A running maximum that rises in every tile, one that never rises, and logits of thousands."""
    case = Case([2000, 2000, 2000, 300])
    ramp = torch.linspace(0.05, 3.0, 2000, device=DEVICE)
    for row, factor in enumerate((ramp, ramp.flip(0), 40 * ramp)):
        positions = torch.arange(2000, device=DEVICE)
        page, offset = case.table[row][positions // 16].long(), positions % 16
        direction = case.q[row].view(KV_HEADS, -1, DIM)[:, 0].float()
        case.k[page, offset] = (factor[:, None, None] * direction / 8).to(BF16)
    assert_near_the_oracle(case)


def test_without_sinks_with_a_scale_and_strided_queries() -> None:
    case = Case([5, 700, 1, 100])
    wide = randn(4, HEADS, 2 * DIM, seed=4)
    for q in (wide[:, :, :DIM], wide[:, :, DIM:], wide[:, :, ::2], wide[..., 1 : DIM + 1]):
        tensors = (case.k, case.v, case.table, case.lengths)
        got = ops.attention_decode(q, *tensors, None, 0, 0.05)
        want = reference.attention_decode(
            q.float(), case.k.float(), case.v.float(), case.table, case.lengths, None, 0, 0.05
        )
        assert relative_error(got, want) < 2**-7


@pytest.mark.parametrize("window", [0, 513])
def test_broken_lengths_and_pages_are_nan_and_nothing_else(window: int) -> None:
    if not ON_GPU:
        return  # an error there
    case = Case([700] * 6, window=window)
    want = case.run()
    case.lengths[0], case.lengths[1] = -1, case.table.shape[1] * 16 + 1
    case.table[2, 43], case.table[3, 12] = -1, 2**31 - 1
    case.table[4, 0] = -7  # before the window
    got = case.run()
    assert bool(got[:4].isnan().all())
    assert torch.equal(bits(got[5]), bits(want[5]))
    assert bool(got[4].isnan().all()) == (window == 0)


# -------------------------------------------------------------------------------------- its bits


@pytest.mark.parametrize("window", [0, 513, 1500])
def test_neither_batchmates_nor_the_table_s_width_change_a_bit(window: int) -> None:
    lengths = [*some_lengths(6, seed=5), 513, 1, 0, LONGEST]
    case = Case(lengths, window=window, width=400)
    whole = case.run()
    for row in range(len(lengths)):
        only = slice(row, row + 1)
        assert torch.equal(bits(case.run(only)), bits(whole[only]))
        assert torch.equal(bits(case.run(slice(row, None))[:1]), bits(whole[only]))
    order = torch.randperm(len(lengths), generator=op_samples.rng(1)).to(DEVICE)
    wide = torch.full((len(lengths), 16_500 if ON_GPU else 500), -1, dtype=torch.int32)
    wide = wide.to(DEVICE)
    wide[:, : case.table.shape[1]] = case.table
    got = ops.attention_decode(
        case.q[order], case.k, case.v, wide[order], case.lengths[order], case.sinks, window
    )
    assert torch.equal(bits(got), bits(whole[order]))


@pytest.mark.parametrize("window", [0, 513])
def test_run_to_run_and_a_clean_workspace(window: int) -> None:
    case = Case([LONGEST, 5, 2000 if ON_GPU else 200, 130], window=window)
    workspace = ops.make_workspace(DEVICE)
    want = case.run()
    differing = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(REPLAYS // 5 + 1):
        differing += (bits(case.run(workspace=workspace)) != bits(want)).any()
        differing += workspace.any()
    assert int(differing) == 0


@pytest.mark.parametrize("window", [0, 513])
def test_a_graph_serves_growing_lengths(window: int) -> None:
    lengths = (8, 513, 514, 4096, 100_000) if ON_GPU else (8, 30)
    case = Case([max(lengths)] * 2, window=0)
    case.window = window
    workspace, out = ops.make_workspace(DEVICE), torch.empty_like(case.q)

    def step() -> None:
        ops.attention_decode(
            case.q, case.k, case.v, case.table, case.lengths, case.sinks, window,
            workspace=workspace, out=out,
        )  # fmt: skip

    replay = captured(step)[0].replay if ON_GPU else step
    for length in (*lengths, *reversed(lengths)):
        case.lengths.fill_(length)
        case.lengths[1] = length // 2
        out.fill_(torch.nan)
        replay()
        assert torch.equal(bits(out), bits(case.run()))


def test_behind_the_kernel_that_writes_q_and_the_newest_key() -> None:
    """With PDL, a thousand times: a key or a query that was read too early would show."""
    requests, hidden, page = 3, 256, 16
    lengths = int32(600, 17, 1025).to(DEVICE) if ON_GPU else int32(60, 17, 33).to(DEVICE)
    width = 70
    table = (torch.arange(requests * width, dtype=torch.int32) + 1).view(requests, width)
    table = table.to(DEVICE)
    last = (lengths - 1).long()
    pages = table.gather(1, (last // page)[:, None])[:, 0]
    slots = pages.long() * page + last % page
    weight = randn((HEADS + 2 * KV_HEADS) * DIM, hidden, seed=1, scale=0.06)
    norm = torch.ones(DIM, dtype=BF16, device=DEVICE)
    inputs = randn(4, requests, hidden, seed=2)
    sinks = randn(HEADS, seed=3).float()
    layers = (0, 513, 0, 513)
    caches_ = [
        [randn(requests * width + 1, page, KV_HEADS, DIM, seed=10 * i + j) for j in range(2)]
        for i in range(len(layers))
    ]
    newest = (pages.long(), last % page)
    workspace = ops.make_workspace(DEVICE)
    outs = [torch.empty(requests, HEADS, DIM, dtype=BF16, device=DEVICE) for _ in layers]
    x = inputs[0].clone()
    output = randn(hidden, HEADS * DIM, seed=5, scale=0.02)

    def step(pdl: bool) -> None:
        rows = x
        for window, (k, v), out in zip(layers, caches_, outs, strict=True):
            q = ops.bf16_qkv_norm_rope_kv_write(
                rows, weight, norm, norm, None, last, slots, k, v, enable_pdl=pdl,
                workspace=workspace,
            )  # fmt: skip
            ops.attention_decode(
                q, k, v, table, lengths, sinks, window, out=out, enable_pdl=pdl,
                workspace=workspace,
            )  # fmt: skip
            rows = ops.bf16_linear(out.flatten(1), output, enable_pdl=pdl)

    want = []
    for value in inputs:
        x.copy_(value)
        step(False)
        want.append([out.clone() for out in outs])
    replay = captured(lambda: step(True))[0].replay if ON_GPU else lambda: step(True)
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for index in range(REPLAYS):
        for k, v in caches_:  # the newest rows are not there until they are written
            k[newest] = torch.nan
            v[newest] = torch.nan
        x.copy_(inputs[index % len(inputs)])
        replay()
        for out, right in zip(outs, want[index % len(inputs)], strict=True):
            wrong += (bits(out) != bits(right)).any()
    assert int(wrong) == 0


# --------------------------------------------------------------------------------- what it takes


@pytest.mark.parametrize("window", [0, 513])
@pytest.mark.parametrize("requests", [1, 6])
def test_A8_a_cache_of_more_than_2_31_elements(window: int, requests: int) -> None:
    if not ON_GPU:
        return
    page = 128
    blocks = 2**31 // (page * KV_HEADS * DIM) + 10
    last = torch.arange(blocks - 8, blocks, device=DEVICE)
    caches = [torch.zeros(blocks, page, KV_HEADS, DIM, dtype=BF16, device=DEVICE) for _ in range(2)]
    for index, cache in enumerate(caches):
        cache[last] = randn(8, page, KV_HEADS, DIM, seed=index)
    q = randn(requests, HEADS, DIM, seed=2)
    lengths = torch.arange(1000, 1000 - requests, -1, dtype=torch.int32, device=DEVICE)

    def run(k: Tensor, v: Tensor, pages: Tensor) -> Tensor:
        table = pages.int().expand(requests, -1).contiguous()
        return ops.attention_decode(q, k, v, table, lengths, None, window)

    few = [cache[last] for cache in caches]
    assert torch.equal(bits(run(*caches, last)), bits(run(*few, last - last[0])))


def test_which_calls_the_kernels_take() -> None:
    if not ON_GPU:
        return
    case = Case([40, 7])
    caches_ = (case.k, case.v)

    def takes(q: Tensor, k: Tensor) -> bool:
        return native_attention.takes(q, k)

    assert takes(case.q, case.k)
    assert not takes(case.q.float(), case.k.float())
    assert not takes(case.q[:, :16], case.k)
    assert not takes(case.q[..., :64], case.k[..., :64])
    assert not takes(case.q[:0], case.k)
    # What they leave is done all the same, by the general body.
    few = [cache[:, :, :2] for cache in caches_]
    got = ops.attention_decode(case.q[:, :8], *few, case.table, case.lengths)
    want = reference.attention_decode(
        case.q[:, :8].float(), *(c.float() for c in few), case.table, case.lengths, None, 0, None
    )
    assert relative_error(got, want) < 2**-7
