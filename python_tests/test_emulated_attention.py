"""The decode attention's kernels, from their own sources, on the CPU.

`emulation/simt.h` runs a kernel's threads, warp by warp in random order; instructions are replaced
by what they do. So the whole arithmetic is tested without a GPU: which keys a split has, where a
piece stands in shared memory, the ring of tiles, the merging, and what is read ahead of the wait.
Asynchronous copies happen at once, or only when they are waited for. What of a GPU it does not have
is its memory's order: a missing fence shows on a GPU alone.
"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from attention_case import Case
from emulated import compiled, pointer
from torch import Tensor

H200 = 132  # multiprocessors


@pytest.fixture(scope="session")
def library() -> Any:
    return compiled("attention")


def emulate(
    library: Any,
    case: Case,
    *,
    multiprocessors: int = H200,
    late_copies: bool = False,
    seed: int = 1,
    written: list[Tensor] | None = None,
) -> Tensor:
    """The kernels' output; `written`: tensors that hold NaN until the kernel in front has ended."""
    out = torch.full_like(case.q, torch.nan)
    values = [each.flatten().view(torch.int16).clone() for each in written or []]
    places = torch.tensor(
        [each.data_ptr() + 2 * i for each in written or [] for i in range(each.numel())]
    )
    for each in written or []:
        assert each.is_contiguous()
        each.fill_(torch.nan)
    together = torch.cat(values) if values else torch.empty(0, dtype=torch.int16)
    strides = torch.tensor([*case.k.stride()[:3], *case.v.stride()[:3]])
    counters = torch.zeros(case.q.shape[0] * case.k.shape[2], dtype=torch.int32)
    launched = library.emulated_attention_decode(
        pointer(case.q), pointer(case.k), pointer(case.v), pointer(strides),
        ctypes.c_int64(case.k.shape[0]), ctypes.c_int64(case.page), case.k.shape[2],
        pointer(case.table), ctypes.c_int64(case.table.shape[1]), pointer(case.lengths),
        case.q.shape[0], pointer(case.sinks), case.window, ctypes.c_float(case.q.shape[2] ** -0.5),
        pointer(out), pointer(counters), multiprocessors, int(late_copies), seed,
        pointer(places), pointer(together), ctypes.c_int64(len(together)),
    )  # fmt: skip
    assert launched == 0
    assert not counters.any()
    return out


@pytest.mark.parametrize("late_copies", [False, True])
@pytest.mark.parametrize(
    "lengths, window, page, layout",
    [
        ([0, 1, 16, 17, 512, 513, 514, 700], 513, 16, "hnd"),
        ([700, 65, 128], 513, 64, "interleaved"),
        ([1009, 1100], 1009, 32, "nhd"),
        ([1, 2, 40], 1, 128, "halves"),
        ([0, 1, 15, 17, 127, 129, 257, 600], 0, 16, "nhd"),
        ([1500, 1511, 3], 1500, 32, "hnd"),
    ],
)
def test_values(
    library: Any, lengths: list[int], window: int, page: int, layout: str, late_copies: bool
) -> None:
    """A short window's kernel, and the other one on a GPU where CTAs take several splits."""
    case = Case(lengths, "cpu", window=window, page=page, layout=layout, kv_heads=1)
    got = emulate(library, case, multiprocessors=2, late_copies=late_copies, seed=len(lengths))
    case.assert_near_the_oracle(got)


def test_as_many_splits_as_there_are_and_more_requests_than_a_warp_counts(library: Any) -> None:
    case = Case([64 * 128 + 5], "cpu", kv_heads=1)
    case.assert_near_the_oracle(emulate(library, case))
    lengths = torch.randint(0, 150, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    case = Case(lengths, "cpu", kv_heads=1)
    case.assert_near_the_oracle(emulate(library, case, multiprocessors=4))


@pytest.mark.parametrize("window", [0, 513])
def test_bits_do_not_depend_on_batchmates_or_the_table_s_width(library: Any, window: int) -> None:
    """Alone a request has deep rings, among others shallow ones."""
    case = Case([900, 5, 1200], "cpu", window=window, width=300, kv_heads=2)
    together = emulate(library, case, multiprocessors=20, late_copies=True)
    for row in (0, 2):
        alone = Case([900, 5, 1200], "cpu", window=window, kv_heads=2)
        rows = slice(row, row + 1)
        alone.q, alone.lengths = alone.q[rows].contiguous(), alone.lengths[rows].contiguous()
        alone.table = alone.table[rows].contiguous()
        got = emulate(library, alone, multiprocessors=20, seed=7)
        assert torch.equal(got.view(torch.int16), together[rows].view(torch.int16))


@pytest.mark.parametrize("window", [0, 513])
def test_q_and_the_newest_key_are_read_after_the_wait(library: Any, window: int) -> None:
    case = Case([700, 16, 1], "cpu", window=window, kv_heads=2)
    last = (case.lengths - 1).long()
    pages = case.table.gather(1, (last // case.page)[:, None])[:, 0].long()
    newest = [
        cache[page, position % case.page, head]
        for cache in (case.k, case.v)
        for page, position in zip(pages.tolist(), last.tolist(), strict=True)
        for head in range(2)
    ]
    want = emulate(library, case)
    got = emulate(library, case, written=[case.q, *newest])
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))
    case.assert_near_the_oracle(got)


@pytest.mark.parametrize("window", [0, 513])
def test_broken_lengths_and_pages_are_nan_and_nothing_else(library: Any, window: int) -> None:
    case = Case([300, 300, 300, 300], "cpu", window=window, kv_heads=1)
    want = emulate(library, case)
    case.lengths[0], case.lengths[1] = -1, case.table.shape[1] * 16 + 1
    case.table[2, 7] = case.k.shape[0]
    got = emulate(library, case)
    assert bool(got[:3].isnan().all())
    assert torch.equal(got[3].view(torch.int16), want[3].view(torch.int16))
