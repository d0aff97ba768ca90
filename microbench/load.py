"""Times the loading of a full-size NVFP4 GGUF, which it writes first, from a synthetic model.

    python -m microbench.load FOLDER --output docs/results/h200

The file is 23 GB. It is read twice: as it lies in the page cache after writing, and, where the
system lets its pages be dropped, from the disk. The loaded model is compared with the one that was
written, bit by bit.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from flint_kernels import results
from flint_kernels.loading import load, synthetic
from flint_kernels.loading.export import save_gguf
from flint_kernels.model import Flint, FlintConfig
from microbench.kernels import aligned

BENCH = "load"
CASE = "gguf 40B"


class Peak:
    """The most anonymous memory (not the mapped file) that this process has had within it."""

    def __enter__(self) -> Peak:
        self._stop = threading.Event()
        self.start = self.most = anonymous_bytes()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.most = max(self.most, anonymous_bytes())

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            self.most = max(self.most, anonymous_bytes())

    @property
    def extra(self) -> int:
        return self.most - self.start


def anonymous_bytes() -> int:
    """Memory of this process that is neither a file's nor shared; pinned memory is among it."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def drop_cached_pages(path: Path) -> None:
    """Asks the system to forget the file's pages, which then have to be read again."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


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


def measure(
    config: FlintConfig, folder: Path, device: torch.device, case: str = CASE
) -> list[results.Row]:
    model = synthetic(config, "nvfp4", device=device)
    path = folder / "model.gguf"
    start = time.perf_counter()
    save_gguf(model, path, progress=False)
    written = time.perf_counter() - start
    size = path.stat().st_size
    of_file = {"checkpoint": "nvfp4", "file_bytes": size}
    rows = [results.row(BENCH, f"{case} write", "s", [written], **of_file)]
    for name in ("page cache", "disk"):
        if name == "disk":
            drop_cached_pages(path)
        with Peak() as peak:
            start = time.perf_counter()
            loaded = load(path, device=device, progress=False)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
        wrong = differences(model, loaded)
        if wrong:
            raise RuntimeError(f"{len(wrong)} tensors differ from what was written: {wrong[:5]}")
        more = of_file | {"from": name}
        label = case if name == "page cache" else f"{case} {name}"
        rows.append(results.row(BENCH, label, "s", [seconds], **more))
        rows.append(results.row(BENCH, label, "GB/s", [size / seconds / 1e9], **more))
        rows.append(results.row(BENCH, label, "bytes", [peak.extra], **more))
        del loaded
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
