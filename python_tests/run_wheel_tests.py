"""Tests of an installed wheel, far from the tree; how many passed as result rows.

    python python_tests/run_wheel_tests.py --wheel dist/*.whl \\
        --output docs/results/h200/wheel_tests.json -- -m gpu -n 8 python_tests/gpu

The wheel goes into a folder of its own, beside copies of the tests, and nothing of the tree is on
the path. Tests that need the tree are left out by the arguments of pytest after `--`.

After --seconds pytest is stopped and says what has passed; the tests that were left count as a
failure.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from flint_kernels import results

ROOT = Path(__file__).parents[1]
WHERE = "import flint_kernels; print(flint_kernels.__file__)"


def counted(text: str) -> dict[str, float]:
    """What pytest's last line says: passed, failed and errors."""
    found = {kind: re.findall(rf"(\d+) {kind}", text) for kind in ("passed", "failed", "error")}
    counts = {kind: float(numbers[-1]) if numbers else 0.0 for kind, numbers in found.items()}
    return {"tests": counts["passed"], "failures": counts["failed"] + counts["error"]}


def stopped(command: list[str], seconds: float | None, **options: Any) -> tuple[int, str]:
    """The status and the output of pytest, which is interrupted after so long, and then says what
    has passed. It alone: its processes would each end in a traceback."""
    # A shell's job in the background ignores it, and so would all that it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options) as process:
        try:
            text, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            text, _ = process.communicate()
    return process.returncode, text


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--wheel", type=Path, required=True)
    parser.add_argument("--output", required=True, help="the JSON file to be written")
    parser.add_argument("--device", default="cuda", help="what the rows call the machine by")
    parser.add_argument("--seconds", type=float, help="that the tests may take")
    parser.add_argument("--commit", help="of a tree that is no git checkout")
    parser.add_argument("rest", nargs="*", help="arguments of pytest")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        site, tests = Path(folder) / "site", Path(folder) / "tests"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
        subprocess.run([*pip, "--target", str(site), str(options.wheel)], check=True)
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "python_tests", tests / "python_tests", ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", tests)
        # The working directory is not on the path.
        environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}

        def run(*command: str, seconds: float | None = None) -> tuple[int, str]:
            return stopped([sys.executable, *command], seconds, cwd=tests, env=environment)

        where = run("-c", WHERE)[1].strip()
        if not where.startswith(str(site)):
            raise SystemExit(f"the package came from {where}, want {site}")
        pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *options.rest]
        status, text = run(*pytest, seconds=options.seconds)
    counts = counted(text)
    if status:
        counts["failures"] = max(counts["failures"], 1.0)
    sys.stdout.write(text[-3000:] if status else f"{counts}\n")
    case = f"Python {sys.version_info.major}.{sys.version_info.minor}, torch {torch.__version__}"
    rows = [results.row("wheel_tests", case, metric, [value]) for metric, value in counts.items()]
    results.write(options.output, rows, results.describe(options.device, options.commit))
    return status


if __name__ == "__main__":
    sys.exit(main())
