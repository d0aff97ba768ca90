"""test_sanitized_gpu.py under every tool of compute-sanitizer; its errors as result rows.

    python python_tests/gpu/run_compute_sanitizer.py --output docs/results/h200/sanitizers.json

racecheck sees shared memory alone, so it adds nothing for kernels without; it is run over all.

Errors are those of every kernel but cuBLAS's products, for which torch's own copies, comparisons
and reductions read what kernels here have written. cuBLAS reads padding that nobody wrote; the
tests read every input of a product by a kernel of torch's before (`_inputs_are_read`), so that what
is not initialised in one is found there. So errors in cuBLAS are its own, and are counted apart.

All tools run at once, and --workers shares the tests of each between as many processes. A
test that has not passed, for whatever reason, is an error.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from flint_kernels import results

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]


def triton_kernels() -> list[str]:
    """The names of the functions that Triton compiles."""
    sources = (ROOT / "flint_kernels" / "backends" / "triton").glob("*.py")
    texts = [source.read_text(encoding="utf-8") for source in sources]
    found = [re.findall(r"@triton\.jit[^@]*?\ndef (\w+)", text) for text in texts]
    return sorted(name for names in found for name in names)


TESTS = FOLDER / "test_sanitized_gpu.py"
# initcheck: padding of the allocator's blocks is never written, and no kernel may read it.
TOOLS = {
    "memcheck": ["--leak-check", "no"],
    "initcheck": [],
    "synccheck": [],
    "racecheck": ["--racecheck-report", "all"],
}
# Each error in full, so that its kernel is known; without the host's stack, which takes long.
REPORT = ["--print-limit", "100000", "--show-backtrace", "no", "--target-processes", "all"]
# Of a package's own kernels the sanitizer says the namespace, or Triton's function.
OURS = re.compile(r"flint::|^(" + "|".join(triton_kernels()) + r")\b")
PRODUCT = re.compile(r"cublas|cutlass|gemm|gemv|nvjet|splitK", re.IGNORECASE)
PYTEST = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu"]


def collected(rest: list[str]) -> list[str]:
    """The tests, by their ids."""
    command = [*PYTEST, "-q", "--collect-only", str(TESTS), "-k", "not unsanitized", *rest]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    ids = [line for line in done.stdout.splitlines() if "::" in line]
    if done.returncode or not ids:
        raise SystemExit(f"no tests were collected:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return ids


@dataclass
class Report:
    """What was counted of a tool, or of one of its processes."""

    errors: int = 0
    passed: int = 0
    kernels: Counter[str] = field(default_factory=Counter)  # errors by kernel
    elsewhere: Counter[str] = field(default_factory=Counter)  # those of cuBLAS, by kernel

    def __add__(self, other: Report) -> Report:
        return Report(*(getattr(self, name) + getattr(other, name) for name in vars(self)))


def run(tool: str, tests: list[str], log: Path | None) -> Report:
    """A report with at least one error where the tests did not pass; all that was said in `log`."""
    command = ["compute-sanitizer", "--tool", tool, *TOOLS[tool], *REPORT]
    # torch's own caching would hide where one tensor ends and the next begins.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(
        [*command, *PYTEST, "-v", *tests],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    text = done.stdout + done.stderr
    if log is not None:
        log.write_text(text, encoding="utf-8")
    report = counted(text)
    if done.returncode or report.passed != len(tests):
        report.errors = max(report.errors, 1)
    if report.errors:
        sys.stdout.write(f"{tool}: {tests[0]} ...\n{text[-4000:]}\n")
    return report


def counted(text: str) -> Report:
    """Errors are those that a sanitizer's summaries name, one where there is no summary, without
    those in products of cuBLAS."""
    summaries = re.findall(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+)", text)
    places = re.findall(r"^=+ +at (.+?)\+0x[0-9a-f]+(?: in .*)?$", text, re.MULTILINE)
    foreign = {place for place in places if PRODUCT.search(place) and not OURS.search(place)}
    elsewhere = Counter(plain(place) for place in places if place in foreign)
    kernels = Counter(plain(place) for place in places if place not in foreign)
    errors = sum(map(int, summaries)) - elsewhere.total() if summaries else 1
    passed = re.findall(r"(\d+) passed", text)
    return Report(max(errors, 0), int(passed[-1]) if passed else 0, kernels, elsewhere)


def plain(kernel: str) -> str:
    """A kernel's name without its arguments."""
    return re.split(r"[<(]", kernel.removeprefix("void "))[0]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--output", required=True, help="the JSON file to be written")
    parser.add_argument("--tool", choices=TOOLS, action="append", help="default: all of them")
    parser.add_argument("--workers", type=int, default=1, help="processes of each tool")
    parser.add_argument("--logs", type=Path, help="a folder for all that the tools say")
    parser.add_argument("--commit", help="of a tree that is no git checkout")
    parser.add_argument("rest", nargs="*", help="arguments of pytest")
    options = parser.parse_args(argv)
    tests = collected(options.rest)
    # Neighbours are alike: every process gets some of each kind.
    workers = min(options.workers, len(tests))
    shares = [tests[first::workers] for first in range(workers)]
    tools = options.tool or list(TOOLS)
    if options.logs is not None:
        options.logs.mkdir(parents=True, exist_ok=True)

    def log(tool: str, number: int) -> Path | None:
        return options.logs and options.logs / f"{tool}.{number}.log"

    rows, total = [], 0
    with ThreadPoolExecutor(workers * len(tools)) as pool:
        running = {
            tool: [pool.submit(run, tool, share, log(tool, i)) for i, share in enumerate(shares)]
            for tool in tools
        }
        for tool, futures in running.items():
            report = sum((future.result() for future in futures), Report())
            total += report.errors
            counts = {
                "errors": report.errors,
                "tests": report.passed,
                "errors in cuBLAS": report.elsewhere.total(),
            }
            kernels = {"errors": report.kernels, "errors in cuBLAS": report.elsewhere}
            for metric, value in counts.items():
                more = {"kernels": dict(kernels[metric])} if metric in kernels else {}
                rows.append(results.row("sanitizer", tool, metric, [float(value)], **more))
            sys.stdout.write(f"{tool}: {counts}, {rows[-3]['kernels']}, {rows[-1]['kernels']}\n")
            sys.stdout.flush()
            results.write(options.output, rows, results.describe("cuda", options.commit))
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
