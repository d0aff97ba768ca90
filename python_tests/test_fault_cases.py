"""Every row of the fault table is a test that has its id in its name, on every device it is about.

The table is `CASES` in docs/generate_faults.py, which also writes docs/faults.md.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from planted_faults import PLANTED

ROOT = Path(__file__).parents[1]


def generator() -> ModuleType:
    """docs/generate_faults.py; docs is no package."""
    path = ROOT / "docs" / "generate_faults.py"
    if path.stem not in sys.modules:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec and spec.loader
        module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[path.stem]


CASES = generator().CASES


def test_every_family_is_complete() -> None:
    """A row that is dropped from the table would drop its tests."""
    families = {"N": 7, "R": 5, "T": 3, "A": 9, "Q": 6, "G": 6, "C": 11}
    want = [f"{family}{i}" for family, n in families.items() for i in range(1, n + 1)]
    assert [case.id for case in CASES] == want


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_case_is_a_test_on_each_of_its_devices(case) -> None:
    tests = generator().tests_of_cases().get(case.id)
    assert tests is not None, f"no test is named test_{case.id}_..."
    for device in case.where:
        assert getattr(tests, device), f"no test_{case.id}_... for the {device}"


def test_no_test_is_named_after_a_case_that_is_not_there() -> None:
    assert set(generator().tests_of_cases()) == {case.id for case in CASES}


def test_the_page_is_up_to_date() -> None:
    page = generator()
    assert page.PATH.read_text(encoding="utf-8") == page.document(), "run `make docs`"


@pytest.mark.parametrize("fault", PLANTED, ids=lambda f: f"{f.family}, {f.what}")
def test_a_planted_fault_fits_the_sources(fault) -> None:
    """The edit finds its place once and changes it, and the test that it names exists."""
    text = (ROOT / fault.file).read_text(encoding="utf-8")
    assert text.count(fault.old) == 1
    assert fault.new != fault.old
    file, _, test = fault.test.partition("::")
    source = (ROOT / "python_tests" / file).read_text(encoding="utf-8")
    assert f"def {test.partition('[')[0]}" in source


def test_every_family_of_faults_is_planted() -> None:
    families = {fault.family for fault in PLANTED}
    assert families >= {
        "window edge", "missing PDL wait", "dropped sink", "swapped nibble",
        "one scale for all shards", "unsigned scale read as signed", "stale counter",
    }  # fmt: skip


def test_what_was_found_has_its_test() -> None:
    tests = {name for _, name in generator().test_functions()}
    for fault, _, _, test in generator().FOUND:
        assert test in tests, fault


def test_what_closes_a_case_is_in_the_sources() -> None:
    """Names in code spans, as far as they are names: a helper that is gone closes nothing."""
    sources = "\n".join(
        path.read_text(encoding="utf-8")
        for folder in ("flint_kernels", "csrc")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".py", ".h", ".cpp", ".cu", ".cuh")
    )
    closing = [case.closed_by for case in CASES] + [found[2] for found in generator().FOUND]
    for text in closing:
        for span in re.findall(r"`([^`]+)`", text):
            *_, name = re.split(r"[./]", span.removesuffix(".h").removeprefix("@"))
            assert re.search(rf"\b{name}\b", sources), text
