"""Runs test_op_properties.py with many examples and writes how many they were as result rows.

    python python_tests/run_properties.py --output docs/results/cpu/properties.json

Everything after `--` goes to pytest: `-- -m gpu` is the campaign on a GPU.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from flint_kernels import results

FOLDER = Path(__file__).parent


class Examples:
    """A plugin of pytest: the profile of the campaign with this many examples of each test."""

    def __init__(self, count: int) -> None:
        self.count = count

    @pytest.hookimpl(trylast=True)  # after Hypothesis has loaded the profile that it was told
    def pytest_configure(self, config: pytest.Config) -> None:
        name = "counted"
        campaign = settings.get_profile("campaign")
        settings.register_profile(name, campaign, max_examples=self.count)
        settings.load_profile(name)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--output", required=True, help="the JSON file to be written")
    parser.add_argument("--examples", type=int, default=2000, help="of each test")
    parser.add_argument("--device", default="cpu", help="what the rows call the machine by")
    parser.add_argument("rest", nargs="*", help="arguments of pytest")
    options = parser.parse_args(argv)
    test = FOLDER / "test_op_properties.py"
    more = ["-q", "--hypothesis-profile=campaign", str(test), *options.rest]
    status = pytest.main(more, plugins=[Examples(options.examples)])
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
