"""silu_and_mul at the widths of Flint's dense layers and of its shared expert."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from flint_kernels import ops
from microbench.cases import Group, Outputs, Subject, bench, compiled, randn

SHAPES = ((1, 6144), (1, 1024), (8192, 6144), (8192, 1024))

# silu(1.2785) is 1, so that what a chain of gates multiplies neither grows nor dies.
NEUTRAL_GATE, GATE_SPREAD = 1.2785, 0.03


@dataclass(frozen=True)
class Buffers:
    x: Tensor  # [M, 2 * D]
    act: Tensor | None = None  # [M, D], the output of a chained launch


def make(rows: int, width: int, device: torch.device, index: int) -> Buffers:
    return Buffers(randn(device, index, rows, 2 * width))


def make_neutral(width: int, device: torch.device, index: int) -> Buffers:
    x = randn(device, index, 1, 2 * width)
    x[:, :width] = NEUTRAL_GATE + GATE_SPREAD * x[:, :width].float()
    return Buffers(x, torch.empty_like(x[:, :width]))


def chained(sets: Sequence[Buffers]) -> list[Buffers]:
    """One row: the output of each launch is the `up` half of the next one's input."""
    linked = [replace(a, act=b.x[:, b.x.shape[1] // 2 :]) for a, b in pairwise(sets)]
    return [*linked, sets[-1]]


def shared_activations(sets: Sequence[Buffers]) -> list[Buffers]:
    return [sets[0]] * len(sets)


def silu_and_mul(buffers: Buffers) -> Outputs:
    return (ops.silu_and_mul(buffers.x),)


def silu_and_mul_into(buffers: Buffers, *, enable_pdl: bool) -> Outputs:
    """The kernel without the copy with which the op fills a given buffer."""
    x, act = buffers.x, buffers.act
    assert act is not None
    if x.is_cuda:
        torch.ops.flint_native.silu_and_mul_cuda_out(x, act, enable_pdl)
    else:
        ops.silu_and_mul(x, out=act)
    return (act,)


def composition(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


@bench("silu_and_mul")
def _(device: torch.device) -> Iterator[Group]:
    compiled_composition = compiled(composition)
    peers = [
        Subject("torch", lambda buffers: (composition(buffers.x),)),
        Subject("torch.compile", lambda buffers: (compiled_composition(buffers.x),)),
    ]
    for rows, width in SHAPES:
        case, size = f"M={rows} D={width}", 2 * 3 * rows * width  # gate, up, out
        new = partial(make, rows, width, device)
        yield Group("silu_and_mul", size, new, [Subject("flint", silu_and_mul, case), *peers])
        if rows > 1:
            continue
        hot = Subject("flint", silu_and_mul, f"{case} hot")
        yield Group("silu_and_mul", size, new, [hot, *peers], hot=True)
        pdl = partial(silu_and_mul_into, enable_pdl=True)
        plain = partial(silu_and_mul_into, enable_pdl=False)
        subjects = [
            Subject("flint pdl", pdl, f"{case} pdl", chained),
            Subject("flint chain", plain, f"{case} chain", chained),
            *(replace(peer, arrange=shared_activations) for peer in peers),
        ]
        new = partial(make_neutral, width, device)
        yield Group("silu_and_mul", size, new, subjects, chained=True)
