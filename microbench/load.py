"""Times the loading of a full-size NVFP4 GGUF, which it writes first, from a synthetic model.

    python -m microbench.load FOLDER --output docs/results/h200

The file is 23 GB. It is read twice: as it lies in the page cache after writing, and, where the
system lets its pages be dropped, from the disk; where it does not, there are no rows of the disk.
The loaded model is compared with the one that was written, bit by bit.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from flint_kernels import results
from flint_kernels.loading import load, synthetic
from flint_kernels.loading.export import save_gguf
from flint_kernels.model import Flint, FlintConfig
from microbench.kernels import aligned

BENCH = "load"
CASE = "gguf 40B"


class Peak:
    """The most memory of the host (not the mapped file) that this process has had within it."""

    def __enter__(self) -> Peak:
        self._stop = threading.Event()
        self.start = self.most = host_bytes()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.most = max(self.most, host_bytes())

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            self.most = max(self.most, host_bytes())

    @property
    def extra(self) -> int:
        return self.most - self.start


def host_bytes() -> int:
    """Memory of this process that is neither a file's nor shared, and what torch has pinned for
    copies to a GPU, which the system counts as a device's."""
    pinned = 0
    if torch.cuda.is_initialized():
        pinned = torch.cuda.host_memory_stats().get("active_bytes.current", 0)
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024 + pinned
    return pinned


def drop_cached_pages(path: Path) -> bool:
    """Has the system forget the file's pages, which then have to be read again; False where it
    keeps more than a hundredth of them."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return cached_share(path) < 0.01


def cached_share(path: Path) -> float:
    """How much of a file is in the page cache; 1 where the system does not say."""
    pages = -(-path.stat().st_size // mmap.PAGESIZE)
    resident = (ctypes.c_ubyte * pages)()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        start = ctypes.c_char.from_buffer(mapped)
        asked = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(mapped)), resident
        )
        del start  # which would keep the mapping
    if asked != 0:
        return 1.0
    return int(torch.frombuffer(resident, dtype=torch.uint8).bitwise_and(1).sum()) / pages


def differences(one: Flint, two: Flint) -> list[str]:
    """Names of the tensors that are not equal to the bit."""
    others = dict(two.named_parameters())
    return [
        name
        for name, tensor in one.named_parameters()
        if not torch.equal(
            tensor.detach().reshape(-1).view(torch.uint8),
            others[name].detach().reshape(-1).view(torch.uint8),
        )
    ]


def write(model: Flint, path: Path, case: str = CASE) -> list[results.Row]:
    """Writes the file; how long it took."""
    start = time.perf_counter()
    save_gguf(model, path, progress=False)
    seconds = time.perf_counter() - start
    return [results.row(BENCH, f"{case} write", "s", [seconds], **of_file(path))]


def read(model: Flint, path: Path, source: str, case: str = CASE) -> list[results.Row]:
    """Loads the file, from page cache or disk as `source` says: time, rate and host memory.

    Raises RuntimeError where what was loaded is not `model`.
    """
    with Peak() as peak:
        start = time.perf_counter()
        loaded = load(path, device=model.device, progress=False)
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    wrong = differences(model, loaded)
    if wrong:
        raise RuntimeError(f"{len(wrong)} tensors differ from what was written: {wrong[:5]}")
    more = of_file(path) | {"from": source}
    label = case if source == "page cache" else f"{case} {source}"
    figures = {"s": seconds, "GB/s": more["file_bytes"] / seconds / 1e9, "bytes": peak.extra}
    return [results.row(BENCH, label, metric, [value], **more) for metric, value in figures.items()]


def of_file(path: Path) -> dict[str, Any]:
    return {"checkpoint": "nvfp4", "file_bytes": path.stat().st_size}


def measure(
    config: FlintConfig, folder: Path, device: torch.device, case: str = CASE
) -> list[results.Row]:
    model = synthetic(config, "nvfp4", device=device)
    path = folder / "model.gguf"
    rows = write(model, path, case)
    rows += read(model, path, "page cache", case)
    if drop_cached_pages(path):
        rows += read(model, path, "disk", case)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m microbench.load", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "folder", type=Path, help="in which a folder of its own is made, and removed again"
    )
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="writes load.json there")
    parser.add_argument("--commit", help="of the tree, where it is run without its git history")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("no GPU: torch.cuda.is_available() is false; the model is loaded to one")
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as own:
        rows = measure(FlintConfig.flint_40b(), Path(own), torch.device("cuda", 0))
    if options.output:
        results.write(options.output / "load.json", rows, results.describe("cuda", options.commit))
    lines = [(row["case"], row["metric"], f"{row['median']:.4g}") for row in rows]
    print(aligned([("case", "metric", "figure"), *lines]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
