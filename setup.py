"""Builds the native library, `flint_kernels/lib/libflint_kernels.so`, beside the Python package.

The library uses torch's stable ABI alone: no Python ABI, one file for every torch from
TORCH_MINIMUM on. So the wheel's tag is py3-none-<platform>. Where nothing can be built the
installation still succeeds, and the PyTorch bodies of the same functions are used; a small JSON
file beside the library says what was built, or why nothing was.

    pip install --no-build-isolation -e .     for development
    python setup.py build_ext --inplace       to rebuild the library after a change in csrc/

Everything else about the package is in pyproject.toml.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import setuptools
from setuptools import Extension, setup
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
LIBRARY = Path("flint_kernels/lib/libflint_kernels.so")
INFO = LIBRARY.with_suffix(".json")

TORCH_MINIMUM = (2, 11)
# The oldest x86-64 with SSSE3's byte shuffles; every x86 server since about 2011 has it.
X86_LEVEL = "x86-64-v2"


class BuildError(Exception):
    """The reason, a sentence without a full stop."""


@dataclass(frozen=True)
class Toolchain:
    compiler: str
    compiler_version: str
    ninja: str
    torch_dir: Path
    torch_version: str

    @staticmethod
    def find() -> Toolchain:
        compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
        if compiler is None or shutil.which(compiler) is None:
            raise BuildError("no C++ compiler was found; install g++ 11 or newer, or set CXX")
        ninja = shutil.which("ninja")
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
        version = subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, check=True
        ).stdout.splitlines()[0]
        torch_dir = Path(spec.submodule_search_locations[0])
        return Toolchain(compiler, version, ninja, torch_dir, torch_version)


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
    ]


def link_flags(tools: Toolchain) -> list[str]:
    # libtorch_cpu is the only torch library named: a CPU-only torch has it, and so has every
    # other. No run path: it is already loaded when the library is. `-z now`: a function that a
    # torch lacks is an error at load, with a message, and not an abort at the first call.
    return [
        "-shared -pthread -Wl,--no-undefined -Wl,--as-needed -Wl,-z,now",
        f"-L{tools.torch_dir / 'lib'} -ltorch_cpu",
    ]


def ninja_file(tools: Toolchain, library: Path) -> str:
    """Sources to objects, objects to the library.

    A source language is a rule and a loop: CUDA's .cu files become objects of a second rule,
    `nvcc`, and join the same link.
    """
    lines = [
        "ninja_required_version = 1.3",
        "rule cxx",
        f"  command = {tools.compiler} -MMD -MF $out.d {' '.join(cpu_flags(tools))} -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = C++ $in",
        "rule link",
        f"  command = {tools.compiler} $in -o $out {' '.join(link_flags(tools))}",
        "  description = link $out",
    ]
    objects = []
    for source in sources("*.cpp"):
        objects.append(f"{source}.o")
        lines.append(f"build {objects[-1]}: cxx {_escape(ROOT / source)}")
    lines.append(f"build {_escape(library)}: link {' '.join(objects)}")
    return "\n".join(lines) + "\n"


def _escape(path: Path) -> str:
    return re.sub(r"([$: ])", r"$\1", str(path))


def sources(pattern: str) -> list[str]:
    found = sorted((ROOT / SOURCE_DIR).rglob(pattern))
    return [str(path.relative_to(ROOT)) for path in found]


def registered_ops() -> list[str]:
    """The ops that the bindings register, as `namespace::name`."""
    names = []
    for source in sources("torch/*.cpp"):
        text = (ROOT / source).read_text()
        for namespace, body in re.findall(
            r"LIBRARY_IMPL\((\w+),[^{]*\{(.*?)^\}", text, re.S | re.M
        ):
            names += [f"{namespace}::{name}" for name in re.findall(r'm\.impl\("(\w+)"', body)]
    return sorted(set(names))


def build_library(library: Path, work: Path) -> dict[str, Any]:
    """Builds `library`; returns what the JSON file is to say. Raises BuildError."""
    tools = Toolchain.find()
    work.mkdir(parents=True, exist_ok=True)
    library.parent.mkdir(parents=True, exist_ok=True)
    (work / "build.ninja").write_text(ninja_file(tools, library.resolve()))
    print(f"flint-kernels: building {library} with {tools.compiler_version}", flush=True)
    done = subprocess.run([tools.ninja, "-C", str(work)], check=False)
    if done.returncode:
        raise BuildError(f"{tools.compiler} failed (its messages are in the build's output)")
    return {
        "built": True,
        "torch_built_with": tools.torch_version,
        "torch_minimum": _dotted(TORCH_MINIMUM),
        "compiler": tools.compiler_version,
        "cpu_architecture": X86_LEVEL if platform.machine() == "x86_64" else platform.machine(),
        "cuda_architectures": [],
        "ops": registered_ops(),
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


class Wheel(bdist_wheel):  # type: ignore[misc]
    """A wheel for one platform and every Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


class SourceDistribution(sdist):  # type: ignore[misc]
    """A complete one: the tests, documents and tools of the tree with the package."""

    EXTRA = (
        ".ci/*", ".clang-format", "CONTRIBUTING.md", "Makefile", "requirements*.txt",
        "csrc/**/*", "docs/**/*", "microbench/**/*", "python_tests/**/*",
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
    ext_modules=[Extension("flint_kernels.lib.libflint_kernels", sources=sources("*.cpp"))],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": Wheel, "sdist": SourceDistribution},
)
