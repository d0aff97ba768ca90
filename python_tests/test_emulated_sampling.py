"""The kernels of sampling, from their own sources, on the CPU (see `test_emulated_attention`)."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import pytest
import torch
from emulated import compiled, pointer
from op_samples import randn
from torch import Tensor

from flint_kernels import ops
from flint_kernels.reference import sampling as reference

LARGEST = torch.finfo(torch.float32).max


@pytest.fixture(scope="session")
def library() -> Any:
    return compiled("sampling")


class Rows:
    """Settings of rows, the model's own unless said otherwise."""

    def __init__(self, rows: int, **settings: Any) -> None:
        self.temperature = torch.ones(rows)
        self.top_k = torch.full((rows,), 20, dtype=torch.int32)
        self.top_p = torch.full((rows,), 0.95)
        self.seed = torch.arange(rows) * 7919 - 3
        self.offset = torch.arange(rows) + (1 << 33)
        for name, value in settings.items():
            getattr(self, name).copy_(torch.as_tensor(value))

    def tensors(self) -> tuple[Tensor, ...]:
        return self.temperature, self.top_k, self.top_p, self.seed, self.offset


def emulate(library: Any, logits: Tensor, rows: Rows, most: int = 32, seed: int = 1) -> list[int]:
    tokens = torch.full((len(logits),), -7)
    launched = library.emulated_sample(
        pointer(logits), ctypes.c_int64(logits.stride(0)), ctypes.c_int64(logits.shape[0]),
        ctypes.c_int64(logits.shape[1]), *map(pointer, rows.tensors()), most, pointer(tokens), seed,
    )  # fmt: skip
    assert launched
    return tokens.tolist()


@pytest.mark.parametrize("vocabulary", [1, 19, 32, 33, 1025, 34_000])
def test_tokens_are_those_of_the_cpu(library: Any, vocabulary: int) -> None:
    rows = 5 if vocabulary < 4000 else 2
    logits = randn(rows, vocabulary, seed=vocabulary, dtype=torch.float32) * 3
    settings = Rows(
        rows, temperature=[1.0, 0.0, 0.3, 2.0, 1e-30][:rows], top_k=[20, 20, 1, 32, 3][:rows],
        top_p=[0.95, 0.95, 1.0, 1.0, 0.5][:rows],
    )  # fmt: skip
    want = ops.sample(logits, *settings.tensors(), max_top_k=32).tolist()
    assert emulate(library, logits, settings, seed=vocabulary) == want


def test_many_draws_of_one_row_are_those_of_the_cpu(library: Any) -> None:
    """As a row of its own each: every boundary of the cumulative sum comes up."""
    logits = randn(1, 50, seed=3, dtype=torch.float32).expand(20, -1) * 2
    settings = Rows(20)
    got = emulate(library, logits, settings)
    assert got == ops.sample(logits, *settings.tensors()).tolist()
    assert len(set(got)) > 5


def test_ties_go_to_the_lower_token_wherever_they_stand(library: Any) -> None:
    logits = torch.zeros(3, 2500)
    logits[1, 2000:2010] = 1.0
    logits[2, ::2] = -0.0  # ties with +0
    settings = Rows(3, top_k=[3, 12, 4], top_p=1.0)
    for offset in range(3):
        settings.offset.fill_(offset)
        got = emulate(library, logits, settings)
        assert got == ops.sample(logits, *settings.tensors()).tolist()
        assert got[0] < 3 and got[2] < 4
        assert got[1] in (0, 1, *range(2000, 2010))


def test_what_is_no_number(library: Any) -> None:
    logits = torch.full((6, 1100), -math.inf)
    logits[0, 1050] = math.inf
    logits[0, 3] = LARGEST  # +inf counts as it: a tie, which the lower token has
    logits[1] = math.nan
    logits[1, 700] = -LARGEST
    logits[2, 8], logits[2, 9] = math.nan, 0.5
    logits[3] = math.nan
    settings = Rows(6, temperature=[0.0, 1.0, 1.0, 1.0, 1.0, 0.0])
    assert emulate(library, logits, settings) == [3, 700, 9, -1, -1, -1]


@pytest.mark.parametrize(
    "settings",
    [{"top_k": 0}, {"top_k": 21}, {"top_k": -1}, {"temperature": -1.0},
     {"temperature": math.nan}, {"temperature": math.inf}, {"top_p": 0.0}, {"top_p": 1.5},
     {"top_p": math.nan}, {"temperature": 0.0, "top_k": -1}],
)  # fmt: skip
def test_settings_out_of_range_give_no_token_and_leave_other_rows_alone(
    library: Any, settings: dict[str, float]
) -> None:
    logits = randn(3, 1500, seed=1, dtype=torch.float32)
    want = emulate(library, logits, Rows(3), most=20)
    rows = Rows(3)
    for name, value in settings.items():
        getattr(rows, name)[1] = value
    assert emulate(library, logits, rows, most=20) == [want[0], -1, want[2]]


def test_greedy_rows_need_no_top_k(library: Any) -> None:
    logits = randn(1, 1500, seed=1, dtype=torch.float32)
    got = emulate(library, logits, Rows(1, temperature=0.0, top_k=0), most=20)
    assert got == [int(logits.argmax())]


def test_a_row_s_token_does_not_depend_on_the_others_nor_on_the_stride(library: Any) -> None:
    wide = randn(4, 2 * 1300, seed=5, dtype=torch.float32)
    logits = wide[:, :1300]
    rows = Rows(4)
    together = emulate(library, logits, rows)
    for row in range(4):
        alone = Rows(1, seed=rows.seed[row], offset=rows.offset[row])
        assert emulate(library, logits[row : row + 1].clone(), alone) == [together[row]]


def test_what_the_kernels_do_not_take(library: Any) -> None:
    logits, rows = torch.zeros(1, 8), Rows(1)
    with pytest.raises(AssertionError):
        emulate(library, logits, rows, most=33)
    with pytest.raises(AssertionError):
        emulate(library, logits, rows, most=0)


def test_advance_is_the_reference_s(library: Any) -> None:
    rows, page, width = 150, 16, 3
    generator = torch.Generator().manual_seed(0)

    def integers(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.randint(low, high, shape, generator=generator).to(dtype)

    seq_lens = integers(0, width * page + 1, rows)
    seq_lens[:3] = torch.tensor([0, width * page, 16])
    positions = (seq_lens - 1).clamp(min=0)
    # Positions and lengths that no row can have: nothing may be read or written by them.
    worst = [-(1 << 31), -(1 << 31) + 1, -7, -1, 0, 1 << 30, (1 << 31) - 2, (1 << 31) - 1]
    pairs = torch.cartesian_prod(*2 * [torch.tensor(worst, dtype=torch.int32)])
    positions[-64:], seq_lens[-64:] = pairs.T
    step = [
        integers(-1, 99, rows, dtype=torch.int64),  # tokens
        integers(0, 9, rows, width),
        integers(0, 9, rows, width),
        integers(0, 99, rows, dtype=torch.int64),  # ids
        positions,
        integers(-1, 40, rows),
        integers(-1, 40, rows),
        seq_lens,
        seq_lens.to(torch.int64),
        integers(0, 99, rows, 5, dtype=torch.int64),
    ]
    want = [tensor.clone() for tensor in step]
    reference.decode_advance(*want[:3], page, *want[3:])
    sizes = ctypes.c_int64(width), ctypes.c_int64(5), rows, page
    assert library.emulated_decode_advance(*map(pointer, step), *sizes)
    for got, expected in zip(step, want, strict=True):
        assert torch.equal(got, expected)
    assert step[4][0] == 0 and step[7][0] == 0  # padding stays
    assert step[5][1] in (-1,) and step[4][1] == width * page  # no room: nowhere to write
