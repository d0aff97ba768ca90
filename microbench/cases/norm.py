"""rms_norm and fused_add_rms_norm at Flint's width."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from flint_kernels import ops
from microbench.cases import Group, Outputs, Subject, bench, compiled, near_one, randn

ROWS = (1, 8, 64, 512, 8192)
CHAINED_ROWS = (1, 8, 64)  # of decode, where short kernels follow each other
HOT_ROWS = (1, 8)
WIDTH = 2048
EPS = 1e-6


@dataclass
class Buffers:
    x: Tensor  # [M, D]
    residual: Tensor  # [M, D]; rms_norm has no use for it
    weight: Tensor  # [D]
    previous: Buffers | None = None  # whose outputs a chained launch takes for x and residual
    outputs: Outputs = ()


Call = Callable[[Buffers], Outputs]


def make(rows: int, device: torch.device, index: int) -> Buffers:
    x, residual = (randn(device, 3 * index + i, rows, WIDTH) for i in range(2))
    return Buffers(x, residual, near_one(device, 3 * index + 2, WIDTH))


def chained(sets: Sequence[Buffers]) -> list[Buffers]:
    for before, after in pairwise(sets):
        after.previous = before
    return list(sets)


def shared_activations(sets: Sequence[Buffers]) -> list[Buffers]:
    """For the peers of a chain: activations as warm as a chain's, weights as cold."""
    return [replace(each, x=sets[0].x, residual=sets[0].residual) for each in sets]


def in_chain(call: Call) -> Call:
    def launch(buffers: Buffers) -> Outputs:
        taken = buffers
        if buffers.previous is not None:
            x, residual = (*buffers.previous.outputs, buffers.residual)[:2]
            taken = replace(buffers, x=x, residual=residual)
        buffers.outputs = call(taken)
        return buffers.outputs

    return launch


def groups(
    name: str,
    launch_bytes: Callable[[int], int],
    kernel: Callable[..., Outputs],
    peer: Callable[[Tensor, Tensor, Tensor], Outputs],
    device: torch.device,
) -> Iterator[Group]:
    def torch_peer(buffers: Buffers) -> Outputs:
        return peer(buffers.x, buffers.residual, buffers.weight)

    compiled_peer = compiled(peer)

    def compiled_torch_peer(buffers: Buffers) -> Outputs:
        outputs: Outputs = compiled_peer(buffers.x, buffers.residual, buffers.weight)
        return outputs

    plain, pdl = partial(kernel, enable_pdl=False), partial(kernel, enable_pdl=True)
    peers = [Subject("torch", torch_peer), Subject("torch.compile", compiled_torch_peer)]
    warm_peers = [replace(each, arrange=shared_activations) for each in peers]
    for rows in ROWS:
        new = partial(make, rows, device)
        case, size = f"M={rows}", launch_bytes(rows)
        yield Group(name, size, new, [Subject("flint", plain, case), *peers])
        if rows in HOT_ROWS:
            hot = Subject("flint", plain, f"{case} hot")
            yield Group(name, size, new, [hot, *peers], hot=True)
        if rows in CHAINED_ROWS:
            chains = [
                Subject("flint pdl", in_chain(pdl), f"{case} pdl", chained),
                Subject("flint chain", in_chain(plain), f"{case} chain", chained),
            ]
            yield Group(name, size, new, [*chains, *warm_peers], chained=True)


def rms_norm(buffers: Buffers, *, enable_pdl: bool) -> Outputs:
    return (ops.rms_norm(buffers.x, buffers.weight, EPS, enable_pdl=enable_pdl),)


def torch_rms_norm(x: Tensor, _residual: Tensor, weight: Tensor) -> Outputs:
    return (F.rms_norm(x, (WIDTH,), weight, EPS),)


def fused_add_rms_norm(buffers: Buffers, *, enable_pdl: bool) -> Outputs:
    outputs: Outputs = ops.fused_add_rms_norm(
        buffers.x, buffers.residual, buffers.weight, EPS, enable_pdl=enable_pdl
    )
    return outputs


def torch_fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Outputs:
    added = x + residual
    return F.rms_norm(added, (WIDTH,), weight, EPS), added


def rms_norm_bytes(rows: int) -> int:
    return 2 * WIDTH * (2 * rows + 1)  # x, out; weight


def fused_add_rms_norm_bytes(rows: int) -> int:
    return 2 * WIDTH * (4 * rows + 1)  # x, residual and both outputs; weight


@bench("rms_norm")
def _(device: torch.device) -> Iterator[Group]:
    return groups("rms_norm", rms_norm_bytes, rms_norm, torch_rms_norm, device)


@bench("fused_add_rms_norm")
def _(device: torch.device) -> Iterator[Group]:
    return groups(
        "fused_add_rms_norm",
        fused_add_rms_norm_bytes,
        fused_add_rms_norm,
        torch_fused_add_rms_norm,
        device,
    )
