"""test_sanitized_gpu.py under every tool of compute-sanitizer; its errors as result rows.

    python python_tests/gpu/run_compute_sanitizer.py --output docs/results/h200/sanitizers.json

racecheck sees shared memory alone, so it adds nothing for kernels without; it is run over all.
Errors in kernels of torch's libraries (cuBLAS reads padding that nobody wrote) are counted apart.
--workers shares each tool's tests between as many processes, which all run at once.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
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
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu"]


def collected(rest: list[str]) -> list[str]:
    """The tests, by their ids."""
    command = [*PYTEST, "--collect-only", str(TESTS), "-k", "not unsanitized", *rest]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    ids = [line for line in done.stdout.splitlines() if "::" in line]
    if done.returncode or not ids:
        raise SystemExit(f"no tests were collected:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return ids


def run(tool: str, tests: list[str]) -> tuple[int, int, Counter[str]]:
    """Errors, at least one where the tests did not pass; tests that passed; and errors in kernels
    of other libraries, by kernel."""
    command = ["compute-sanitizer", "--tool", tool, *TOOLS[tool], *REPORT]
    # torch's own caching would hide where one tensor ends and the next begins.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(
        [*command, *PYTEST, *tests],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    errors, passed, elsewhere = counted(done.stdout + done.stderr)
    if done.returncode or passed != len(tests):
        errors = max(errors, 1)
    if errors:
        sys.stdout.write(f"{tool}: {tests[0]} ...\n{(done.stdout + done.stderr)[-4000:]}\n")
    return errors, passed, elsewhere


def counted(text: str) -> tuple[int, int, Counter[str]]:
    """Errors that a sanitizer's summaries name, one where there is none, without those in kernels
    of other libraries; tests that passed; and the others, by kernel."""
    summaries = re.findall(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+)", text)
    places = re.findall(r"^=+ +at (.+?)\+0x[0-9a-f]+(?: in .*)?$", text, re.MULTILINE)
    elsewhere = Counter(plain(place) for place in places if not OURS.search(place))
    passed = re.search(r"(\d+) passed", text)
    errors = sum(map(int, summaries)) - elsewhere.total() if summaries else 1
    return max(errors, 0), int(passed[1]) if passed else 0, elsewhere


def plain(kernel: str) -> str:
    """A kernel's name without its arguments."""
    return re.split(r"[<(]", kernel.removeprefix("void "))[0]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--output", required=True, help="the JSON file to be written")
    parser.add_argument("--tool", choices=TOOLS, action="append", help="default: all of them")
    parser.add_argument("--workers", type=int, default=1, help="processes of each tool")
    parser.add_argument("--commit", help="of a tree that is no git checkout")
    parser.add_argument("rest", nargs="*", help="arguments of pytest")
    options = parser.parse_args(argv)
    tests = collected(options.rest)
    # Neighbours are alike: every process gets some of each kind.
    workers = min(options.workers, len(tests))
    shares = [tests[first::workers] for first in range(workers)]
    tools = options.tool or list(TOOLS)
    rows, total = [], 0
    at_once = 1 if workers == 1 else workers * len(tools)
    with ThreadPoolExecutor(at_once) as pool:
        running = {tool: [pool.submit(run, tool, share) for share in shares] for tool in tools}
        for tool, futures in running.items():
            done = [future.result() for future in futures]
            errors, passed = (sum(one[i] for one in done) for i in range(2))
            elsewhere = sum((one[2] for one in done), Counter())
            total += errors
            sys.stdout.write(f"{tool}: {passed} tests, {errors} errors; {dict(elsewhere)}\n")
            sys.stdout.flush()
            counts = {"errors": errors, "tests": passed, "elsewhere": elsewhere.total()}
            for metric, value in counts.items():
                rows.append(results.row("sanitizer", tool, metric, [float(value)]))
            rows[-1]["kernels"] = sorted(elsewhere)
    results.write(options.output, rows, results.describe("cuda", options.commit))
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
