"""What is in the built library: machine code for each promised GPU, and kernels that do not spill.

No GPU is needed. Where the library was built without nvcc it says so, and has none of it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import struct
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from flint_kernels.backends import cuda, native

# sm_103a and sm_120a are built as well, and their spills are reported but do not fail.
NO_SPILLS_ON = ("sm_90a", "sm_100a")
PROMISED = ("sm_90a", "sm_100a", "sm_103a", "sm_120a")
SHARED_MEMORY_OF_A_CTA = 48 * 1024  # what any architecture gives without being asked

_FAT_BINARY_MAGIC = 0xBA55ED50
_ELF_KIND = 2


def fat_binary_entries(library: Path) -> list[tuple[int, int]]:
    """(kind, architecture number) of every entry in the library's fat binaries.

    nvcc puts them into the section .nv_fatbin, one for a source: a header (magic, version, header
    size as 16 bits, size of the rest), then entries, each with a header of its own that has the
    kind (1 PTX, 2 machine code), header and payload sizes, and the architecture at byte 28.
    """
    section = section_bytes(library, ".nv_fatbin")
    entries = []
    at = 0
    while (at := section.find(struct.pack("<I", _FAT_BINARY_MAGIC), at)) >= 0:
        _, _, header, size = struct.unpack_from("<IHHQ", section, at)
        at += header
        end = at + size
        while at < end:
            kind, _, entry_header, payload = struct.unpack_from("<HHIQ", section, at)
            (architecture,) = struct.unpack_from("<I", section, at + 28)
            entries.append((kind, architecture))
            at += entry_header + payload
    return entries


def section_bytes(library: Path, wanted: str) -> bytes:
    """A section of a 64-bit little-endian ELF file; empty where there is none of the name."""
    data = library.read_bytes()
    assert data[:6] == b"\x7fELF\x02\x01"
    (table,) = struct.unpack_from("<Q", data, 40)
    size, count, names = struct.unpack_from("<HHH", data, 58)
    # Each: name, type, flags, address, offset, size, ...
    headers = [struct.unpack_from("<IIQQQQ", data, table + i * size) for i in range(count)]
    names_at = headers[names][4]
    for name, _, _, _, offset, length in headers:
        start = names_at + name
        if data[start : data.index(b"\0", start)].decode() == wanted:
            return data[offset : offset + length]
    return b""


def built_architectures() -> list[str]:
    info = native.build_info()
    assert info["built"] is True
    if not info["cuda_architectures"]:
        assert info["cuda_why_not"]
        assert info["cuda_kernels"] == []
        assert fat_binary_entries(native.LIBRARY_PATH) == []
    return list(info["cuda_architectures"])


def number(architecture: str) -> int:
    return int(architecture.removeprefix("sm_").rstrip("af"))


def test_C11_the_library_has_code_for_every_promised_architecture() -> None:
    architectures = built_architectures()
    if not architectures:
        return
    assert set(PROMISED) <= set(architectures)
    found = Counter(fat_binary_entries(native.LIBRARY_PATH))
    sources = {kernel["source"] for kernel in native.build_info()["cuda_kernels"]}
    # Machine code alone, one piece a source and architecture: nothing is left to the driver.
    assert found == {(_ELF_KIND, number(name)): len(sources) for name in architectures}


def test_cuobjdump_sees_the_same() -> None:
    tool = cuobjdump()
    if not built_architectures() or tool is None:
        return
    listed = subprocess.run(
        [tool, "--list-elf", str(native.LIBRARY_PATH)], capture_output=True, text=True, check=True
    ).stdout
    names = [line.split(".")[-2] for line in listed.splitlines() if line.endswith(".cubin")]
    assert Counter((_ELF_KIND, number(name)) for name in names) == Counter(
        fat_binary_entries(native.LIBRARY_PATH)
    )


def cuobjdump() -> str | None:
    """On PATH, or in the Triton package, which brings it."""
    if found := shutil.which("cuobjdump"):
        return found
    spec = importlib.util.find_spec("triton")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0]) / "backends/nvidia/bin/cuobjdump"
    return str(path) if path.exists() else None


def kernels() -> list[dict[str, Any]]:
    return list(native.build_info()["cuda_kernels"])


def test_every_kernel_is_compiled_for_every_architecture() -> None:
    of_kernel: dict[str, set[str]] = {}
    for kernel in kernels():
        name = f"{kernel['source']}: {kernel['kernel']}"
        of_kernel.setdefault(name, set()).add(f"sm_{kernel['architecture']}")
    architectures = set(built_architectures())
    assert bool(of_kernel) == bool(architectures)
    assert {name: built for name, built in of_kernel.items() if built != architectures} == {}


def test_no_kernel_spills() -> None:
    spilling = {
        f"{kernel['kernel']} on sm_{kernel['architecture']}": kernel
        for kernel in kernels()
        if f"sm_{kernel['architecture']}" in NO_SPILLS_ON
        and (kernel["spill_store_bytes"] or kernel["spill_load_bytes"] or kernel["stack_bytes"])
    }
    assert spilling == {}


def test_registers_and_shared_memory_are_within_the_limits() -> None:
    for kernel in kernels():
        assert 0 < kernel["registers"] <= 255, kernel
        assert kernel["shared_bytes"] <= SHARED_MEMORY_OF_A_CTA, kernel


def test_the_runtime_is_the_librarys_own() -> None:
    """No CUDA library is needed to load it, and it exports no CUDA function to another one."""
    read = subprocess.run(
        ["readelf", "-d", str(native.LIBRARY_PATH)], capture_output=True, text=True, check=True
    ).stdout
    assert "torch_cuda" not in read and "cudart" not in read and "libcuda" not in read
    exported = subprocess.run(
        ["nm", "-D", "--defined-only", str(native.LIBRARY_PATH)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "cuda" not in exported.lower()


def test_this_gpu_or_why_not() -> None:
    """What a user is told where the library has no code for the GPU."""
    if not built_architectures():
        assert "has no GPU kernels" in str(native.cuda_why_not((9, 0)))
        return
    assert native.cuda_why_not((9, 0)) is None
    reason = str(native.cuda_why_not((8, 6)))
    assert "has no kernels for this GPU" in reason and "the GPU needs sm_86" in reason
    # Code with an "a" runs on that very architecture alone.
    assert "the GPU needs sm_121" in str(native.cuda_why_not((12, 1)))


def test_a_driver_that_is_too_old_for_the_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    built = {"cuda_architectures": ["sm_90a"], "cuda_compiler": "release 13.0, V13.0.88"}
    monkeypatch.setattr(native, "build_info", lambda: built)
    why_not = native.cuda_why_not.__wrapped__
    for driver in (None, (13, 0), (14, 1)):
        assert why_not((9, 0), driver) is None
    reason = str(why_not((9, 0), (12, 8)))
    assert "need a driver for CUDA 13, and this one is for CUDA 12.8. Update the driver" in reason
    assert "has no kernels for this GPU" in str(why_not((8, 6), (12, 8)))


def test_the_driver_s_version_is_read_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert native.driver_cuda.__wrapped__() is None or torch.cuda.is_available()
    source = tmp_path / "driver.cpp"
    source.write_text('extern "C" int cuDriverGetVersion(int* v) { *v = 12080; return 0; }')
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["g++", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    real = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda name: real(str(tmp_path / name)))
    assert native.driver_cuda.__wrapped__() == (12, 8)


def test_a_torch_for_other_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "for NVIDIA GPUs, and this torch is for others" in str(cuda._why_not.__wrapped__(0))
