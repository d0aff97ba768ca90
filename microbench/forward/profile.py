"""The kernels of a forward: how many, and how long each of them runs.

Taken from a profile of one replay of the graph that is timed. A kernel that is launched with
programmatic dependent launch begins before the one ahead of it has ended, so the times of kernels
add up to more than the forward takes; `added` is what each adds to the time at which everything
before it had ended, and those sum to the whole.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch


@dataclass(frozen=True)
class Kernel:
    """A launch: microseconds, its start counted from that of the first."""

    name: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    start: float
    time: float


@dataclass(frozen=True)
class Line:
    """Launches of one kernel with one grid: how many, and microseconds."""

    name: str
    grid: tuple[int, ...]
    count: int
    median: float
    added: float
    """The sum over all launches."""


def record(replay: Callable[[], Any]) -> list[Kernel]:
    """The kernels of one replay, in the order of their starts."""
    from torch.profiler import ProfilerActivity, profile

    replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        replay()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        return kernels_of(json.loads(path.read_text(encoding="utf-8")))


def kernels_of(trace: dict[str, Any]) -> list[Kernel]:
    """Those of a trace in Chrome's format, as torch's profiler writes it."""
    events = [
        event
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    events.sort(key=lambda event: (event["ts"], event["ts"] + event["dur"]))
    first = events[0]["ts"] if events else 0.0
    return [
        Kernel(
            short_name(event["name"]),
            tuple(event["args"].get("grid", ())),
            tuple(event["args"].get("block", ())),
            event["ts"] - first,
            event["dur"],
        )
        for event in events
    ]


def added(kernels: Sequence[Kernel]) -> list[float]:
    """What each kernel adds to the time at which all before it had ended; gaps are among it."""
    end, result = 0.0, []
    for kernel in kernels:
        own = max(end, kernel.start + kernel.time)
        result.append(own - end)
        end = own
    return result


def lines(kernels: Sequence[Kernel]) -> list[Line]:
    """The kernels by name and grid, those that add most first."""
    times: dict[tuple[str, tuple[int, ...]], list[tuple[float, float]]] = defaultdict(list)
    for kernel, more in zip(kernels, added(kernels), strict=True):
        times[kernel.name, kernel.grid].append((kernel.time, more))
    found = [
        Line(name, grid, len(of), median(time for time, _ in of), sum(more for _, more in of))
        for (name, grid), of in times.items()
    ]
    return sorted(found, key=lambda line: -line.added)


HEAD = ("kernel", "grid", "launches", "us each", "adds us", "us a layer", "share")


def table(kernels: Sequence[Kernel], layers: int) -> list[tuple[str, ...]]:
    """Cells of the printed table."""
    found = lines(kernels)
    whole = sum(line.added for line in found) or 1.0
    cells = [
        (
            line.name,
            "x".join(map(str, line.grid)),
            str(line.count),
            f"{line.median:.2f}",
            f"{line.added:.1f}",
            f"{line.added / layers:.2f}",
            f"{100 * line.added / whole:.1f}%",
        )
        for line in found
    ]
    busy = sum(kernel.time for kernel in kernels)
    total = ("all", "", str(len(kernels)), "", f"{whole:.1f}", f"{whole / layers:.2f}", "100%")
    return [HEAD, *cells, total, ("sum of the kernels' own times", "", "", "", f"{busy:.1f}")]


def short_name(name: str) -> str:
    """Without namespaces, return type and arguments; template arguments stay."""
    name = name.replace("(anonymous namespace)::", "")
    name = re.sub(r"^void ", "", name)
    name = re.sub(r"\b(?:\w+::)+", "", name)
    depth = 0
    for place, letter in enumerate(name):
        depth += {"<": 1, ">": -1}.get(letter, 0)
        if letter == "(" and depth == 0:
            return name[:place]
    return name
