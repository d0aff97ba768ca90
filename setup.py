"""Builds the native library, `flint_kernels/lib/libflint_kernels.so`, beside the Python package.

The library uses torch's stable ABI alone: no Python ABI, one file for every torch from
TORCH_MINIMUM on. So the wheel's tag is py3-none-<platform>. Where nothing can be built the
installation still succeeds, and the PyTorch bodies of the same functions are used; a small JSON
file beside the library says what was built, or why nothing was.

With nvcc (in CUDA_HOME, or on PATH) the library also has the GPU kernels, as machine code for each
architecture of CUDA_ARCHITECTURES; FLINT_KERNELS_CUDA_ARCHS names others ("90a 100a"), or none
("none"). The CUDA runtime is linked in and torch's CUDA library is not, so the same file loads
where there is no GPU, no driver and no CUDA build of torch.

    pip install --no-build-isolation -e .     for development
    python setup.py build_ext --inplace       to rebuild the library after a change in csrc/
    python setup.py build_test_module         csrc/ as a Python module, for the tests alone

Everything else about the package is in pyproject.toml.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import setuptools
from setuptools import Command, Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

# Without build isolation it is the environment's setuptools, which may be years old.
SETUPTOOLS_MINIMUM = 77
if int(setuptools.__version__.split(".")[0]) < SETUPTOOLS_MINIMUM:
    raise SystemExit(
        f"flint-kernels: got setuptools {setuptools.__version__}, want {SETUPTOOLS_MINIMUM} or "
        'newer: pip install --upgrade "setuptools>=77" ninja'
    )
from setuptools.command.bdist_wheel import bdist_wheel  # noqa: E402  (newer setuptools only)

ROOT = Path(__file__).parent.resolve()
SOURCE_DIR = Path("csrc")
TEST_MODULE = SOURCE_DIR / "test_module" / "device_helpers.cpp"  # not in the library
LIBRARY = Path("flint_kernels/lib/libflint_kernels.so")
INFO = LIBRARY.with_suffix(".json")

TORCH_MINIMUM = (2, 11)
# "a": with the instructions that only this architecture has (wgmma, tcgen05), and for it alone.
CUDA_ARCHITECTURES = ("90a", "100a", "103a", "120a")
CUDA_ARCHITECTURES_VARIABLE = "FLINT_KERNELS_CUDA_ARCHS"
# The oldest x86-64 with SSSE3's byte shuffles; every x86 server since about 2011 has it.
X86_LEVEL = "x86-64-v2"


class BuildError(Exception):
    """The reason, a sentence without a full stop."""


@dataclass(frozen=True)
class Cuda:
    """nvcc, its toolkit, and what to compile for."""

    nvcc: str
    version: str
    include: Path
    runtime: Path  # libcudart_static.a
    architectures: tuple[str, ...]

    @staticmethod
    def find() -> Cuda:
        """Raises BuildError where there is no nvcc, or it is switched off."""
        wanted = os.environ.get(CUDA_ARCHITECTURES_VARIABLE, " ".join(CUDA_ARCHITECTURES))
        names = [name.removeprefix("sm_") for name in re.split(r"[\s,;]+", wanted) if name]
        if not names or names == ["none"]:
            raise BuildError(f"it is switched off by {CUDA_ARCHITECTURES_VARIABLE}")
        for name in names:
            if not re.fullmatch(r"\d{2,3}[af]?", name):
                raise BuildError(
                    f"{CUDA_ARCHITECTURES_VARIABLE} got {name!r}, want names like 90a, apart by "
                    "spaces"
                )
        home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
        nvcc = shutil.which("nvcc", path=f"{home}/bin") if home else shutil.which("nvcc")
        if nvcc is None:
            where = f"in {home}/bin, which CUDA_HOME names" if home else "on PATH"
            raise BuildError(f"nvcc was not found {where}; install CUDA 13, or set CUDA_HOME")
        known = _output(nvcc, "--list-gpu-code").split()
        unknown = [name for name in names if f"sm_{name.rstrip('af')}" not in known]
        if unknown:
            print(f"flint-kernels: this nvcc does not know sm_{', sm_'.join(unknown)}", flush=True)
        names = [name for name in names if name not in unknown]
        if not names:
            raise BuildError("nvcc knows none of the wanted architectures; install CUDA 13")
        # nvcc may be a script that calls another one, so it is asked where its toolkit is.
        dry_run = subprocess.run(
            [nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True, check=False
        ).stderr
        found = re.search(r"^#\$ TOP=(.*)$", dry_run, re.M)
        top = Path(found.group(1).strip() if found else Path(nvcc).parents[1]).resolve()
        targets = [*top.glob(f"targets/{platform.machine()}-linux"), top]
        for root in targets:
            for runtime in (root / "lib", root / "lib64"):
                header = root / "include" / "cuda_runtime.h"
                if (runtime / "libcudart_static.a").exists() and header.exists():
                    version = _output(nvcc, "--version").splitlines()[-2]
                    library = runtime / "libcudart_static.a"
                    return Cuda(nvcc, version, header.parent, library, tuple(names))
        raise BuildError(f"the toolkit in {top} lacks cuda_runtime.h or libcudart_static.a")


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@dataclass(frozen=True)
class Toolchain:
    compiler: str
    compiler_version: str
    ninja: str
    torch_dir: Path
    torch_version: str
    cuda: Cuda | None
    no_cuda_reason: str | None

    @staticmethod
    def find() -> Toolchain:
        compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
        if compiler is None or shutil.which(compiler) is None:
            raise BuildError("no C++ compiler was found; install g++ 11 or newer, or set CXX")
        # A virtual environment that is not activated is not on PATH.
        ninja = shutil.which("ninja") or shutil.which("ninja", path=sysconfig.get_path("scripts"))
        if ninja is None:
            raise BuildError("ninja was not found; pip install ninja")
        spec = importlib.util.find_spec("torch")
        if spec is None or not spec.submodule_search_locations:
            raise BuildError(
                "torch was not found in the build environment; install torch first, then this "
                "package with --no-build-isolation"
            )
        torch_version = importlib.metadata.version("torch")
        if _release(torch_version) < TORCH_MINIMUM:
            raise BuildError(f"torch {torch_version} is older than {_dotted(TORCH_MINIMUM)}")
        version = _output(compiler, "--version").splitlines()[0]
        torch_dir = Path(spec.submodule_search_locations[0])
        cuda, no_cuda_reason = None, None
        try:
            cuda = Cuda.find()
        except BuildError as reason:
            no_cuda_reason = str(reason)
        return Toolchain(compiler, version, ninja, torch_dir, torch_version, cuda, no_cuda_reason)


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


# --------------------------------------------------------------------------- the build


def cpu_flags(tools: Toolchain) -> list[str]:
    flags = ["-std=c++20", "-O3", "-g1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
    if platform.machine() in ("x86_64", "AMD64"):
        flags.append(f"-march={X86_LEVEL}")
    target = (TORCH_MINIMUM[0] << 56) | (TORCH_MINIMUM[1] << 48)
    return [
        *flags,
        f"-ffile-prefix-map={ROOT}=.",  # the binary does not depend on where it was built
        f"-DTORCH_TARGET_VERSION={target:#018x}",
        f"-I{ROOT / SOURCE_DIR}",
        f"-isystem {tools.torch_dir / 'include'}",
        *([f"-isystem {tools.cuda.include}"] if tools.cuda else []),
        os.environ.get("CXXFLAGS", ""),  # `make sanitize` instruments the library so
    ]


def cuda_flags(tools: Toolchain, cuda: Cuda) -> list[str]:
    host = "-fPIC,-fvisibility=hidden,-Wall,-Wextra," + f"-ffile-prefix-map={ROOT}=."
    return [
        "-std=c++20 -O3",
        f"-ccbin {tools.compiler} -Xcompiler={host}",
        "--expt-relaxed-constexpr",  # std::bit_cast, in the headers that host and device share
        "-Xptxas=-v",  # registers and spills, kept beside the object
        "--threads 2",
        *(f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in cuda.architectures),
        f"-I{ROOT / SOURCE_DIR}",
    ]


def link_flags(tools: Toolchain) -> list[str]:
    # libtorch_cpu is the only torch library named: a CPU-only torch has it, and so has every
    # other. No run path: it is already loaded when the library is. `-z now`: a function that a
    # torch lacks is an error at load, with a message, and not an abort at the first call.
    flags = [
        "-shared -pthread -Wl,--no-undefined -Wl,--as-needed -Wl,-z,now",
        f"-L{tools.torch_dir / 'lib'} -ltorch_cpu",
        os.environ.get("LDFLAGS", ""),
    ]
    if tools.cuda:
        # A runtime of its own, hidden: exported, its functions and those of the runtime that torch
        # loads would take each other's calls.
        flags.append(f"{tools.cuda.runtime} -Wl,--exclude-libs,libcudart_static.a -ldl -lrt")
    return flags


def ninja_file(tools: Toolchain, library: Path) -> str:
    """Sources to objects, objects to the library; a source language is a rule and a loop."""
    lines = [
        "ninja_required_version = 1.3",
        "rule cxx",
        f"  command = {tools.compiler} -MMD -MF $out.d {' '.join(cpu_flags(tools))} -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = C++ $in",
        *(cuda_rule(tools, tools.cuda) if tools.cuda else []),
        "rule link",
        f"  command = {tools.compiler} $in -o $out {' '.join(link_flags(tools))}",
        "  description = link $out",
    ]
    objects = []
    for source in cpp_sources(with_cuda=tools.cuda is not None):
        objects.append(f"{source}.o")
        lines.append(f"build {objects[-1]}: cxx {_escape(ROOT / source)}")
    for source in sources("*.cu") if tools.cuda else []:
        objects.append(f"{source}.o")
        lines.append(f"build {objects[-1]}: nvcc {_escape(ROOT / source)}")
    lines.append(f"build {_escape(library)}: link {' '.join(objects)}")
    return "\n".join(lines) + "\n"


def cuda_rule(tools: Toolchain, cuda: Cuda) -> list[str]:
    # ptxas writes of registers and spills where errors go; the messages go to a file first.
    command = f"{cuda.nvcc} -MMD -MF $out.d {' '.join(cuda_flags(tools, cuda))} -c $in -o $out"
    return [
        "rule nvcc",
        f"  command = {command} > $out.{PTXAS} 2>&1 || (cat $out.{PTXAS}; exit 1)",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = CUDA $in",
    ]


def _escape(path: Path) -> str:
    return re.sub(r"([$: ])", r"$\1", str(path))


def sources(pattern: str) -> list[str]:
    found = (path.relative_to(ROOT) for path in sorted((ROOT / SOURCE_DIR).rglob(pattern)))
    return [str(path) for path in found if path != TEST_MODULE]


def cpp_sources(*, with_cuda: bool) -> list[str]:
    """The .cpp files; bindings of GPU kernels, csrc/torch/cuda_*.cpp, need the CUDA headers."""
    found = sources("*.cpp")
    return [s for s in found if with_cuda or not Path(s).name.startswith("cuda_")]


def kernel_resources(work: Path) -> list[dict[str, Any]]:
    """What ptxas says of each kernel and architecture: registers, spills, stack, shared memory."""
    kernels = []
    for source in sources("*.cu"):
        text = (work / f"{source}.o.{PTXAS}").read_text()
        for name, arch, body in re.findall(
            r"Compiling entry function '(\w+)' for 'sm_(\w+)'(.*?)(?=Compiling entry|\Z)",
            text,
            re.S,
        ):
            used = {
                key: int(found.group(1)) if (found := re.search(pattern, body)) else 0
                for key, pattern in _RESOURCES.items()
            }
            kernels.append({"kernel": name, "source": source, "architecture": arch, **used})
    demangler = shutil.which("c++filt")
    if demangler is not None and kernels:
        names = "\n".join(kernel["kernel"] for kernel in kernels)
        plain = subprocess.run(
            [demangler], input=names, capture_output=True, text=True, check=True
        ).stdout.splitlines()
        for kernel, name in zip(kernels, plain, strict=True):
            kernel["kernel"] = re.sub(
                r"^void |flint::cuda::|\(anonymous namespace\)::|\(.*", "", name
            )
    return kernels


PTXAS = "ptxas"  # the suffix of the files that hold its messages
_RESOURCES = {
    "registers": r"Used (\d+) registers",
    "spill_store_bytes": r"(\d+) bytes spill stores",
    "spill_load_bytes": r"(\d+) bytes spill loads",
    "stack_bytes": r"(\d+) bytes stack frame",
    "shared_bytes": r"(\d+) bytes smem",
}


def registered_ops(*, with_cuda: bool) -> list[str]:
    """The ops that the bindings register, as `namespace::name`."""
    names = []
    for source in cpp_sources(with_cuda=with_cuda):
        text = (ROOT / source).read_text()
        for namespace, body in re.findall(r"LIBRARY_IMPL\((\w+),[^{]*\{(.*?)\}", text, re.S):
            names += [f"{namespace}::{name}" for name in re.findall(r'm\.impl\("(\w+)"', body)]
    return sorted(set(names))


def build_library(library: Path, work: Path) -> dict[str, Any]:
    """Builds `library`; returns what the JSON file is to say. Raises BuildError."""
    tools = Toolchain.find()
    work.mkdir(parents=True, exist_ok=True)
    library.parent.mkdir(parents=True, exist_ok=True)
    (work / "build.ninja").write_text(ninja_file(tools, library.resolve()))
    print(f"flint-kernels: building {library} with {tools.compiler_version}", flush=True)
    cuda = tools.cuda
    if cuda:
        print(
            f"flint-kernels: GPU kernels for sm_{', sm_'.join(cuda.architectures)} with nvcc, "
            f"{cuda.version}",
            flush=True,
        )
    else:
        print(f"flint-kernels: WITHOUT GPU kernels: {tools.no_cuda_reason}", flush=True)
    done = subprocess.run([tools.ninja, "-C", str(work)], check=False)
    if done.returncode:
        failed = f"{tools.compiler} or {cuda.nvcc}" if cuda else tools.compiler
        raise BuildError(f"{failed} failed (its messages are in the build's output)")
    return {
        "built": True,
        "torch_built_with": tools.torch_version,
        "torch_minimum": _dotted(TORCH_MINIMUM),
        "compiler": tools.compiler_version,
        "cpu_architecture": X86_LEVEL if platform.machine() == "x86_64" else platform.machine(),
        "cuda_architectures": [f"sm_{arch}" for arch in cuda.architectures] if cuda else [],
        "cuda_compiler": cuda.version if cuda else None,
        "cuda_why_not": tools.no_cuda_reason,
        "ops": registered_ops(with_cuda=cuda is not None),
        "cuda_kernels": kernel_resources(work) if cuda else [],
    }


class BuildLibrary(build_ext):  # type: ignore[misc]
    """build_ext with the one library in place of a Python extension module."""

    def run(self) -> None:
        library, info = self._outputs()
        work = Path(self.build_temp).resolve() / "native"
        try:
            facts = build_library(library, work)
            print(f"flint-kernels: built {library}: {', '.join(facts['ops'])}", flush=True)
        except BuildError as reason:
            # A library left from an earlier build would no longer match its sources.
            library.unlink(missing_ok=True)
            facts = {"built": False, "reason": str(reason)}
            print(
                f"flint-kernels: the native library is NOT built: {reason}.\n"
                "flint-kernels: PyTorch does its work instead: the same results, more slowly.",
                flush=True,
            )
        info.parent.mkdir(parents=True, exist_ok=True)
        info.write_text(json.dumps(facts, indent=2) + "\n")

    def get_outputs(self) -> list[str]:
        return [str(path) for path in self._outputs() if path.exists()]

    def get_output_mapping(self) -> dict[str, str]:
        return {}

    def _outputs(self) -> tuple[Path, Path]:
        base = ROOT if self.inplace or self.editable_mode else Path(self.build_lib)
        return base / LIBRARY, base / INFO


class BuildTestModule(Command):  # type: ignore[misc]
    """Compiles csrc/test_module as the library's sources are, into a folder. In no wheel.

    Prints the module's path as its last line. Nothing is compiled where nothing has changed; calls
    at the same time wait for each other.
    """

    description = "build the Python module of csrc/ helpers that the tests use"
    user_options = [("directory=", None, "where to build (default: build/test_module)")]  # noqa: RUF012

    def initialize_options(self) -> None:
        self.directory = str(ROOT / "build" / "test_module")

    def finalize_options(self) -> None:
        pass

    def run(self) -> None:
        try:
            tools = Toolchain.find()
            if importlib.util.find_spec("pybind11") is None:
                raise BuildError('pybind11 was not found; pip install "flint-kernels[test]"')
        except BuildError as reason:
            raise SystemExit(f"flint-kernels: the test module is NOT built: {reason}.") from None
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        work = Path(self.directory).resolve() / suffix.split(".")[1]  # one a Python
        work.mkdir(parents=True, exist_ok=True)
        module = work / f"flint_device_helpers{suffix}"
        with (work / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (work / "build.ninja").write_text(test_module_ninja_file(tools, module))
            if subprocess.run([tools.ninja, "-C", str(work)], check=False).returncode:
                raise SystemExit(
                    f"flint-kernels: the test module is NOT built: {tools.compiler} "
                    "failed (its messages are above)."
                )
        print(module, flush=True)


def test_module_ninja_file(tools: Toolchain, module: Path) -> str:
    import pybind11

    includes = (pybind11.get_include(), sysconfig.get_path("include"))
    # -O1 is quicker to compile; the arithmetic is the same.
    flags = [*cpu_flags(tools), "-O1 -g0", *(f"-isystem {include}" for include in includes)]
    lines = [
        "ninja_required_version = 1.3",
        "rule module",
        f"  command = {tools.compiler} -shared -MMD -MF $out.d {' '.join(flags)} $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = test module $out",
        f"build {_escape(module)}: module {_escape(ROOT / TEST_MODULE)}",
    ]
    return "\n".join(lines) + "\n"


class Wheel(bdist_wheel):  # type: ignore[misc]
    """A wheel for one platform and every Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


class SourceDistribution(sdist):  # type: ignore[misc]
    """A complete one: the tests, documents and tools of the tree with the package."""

    EXTRA = (
        ".ci/*", ".clang-format", "CONTRIBUTING.md", "Makefile", "requirements*.txt",
        "csrc/**/*", "docs/**/*", "fuzz/**/*", "microbench/**/*", "python_tests/**/*",
    )  # fmt: skip

    def make_distribution(self) -> None:
        for pattern in self.EXTRA:
            files = (path for path in ROOT.glob(pattern) if path.is_file())
            kept = (path for path in files if "__pycache__" not in path.parts)
            self.filelist.extend(str(path.relative_to(ROOT)) for path in kept)
        self.filelist.remove_duplicates()
        super().make_distribution()


setup(
    # Its sources are the build's own business (BuildLibrary), its name that of the library.
    ext_modules=[
        Extension("flint_kernels.lib.libflint_kernels", sources=sources("*.cpp") + sources("*.cu"))
    ],
    cmdclass={
        "build_ext": BuildLibrary,
        "build_test_module": BuildTestModule,
        "bdist_wheel": Wheel,
        "sdist": SourceDistribution,
    },
)
