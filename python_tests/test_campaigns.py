"""What the searches of docs/faults.md count, and that they can find something."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import planted_faults
import pytest
import run_wheel_tests
from planted_faults import PLANTED

TESTS = Path(__file__).parent


@pytest.fixture(scope="module")
def sanitizer() -> ModuleType:
    """python_tests/gpu/run_compute_sanitizer.py; python_tests is no package."""
    path = TESTS / "gpu" / "run_compute_sanitizer.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where a dataclass looks for its annotations
    spec.loader.exec_module(module)
    return module


LINE = "=========     at {}+0x1a0\n=========     by thread (0,0,0) in block (0,0,0)\n"
NATIVE = "void flint::cuda::(anonymous namespace)::rms_norm_cta<false, 1>(Job)"
GEMV = "void flint::cuda::gemv_rows<4>(Job)"
COPY = "void at::native::elementwise_kernel<128, 2>(int, T1)"
FOREIGN = "void gemv2T_kernel_val<int, int, __nv_bfloat16>(T1) in cublas"


def report(*kernels: str) -> str:
    lines = "".join(LINE.format(kernel) for kernel in kernels)
    return (
        f"{lines}{len(kernels) + 7} passed in 3.2s\n========= ERROR SUMMARY: {len(kernels)} errors"
    )


@pytest.mark.parametrize(
    ("kernels", "errors"),
    [
        ((), 0),
        ((NATIVE,), 1),
        (("attention_kernel", "expert_matmul_kernel"), 2),  # Triton's
        ((GEMV,), 1),  # of this package, whatever its name has in it
        ((FOREIGN,), 0),
        ((COPY,), 1),  # of torch's: it reads what kernels here have written, or not
        ((FOREIGN, NATIVE, FOREIGN), 1),
    ],
)
def test_errors_of_a_sanitizer_are_those_of_all_kernels_but_cublas_s(
    sanitizer: ModuleType, kernels: tuple[str, ...], errors: int
) -> None:
    found = sanitizer.counted(report(*kernels))
    assert (found.errors, found.passed) == (errors, len(kernels) + 7)
    assert set(found.elsewhere) <= {"gemv2T_kernel_val"}
    assert found.elsewhere.total() == kernels.count(FOREIGN)
    assert found.kernels.total() == errors


def test_a_sanitizer_that_says_nothing_has_not_passed(sanitizer: ModuleType) -> None:
    assert sanitizer.counted("12 passed in 3.2s").errors == 1


def test_the_races_of_racecheck_count(sanitizer: ModuleType) -> None:
    text = "3 passed\n========= RACECHECK SUMMARY: 4 hazards displayed (4 errors, 0 warnings)"
    found = sanitizer.counted(text)
    assert (found.errors, found.passed) == (4, 3)


TOOL = """\
#!/bin/sh
while [ "$1" != -m ]; do python="$1"; shift; done
"$python" "$@" || exit
echo "========= ERROR SUMMARY: 0 errors"
"""


@pytest.mark.parametrize(("passing", "errors"), [("", 0), ("--maxfail=1 --co", 1)])
def test_a_sanitizer_runs_every_test_or_has_an_error(
    sanitizer: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    passing: str,
    errors: int,
) -> None:
    """By a tool that finds nothing, and runs the tests or only lists them."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(TOOL.replace('"$@"', f'"$@" {passing}'))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("LOW_LATENCY_DEVICE", "cpu")
    monkeypatch.setattr(sanitizer.results, "describe", lambda device, commit: {})
    output, logs = tmp_path / "rows.json", tmp_path / "logs"
    options = ["--tool", "memcheck", "--logs", str(logs)]
    rest = ["--", "-k", "choice_of_experts and not unsanitized"]
    assert sanitizer.main([*options, "--output", str(output), *rest]) == errors
    rows = json.loads(output.read_text(encoding="utf-8"))["rows"]
    counts = {row["metric"]: row["median"] for row in rows}
    assert counts == {"errors": errors, "tests": 0 if errors else 3, "errors in cuBLAS": 0}
    assert (logs / "memcheck.0.log").is_file()


def test_every_kernel_of_triton_is_ours(sanitizer: ModuleType) -> None:
    for name in ("attention_kernel", "merge_kernel", "combine_kernel", "expert_matmul_kernel"):
        assert sanitizer.OURS.search(name), name


def test_processes_share_the_property_tests(tmp_path: Path) -> None:
    """As many examples as one process makes."""
    found = []
    for workers in ("0", "2"):
        output = tmp_path / f"{workers}.json"
        command = [
            sys.executable, str(TESTS / "run_properties.py"), "--examples", "3", "--output",
            str(output), "--", "-k", "rms_norm and cpu-general and not router", "-n", workers,
        ]  # fmt: skip
        subprocess.run(command, check=True, cwd=TESTS.parent, capture_output=True)
        rows = json.loads(output.read_text(encoding="utf-8"))["rows"]
        found.append({row["case"]: row["median"] for row in rows})
    # Two ops, and of each a test of legal and one of illegal calls.
    assert found[0] == found[1] == {"legal calls": 6, "illegal calls": 6, "all": 0}


@pytest.mark.parametrize(
    ("text", "tests", "failures"),
    [
        ("...\n174 passed in 3.2s", 174, 0),
        ("2 failed, 10 passed, 1 error in 3s", 10, 3),
        ("no tests ran", 0, 0),
    ],
)
def test_what_pytest_says_of_a_wheel_is_counted(text: str, tests: int, failures: int) -> None:
    assert run_wheel_tests.counted(text) == {"tests": tests, "failures": failures}


def test_tests_of_a_wheel_that_take_too_long_say_what_has_passed() -> None:
    like_pytest = (
        "import time\n"
        "try:\n"
        "    time.sleep(600)\n"
        "except KeyboardInterrupt:\n"
        "    print('1 failed, 17 passed in 5s')\n"
        "    raise SystemExit(2)\n"
    )
    status, text = run_wheel_tests.stopped([sys.executable, "-c", like_pytest], seconds=5)
    assert status == 2
    assert run_wheel_tests.counted(text) == {"tests": 17, "failures": 1}


def test_planted_faults_in_cpp_have_libraries_of_their_own() -> None:
    folders = [fault.folder for fault in PLANTED]
    assert len(set(folders)) == len({fault.case for fault in PLANTED})
    assert all(Path(folder).name == folder for folder in folders)


def test_a_copy_is_as_it_was_when_a_fault_is_taken_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its library too, where one was built beforehand."""
    fault = next(fault for fault in PLANTED if fault.compiled)
    root, built = tmp_path / "root", tmp_path / "built"
    for name in planted_faults.COPIED:
        (root / name).mkdir(parents=True)
    for name in planted_faults.FILES:
        (root / name).write_text("")
    for folder, text in ((root / planted_faults.LIBRARY, "sound"), (built / fault.folder, "bad")):
        folder.mkdir(parents=True)
        (folder / "library").write_text(text)
    source = root / fault.file
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_text(f"before\n{fault.old}\nafter\n")
    monkeypatch.setattr(planted_faults, "ROOT", root)
    monkeypatch.setattr(planted_faults, "WORK", tmp_path / "work")
    copy = planted_faults.Copy(0, fault.device, built)
    recorded = built / fault.folder / planted_faults.SOURCES
    recorded.write_text(copy.sources())
    with pytest.raises(RuntimeError, match="a library of other sources"):
        copy.plant(fault)  # it was built without the fault
    recorded.write_text(copy.sources())
    (copy.path / fault.file).write_text(source.read_text())
    library = copy.path / planted_faults.LIBRARY / "library"
    seen = []

    def status(tests: list[str]) -> int:
        seen.append((tests, (copy.path / fault.file).read_text(), library.read_text()))
        return 1

    monkeypatch.setattr(copy, "pytest_status", status)
    assert copy.is_caught(fault)
    assert seen == [([fault.test], f"before\n{fault.new}\nafter\n", "bad")]
    assert (copy.path / fault.file).read_text() == source.read_text()
    assert library.read_text() == "sound"
