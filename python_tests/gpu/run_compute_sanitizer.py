"""test_sanitized_gpu.py under every tool of compute-sanitizer; its errors as result rows.

    python python_tests/gpu/run_compute_sanitizer.py --output docs/results/h200/sanitizers.json

racecheck sees shared memory alone, so it adds nothing for kernels without; it is run over all.
--workers shares each tool's tests between as many processes, which all run at once.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from flint_kernels import results

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
TESTS = FOLDER / "test_sanitized_gpu.py"
# initcheck: padding of the allocator's blocks is never written, and no kernel may read it.
TOOLS = {
    "memcheck": ["--leak-check", "no"],
    "initcheck": [],
    "synccheck": [],
    "racecheck": ["--racecheck-report", "all"],
}
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu"]


def collected(rest: list[str]) -> list[str]:
    """The tests, by their ids."""
    command = [*PYTEST, "--collect-only", str(TESTS), "-k", "not unsanitized", *rest]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    ids = [line for line in done.stdout.splitlines() if "::" in line]
    if done.returncode or not ids:
        raise SystemExit(f"no tests were collected:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return ids


def run(tool: str, tests: list[str]) -> tuple[int, int]:
    """Errors, at least one where the tests did not pass; and tests that passed."""
    command = ["compute-sanitizer", "--tool", tool, *TOOLS[tool], "--target-processes", "all"]
    # torch's own caching would hide where one tensor ends and the next begins.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(
        [*command, *PYTEST, *tests],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    errors, passed = counted(done.stdout + done.stderr)
    if done.returncode or passed != len(tests):
        errors = max(errors, 1)
    if errors:
        sys.stdout.write(f"{tool}: {tests[0]} ...\n{(done.stdout + done.stderr)[-4000:]}\n")
    return errors, passed


def counted(text: str) -> tuple[int, int]:
    """Errors that the summaries of a sanitizer name, one where there is none; and tests passed."""
    summaries = re.findall(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+)", text)
    passed = re.search(r"(\d+) passed", text)
    return sum(map(int, summaries)) if summaries else 1, int(passed[1]) if passed else 0


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
            errors, passed = (sum(column) for column in zip(*done, strict=True))
            total += errors
            sys.stdout.write(f"{tool}: {passed} tests, {errors} errors\n")
            sys.stdout.flush()
            rows.append(results.row("sanitizer", tool, "errors", [float(errors)]))
            rows.append(results.row("sanitizer", tool, "tests", [float(passed)]))
    results.write(options.output, rows, results.describe("cuda", options.commit))
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
