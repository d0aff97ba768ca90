"""test_sanitized_gpu.py under every tool of compute-sanitizer; its errors as result rows.

    python python_tests/gpu/run_compute_sanitizer.py --output docs/results/h200/sanitizers.json

racecheck sees shared memory alone, so it adds nothing for kernels without; it is run over all.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

from flint_kernels import results

FOLDER = Path(__file__).parent
# initcheck: padding of the allocator's blocks is never written, and no kernel may read it.
TOOLS = {
    "memcheck": ["--leak-check", "no"],
    "initcheck": [],
    "synccheck": [],
    "racecheck": ["--racecheck-report", "all"],
}


def run(tool: str, rest: list[str]) -> tuple[int, int]:
    """Errors, at least one where the tests did not pass; and tests that passed."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu"]
    tests = [str(FOLDER / "test_sanitized_gpu.py"), "-k", "not unsanitized", *rest]
    # torch's own caching would hide where one tensor ends and the next begins.
    command = ["compute-sanitizer", "--tool", tool, *TOOLS[tool], "--target-processes", "all"]
    environment = ["env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1"]
    done = subprocess.run(
        [*environment, *command, *pytest, *tests], capture_output=True, text=True, check=False
    )
    text = done.stdout + done.stderr
    summaries = re.findall(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+)", text)
    passed = re.search(r"(\d+) passed", text)
    errors = sum(map(int, summaries))
    if done.returncode or not summaries or not passed:
        errors = max(errors, 1)
        sys.stdout.write(text[-4000:])
    return errors, int(passed[1]) if passed else 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--output", required=True, help="the JSON file to be written")
    parser.add_argument("--tool", choices=TOOLS, action="append", help="default: all of them")
    parser.add_argument("rest", nargs="*", help="arguments of pytest")
    options = parser.parse_args(argv)
    rows, total = [], 0
    for tool in options.tool or TOOLS:
        errors, passed = run(tool, options.rest)
        total += errors
        sys.stdout.write(f"{tool}: {passed} tests, {errors} errors\n")
        sys.stdout.flush()
        rows.append(results.row("sanitizer", tool, "errors", [float(errors)]))
        rows.append(results.row("sanitizer", tool, "tests", [float(passed)]))
    results.write(options.output, rows, results.describe("cuda"))
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
