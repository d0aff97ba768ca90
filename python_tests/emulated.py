"""Compiles a kernel's own sources for `emulation/simt.h`, which runs its threads on the CPU."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import subprocess
from pathlib import Path

from torch import Tensor

ROOT = Path(__file__).parents[1]
EMULATION = ROOT / "python_tests" / "emulation"
SOURCES = [*EMULATION.rglob("*.*"), *(ROOT / "csrc").glob("*.h"), *(ROOT / "csrc/cuda").iterdir()]
FLAGS = (
    "-std=c++20",
    "-O2",
    "-fPIC",
    "-shared",
    "-pthread",
    "-Wno-unknown-pragmas",
    "-Wno-psabi",
    "-fno-gnu-unique",
)


def compiled(name: str) -> ctypes.CDLL:
    """`emulation/NAME.cc` as a shared library, compiled anew where a source is newer."""
    work = ROOT / "build" / "emulation"
    work.mkdir(parents=True, exist_ok=True)
    path = work / f"{name}.so"
    with (work / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        newest = max(source.stat().st_mtime for source in SOURCES)
        if not path.exists() or path.stat().st_mtime < newest:
            compiler = os.environ.get("CXX") or shutil.which("g++") or "g++"
            includes = [f"-I{EMULATION}", f"-I{ROOT / 'csrc'}"]
            made = path.with_suffix(".new")
            command = [compiler, *FLAGS, *includes, str(EMULATION / f"{name}.cc"), "-o", made]
            subprocess.run(command, check=True)
            made.rename(path)
    return ctypes.CDLL(str(path))


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())
