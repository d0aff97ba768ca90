"""Result rows: the one form in which benchmarks and validation write their figures.

A file holds `{"meta": {...}, "rows": [...]}`. `meta` says what ran where, for all rows of the file;
a row is one metric of one case. Tables and plots of the docs are made from these files.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]

_ROOT = Path(__file__).parents[1]


def row(
    bench: str,
    case: str,
    metric: str,
    values: Sequence[float],
    *,
    checkpoint: str = "",
    floor: float = 0.0,
    peer: str = "",
    peer_median: float = 0.0,
    **more: Any,
) -> Row:
    """One row; `values` are the repetitions of which median and spread are given.

    `floor`: the same metric at the machine's measured ceiling. `peer`: the best alternative that
    ran beside it. `more`: further keys, for what a single bench has to say.
    """
    if not values:
        raise ValueError(f"values: got none for {bench} {case} {metric}, want at least one")
    return {
        "bench": bench,
        "case": case,
        "checkpoint": checkpoint,
        "metric": metric,
        "median": statistics.median(values),
        "p20": quantile(values, 0.2),
        "p80": quantile(values, 0.8),
        "floor": floor,
        "peer": peer,
        "peer_median": peer_median,
        **more,
    }


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile (0 to 1) of `values`, between neighbours by linear interpolation."""
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def write(path: str | os.PathLike[str], rows: Sequence[Row], meta: dict[str, Any]) -> None:
    """Writes a result file, its folder too if need be."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"meta": meta, "rows": list(rows)}, indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def describe(device: torch.device | str, commit: str | None = None) -> dict[str, Any]:
    """`meta` of a run on `device`: hardware, versions, commit and date (UTC).

    Keys: gpu ("" where the CPU ran), cpu, threads, driver, cuda, torch, triton, python, commit,
    date. What is not there is "". `commit` None: that of the source tree, "-dirty" behind it where
    files differ from it.
    """
    device = torch.device(device)
    on_gpu = device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name(device) if on_gpu else "",
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "driver": driver_version() if on_gpu else "",
        "cuda": (torch.version.cuda or "") if on_gpu else "",
        "torch": torch.__version__,
        "triton": package_version("triton"),
        "python": platform.python_version(),
        "commit": source_commit() if commit is None else commit,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }


def cpu_name() -> str:
    """What the processor calls itself, else the machine's architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def driver_version() -> str:
    """The NVIDIA driver's version, "" where there is none."""
    try:
        return Path("/sys/module/nvidia/version").read_text(encoding="ascii").strip()
    except OSError:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return _output(query).partition("\n")[0]


def package_version(name: str) -> str:
    """The version of an installed package, "" where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def source_commit() -> str:
    """The commit of the tree that this package runs from; "" where it is no git checkout."""
    if not (_ROOT / ".git").exists():
        return ""
    commit = _output(["git", "-C", str(_ROOT), "rev-parse", "HEAD"])
    changes = _output(["git", "-C", str(_ROOT), "status", "--porcelain", "--untracked-files=no"])
    return commit + ("-dirty" if commit and changes else "")


def _output(command: list[str]) -> str:
    """What a command prints; "" where it is not there or fails."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return run.stdout.strip()
