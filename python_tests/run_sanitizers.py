"""The C++ code under AddressSanitizer and UndefinedBehaviorSanitizer, by the tests that call it.

    python python_tests/run_sanitizers.py --output docs/results/cpu/sanitizers.json

A copy of the tree is built with both in build/sanitize, the library and the test module, and tests
run there with the sanitizer's runtime loaded before Python. A finding ends the run.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from flint_kernels import results

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build" / "sanitize"
COPIED = ("csrc", "docs", "flint_kernels", "fuzz", "microbench", "python_tests")
FILES = ("Makefile", "README.md", "pyproject.toml", "requirements.txt", "setup.py")
SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"
# Those that call C++. What compiles with torch.compile calls nothing else, and takes minutes here.
TESTS = (
    "test_admitted_calls", "test_attention_ops", "test_device_helpers", "test_errors",
    "test_fuzz_targets", "test_generation", "test_kv_write_ops", "test_linear_ops",
    "test_loading_gguf", "test_namespace", "test_native_matmul", "test_norm_ops",
    "test_nvfp4_format", "test_op_properties", "test_overlap", "test_router_and_experts",
    "test_row_invariance", "test_sampling",
)  # fmt: skip
LEFT_OUT = "not compile and not inductor and not opcheck and not memory"


def build() -> None:
    shutil.rmtree(WORK, ignore_errors=True)
    for folder in COPIED:
        ignored = shutil.ignore_patterns("__pycache__", "lib")
        shutil.copytree(ROOT / folder, WORK / folder, ignore=ignored)
    for name in FILES:
        shutil.copy(ROOT / name, WORK / name)
    environment = {
        **os.environ,
        "CXXFLAGS": f"-O1 -g {SANITIZERS}",
        "LDFLAGS": SANITIZERS,
        "FLINT_KERNELS_CUDA_ARCHS": "none",
    }
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    subprocess.run(command, cwd=WORK, env=environment, check=True)


def runtime() -> str:
    """What has to be loaded before everything else: AddressSanitizer, and the C++ library, of which
    it takes the throwing of exceptions and which Python alone does not load."""
    compiler = os.environ.get("CXX", "g++")
    paths = []
    for name in ("libasan.so", "libstdc++.so"):
        command = [compiler, f"-print-file-name={name}"]
        found = Path(subprocess.check_output(command, text=True).strip())
        if not found.is_file():
            raise SystemExit(f"sanitizers: got no {name} of {compiler}; install it")
        paths.append(str(found.resolve()))
    return " ".join(paths)


def run(arguments: list[str]) -> tuple[int, int, str]:
    """Exit status, tests that passed, and what was printed."""
    log = WORK / "log"
    reports = f"log_path={WORK / 'report'}"  # pytest would keep stderr to itself
    environment = {
        **os.environ,
        "LD_PRELOAD": runtime(),
        # Python frees little at its end, and what a test module is built with is not ours to tell.
        "ASAN_OPTIONS": f"detect_leaks=0:allocator_may_return_null=1:{reports}",
        "UBSAN_OPTIONS": f"print_stacktrace=1:{reports}",
        "CXXFLAGS": f"-O1 -g {SANITIZERS}",
        "PYTHONPATH": str(WORK),
        "OMP_NUM_THREADS": "2",
    }
    in_use = "from flint_kernels.backends import native; assert native.is_available()"
    subprocess.run([sys.executable, "-c", in_use], cwd=WORK, env=environment, check=True)
    files = [f"python_tests/{test}.py" for test in TESTS]
    options = ["-q", "-p", "no:cacheprovider", "-k", LEFT_OUT, *arguments]
    with log.open("wb") as output:
        status = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *files],
            cwd=WORK, env=environment, stdout=output, stderr=output, check=False,
        ).returncode  # fmt: skip
    found = sorted(WORK.glob("report.*"))
    text = "".join(p.read_text(encoding="utf-8", errors="replace") for p in (*found, log))
    passed = re.search(r"(\d+) passed", text)
    return status, int(passed[1]) if passed else 0, text


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--output", required=True, help="the JSON file to be written")
    parser.add_argument("rest", nargs="*", help="arguments of pytest, such as `-- -n 2`")
    options = parser.parse_args(argv)
    build()
    status, passed, text = run(options.rest)
    found = len(re.findall(r"AddressSanitizer: |runtime error: ", text))
    case = "AddressSanitizer, UndefinedBehaviorSanitizer: C++ by the CPU tests"
    errors = max(found, int(status != 0))  # a run that failed for another reason has shown nothing
    rows = [
        results.row("sanitizer", case, "errors", [float(errors)]),
        results.row("sanitizer", case, "tests", [float(passed)]),
    ]
    results.write(options.output, rows, results.describe("cpu"))
    sys.stdout.write(f"{case}: {passed} tests, {errors} errors\n")
    if errors:
        sys.stdout.write(text[-4000:])
    return status


if __name__ == "__main__":
    sys.exit(main())
