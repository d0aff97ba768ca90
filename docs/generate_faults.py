"""Writes docs/faults.md: the fault table, the campaigns' figures and the planted faults.

python docs/generate_faults.py

The tests of a case are found by their names, the figures in the rows of docs/results, the planted
faults in python_tests/planted_faults.py. python_tests/test_fault_cases.py holds the page to them.
"""

from __future__ import annotations

import ast
import json
import re
import runpy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

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
    Case("N6", "SiLU gates at the limits", BOTH, "no value of a gate is flushed or clamped"),
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


# What these searches found in this package: the fault, what found it, what closes its kind, a test.
PROPERTY, FUZZER, BY_HAND = "property test", "fuzzer", "test of this page"
FOUND = (
    ("rows of width 0 ended in an error of torch's", PROPERTY, "`flat_rows`",
     "test_no_columns_at_all"),
    ("no rows at q/k norm and RoPE did too", PROPERTY, "sizes are named, not left to `reshape`",
     "test_a_legal_call_is_right"),
    ("a skipped expert entry was NaN where expert 0's global scale was", PROPERTY,
     "`_entry_scales`", "test_a_skipped_entry_takes_no_scale"),
    ("an epsilon below FP32's range was taken, and was 0", PROPERTY, "`Checker.positive`",
     "test_an_epsilon_that_fp32_has_not"),
    ("None for a tensor ended in an error of torch's C shim", PROPERTY, "`_check_given`",
     "test_none_in_place_of_a_tensor"),
    ("so did a tensor of the meta device beside one of the CPU", PROPERTY, "`code_of`",
     "test_a_tensor_without_memory_beside_one_of_the_cpu"),
    ("a tokenizer whose merges lack its prefix ended the process", FUZZER, "`_check_merges`",
     "test_a_prefix_that_a_merge_has_not"),
    ("errors and panics of the tokenizer's package were no ValueErrors", FUZZER,
     "`_errors_are_values`", "test_errors_of_the_package_are_value_errors"),
    ("a tokenizer could pad to any length and multiply a text", BY_HAND, "`parse`, `_growth`",
     "test_replacements_that_multiply_a_text_are_refused"),
    ("a JSON file had no bound, could be a pipe, or have a key twice", BY_HAND, "`read_json`",
     "test_json_is_read_within_bounds"),
    ("a model or cache that did not fit ended the process on the CPU", BY_HAND, "`room_for`",
     "test_a_model_that_does_not_fit_is_refused_before_it_is_made"),
    ("of threads with first calls together one lost the C++ library for all", BY_HAND,
     "`_load_once`, under a lock",
     "test_threads_whose_first_calls_come_together_load_one_library"),
    ("any version of a dependency was taken, with functions missing in some", BY_HAND,
     "lower bounds", "test_dependencies_of_the_package_have_a_lower_bound_and_a_reason"),
    ("a kernel passed over NaN of expert 0, which has the largest key there is", BY_HAND,
     "`router_topk_rows`", "test_T1_T2_router_equals_the_cpu_s"),
    ("a window of 2^31 or more did not compile on a GPU", PROPERTY, "`_window`",
     "test_a_window_beyond_int32_is_none"),
    ("experts without columns ended in a division by zero on a GPU", PROPERTY, "`combine`",
     "test_experts_without_columns"),
    ("experts' ids of one choice were read on a GPU by other strides than they had", PROPERTY,
     "no Triton kernel gets strides that it does not know (`_check_dense`)",
     "test_a_kernel_gets_no_strides_that_it_does_not_know"),
    ("the plan of a next step was written by a position that no row can have", PROPERTY,
     "`decode_advance` goes by the length, which was held to the table",
     "test_decode_advance_of_positions_that_no_row_can_have"),
    ("V that is not finite reaches rows on a GPU that do not see it", PROPERTY,
     "said of the op (`attention_prefill`), and held to one request",
     "test_a_legal_call_is_right"),
    ("a planted fault in C++ stayed in the copy for the faults after it", BY_HAND,
     "the copy's library goes back too", "test_a_copy_is_as_it_was_when_a_fault_is_taken_out"),
)  # fmt: skip


def found() -> str:
    lines = [[fault, by, closed, f"`{test}`"] for fault, by, closed, test in FOUND]
    return table(["fault", "found by", "closed by", "test"], lines)


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


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def cases() -> str:
    """The fault table: what happened to others, what closes it here, and how many tests ask."""
    lines = []
    for case in CASES:
        tests = tests_of_cases()[case.id]
        counts = [str(len(names)) if names else "-" for names in (tests.cpu, tests.gpu)]
        lines.append([case.id, case.fault, case.closed_by, *counts])
    return table(["id", "fault", "closed by", "tests, CPU", "tests, GPU"], lines)


# ------------------------------------------------------------------ figures, out of result rows

NOT_RUN = "*Not run in this version.*"


def rows(machine: str, name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """meta and rows of docs/results/<machine>/<name>.json; nothing where there is no such file."""
    path = ROOT / "docs" / "results" / machine / f"{name}.json"
    if not path.is_file():
        return {}, []
    content = json.loads(path.read_text(encoding="utf-8"))
    return content["meta"], content["rows"]


def where(meta: dict[str, Any]) -> str:
    machine = meta["gpu"] or meta["cpu"]
    return (
        f"\n\nRun {meta['date']} on {machine}, torch {meta['torch']}; commit {meta['commit'][:12]}."
    )


def figures(machine: str, name: str, head: str, metrics: Sequence[str]) -> str:
    """A line a case, a column a metric."""
    meta, found = rows(machine, name)
    if not found:
        return NOT_RUN
    by_case: dict[str, dict[str, float]] = {}
    for row in found:
        by_case.setdefault(row["case"], {})[row["metric"]] = row["median"]
    lines = [
        [case, *(f"{values[m]:,.0f}" if m in values else "" for m in metrics)]
        for case, values in by_case.items()
    ]
    return table([head, *metrics], lines) + where(meta)


def sanitizers_gpu() -> str:
    """The table, and which kernels the errors are in."""
    text = figures("h200", "sanitizers", "tool", SANITIZED)
    lines = [
        f"- {row['case']}, {row['metric']}: "
        + ", ".join(f"`{kernel}` ({count:,})" for kernel, count in sorted(row["kernels"].items()))
        for row in rows("h200", "sanitizers")[1]
        if row.get("kernels")
    ]
    return "\n".join([text, *(["", "By kernel:", "", *lines] if lines else [])])


def since(name: str, said: str) -> str:
    """What became of failures on a GPU, where the rows have any."""
    failed = any(r["metric"] == "failures" and r["median"] for r in rows("h200", name)[1])
    return f"\n\n{said}" if failed else ""


def planted_faults() -> str:
    """Every planted fault, the test that has to go red, and whether it did."""
    planted = runpy.run_path(str(TESTS / "planted_faults.py"))["PLANTED"]
    results = {"cpu": rows("cpu", "planted_faults"), "cuda": rows("h200", "planted_faults")}
    caught = {
        (device, row["case"]): bool(row["median"])
        for device, (_, found) in results.items()
        for row in found
    }
    lines = []
    for fault in planted:
        state = caught.get((fault.device, f"{fault.family}: {fault.what}"))
        says = {None: "not run", True: "caught", False: "**missed**"}[state]
        test = fault.test.split("[")[0].replace("::", "` `")
        lines.append([fault.family, fault.what, f"`{fault.file}`", f"`{test}`", says])
    text = table(["family", "fault", "planted in", "test that goes red", "state"], lines)
    return text + "".join(where(meta) for meta, found in results.values() if found)


# ------------------------------------------------------------------ the page


def document() -> str:
    closed = sum(all(getattr(tests_of_cases()[c.id], d) for d in c.where) for c in CASES)
    return PAGE.format(
        closed=closed,
        cases=len(CASES),
        table=cases(),
        found=found(),
        count=len(FOUND),
        properties=figures("cpu", "properties", "calls", ("examples", "failures")),
        properties_gpu=figures("h200", "properties", "calls", ("examples", "failures"))
        + since("properties", PROPERTIES_SINCE),
        fuzz=figures("cpu", "fuzz", "target", ("executions", "findings")),
        sanitizers=figures("cpu", "sanitizers", "sanitizers", ("errors", "tests")),
        sanitizers_gpu=sanitizers_gpu(),
        endurance=figures("h200", "endurance", "checkpoint", ENDURED)
        + since("endurance", ENDURANCE_SINCE),
        planted=planted_faults(),
    )


PROPERTIES_SINCE = """\
The 1 says that tests failed. Their causes were mended afterwards: experts' ids of one choice and
`decode_advance`, of the table above; what failed besides came after it in the same process, whose
GPU answered no more. The search has not run again since."""
ENDURANCE_SINCE = """\
The failure is the reference's. In one part of the run eight requests of one lane were compared, by
the lanes' random numbers in that part alone, and it made steps of nine rows: those go to the
kernels of many rows, whose bits are others. It makes none of more than eight now
(`test_a_reference_has_no_more_rows_than_what_it_judges`); the run has not been made again since."""
SANITIZED = ("errors", "tests", "errors in cuBLAS")
ENDURED = (
    "processes",
    "steps",
    "tokens",
    "requests",
    "requests compared",
    "GPU bytes grown",
    "failures",
)

PAGE = """\
# Faults

*Generated by `python docs/generate_faults.py`; do not edit. Figures come from the rows under
[results](results/README.md).*

What broke in kernels and engines like these, what keeps it from happening here, and how hard it was
looked for. A fault is closed as a kind: by a check or a type that every caller goes through.

## The table of faults

{closed} of {cases} cases have a test of their name (`test_G1_...`) on every device that they are
about. Tests on a GPU run there by `make gpu-test`, those of C7 that need two of them by
`make gpu-test-two`, which have not run yet.

{table}

## Found here

{count} faults of this package that these searches found, all closed:

{found}

## Property tests

Random legal calls of every op, of any shape, memory layout and value (NaN, infinities, subnormals,
values that overflow), against float64 arithmetic that carries a bound of the error along
(`python_tests/running_error.py`): the bound is derived, and nothing is compared where FP32 has no
one answer. Each call is made twice, once by the out-variant, and may write what it declares and
nothing else. Illegal calls have to be an exception with a message of the package or of torch's
dispatcher, and to write nothing. An op without strategies fails a test. The default run takes a few
examples of each; `make properties` is the search, `make gpu-properties` that on a GPU.

On the CPU, by the bodies of the library and by those of plain PyTorch:

{properties}

On a GPU, by the kernels and by the general bodies (25 examples of each test, before these, found
what the table above says of windows, of experts without columns and of V):

{properties_gpu}

## Files under a fuzzer

`make fuzz` runs the readers of GGUF, safetensors, config.json (alone, and beside good weights), the
index of shards and tokenizer.json under atheris, and the C++ conversions of NVFP4 under libFuzzer
with AddressSanitizer and UndefinedBehaviorSanitizer. A finding is any exception but a ValueError,
an OSError or a MemoryError that says what was needed; a crash; a hang; or 512 MiB of memory more
than before. JSON is mutated as a tree. Inputs that were findings are kept in `fuzz/inputs` and
replayed by the tests. atheris sees no further than Python: of what lies in Rust (safetensors,
tokenizers) it has no coverage to go by.

{fuzz}

## Sanitizers

`make sanitize` builds the C++ code with AddressSanitizer and UndefinedBehaviorSanitizer and runs
the CPU tests that call it:

{sanitizers}

`make gpu-sanitize` runs `python_tests/gpu/test_sanitized_gpu.py`, whose calls are to launch every
kernel once (its last test asks torch's profiler whether they do), under compute-sanitizer's
memcheck, initcheck, synccheck and racecheck. Errors are those of every kernel, torch's copies and
comparisons among them: those read what the kernels here have written. Only what lies in cuBLAS's
products is counted apart: they may read padding that nobody wrote. So that it hides nothing, every
input of such a product is read by a kernel of torch's before, element by element, and an input that
nobody had written would be an error there.

{sanitizers_gpu}

## Threads, processes, memory

Threads that load and decode, with models of their own and with one model, two processes, and first
calls that come together give what each gives alone (`python_tests/test_concurrency.py`). What does
not fit is a MemoryError that says how much was needed, before anything is allocated where that can
be known, and leaves a process that goes on (`python_tests/test_memory.py`). The same on a GPU, with
graph replays beside eager calls and a capture that runs out of memory, is
`python_tests/gpu/test_concurrency_gpu.py`, which passed on an H200.

Endurance (`make gpu-endurance`): a million decode steps of flint-tiny, each of up to eight requests
that come with prompts of random lengths and stay for a random time. Of 1% of the requests every
token and the last logits have to be, to the bit, those of the model's own steps, made again without
graphs; counters have to be zero, pages free, and memory what it was. Processes share the steps,
each with a model, decoders and requests of its own, at once on one GPU.

{endurance}

## Planted faults

A suite that nothing can make red shows nothing. `make planted` puts each of these into a copy of
the tree and runs the test beside it; `make gpu-planted` those that show on a GPU alone.

{planted}

## Security

No pickle is read or written, and no code comes out of a file: a test reads every source of the tree
for it, and another watches a load by an audit hook. A config.json cannot name code, an index of
shards no file outside its folder. What a file claims is held against its size before memory is
taken for it; JSON files have a bound and each key once. A tokenizer.json neither pads nor
truncates, and one whose replacements would multiply a text, or whose merges would end the process
inside the package `tokenizers`, is refused.

| dependency | why, and why from there |
| --- | --- |
| `torch` | from 2.11: the stable ABI of the C++ library |
| `numpy` | what torch and the readers of files exchange; from 1.26, the oldest that was run |
| `safetensors` | reads the format; from 0.6.2, which tells the order of the data (`offset_keys`) |
| `tokenizers` | reads tokenizer.json; from 0.20, the oldest that was run |
| `tqdm` | the bar of a load; from 4.66, the oldest that was run |
| `transformers` | `flint_kernels.integrations.transformers`; from 5.24, whose interfaces it uses |
| `openai` | the client of `transformers serve` in the documents; from 1.0, its present interface |
| `triton` | tests of the GPU's general bodies in its interpreter |
| `pytest`, `pytest-xdist`, `hypothesis` | run the tests |
| `gguf`, `ml_dtypes` | second readers of the formats, for tests; gguf from 0.19: it has NVFP4 |
| `pybind11` | the tests' module of device helpers |
| `atheris` | the fuzzer |
| `ruff`, `mypy`, `clang-format` | one version each: another one formats otherwise |

No upper bound is set: no newer version that fails is known. The lower bounds of numpy, safetensors,
tokenizers and tqdm were run once, together, with the tests of loading, generation and training.
"""


def main() -> None:
    PATH.write_text(document(), encoding="utf-8")


if __name__ == "__main__":
    main()
