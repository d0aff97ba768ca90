"""The prefill attention's kernel, from its own sources, on the CPU: see test_emulated_attention.py.

Copies and products happen at once, or only when they are waited for, so that a buffer which is
given back too early shows.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import pytest
import torch
from emulated import compiled, pointer
from prefill_case import DIM, PrefillCase
from torch import Tensor


@pytest.fixture(scope="session")
def library() -> Any:
    return compiled("attention_prefill")


def emulate(
    library: Any,
    case: PrefillCase,
    *,
    multiprocessors: int = 3,
    late: bool = False,
    seed: int = 1,
) -> Tensor:
    out = torch.full_like(case.q, torch.nan, memory_format=torch.contiguous_format)
    strides = torch.tensor([*case.k_cache.stride()[:3], *case.v_cache.stride()[:3]])
    v = case.v.contiguous()
    launched = library.emulated_attention_prefill(
        pointer(case.q), pointer(case.k), pointer(v), pointer(case.cu_seqlens),
        case.q.shape[0], len(case.requests), pointer(case.k_cache), pointer(case.v_cache),
        pointer(strides), ctypes.c_int64(case.k_cache.shape[0]), ctypes.c_int64(case.page),
        case.k.shape[1], pointer(case.table if case.has_past else None),
        ctypes.c_int64(case.table.shape[1]), pointer(case.context_lens), pointer(case.sinks),
        case.window, ctypes.c_float(DIM**-0.5), pointer(out), multiprocessors, int(late), seed,
    )  # fmt: skip
    assert launched == 0
    return out


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    "requests, window, page, layout",
    [
        ([(0, 1), (0, 16), (0, 0), (0, 17), (0, 40)], 0, 16, "hnd"),
        ([(175, 3), (176, 1), (177, 20), (400, 5)], 0, 16, "nhd"),
        ([(0, 200)], 0, 64, "interleaved"),
        ([(511, 2), (512, 1), (513, 3), (1000, 18), (15, 2)], 513, 32, "halves"),
        ([(40, 200)], 33, 128, "hnd"),
        ([(3, 50), (60, 1)], 1, 16, "nhd"),
    ],
)
def test_values(
    library: Any,
    requests: list[tuple[int, int]],
    window: int,
    page: int,
    layout: str,
    late: bool,
) -> None:
    case = PrefillCase(requests, "cpu", window=window, page=page, layout=layout, kv_heads=1)
    case.assert_near_the_oracle(emulate(library, case, late=late, seed=len(requests)))


def test_without_a_past_and_two_heads(library: Any) -> None:
    case = PrefillCase([(0, 190), (0, 33)], "cpu", past=False, kv_heads=2, window=100)
    case.assert_near_the_oracle(emulate(library, case, late=True, multiprocessors=4))


def zeros(chunk: int, window: int = 0) -> PrefillCase:
    """A fresh chunk of one KV head, all zeros, with sinks of -inf."""
    case = PrefillCase([(0, chunk)], "cpu", past=False, kv_heads=1, window=window)
    for name in ("q", "k", "v"):
        setattr(case, name, torch.zeros_like(getattr(case, name)).contiguous())
    case.sinks.fill_(-math.inf)
    return case


@pytest.mark.parametrize(("key", "value"), [(88, 1 / 512), (87, 0.0), (600, 1 / 512)])
def test_A1_the_window_counts_the_current_token(library: Any, key: int, value: float) -> None:
    case = zeros(601, window=513)
    case.v[key] = 1.0
    assert emulate(library, case)[-1].unique().tolist() == [value]  # 1/513 in BF16


def test_A2_very_negative_logits(library: Any) -> None:
    case = zeros(4)
    case.q[:, :, 0], case.k[:, :, 0] = -128.0 * math.sqrt(DIM), 480.0
    case.v[:] = torch.arange(1.0, 5.0).view(4, 1, 1)
    assert emulate(library, case)[-1].unique().tolist() == [2.5]
    case.sinks.zero_()  # any ordinary sink outweighs such keys
    assert emulate(library, case)[-1].unique().tolist() == [0.0]


@pytest.mark.parametrize("step", [0.05, 0.5, 30.0])
@pytest.mark.parametrize("late", [False, True])
def test_logits_that_rise_from_tile_to_tile(library: Any, step: float, late: bool) -> None:
    """By little, by more than a tile's weights may, and by more than a number holds."""
    case = PrefillCase([(300, 170)], "cpu", kv_heads=1, seed=3)
    case.q[:, :, 0] = DIM**0.5
    case.q[::3, ::2, 0] *= -1.0
    rows = torch.arange(470.0) * step
    case.k[:, :, 0] = rows[300:, None]
    positions = torch.arange(300)
    case.k_cache[case.table[0, positions // 16].long(), positions % 16, :, 0] = rows[:300, None].to(
        torch.bfloat16
    )
    case.assert_near_the_oracle(emulate(library, case, late=late))


@pytest.mark.parametrize("factor", [2.0, 4.0, 30.0])
def test_few_keys_that_have_most_of_the_weight(library: Any, factor: float) -> None:
    """Where the rounding of one weight shows, it has to be that of the row's own maximum."""
    case = PrefillCase([(600, 40)], "cpu", kv_heads=1, seed=3)
    case.q *= factor
    case.assert_near_the_oracle(emulate(library, case))


@pytest.mark.parametrize(
    ("sink", "share"), [(100.0, 0.0), (1e30, 0.0), (-math.inf, 1.0), (math.log(3.0), 0.5)]
)
def test_A3_sinks(library: Any, sink: float, share: float) -> None:
    case = zeros(3)
    case.v[:] = torch.arange(1.0, 4.0).view(3, 1, 1)
    case.sinks.fill_(sink)
    got = emulate(library, case)[-1].float()
    assert bool(((got - 2.0 * share).abs() <= 2**-7 * share).all() or got.abs().max() < 1e-30)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int16)


@pytest.mark.parametrize("window", [0, 60])
def test_bits_do_not_depend_on_batchmates_or_the_number_of_ctas(library: Any, window: int) -> None:
    case = PrefillCase([(100, 40), (7, 30), (0, 20)], "cpu", window=window, width=30, kv_heads=1)
    together = emulate(library, case, late=True)
    assert torch.equal(bits(emulate(library, case, multiprocessors=1, seed=3)), bits(together))
    for row in range(3):
        alone = PrefillCase(case.requests, "cpu", window=window, kv_heads=1)
        begin, end = case.bounds(row)
        for name in ("q", "k", "v"):
            setattr(alone, name, getattr(alone, name)[begin:end].contiguous())
        alone.table = alone.table[row : row + 1].contiguous()
        alone.context_lens = alone.context_lens[row : row + 1].contiguous()
        alone.requests = alone.requests[row : row + 1]
        alone.cu_seqlens = torch.tensor([0, end - begin], dtype=torch.int32)
        assert torch.equal(bits(emulate(library, alone)), bits(together[begin:end]))


def test_broken_lengths_and_pages_are_nan_and_nothing_else(library: Any) -> None:
    case = PrefillCase([(70, 5), (70, 5), (70, 5), (90, 18)], "cpu", window=60, kv_heads=1)
    want = emulate(library, case)
    case.context_lens[0], case.context_lens[1] = -1, case.table.shape[1] * 16 + 1
    case.table[2, 3] = case.k_cache.shape[0]
    case.table[3, 0] = -9  # before the window
    got = emulate(library, case)
    assert bool(got[:15].isnan().all())
    assert torch.equal(bits(got[15:]), bits(want[15:]))


@pytest.mark.parametrize("offsets", [[0, 9, 4, 10], [1, 4, 9, 10], [0, 4, 9, 11], [0, 4, 9, 9]])
def test_broken_offsets_are_nan(library: Any, offsets: list[int]) -> None:
    case = PrefillCase([(0, 4), (0, 5), (0, 1)], "cpu", kv_heads=1)
    case.cu_seqlens = torch.tensor(offsets, dtype=torch.int32)
    assert bool(emulate(library, case).isnan().all())
