"""Runs the package that `export_layer.py` has made. Of this project it imports the ops alone.

python docs/examples/load_layer.py layer.pt2
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from flint_kernels import ops  # registers the ops that the package calls

HIDDEN, KV_HEADS, HEAD_DIM = 128, 1, 128  # flint-tiny's
PAGE = 16  # tokens


def wave(*shape: int) -> Tensor:
    """Some BF16 values; load_layer.cpp makes the same."""
    return torch.arange(torch.Size(shape).numel()).sin().view(shape).bfloat16()


def inputs(requests: int) -> tuple[Tensor, ...]:
    """Request b has b + 5 tokens, the new one among them, in pages 2b and 2b + 1."""
    b = torch.arange(requests, dtype=torch.int32)
    positions = b + 4
    x, residual = wave(2, requests, HIDDEN)
    cache = wave(2 * requests, 2, PAGE, KV_HEADS, HEAD_DIM)  # K and V of a page side by side
    slots = b * 2 * PAGE + positions
    block_table = torch.stack([2 * b, 2 * b + 1], dim=1)
    workspace = ops.make_workspace("cpu")
    return x, residual, positions, slots, block_table, positions + 1, cache, workspace


def report(layer: Callable[..., tuple[Tensor, ...]]) -> str:
    """Sums of what the layer gives for 1, 2 and 8 requests, and of the cache that it writes."""
    lines = []
    for requests in (1, 2, 8):
        given = inputs(requests)
        sums = [tensor.double().sum().item() for tensor in (*layer(*given), given[6])]
        lines.append(f"{requests}: " + " ".join(f"{value:.6f}" for value in sums))
    return "\n".join(lines)


if __name__ == "__main__":
    print(report(torch._inductor.aoti_load_package(sys.argv[1])))
