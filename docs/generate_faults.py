"""Writes docs/faults.md: the fault table, the campaigns' figures and the planted faults.

python docs/generate_faults.py

The tests of a case are found by their names, the figures in the rows of docs/results, the planted
faults in python_tests/planted_faults.py. python_tests/test_fault_cases.py holds the page to them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PATH = ROOT / "docs" / "faults.md"
TESTS = ROOT / "python_tests"

BOTH, CPU, GPU = ("cpu", "gpu"), ("cpu",), ("gpu",)


@dataclass(frozen=True)
class Case:
    """A kind of fault that people met in kernels like these."""

    id: str
    fault: str
    where: tuple[str, ...]
    """The devices on which it must be tested."""
    closed_by: str
    """What makes the whole kind impossible, or an error."""


@dataclass
class Tests:
    """Names of the tests of one case."""

    cpu: list[str] = field(default_factory=list)
    gpu: list[str] = field(default_factory=list)


OFFSETS = "offsets are `int64_t` in every kernel, and the helpers that compute them are tested"
SLOTS = "`check_slot_values` on the CPU; one device helper decides what becomes of a row on a GPU"
PAGES = "`check_table_values` on the CPU; on a GPU a page is used after it was held to the bounds"
HEADER = "nothing is taken before a claimed number was held against the file's size (`_Header`)"
MATCH = "every tensor is matched by name, type and shape before the module is made (`match`)"
SCALES = "one table and one pair of helpers (`csrc/nvfp4_layout.h`) for host and device"
SHARDS = "the op takes a scale a shard; a fused weight without them is an error (`Checker.nvfp4`)"
DECLARED = "schema, fake, checks and out-variant come of one declaration (`@op`)"

CASES = (
    Case("N1", "x is a strided view", BOTH, "bodies take any strides; property tests draw them"),
    Case("N2", "views one element into a buffer", BOTH, "vector loads ask the address first"),
    Case("N3", "no rows, then an ordinary call", BOTH, "an empty launch is none (`launch`)"),
    Case("N4", "72 fused adds in a chain", BOTH, "the norm sees the sum before it is rounded"),
    Case("N5", "rows of 300", BOTH, "sums are FP32 whatever the activations"),
    Case("N6", "SiLU gates at the limits", BOTH, "exact exponential and division"),
    Case("N7", "more than 2^31 elements", GPU, OFFSETS),
    Case("R1", "positions outside the table", BOTH, SLOTS),
    Case("R2", "the module is cast", CPU, "`Flint._apply` changes the device alone"),
    Case("R3", "slots of -1", BOTH, SLOTS),
    Case("R4", "more rows than slots, garbage behind", BOTH, SLOTS),
    Case("R5", "interleaved caches", BOTH, "caches go by strides alone (`Checker.paged_cache`)"),
    Case("T1", "NaN and infinities in the router", BOTH, "a total order on keys (`topk_key.h`)"),
    Case("T2", "ties, and scores that are all 1", BOTH, "logits are ranked, not scores"),
    Case("T3", "logits apart below BF16", BOTH, "logits are rounded before they are ranked"),
    Case("A1", "the edge of the window", BOTH, "one definition, which counts the query itself"),
    Case("A2", "very negative logits", BOTH, "the maximum is over the attended keys alone"),
    Case("A3", "sinks far above, -inf, without keys", BOTH, "the sink joins once, at the end"),
    Case("A4", "requests without keys", BOTH, "a length of 0 writes zeros"),
    Case("A5", "NaN where nothing is to be read", BOTH, "masked slots are never loaded as values"),
    Case("A6", "garbage in the tail of the table", BOTH, PAGES),
    Case("A7", "chunks against one shot", BOTH, "a window layer writes after it has read"),
    Case("A8", "a cache of more than 2^31 elements", BOTH, OFFSETS),
    Case("A9", "other head counts and sizes", BOTH, "a kernel hands back what it was not made for"),
    Case("Q1", "every scale byte", BOTH, SCALES),
    Case("Q2", "global scales that differ", BOTH, SHARDS),
    Case("Q3", "large sums", BOTH, "sums are FP32, the global scale comes after them"),
    Case("Q4", "rows of NaN beside real rows", BOTH, "a row's sums have no other row's values"),
    Case("Q5", "ids of -1, twice, out of range", BOTH, "`check_expert_ids`; a GPU skips the entry"),
    Case("Q6", "many tokens", BOTH, "grids are made by a helper that knows their limits"),
    Case("G1", "the order of the nibbles", BOTH, SCALES),
    Case("G2", "a file that is cut", CPU, HEADER),
    Case("G3", "a byte-swapped file", CPU, HEADER),
    Case("G4", "a read-only file, warnings as errors", CPU, "a private mapping, which is writable"),
    Case("G5", "host memory while loading", CPU, "one staging buffer (`Transfer`)"),
    Case("G6", "types, missing, twice, FP4 marks", CPU, MATCH),
    Case("C1", "`opcheck` on every op", BOTH, DECLARED),
    Case("C2", "a write, then a read, compiled", BOTH, "the caches alone are declared mutable"),
    Case("C3", "fake and real metadata", BOTH, DECLARED),
    Case("C4", "an input that requires grad", BOTH, "every op has a body at the Autograd key"),
    Case("C5", "the first call is in a capture", BOTH, "nothing compiles there (`launch`)"),
    Case("C6", "a chain behind a slow producer", GPU, "what is read early is written down per op"),
    Case("C7", "another current device, two devices", GPU, "the tensors' device is made current"),
    Case("C8", "one tensor on another device", BOTH, "`Checker.tensor` sees every tensor"),
    Case("C9", "no GPU, no Triton, no nvcc", CPU, "nothing optional is imported at import"),
    Case("C10", "a library of another torch", CPU, "`native.load` says which versions"),
    Case("C11", "the binary's architectures", CPU, "the table of the docs is held to the binary"),
)  # fmt: skip


def test_functions() -> Iterator[tuple[str, str]]:
    """(device, name) of every test function of the tree."""
    for path in sorted(TESTS.rglob("*.py")):
        device = "gpu" if path.parent.name == "gpu" else "cpu"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield device, node.name


@cache
def tests_of_cases() -> dict[str, Tests]:
    """Case id -> its tests: those with the id in their name."""
    found: dict[str, Tests] = {}
    for device, name in test_functions():
        for case in re.findall(r"_([NRTAQGC]\d+)(?=_)", name):
            getattr(found.setdefault(case, Tests()), device).append(name)
    return found


def cases() -> str:
    """The fault table: what happened to others, what closes it here, and how many tests ask."""
    lines = ["| id | fault | closed by | tests, CPU | tests, GPU |", "| --- " * 5 + "|"]
    for case in CASES:
        tests = tests_of_cases()[case.id]
        counts = (
            str(len(names)) if names or device in case.where else "-"
            for device, names in (("cpu", tests.cpu), ("gpu", tests.gpu))
        )
        lines.append(f"| {case.id} | {case.fault} | {case.closed_by} | {' | '.join(counts)} |")
    return "\n".join(lines)
