"""The library's prefill attention: against the oracle, bit by bit, in graphs, behind other kernels.

With ATTENTION_DEVICE=cpu the tests run against the CPU's bodies at small sizes, which finds their
own mistakes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import op_samples
import pytest
import torch
from attention_case import randn, relative_error
from op_samples import BF16, LAYOUTS, int32
from prefill_case import DIM, PrefillCase
from support import bits, captured
from torch import Tensor

from flint_kernels import ops
from flint_kernels.backends import native_prefill
from flint_kernels.reference import attention as reference

pytestmark = pytest.mark.gpu

DEVICE = os.environ.get("ATTENTION_DEVICE", "cuda")
ON_GPU = DEVICE == "cuda"
LONGEST = 2500 if ON_GPU else 100
WINDOWS = (0, 1, 16, 513)
# Tiles of 24 queries and of 112 keys, pages, the window, each with what lies beside it.
EDGES = sorted(
    {
        max(0, n + d)
        for n in (0, 16, 24, 48, 64, 112, 128, 224, 336, 512, 513, 536)
        for d in (-1, 0, 1)
    }
)
if not ON_GPU:
    EDGES = [edge for edge in EDGES if edge < 70]


@pytest.fixture(autouse=True)
def _errors_belong_to_their_test() -> Iterator[None]:
    yield
    if ON_GPU:
        torch.cuda.synchronize()


def Case(requests: list[tuple[int, int]], **options: Any) -> PrefillCase:
    return PrefillCase(requests, DEVICE, **options)


def random_requests(count: int, seed: int) -> list[tuple[int, int]]:
    lengths = torch.randint(0, LONGEST, (2, count), generator=op_samples.rng(seed))
    lengths[1] //= 4
    return [(int(past), int(chunk)) for past, chunk in lengths.T]


def assert_near_the_oracle(case: PrefillCase) -> None:
    if ON_GPU:
        assert native_prefill.takes(case.q, case.k, case.cu_seqlens, case.past[0])
    case.assert_near_the_oracle(case.run())


# ------------------------------------------------------------------------------------- its values


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("page", [16, 32, 64, 128])
def test_edges(page: int, window: int) -> None:
    """Every length of the past with a short chunk, and of the chunk with a short past."""
    requests = [*((edge, 1 + edge % 19) for edge in EDGES), *((edge % 23, edge) for edge in EDGES)]
    assert_near_the_oracle(Case(requests, page=page, window=window, seed=page + window))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [0, 513, 1500])
@pytest.mark.parametrize("kv_heads", [1, 4, 5])
def test_random_lengths_and_layouts(layout: str, window: int, kv_heads: int) -> None:
    requests = random_requests(6, seed=window + kv_heads)
    assert_near_the_oracle(
        Case(requests, layout=layout, window=window, kv_heads=kv_heads, seed=kv_heads)
    )


@pytest.mark.parametrize("window", [0, 513])
def test_without_a_past(window: int) -> None:
    requests = [(0, chunk) for _, chunk in random_requests(5, seed=2)]
    assert_near_the_oracle(Case([*requests, (0, 0), (0, 1)], past=False, window=window))


def test_many_requests() -> None:
    requests = random_requests(300 if ON_GPU else 40, seed=4)
    requests = [(past % 200, chunk % 40) for past, chunk in requests]
    assert_near_the_oracle(Case(requests, page=48, layout="nhd", kv_heads=2))


@pytest.mark.parametrize("window", [0, 513])
def test_real_sizes(window: int) -> None:
    size = 8192 if ON_GPU else 60
    assert_near_the_oracle(Case([(0, size)], window=window))
    assert_near_the_oracle(Case([(12 * size, 130)], window=window, page=64, layout="interleaved"))


def test_large_and_small_logits() -> None:
    """A running maximum that rises in every tile, one that never rises, and logits of thousands."""
    size = 900 if ON_GPU else 60
    case = Case([(0, size)] * 3, kv_heads=1)
    ramp = torch.linspace(0.05, 3.0, size, device=DEVICE)
    direction = randn(DEVICE, 1, DIM, seed=3).float()
    for row, factor in enumerate((ramp, ramp.flip(0), 40 * ramp)):
        begin, end = case.bounds(row)
        case.k[begin:end] = (factor[:, None, None] * direction / 8).to(BF16)
        case.q[begin:end] += direction.to(BF16)
    assert_near_the_oracle(case)


@pytest.mark.parametrize("factor", [2.0, 4.0, 30.0])
def test_few_keys_that_have_most_of_the_weight(factor: float) -> None:
    """Where the rounding of one weight shows, it has to be that of the row's own maximum."""
    case = Case([(40 if not ON_GPU else 600, 60 if not ON_GPU else 1500)], kv_heads=1)
    case.q *= factor
    assert_near_the_oracle(case)


def test_without_sinks_with_a_scale_and_strided_rows() -> None:
    case = Case([(30, 40), (0, 7)], kv_heads=1)
    rows, heads = case.q.shape[:2]
    wide = randn(DEVICE, rows, heads, 2 * DIM, seed=4)
    k = randn(DEVICE, rows, 2 * DIM, 1, seed=5).transpose(1, 2)[..., :DIM]
    for q in (wide[:, :, :DIM], wide[:, :, DIM:], wide[:, :, ::2], wide[..., 1 : DIM + 1]):
        rest = (k, case.v, case.cu_seqlens, *case.past, None, 0, 0.05)
        got = ops.attention_prefill(q, *rest)
        floats = [x.float() if x is not None and x.is_floating_point() else x for x in rest[:7]]
        want = reference.attention_prefill(q.float(), *floats, None, 0, 0.05)
        assert relative_error(got, want) < 2**-7


# ------------------------------------------------------------- what is not read, and what is broken


@pytest.mark.parametrize("window", [0, 60])
def test_nan_in_other_requests_reaches_nobody(window: int) -> None:
    case = Case([(70, 40), (33, 30), (20, 50)], window=window)
    want = case.run()
    begin, end = case.bounds(1)
    for rows in (case.q, case.k, case.v):
        rows[begin:end] = torch.nan
    got = case.run()
    for row in (0, 2):
        begin, end = case.bounds(row)
        assert torch.equal(bits(got[begin:end]), bits(want[begin:end]))


def test_broken_lengths_and_pages_are_nan_and_nothing_else() -> None:
    if not ON_GPU:
        return  # an error there
    case = Case([(90, 5), (90, 5), (90, 5), (90, 18)], window=60)
    want = case.run()
    case.context_lens[0], case.context_lens[1] = -1, case.table.shape[1] * 16 + 1
    case.table[2, 3] = case.k_cache.shape[0]
    case.table[3, 0] = -9  # before the window
    got = case.run()
    assert bool(got[:15].isnan().all())
    assert torch.equal(bits(got[15:]), bits(want[15:]))


@pytest.mark.parametrize("offsets", [[0, 9, 4, 10], [1, 4, 9, 10], [0, 4, 9, 11], [0, 4, 9, 9]])
def test_broken_offsets_are_nan(offsets: list[int]) -> None:
    if not ON_GPU:
        return  # an error there
    case = Case([(0, 4), (0, 5), (0, 1)])
    case.cu_seqlens = int32(*offsets).to(DEVICE)
    assert bool(case.run().isnan().all())


# -------------------------------------------------------------------------------------- its bits


@pytest.mark.parametrize("window", [0, 513])
def test_neither_batchmates_nor_the_table_s_width_change_a_bit(window: int) -> None:
    case = Case([*random_requests(5, seed=5), (513, 1), (0, 33)], window=window, width=200)
    whole = case.run()
    narrow = Case(case.requests, window=window)
    for row in range(len(case.requests)):
        begin, end = case.bounds(row)
        for one in (case, narrow):
            assert torch.equal(bits(one.alone(row)), bits(whole[begin:end]))


@pytest.mark.parametrize("window", [0, 513])
def test_run_to_run(window: int) -> None:
    case = Case([(1500, 700), (3, 900), (100, 1)] if ON_GPU else [(20, 9)], window=window)
    want = case.run()
    differing = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(200 if ON_GPU else 2):
        differing += (bits(case.run()) != bits(want)).any()
    assert int(differing) == 0


@pytest.mark.parametrize("window", [0, 513])
def test_chunks_equal_one_shot(window: int) -> None:
    """Row A7: not to the bit, since a chunk's keys are cut into other tiles."""
    pieces = (1, 7, 512, 513, 67) if ON_GPU else (1, 7, 20, 13)
    case = Case([(0, sum(pieces))], window=window, past=False, page=16)
    whole, truth = case.run(), case.reference(torch.float32)
    pages = -(-sum(pieces) // 16)
    caches = [torch.full((pages, 16, 4, DIM), torch.nan, dtype=BF16, device=DEVICE)
              for _ in range(2)]  # fmt: skip
    table = torch.arange(pages, dtype=torch.int32, device=DEVICE)[None]
    done, outs = 0, []
    for piece in pieces:
        rows = slice(done, done + piece)
        outs.append(
            ops.attention_prefill(
                case.q[rows], case.k[rows], case.v[rows], int32(0, piece).to(DEVICE), *caches,
                table, int32(done).to(DEVICE), case.sinks, window,
            )
        )  # fmt: skip
        slots = torch.arange(done, done + piece, device=DEVICE)
        ops.kv_cache_write(case.k[rows], case.v[rows], slots, *caches)
        done += piece
    got = torch.cat(outs)
    plain = case.reference(BF16)
    for one in (got, whole):
        assert relative_error(one, truth) <= 1.1 * relative_error(plain, truth)


def test_a_graph_serves_other_lengths() -> None:
    case = Case([(900, 100), (10, 50)] if ON_GPU else [(30, 10), (1, 5)], width=64)
    first = [t.clone() for t in (case.cu_seqlens, case.context_lens)]
    out = torch.empty_like(case.q)
    replay = captured(lambda: case.run(out=out))[0].replay if ON_GPU else lambda: case.run(out=out)
    total = int(first[0][-1])
    for bounds, lengths in (((0, 1, total), (13, 1)), (first[0].tolist(), first[1].tolist())):
        case.cu_seqlens.copy_(int32(*bounds))
        case.context_lens.copy_(int32(*lengths))
        out.fill_(torch.nan)
        replay()
        assert torch.equal(bits(out), bits(case.run()))
        assert bool(out.isfinite().all())


def test_behind_the_kernel_that_writes_its_inputs() -> None:
    """With PDL: what was read too early would show."""
    case = Case([(200, 300), (0, 40)] if ON_GPU else [(20, 9)])
    norm = torch.ones(DIM, dtype=BF16, device=DEVICE)
    rows, heads = case.q.shape[:2]
    positions = torch.arange(rows, device=DEVICE)
    none = torch.full((rows,), -1, dtype=torch.int64, device=DEVICE)
    qkv = randn(DEVICE, rows, (heads + 8) * DIM, seed=5)

    def step(pdl: bool) -> Tensor:
        q, k = ops.qk_norm_rope_kv_write(
            qkv, norm, norm, None, positions, none, case.k_cache, case.v_cache, enable_pdl=pdl
        )
        v = qkv[:, (heads + 4) * DIM :].view(k.shape)
        return ops.attention_prefill(
            q, k, v, case.cu_seqlens, *case.past, case.sinks, 0, enable_pdl=pdl
        )

    want = step(False)
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(200 if ON_GPU else 2):
        wrong += (bits(step(True)) != bits(want)).any()
    assert int(wrong) == 0


# --------------------------------------------------------------------------------- what it takes


def test_A8_a_cache_of_more_than_2_31_elements() -> None:
    if not ON_GPU:
        return
    page, kv_heads = 128, 4
    blocks = 2**31 // (page * kv_heads * DIM) + 8
    caches = [torch.zeros(blocks, page, kv_heads, DIM, dtype=BF16, device=DEVICE) for _ in range(2)]
    last = torch.arange(blocks - 4, blocks, device=DEVICE)
    for index, cache in enumerate(caches):
        cache[last] = randn(DEVICE, 4, page, kv_heads, DIM, seed=index)
    case = Case([(500, 40)])
    rest = (case.k, case.v, case.cu_seqlens)
    got = ops.attention_prefill(case.q, *rest, *caches, last.int()[None], case.context_lens)
    few = [cache[last] for cache in caches]
    table = torch.arange(4, dtype=torch.int32, device=DEVICE)[None]
    want = ops.attention_prefill(case.q, *rest, *few, table, case.context_lens)
    assert torch.equal(bits(got), bits(want))


def test_which_calls_the_kernel_takes() -> None:
    if not ON_GPU:
        return
    case = Case([(40, 7)])

    def takes(q: Tensor, k: Tensor, cache: Tensor | None = None) -> bool:
        return native_prefill.takes(q, k, case.cu_seqlens, cache)

    assert takes(case.q, case.k) and takes(case.q, case.k, case.k_cache)
    assert not takes(case.q.float(), case.k.float())
    assert not takes(case.q[:, :16], case.k)
    assert not takes(case.q[..., :64], case.k[..., :64])
    assert not takes(case.q[:0], case.k[:0])
    assert not takes(case.q, case.k, case.k_cache[:, :8])
    # What it leaves is done all the same, by the general body: so are caches off by two bytes.
    odd = torch.zeros(case.k_cache.numel() + 1, dtype=BF16, device=DEVICE)[1:]
    odd = odd.view(case.k_cache.shape).copy_(case.k_cache)
    rest = (case.v_cache, case.table, case.context_lens, case.sinks)
    got = ops.attention_prefill(case.q, case.k, case.v, case.cu_seqlens, odd, *rest)
    assert relative_error(got, case.reference(torch.float32)) < 2**-7
