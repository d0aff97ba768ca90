"""Faults that are put into a copy of the tree, and the test that has to go red for each.

    python python_tests/planted_faults.py --output docs/results/cpu/planted_faults.json

A suite that nothing can make red shows nothing. Each fault is a small edit of one file; the copy is
rebuilt where it is C++. `--device cuda` plants those that need a GPU to show; `--build FOLDER` only
builds their libraries, for a run with `--libraries FOLDER` on the machine that has the GPU.
test_fault_cases.py holds every edit to the sources, so that none goes stale.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from flint_kernels import results

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build" / "planted"
COPIED = ("csrc", "docs", "flint_kernels", "fuzz", "microbench", "python_tests")
FILES = ("Makefile", "README.md", "pyproject.toml", "requirements.txt", "setup.py")
LIBRARY = Path("flint_kernels/lib")
SOURCES = "sources.sha256"  # beside a library that was built beforehand: what it was built of


@dataclass(frozen=True)
class Planted:
    """One fault."""

    family: str
    what: str
    file: str
    old: str
    """What stands there, once in the file."""
    new: str
    test: str
    """The test that must fail, as pytest names it below python_tests."""
    device: str = "cpu"

    @property
    def compiled(self) -> bool:
        return self.file.startswith("csrc/")

    @property
    def case(self) -> str:
        return f"{self.family}: {self.what}"

    @property
    def folder(self) -> str:
        """Of its library among those built beforehand."""
        return re.sub(r"\W+", "_", self.case)


_ATTENTION = "flint_kernels/reference/attention.py"
_A1 = "test_attention_ops.py::test_A1_the_window_counts_the_current_token"

PLANTED = (
    Planted(
        "window edge", "decode begins a key late", _ATTENTION,
        "first = max(0, length - window) if window > 0 else 0",
        "first = max(0, length - window + 1) if window > 0 else 0",
        f"{_A1}[plain-88-True-dtype0-decode_one]",
    ),
    Planted(
        "window edge", "the mask of prefill has a key too many", _ATTENTION,
        "seen & (key > position - window)", "seen & (key >= position - window)",
        f"{_A1}[plain-87-False-dtype1-prefill_last]",
    ),
    Planted(
        "window edge", "the C++ body begins a key late", "csrc/torch/attention.cpp",
        "window < keys ? keys - window : 0", "window < keys ? keys - window + 1 : 0",
        f"{_A1}[installed-88-True-dtype0-decode_one]",
    ),
    Planted(
        "dropped sink", "it is taken and not used", _ATTENTION,
        "    if sinks is not None:\n        sink =", "    if False:\n        sink =",
        "test_attention_ops.py::test_A3_sinks[plain-dtype0-decode_one]",
    ),
    Planted(
        "dropped sink", "in the C++ body", "csrc/cpu/attention.cpp",
        "if (query.sinks != nullptr)", "if (query.sinks != nullptr && keys > 600)",
        "test_attention_ops.py::test_A3_sinks[installed-dtype0-decode_one]",
    ),
    Planted(
        "swapped nibble", "the decoder takes the high nibble first",
        "flint_kernels/formats/nvfp4.py",
        "_SHUFFLE = ((0x00F000F000F000F0, 4), (0x0000FF000000FF00, 8), (0x00000000FFFF0000, 16))",
        "_SHUFFLE = ((0x00F000F000F000F0, 4), (0x0000FF000000FF00, 8))",
        "test_nvfp4_format.py::test_G1_worked_example",
    ),
    Planted(
        "swapped nibble", "in the C++ repack's SSE", "csrc/cpu/nvfp4_repack.cpp",
        "const __m128i second = join(_mm_and_si128(_mm_srli_epi16(codes, 4), nibble));",
        "const __m128i second = join(_mm_and_si128(_mm_slli_epi16(codes, 4), nibble));",
        "test_native_library.py::test_repack_equals_pytorch_bit_for_bit",
    ),
    Planted(
        "one scale for all shards", "that of the first", "flint_kernels/reference/linear.py",
        "shard * scale_2[i]", "shard * scale_2[0 * i]",
        "test_linear_ops.py::test_Q2_each_shard_has_its_own_global_scale[plain]",
    ),
    Planted(
        "one scale for all shards", "in the C++ product", "csrc/cpu/matmul.cpp",
        "scales.values[expert * shards + shard]", "scales.values[expert * shards + 0 * shard]",
        "test_linear_ops.py::test_Q2_each_shard_has_its_own_global_scale[installed]",
    ),
    Planted(
        "unsigned scale read as signed", "GGUF's 0xB8 becomes -1",
        "flint_kernels/formats/nvfp4.py",
        "        scales = scales & 0x7F\n        scale_out", "        scale_out",
        "test_nvfp4_format.py::test_Q1_scale_bytes_in_gguf_blocks",
    ),
    Planted(
        "unsigned scale read as signed", "in the helper of host and device",
        "csrc/nvfp4_layout.h", "  return scales & 0x7f7f7f7fu & ~zero;",
        "  return scales & (0xffffffffu - zero);",
        "test_device_helpers.py::test_Q1_four_scales_at_once",
    ),
    Planted(
        "stale counter", "growth of a page table is not counted",
        "flint_kernels/model/cache.py", "        self._growth += 1\n", "",
        "test_graph_decoder.py::test_tables_follow_growth_and_new_owners_of_a_number",
    ),
    Planted(
        "a rounding too many", "the norm sees the rounded sum", "flint_kernels/reference/norm.py",
        "normed = rms_normalise(total, weight, eps)",
        "normed = rms_normalise(total.to(x.dtype).float(), weight, eps)",
        "test_op_properties.py::test_a_legal_call_is_right[fused_add_rms_norm-cpu-general]",
    ),
    Planted(
        "a rounding left out", "P is not rounded in the C++ body", "csrc/cpu/attention.cpp",
        "add_scaled(sum.data(), round_to_bf16(p[j]), v_rows[j], dim);",
        "add_scaled(sum.data(), p[j], v_rows[j], dim);",
        "test_attention_ops.py::test_decode_against_float64",
    ),
    Planted(
        "padding that is read", "a table's entry past the length is held to the bounds",
        "flint_kernels/ops/attention.py",
        "block_table[row, first : (length - 1) // page + 1].tolist()",
        "block_table[row, first:].tolist()",
        "test_op_properties.py::test_a_legal_call_is_right[attention_decode-cpu-general]",
    ),
    Planted(
        "a check left out", "slots beyond the cache are written", "flint_kernels/ops/kv_write.py",
        "if low < -1 or high >= total:", "if low < -1:",
        "test_kv_write_ops.py::test_R4_a_slot_outside_the_cache",
    ),
    Planted(
        "a number that a file claims", "is not held against the file's size",
        "flint_kernels/formats/gguf.py", "        if n_bytes > self._size:", "        if False:",
        "test_gguf_container.py",
    ),
    Planted(
        "two threads, one library", "the second takes the first one's ops for another copy's",
        "flint_kernels/backends/native.py", "    with _loading:\n        return _load_once",
        "    if True:\n        return load",
        "test_concurrency.py::test_threads_whose_first_calls_come_together_load_one_library",
    ),
    Planted(
        "missing PDL wait", "the norm does not wait for the kernel in front",
        "csrc/cuda/norm.cu",
        "  wait_for_previous_kernel();\n\n  Packed<kAdd> part[kVectors];",
        "  Packed<kAdd> part[kVectors];",
        "gpu/test_rows_gpu.py::test_C6_a_pdl_chain_behind_a_slow_producer_is_stable", "cuda",
    ),
    Planted(
        "missing PDL wait", "step 6 reads its rows before they are there",
        "csrc/cuda/moe_gate_up.cu",
        "  wait_for_previous_kernel();\n  // Now: this kernel's experts'",
        "  // Now: this kernel's experts'",
        "gpu/test_low_latency_graphs_gpu.py::test_C6_a_pdl_chain_behind_a_slow_producer", "cuda",
    ),
    Planted(
        "stale counter", "a graph keeps the table of its capture",
        "flint_kernels/model/cache.py", "        self._growth += 1\n", "",
        "gpu/test_graph_decoder_gpu.py::test_a_full_bucket_equals_the_model_s_own_step", "cuda",
    ),
)  # fmt: skip


class Copy:
    """The tree as it is, in a folder of its own, with the library that it has."""

    def __init__(self, number: int, device: str, libraries: Path | None) -> None:
        self.path = WORK / str(number)
        self.device = device
        self.libraries = libraries
        shutil.rmtree(self.path, ignore_errors=True)
        for folder in COPIED:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / folder, self.path / folder, ignore=ignored)
        for name in FILES:
            shutil.copy(ROOT / name, self.path / name)
        if libraries is None:
            self.rebuild()

    @property
    def log(self) -> Path:
        return self.path / "log"

    def rebuild(self) -> None:
        """Only what has changed is compiled."""
        command = [sys.executable, "setup.py", "build_ext", "--inplace"]
        environment = dict(os.environ)
        if self.device == "cpu":
            environment["FLINT_KERNELS_CUDA_ARCHS"] = "none"
        with self.log.open("ab") as log:
            subprocess.run(command, cwd=self.path, env=environment, check=True, stdout=log)

    def put_library(self, source: Path) -> None:
        shutil.copytree(source, self.path / LIBRARY, dirs_exist_ok=True)

    def plant(self, fault: Planted) -> str:
        """Into the sources; what the file held before."""
        path = self.path / fault.file
        sound = path.read_text(encoding="utf-8")
        path.write_text(sound.replace(fault.old, fault.new), encoding="utf-8")
        if fault.compiled and self.libraries is None:
            self.rebuild()
        elif fault.compiled and self.libraries is not None:
            self._check_sources(fault, self.libraries / fault.folder)
            self.put_library(self.libraries / fault.folder)
        return sound

    def sources(self) -> str:
        """A hash of all that a library is built of."""
        digest = hashlib.sha256()
        for path in sorted(path for path in (self.path / "csrc").rglob("*") if path.is_file()):
            digest.update(path.relative_to(self.path).as_posix().encode() + b"\0")
            digest.update(path.read_bytes())
        return digest.hexdigest()

    def _check_sources(self, fault: Planted, library: Path) -> None:
        """A library of other sources may fail the test for reasons of its own."""
        if (library / SOURCES).read_text(encoding="ascii") != self.sources():
            raise RuntimeError(
                f"{library}: got a library of other sources; want one of this tree's with the "
                "fault. Build it again: --build."
            )

    def take_out(self, fault: Planted, sound: str) -> None:
        """The copy is as it was, its library too."""
        (self.path / fault.file).write_text(sound, encoding="utf-8")
        if fault.compiled and self.libraries is None:
            self.rebuild()
        elif fault.compiled and self.libraries is not None:
            self.put_library(ROOT / LIBRARY)

    def pytest_status(self, tests: list[str]) -> int:
        """pytest's exit status: 0 where all pass, 1 where some fail, negative after a signal."""
        mark = "gpu" if self.device == "cuda" else "not gpu and not two_gpus"
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", mark]
        environment = {**os.environ, "PYTHONPATH": str(self.path)}
        paths = [f"python_tests/{test}" for test in tests]
        with self.log.open("ab") as log:
            return subprocess.run(
                [*command, *paths], cwd=self.path, env=environment, stdout=log, stderr=log,
                check=False,
            ).returncode  # fmt: skip

    def is_caught(self, fault: Planted) -> bool:
        """Whether the fault's test fails with it, or ends with the process, as a write beyond a
        buffer may do even after the test has failed."""
        sound = self.plant(fault)
        try:
            status = self.pytest_status([fault.test])
        finally:
            self.take_out(fault, sound)
        return status == 1 or status < 0


def build(faults: list[Planted], device: str, output: Path) -> None:
    """The libraries of the faults in C++, each in a folder of its own."""
    copy = Copy(0, device, None)
    for fault in faults:
        if fault.compiled:
            sound = copy.plant(fault)
            shutil.copytree(copy.path / LIBRARY, output / fault.folder, dirs_exist_ok=True)
            (output / fault.folder / SOURCES).write_text(copy.sources(), encoding="ascii")
            copy.take_out(fault, sound)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--output", help="the JSON file to be written")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--workers", type=int, default=1, help="copies in use at once")
    parser.add_argument("--build", type=Path, metavar="FOLDER", help="build the libraries alone")
    parser.add_argument("--libraries", type=Path, metavar="FOLDER", help="built beforehand")
    parser.add_argument("--commit", help="of a tree that is no git checkout")
    options = parser.parse_args(argv)
    faults = [fault for fault in PLANTED if fault.device == options.device]
    if options.build is not None:
        build(faults, options.device, options.build)
        return 0
    if options.output is None:
        parser.error("--output: got none; want the JSON file to be written")
    copies = [Copy(n, options.device, options.libraries) for n in range(options.workers)]
    if copies[0].pytest_status([fault.test for fault in faults]) != 0:
        sys.stdout.write(f"without a fault the tests are not green: see {copies[0].log}\n")
        return 2
    free: SimpleQueue[Copy] = SimpleQueue()
    for copy in copies:
        free.put(copy)

    def is_caught(fault: Planted) -> bool:
        copy = free.get()
        try:
            return copy.is_caught(fault)
        finally:
            free.put(copy)

    rows, missed = [], 0
    with ThreadPoolExecutor(options.workers) as pool:
        for fault, caught in zip(faults, pool.map(is_caught, faults), strict=True):
            missed += not caught
            rows.append(
                results.row("planted", fault.case, "caught", [float(caught)], test=fault.test)
            )
            sys.stdout.write(f"{'caught' if caught else 'MISSED'}  {fault.case}\n")
            sys.stdout.flush()
    results.write(options.output, rows, results.describe(options.device, options.commit))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
