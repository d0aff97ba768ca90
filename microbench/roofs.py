"""The measured ceilings of a GPU: what it streams, what it multiplies, what a launch costs.

The roof of bytes is the best median of all streams below, reading and copying, at sizes that are
many times the L2. A short kernel cannot reach it: it is over before all memory channels are busy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flint_kernels import results
from microbench.cases import compiled
from microbench.timer import Launch, Timer

BENCH = "roof"
STREAM_MIB = (256, 1024, 4096)
SQUARE = 8192  # the sides of the matrix product


@dataclass(frozen=True)
class Roofs:
    bytes_a_us: float
    flop_a_us: float

    def floor_us(self, launch_bytes: int, launch_flop: int = 0) -> float:
        """What a launch takes at the roof that binds it."""
        return max(launch_bytes / self.bytes_a_us, launch_flop / self.flop_a_us)


def measure(timer: Timer) -> tuple[Roofs, list[results.Row]]:
    """The roofs, and a row for each measurement behind them."""
    streams = [row for size in STREAM_MIB for row in stream_rows(timer, size)]
    product = product_row(timer)
    roofs = Roofs(
        bytes_a_us=max(row["median"] for row in streams) * 1e3,
        flop_a_us=product["median"] * 1e6,
    )
    return roofs, [*streams, product, launch_row(timer)]


def stream_rows(timer: Timer, mebibytes: int) -> list[results.Row]:
    count = mebibytes * 2**20 // 4
    source = torch.rand(count, device="cuda")
    target = torch.empty_like(source)
    compiled_total = compiled(total)
    read = 4 * count
    streams: dict[str, tuple[int, Launch]] = {
        "read by a sum": (read, lambda: total(source)),
        "read by a compiled sum": (read, lambda: compiled_total(source)),
        "copy": (2 * read, lambda: target.copy_(source)),
    }
    try:
        compiled_total(source)
    except Exception as error:  # no compiler, no Triton: the other streams make a roof as well
        print(f"roofs: the compiled sum cannot run: {error}", file=sys.stderr)
        del streams["read by a compiled sum"]
    launches = timer.plan(read).launches
    times = timer.measure({name: [launch] * launches for name, (_, launch) in streams.items()})
    return [
        rate_row(f"{name}, {mebibytes} MiB", "GB/s", moved / 1e3, times[name])
        for name, (moved, _) in streams.items()
    ]


def total(x: torch.Tensor) -> torch.Tensor:
    return x.sum()


def product_row(timer: Timer) -> results.Row:
    a, b = (torch.randn(SQUARE, SQUARE, device="cuda").bfloat16() for _ in range(2))
    flop = 2 * SQUARE**3
    launches = timer.plan(a.nbytes * 3, flop).launches
    times = timer.measure({"mm": [lambda: torch.mm(a, b)] * launches})["mm"]
    return rate_row(f"bf16 matmul {SQUARE}x{SQUARE}x{SQUARE}", "TFLOP/s", flop / 1e6, times)


def launch_row(timer: Timer) -> results.Row:
    """The least that a kernel of torch costs in a graph, without PDL."""
    one = torch.zeros(1, device="cuda")
    add: Callable[[], Any] = lambda: one.add_(1.0)  # noqa: E731
    times = timer.measure({"add": [add] * timer.plan(1).launches}, hot=True)["add"]
    return results.row(BENCH, "launch of a kernel on one element", "us", times)


def rate_row(case: str, metric: str, amount: float, times_us: list[float]) -> results.Row:
    return results.row(BENCH, case, metric, [amount / time for time in times_us])
