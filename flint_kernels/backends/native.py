"""Finds and loads the C++ library, `flint_kernels/lib/libflint_kernels.so`.

`setup.py` builds it and writes a JSON file beside it: what was built and for which torch, or why
nothing was. The library is loaded on first use, never at import, and once a process; its raw ops
are in the private namespace `flint_native`. Everything that it does has a PyTorch body as well, so
a missing library is a matter of speed: :func:`why_not` tells the reason.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import threading
from functools import cache
from pathlib import Path
from typing import Any

import torch

from flint_kernels.backends import native_cpu

DISABLE_VARIABLE = "FLINT_KERNELS_NO_NATIVE"
"""Set to 1 before the first use, this environment variable keeps the library from loading."""

LIBRARY_PATH = Path(__file__).parents[1] / "lib" / "libflint_kernels.so"

_loading = threading.Lock()

_REBUILD = "reinstall the package with `pip install --no-build-isolation` against this torch"


def is_available() -> bool:
    """Whether the library is loaded; the first call loads it."""
    return why_not() is None


@cache
def why_not() -> str | None:
    """A sentence that says why the library is not in use, or None where it is."""
    if os.environ.get(DISABLE_VARIABLE, "0") not in ("", "0"):
        return f"The native library is switched off by {DISABLE_VARIABLE}."
    # Of threads that come here together the first one loads; to the others its library would look
    # like another copy.
    with _loading:
        return _load_once(LIBRARY_PATH)


@cache
def _load_once(path: Path) -> str | None:
    return load(path)


@cache
def cuda_why_not(capability: tuple[int, int], driver: tuple[int, int] | None = None) -> str | None:
    """Why the library's kernels do not run on a GPU of this compute capability, or None.

    A kernel is machine code for one architecture, and there is none to fall back on. `driver`: the
    CUDA version that the GPU's driver is for, where it is known; the library brings the runtime of
    the CUDA that it was built with, whichever CUDA torch has.
    """
    if (reason := why_not()) is not None:
        return reason
    info = build_info()
    built = info["cuda_architectures"]
    if not built:
        return (
            f"The native library has no GPU kernels: {info['cuda_why_not']}. To build them, "
            f"{_REBUILD}."
        )
    wanted = "sm_{}{}".format(*capability)
    if any(name.rstrip("af") == wanted for name in built):
        return _driver_why_not(info["cuda_compiler"], driver)
    return (
        f"The native library has no kernels for this GPU: it has code for {', '.join(built)}, and "
        f"the GPU needs {wanted}. To build it, set FLINT_KERNELS_CUDA_ARCHS and {_REBUILD}."
    )


def _driver_why_not(compiler: str, driver: tuple[int, int] | None) -> str | None:
    found = re.search(r"release (\d+)\.(\d+)", compiler)
    if driver is None or found is None or driver[0] >= int(found[1]):
        return None
    return (
        f"The native library's kernels do not run under this driver: they were built with CUDA "
        f"{found[1]}.{found[2]} and need a driver for CUDA {found[1]}, and this one is for CUDA "
        f"{driver[0]}.{driver[1]}. Update the driver; torch may stay as it is."
    )


@cache
def driver_cuda() -> tuple[int, int] | None:
    """The CUDA version that the NVIDIA driver is for, such as (13, 0); None without a driver."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else (version.value // 1000, version.value % 1000 // 10)


def build_info(path: Path = LIBRARY_PATH) -> dict[str, Any]:
    """What the build wrote beside the library; empty where there was no build.

    Keys: built, reason (where it was not), torch_built_with, torch_minimum, compiler,
    cpu_architecture, cuda_architectures, cuda_compiler, cuda_why_not (where it has no GPU kernels),
    ops, cuda_kernels (registers, spills and shared memory of each, as ptxas reports them).
    """
    try:
        info = json.loads(path.with_suffix(".json").read_text())
    except (OSError, ValueError):
        return {}
    return info if isinstance(info, dict) else {}


def load(path: Path) -> str | None:
    """Loads the library at ``path`` and checks its ops; returns the reason where it cannot."""
    info = build_info(path)
    if not path.is_file() or not info.get("built"):
        reason = info.get("reason", "this installation never built it")
        return f"The native library is not built: {reason}. To build it, {_REBUILD}."

    built_with, minimum = info["torch_built_with"], info["torch_minimum"]
    versions = (
        f"built with torch {built_with} for torch >= {minimum}, and this is torch "
        f"{torch.__version__}"
    )
    if torch.__version__ < minimum:  # TorchVersion compares by release, not by character
        return f"The native library does not fit: it was {versions}. Update torch, or {_REBUILD}."
    if any(_has(op) for op in info["ops"]):
        # Loading a second copy would define the ops twice, which ends the process.
        return (
            f"The native library at {path} is not loaded: another copy of it already is. Import "
            "one installation of the package in a process."
        )
    try:
        torch.ops.load_library(str(path))
    except (OSError, RuntimeError) as error:
        return (
            f"The native library failed to load: it was {versions}: "
            f"{error.__cause__ or error}. To mend it, "
            f"{_REBUILD}."
        )
    needed = {*info["ops"], *(f"flint_native::{name}" for name in native_cpu.NAMES)}
    missing = sorted(op for op in needed if not _has(op))
    if missing:
        return (
            f"The native library lacks {', '.join(missing)}: it was {versions}, or is older than "
            f"this package. To mend it, {_REBUILD}."
        )
    return None


def _has(op: str) -> bool:
    namespace, name = op.split("::")
    return hasattr(getattr(torch.ops, namespace), name)
