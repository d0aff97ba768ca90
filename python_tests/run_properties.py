"""Runs test_op_properties.py with many examples and writes how many they were as result rows.

    python python_tests/run_properties.py --output docs/results/cpu/properties.json

Everything after `--` goes to pytest: `-- -m gpu` is the campaign on a GPU.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from flint_kernels import results

FOLDER = Path(__file__).parent


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--output", required=True, help="the JSON file to be written")
    parser.add_argument("--device", default="cpu", help="what the rows call the machine by")
    parser.add_argument("rest", nargs="*", help="arguments of pytest")
    options = parser.parse_args(argv)
    test = FOLDER / "test_op_properties.py"
    more = ["-q", "--hypothesis-profile=campaign", str(test), *options.rest]
    status = pytest.main(more)
    # pytest has imported the module under its plain name.
    counted = sys.modules[test.stem].EXAMPLES
    rows = [
        results.row("properties", f"{kind} calls", "examples", [float(counted[kind])])
        for kind in ("legal", "illegal")
    ]
    failed = [results.row("properties", "all", "failures", [float(status != 0)])]
    results.write(options.output, rows + failed, results.describe(options.device))
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
