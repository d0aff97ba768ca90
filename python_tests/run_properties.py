"""Runs test_op_properties.py with many examples and writes how many they were as result rows.

    python python_tests/run_properties.py --output docs/results/cpu/properties.json

Everything after `--` goes to pytest: `-- -m gpu -n 8` is the campaign on a GPU, shared by eight
processes.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from flint_kernels import results

FOLDER = Path(__file__).parent
VARIABLE = "PROPERTY_EXAMPLES"  # of each test; how the processes of pytest-xdist are told


class Examples:
    """A plugin of pytest, in every process: the profile of the campaign with `count` examples of
    each test; and how many there were, of all processes, in `ran`."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.ran: Counter[str] = Counter()

    @pytest.hookimpl(trylast=True)  # after Hypothesis has loaded the profile that it was told
    def pytest_configure(self, config: pytest.Config) -> None:
        from hypothesis import settings

        name = "counted"
        campaign = settings.get_profile("campaign")
        settings.register_profile(name, campaign, max_examples=self.count)
        settings.load_profile(name)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        # pytest has imported the module under its plain name.
        own = getattr(sys.modules.get("test_op_properties"), "EXAMPLES", {})
        self.ran.update(own)
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["examples"] = dict(own)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.ran.update(getattr(node, "workeroutput", {}).get("examples", {}))


def pytest_configure(config: pytest.Config) -> None:
    """Of this module as a plugin, which it is in the processes of pytest-xdist."""
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(Examples(int(os.environ[VARIABLE])))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--output", required=True, help="the JSON file to be written")
    parser.add_argument("--examples", type=int, default=2000, help="of each test")
    parser.add_argument("--device", default="cpu", help="what the rows call the machine by")
    parser.add_argument("--commit", help="of a tree that is no git checkout")
    parser.add_argument("rest", nargs="*", help="arguments of pytest")
    options = parser.parse_args(argv)
    os.environ[VARIABLE] = str(options.examples)
    plugin = Examples(options.examples)
    test = str(FOLDER / "test_op_properties.py")
    more = ["-q", "--hypothesis-profile=campaign", "-p", "run_properties", test, *options.rest]
    status = pytest.main(more, plugins=[plugin])
    rows = [
        results.row("properties", f"{kind} calls", "examples", [float(plugin.ran[kind])])
        for kind in ("legal", "illegal")
    ]
    failed = [results.row("properties", "all", "failures", [float(status != 0)])]
    results.write(options.output, rows + failed, results.describe(options.device, options.commit))
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
