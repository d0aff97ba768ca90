"""The C++ library: the same results as PyTorch, what it says when it cannot be used, its build."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flint_kernels.backends import native, native_cpu
from flint_kernels.formats import nvfp4, repack

ROOT = Path(__file__).parents[1]
# Enough super-blocks for eight threads to have a part each (the grain is 2^15).
MANY = 8 * (1 << 15) + 5


@pytest.fixture(autouse=True)
def library() -> None:
    assert native.why_not() is None, native.why_not()


def random_blocks(superblocks: int, seed: int = 0) -> torch.Tensor:
    """Any bytes, but no scale 0xFF: uint8 [superblocks, 36]."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(256, (superblocks, 36), dtype=torch.uint8, generator=generator)
    blocks[:, :4].clamp_(max=0xFE)
    return blocks


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


# ------------------------------------------------------------------------- the same results


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**32 - 1), st.integers(0, 6), st.integers(1, 5))
def test_repack_equals_pytorch_bit_for_bit(seed: int, rows: int, superblocks: int) -> None:
    blocks = random_blocks(rows * superblocks, seed).view(rows, superblocks * 36)
    weight, scale = nvfp4.gguf_to_modelopt(blocks)
    got_weight, got_scale = repack.gguf_to_modelopt(blocks)
    assert torch.equal(got_weight, weight)
    assert same_bytes(got_scale, scale)
    scale.view(torch.uint8)[:, ::3] |= (scale.view(torch.uint8)[:, ::3] == 0).byte() << 7  # some -0
    assert torch.equal(
        repack.modelopt_to_gguf(weight, scale), nvfp4.modelopt_to_gguf(weight, scale)
    )


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_repack_is_the_same_on_any_number_of_threads(threads: int) -> None:
    blocks = random_blocks(MANY)
    weight, scale = nvfp4.gguf_to_modelopt(blocks)
    ops = torch.ops.flint_native
    got_weight, got_scale = torch.zeros_like(weight), torch.zeros_like(scale)
    assert ops.gguf_to_modelopt_out(blocks, got_weight, got_scale, threads) == -1
    assert torch.equal(got_weight, weight)
    assert same_bytes(got_scale, scale)
    got_blocks = torch.zeros_like(blocks)
    assert ops.modelopt_to_gguf_out(weight, scale, got_blocks, threads) == -1
    assert torch.equal(got_blocks, nvfp4.modelopt_to_gguf(weight, scale))

    # The first bad scale is reported, whichever thread meets one first.
    first = 3 * MANY // 4 * 4 + 2
    for at in (first, first + 1, MANY * 4 - 1):
        blocks[at // 4, at % 4] = 0xFF
        scale.view(torch.uint8)[at // 4, at % 4] = 0xB8
    assert ops.gguf_to_modelopt_out(blocks, got_weight, got_scale, threads) == first
    assert ops.modelopt_to_gguf_out(weight, scale, got_blocks, threads) == first


@pytest.mark.parametrize("byte", range(256))
def test_every_scale_byte_is_taken_or_refused_as_pytorch_does(byte: int) -> None:
    def outcome(call: object, *args: torch.Tensor) -> list[list[int]] | str:
        try:
            result = call(*args)  # type: ignore[operator]
        except ValueError as error:
            return str(error)
        result = result if isinstance(result, tuple) else (result,)
        return [part.view(torch.uint8).flatten().tolist() for part in result]

    blocks = random_blocks(6).view(2, 3 * 36)
    weight, scale = nvfp4.gguf_to_modelopt(blocks)
    blocks[1, 36 + 2] = byte
    scale.view(torch.uint8)[1, 6] = byte
    assert outcome(repack.gguf_to_modelopt, blocks) == outcome(nvfp4.gguf_to_modelopt, blocks)
    assert outcome(repack.modelopt_to_gguf, weight, scale) == outcome(
        nvfp4.modelopt_to_gguf, weight, scale
    )


@pytest.mark.parametrize("shape", [(1, 16), (3, 80), (2, 5, 48), (4, 1 << 17, 16)])
def test_dequantize_equals_pytorch_bit_for_bit(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(4)
    *lead, k = shape
    weight = torch.randint(256, (*lead, k // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(256, (*lead, k // 16), dtype=torch.uint8, generator=generator)
    scale = scale.masked_fill_((scale & 0x7F) == 0x7F, 0x7E).view(torch.float8_e4m3fn)
    scales_2 = [None, torch.tensor(1.7e-3)]
    if len(shape) == 3:
        scales_2.append(torch.rand(shape[0], generator=generator))
    for scale_2 in scales_2:
        want = nvfp4.dequantize(weight, scale, scale_2)
        assert same_bytes(repack.dequantize(weight, scale, scale_2), want)
        out = torch.empty(shape)
        assert repack.dequantize(weight, scale, scale_2, out=out) is out
        assert same_bytes(out, want)
    narrow = repack.dequantize(weight, scale, scales_2[-1], torch.bfloat16)
    assert torch.equal(narrow, nvfp4.dequantize(weight, scale, scales_2[-1], torch.bfloat16))


def test_dequantize_every_scale_byte() -> None:
    row = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=torch.uint8)
    scale = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None]
    got = repack.dequantize(row.repeat(256, 1), scale)
    want = nvfp4.dequantize(row.repeat(256, 1), scale)
    nan = torch.isnan(want)
    assert int(nan.sum()) == 32
    assert torch.equal(torch.isnan(got), nan)
    assert same_bytes(got.masked_fill(nan, 0), want.masked_fill(nan, 0))


def test_views_are_taken_and_inputs_left_alone() -> None:
    blocks = random_blocks(12).view(2, 6 * 36)
    part = blocks[:, 36 : 4 * 36]
    before = blocks.clone()
    weight, scale = repack.gguf_to_modelopt(part)
    want = nvfp4.gguf_to_modelopt(part.contiguous())
    assert torch.equal(weight, want[0])
    assert torch.equal(
        repack.modelopt_to_gguf(weight[:, ::2].repeat_interleave(2, 1)[:, :32], scale[:, :4]),
        nvfp4.modelopt_to_gguf(weight[:, ::2].repeat_interleave(2, 1)[:, :32], scale[:, :4]),
    )
    wide = repack.dequantize(weight, scale)
    assert torch.equal(repack.dequantize(weight[:, :32], scale[:, :4]), wide[:, :64])
    assert torch.equal(blocks, before)
    assert repack.dequantize(weight[:0], scale[:0]).shape == (0, 192)


def test_parameters_take_the_native_body(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, scale = nvfp4.gguf_to_modelopt(random_blocks(2))
    want = nvfp4.dequantize(weight, scale)
    monkeypatch.delattr(nvfp4, "dequantize")
    held = [torch.nn.Parameter(part, requires_grad=False) for part in (weight, scale)]
    assert torch.equal(repack.dequantize(*held), want)


def test_dequantize_traces_to_the_pytorch_body() -> None:
    weight, scale = nvfp4.gguf_to_modelopt(random_blocks(2))
    compiled = torch.compile(repack.dequantize, fullgraph=True, backend="eager")
    assert torch.equal(compiled(weight, scale), repack.dequantize(weight, scale))


def test_raw_ops_refuse_buffers_that_do_not_fit() -> None:
    blocks = random_blocks(4)
    weight, scale = nvfp4.gguf_to_modelopt(blocks)
    ops = torch.ops.flint_native
    with pytest.raises(RuntimeError, match="weight: got 96 elements, want 128"):
        ops.gguf_to_modelopt_out(blocks, weight[:3], scale, 1)
    with pytest.raises(RuntimeError, match="weight_scale: got scalar type"):
        ops.modelopt_to_gguf_out(weight, scale.view(torch.uint8), blocks, 1)
    with pytest.raises(RuntimeError, match="weight: want a contiguous tensor"):
        ops.gguf_to_modelopt_out(blocks, torch.zeros(32, 4, dtype=torch.uint8).t(), scale, 1)
    with pytest.raises(RuntimeError, match="weight_scale_2: got 3 values, want a divisor"):
        ops.dequantize_out(weight, scale, torch.ones(3), torch.empty(4, 64), 1)


# ------------------------------------------------------------------------- when it is not there


def run_python(script: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )
    return done.stdout.strip()


def test_C9_import_does_not_load_the_library() -> None:
    script = """
import flint_kernels, torch
print(hasattr(torch.ops.flint_native, "dequantize_out"))
"""
    assert run_python(script) == "False"


def test_C9_the_environment_variable_forces_the_fallback() -> None:
    script = """
import torch
from flint_kernels.backends import native
from flint_kernels.formats import repack
weight, _ = repack.gguf_to_modelopt(torch.zeros(1, 36, dtype=torch.uint8))
print(native.is_available(), hasattr(torch.ops.flint_native, "dequantize_out"), weight.shape[1])
print(native.why_not())
"""
    assert run_python(script, FLINT_KERNELS_NO_NATIVE="1").splitlines() == [
        "False False 32",
        "The native library is switched off by FLINT_KERNELS_NO_NATIVE.",
    ]


def write_build(folder: Path, content: bytes | None = None, **info: object) -> Path:
    """A library file (a copy of the real one unless `content`) with this JSON beside it."""
    path = folder / native.LIBRARY_PATH.name
    path.write_bytes(native.LIBRARY_PATH.read_bytes() if content is None else content)
    path.with_suffix(".json").write_text(json.dumps({**native.build_info(), **info}))
    return path


def test_C10_a_library_for_another_torch_names_both_versions(tmp_path: Path) -> None:
    newer = write_build(tmp_path, torch_built_with="99.2.0", torch_minimum="99.1")
    reason = native.load(newer)
    assert reason is not None
    for part in ("99.2.0", "torch >= 99.1", f"this is torch {torch.__version__}", "reinstall"):
        assert part in reason

    damaged = write_build(
        tmp_path, b"no ELF file", torch_built_with="2.11.0", ops=["flint_native::any"]
    )
    reason = native.load(damaged)
    assert reason is not None
    for part in ("failed to load", "2.11.0", f"this is torch {torch.__version__}"):
        assert part in reason


def test_C10_a_library_with_a_symbol_that_torch_lacks(tmp_path: Path) -> None:
    source = tmp_path / "missing.cpp"
    source.write_text(
        'extern "C" void torch_function_of_the_future();\n'
        "void call() { torch_function_of_the_future(); }\n"
    )
    compiler = os.environ.get("CXX", "g++")
    built = tmp_path / "missing.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-Wl,-z,now", str(source), "-o", str(built)], check=True
    )
    path = write_build(tmp_path, built.read_bytes(), ops=["flint_native::of_the_future"])
    reason = native.load(path)
    assert reason is not None
    assert "torch_function_of_the_future" in reason
    assert f"this is torch {torch.__version__}" in reason


def test_C10_a_library_older_than_the_package(tmp_path: Path) -> None:
    source = tmp_path / "empty.cpp"
    source.write_text("")
    compiler = os.environ.get("CXX", "g++")
    built = tmp_path / "empty.so"
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(built)], check=True)
    path = write_build(tmp_path, built.read_bytes(), ops=["flint_native::of_a_newer_package"])
    reason = native.load(path)
    assert "lacks flint_native::of_a_newer_package" in str(reason)


def test_C10_a_library_without_an_op_that_the_package_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One built in place before the source changed says of itself that it is whole."""
    built = tmp_path / "empty.so"
    (tmp_path / "empty.cpp").write_text("")
    compiler = os.environ.get("CXX", "g++")
    subprocess.run(
        [compiler, "-shared", "-fPIC", str(tmp_path / "empty.cpp"), "-o", str(built)], check=True
    )
    monkeypatch.setattr(native_cpu, "NAMES", {"rms_norm", "of_a_newer_package"})
    path = write_build(tmp_path, built.read_bytes(), ops=[])
    assert "lacks flint_native::of_a_newer_package:" in str(native.load(path))


def test_missing_functions_show_at_load() -> None:
    """The library is linked with `-z now`; a lazy one would abort at the first call instead."""
    listed = subprocess.run(
        ["readelf", "-d", str(native.LIBRARY_PATH)], capture_output=True, text=True, check=True
    ).stdout
    assert re.search(r"\bBIND_NOW\b|FLAGS.*\bNOW\b", listed)


def test_a_second_copy_is_refused(tmp_path: Path) -> None:
    assert "another copy of it already is" in str(native.load(write_build(tmp_path)))


def test_why_not_when_nothing_was_built(tmp_path: Path) -> None:
    reason = native.load(tmp_path / "libflint_kernels.so")
    assert reason is not None
    assert "is not built: this installation never built it" in reason
    path = write_build(tmp_path, built=False, reason="no C++ compiler was found")
    path.unlink()
    assert "is not built: no C++ compiler was found." in str(native.load(path))
    path.with_suffix(".json").write_text("{ not json")
    assert native.build_info(path) == {}


def test_build_info() -> None:
    info = native.build_info()
    assert info["built"] is True
    assert info["torch_minimum"] == "2.11"
    assert "flint_native::gguf_to_modelopt_out" in info["ops"]
    assert native.is_available()
    registered = torch._C._dispatch_get_all_op_names()
    assert set(info["ops"]) == {name for name in registered if name.startswith("flint_native::")}
    with_kernels = [op for op in info["ops"] if op.endswith("_cuda_out")]
    assert bool(with_kernels) == bool(info["cuda_architectures"]) == bool(info["cuda_kernels"])
    assert (info["cuda_why_not"] is None) == bool(info["cuda_architectures"])


def test_the_library_uses_the_stable_abi_alone() -> None:
    """No Python, no C++ symbol of torch: C functions, and those of libstdc++ and libc."""
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", "-C", str(native.LIBRARY_PATH)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    names = [line.split(maxsplit=1)[1] for line in listed.splitlines()]
    torch_names = [name for name in names if "torch" in name]
    assert torch_names
    assert all(re.fullmatch(r"(aoti_)?torch_\w+", name) for name in torch_names)
    assert not [name for name in names if re.match(r"_?Py|c10::|at::", name)]


# ------------------------------------------------------------------------- the build


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the source tree, without its build outputs."""
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tree)
    for name in ("README.md", "LICENSE"):
        (tree / name).write_text("A stand-in.\n")
    shutil.copytree(ROOT / "csrc", tree / "csrc")
    package = tree / "flint_kernels"
    (package / "formats").mkdir(parents=True)
    for name in ("__init__.py", "py.typed", "formats/__init__.py"):
        (package / name).write_text("")
    return tree


def build(tree: Path, *command: str, **environment: str) -> str:
    """Without GPU kernels unless asked for: they take a minute, test_cuda_build.py has them."""
    environment = {"FLINT_KERNELS_CUDA_ARCHS": "none", **environment}
    done = subprocess.run(
        [sys.executable, "setup.py", *command],
        cwd=tree,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_wheel_holds_the_library_and_fits_every_python(tree: Path) -> None:
    output = build(tree, "bdist_wheel")
    assert "flint-kernels: built" in output
    (wheel,) = (tree / "dist").glob("*.whl")
    assert re.fullmatch(r"flint_kernels-[\d.]+-py3-none-linux_\w+\.whl", wheel.name)
    names = zipfile.ZipFile(wheel).namelist()
    assert "flint_kernels/lib/libflint_kernels.so" in names
    assert "flint_kernels/lib/libflint_kernels.json" in names
    assert "flint_kernels/py.typed" in names
    assert not [name for name in names if "device_helpers" in name]  # the tests' own module


def test_without_a_compiler_the_build_succeeds_and_says_so(tree: Path) -> None:
    stale = tree / "flint_kernels/lib/libflint_kernels.so"
    stale.parent.mkdir()
    stale.write_bytes(b"of an earlier build")
    output = build(tree, "build_ext", "--inplace", PATH="", CXX="no-such-compiler")
    assert "the native library is NOT built: no C++ compiler was found" in output
    assert "PyTorch does its work instead" in output
    assert not stale.exists()
    assert "is not built: no C++ compiler was found" in str(native.load(stale))
    build(tree, "bdist_wheel", PATH="", CXX="no-such-compiler")
    (wheel,) = (tree / "dist").glob("*.whl")
    assert "flint_kernels/lib/libflint_kernels.json" in zipfile.ZipFile(wheel).namelist()


@pytest.mark.parametrize(
    "environment, reason",
    [
        ({}, "it is switched off by FLINT_KERNELS_CUDA_ARCHS"),
        (
            {"FLINT_KERNELS_CUDA_ARCHS": "90a", "CUDA_HOME": "/no/such/toolkit"},
            "nvcc was not found in /no/such/toolkit/bin, which CUDA_HOME names",
        ),
        ({"FLINT_KERNELS_CUDA_ARCHS": "hopper"}, "FLINT_KERNELS_CUDA_ARCHS got 'hopper'"),
    ],
)
def test_C9_without_nvcc_the_library_has_no_gpu_kernels_and_says_why(
    tree: Path, environment: dict[str, str], reason: str
) -> None:
    for source in (tree / "csrc").rglob("*.cpp"):  # one source is enough here, and quick
        if source.name != "nvfp4_repack.cpp":
            source.unlink()
    output = build(tree, "build_ext", "--inplace", **environment)
    assert f"WITHOUT GPU kernels: {reason}" in output
    path = tree / "flint_kernels/lib/libflint_kernels.so"
    info = native.build_info(path)
    assert path.exists()
    assert info["cuda_architectures"] == info["cuda_kernels"] == []
    assert reason in info["cuda_why_not"]
    assert not [op for op in info["ops"] if "cuda" in op]


def test_code_that_does_not_compile_is_reported(tree: Path) -> None:
    (tree / "csrc/cpu/nvfp4_repack.cpp").write_text("this is no C++\n")
    output = build(tree, "build_ext", "--inplace")
    assert "the native library is NOT built" in output
    assert "failed (its messages are in the build's output)" in output


def test_a_source_distribution_is_complete(tree: Path) -> None:
    for name in ("python_tests", "docs", "microbench", ".ci"):
        (tree / name).mkdir()
        (tree / name / "run").write_text("")
    build(tree, "sdist", "--formats=zip")
    (archive,) = (tree / "dist").glob("*.zip")
    names = {name.split("/", 1)[1] for name in zipfile.ZipFile(archive).namelist()}
    sources = {str(path.relative_to(tree)) for path in (tree / "csrc").rglob("*.*")}
    assert sources <= names
    assert {"setup.py", "pyproject.toml", "docs/run", ".ci/run", "python_tests/run"} <= names
