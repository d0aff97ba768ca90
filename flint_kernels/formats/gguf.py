"""A strict, lazy reader of GGUF files (versions 2 and 3, little-endian).

A file is memory-mapped and its header is checked in full before anything else happens: a
truncated, hostile or byte-swapped file gives a ValueError that names the section, key or tensor,
and nothing is ever allocated in proportion to a number that the file claims before that number
has been held against the file's real size. A tensor's bytes are read when they are used.

Layout: magic, version, counts | key-value pairs | tensor infos | padding | tensor data. Source:
the GGUF specification in the ggml repository (docs/gguf.md).
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn

import torch

# Far above any real file (a 200,000-token vocabulary is some 10 MiB and 10^6 values), and low
# enough that a hostile header cannot take more than a moment's memory.
MAX_HEADER_BYTES = 1 << 28
MAX_METADATA_VALUES = 1 << 22
MAX_ARRAY_DEPTH = 4
MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)

# id: (name, values of a block, bytes of a block). All types of ggml, so that an error can call
# the one it met by its name.
GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}

_TORCH_TYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}

# Metadata value types: id -> struct code of the scalar.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_UINT32, _BOOL, _STRING, _ARRAY = 4, 7, 8, 9

# Smallest encodings: an empty string is its length; a pair is a key, a type and one byte; a
# tensor info is a name, a dimension count, a type and an offset.
_MIN_STRING, _MIN_ARRAY, _MIN_PAIR, _MIN_INFO = 8, 12, 13, 24


@dataclass(frozen=True)
class GGUFTensor:
    """What the header says of one tensor; checked against the file's size."""

    name: str
    type_id: int
    type_name: str
    shape: tuple[int, ...]
    """In torch's order, slowest dimension first (GGUF writes the opposite one)."""
    n_bytes: int
    offset: int
    """Of the first byte, from the start of the file."""


class GGUFFile:
    """An open GGUF file: ``metadata`` (key -> value), ``tensors`` (name -> GGUFTensor).

    Raises ValueError for everything wrong in the file, OSError where it cannot be opened. A
    context manager; tensors taken from it stay valid after :meth:`close`, for each of them holds
    the mapping. The file must not be changed or cut short while any of them lives.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._map: mmap.mmap | None
        with open(self.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < len(_MAGIC) + 4 + 16:
                raise ValueError(
                    f"{self.path}: the header is cut short: got {size} bytes, want at least 24; "
                    "fetch the file again"
                )
            self._map = _map_private(file.fileno(), size)
        header = _Header(self.path, self._map, size)
        self.version: int = header.version
        self.metadata: dict[str, Any] = header.metadata
        self.tensors: dict[str, GGUFTensor] = header.tensors

    def raw(self, name: str) -> torch.Tensor:
        """The bytes of a tensor: uint8 [*shape[:-1], bytes of a row], a view of the mapping.

        So an NVFP4 tensor [N, K] is [N, K/64 * 36], and an F32 one viewed as float32 is [N, K].
        Nothing is read before it is used. Writing to the view changes this process's copy of
        the page, never the file.
        """
        info = self._info(name)
        row = info.n_bytes // math.prod(info.shape[:-1])
        flat = torch.frombuffer(
            self._mapping(), dtype=torch.uint8, count=info.n_bytes, offset=info.offset
        )
        return flat.view(*info.shape[:-1], row)

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor of a plain type (F32, F16, BF16, F64, I8 to I64) as a view of the mapping."""
        info = self._info(name)
        dtype = _TORCH_TYPES.get(info.type_name)
        if dtype is None:
            raise ValueError(
                f"{self.path}: tensor {name!r}: got type {info.type_name}, want one of "
                f"{', '.join(_TORCH_TYPES)}; take its blocks with raw()"
            )
        return self.raw(name).view(dtype).view(info.shape)

    def release(self, name: str) -> None:
        """Tells the kernel that the bytes of this tensor are done with for now.

        Pages read through a mapping count as the process's memory until something else needs
        them; a loader that releases each tensor holds one at a time. Views stay valid (they read
        the file again), but what was written to them is lost.
        """
        info = self._info(name)
        start = info.offset // mmap.PAGESIZE * mmap.PAGESIZE
        if hasattr(mmap, "MADV_DONTNEED"):
            end = info.offset + info.n_bytes
            self._mapping().madvise(mmap.MADV_DONTNEED, start, end - start)

    def close(self) -> None:
        """Lets go of the mapping; the last tensor that views it unmaps it."""
        # Never mmap.close(): torch keeps a reference to the object but no lock on its memory.
        self._map = None

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"GGUFFile({self.path!r}, version {self.version}, {len(self.metadata)} keys, "
            f"{len(self.tensors)} tensors)"
        )

    def _info(self, name: str) -> GGUFTensor:
        info = self.tensors.get(name)
        if info is None:
            raise ValueError(
                f"{self.path}: tensor {name!r}: got none of that name, want one of the file's "
                f"{len(self.tensors)}; see the `tensors` of this object"
            )
        return info

    def _mapping(self) -> mmap.mmap:
        if self._map is None:
            raise ValueError(f"{self.path}: the file is closed; open it again to read from it")
        return self._map


def _map_private(descriptor: int, size: int) -> mmap.mmap:
    """A copy-on-write mapping: torch takes it for writable and so has nothing to warn about.

    It works for a file without write permission. MAP_NORESERVE keeps the kernel from counting
    the whole file against memory that a copy of every page would need.
    """
    if os.name == "nt":  # pragma: no cover
        return mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000 if os.uname().sysname == "Linux" else 0)
    return mmap.mmap(
        descriptor,
        size,
        flags=mmap.MAP_PRIVATE | no_reserve,
        prot=mmap.PROT_READ | mmap.PROT_WRITE,
    )


class _Header:
    """Parses and checks everything in front of the tensor data."""

    def __init__(self, path: str, data: mmap.mmap, size: int) -> None:
        self._path = path
        self._data = data
        self._size = size
        self._limit = min(size, MAX_HEADER_BYTES)
        self._at = 0
        self._where = "the header"
        self._values_left = MAX_METADATA_VALUES

        self.version = self._read_version()
        tensors, pairs = self._scalar("Q"), self._scalar("Q")
        self._bound(tensors, _MIN_INFO, "tensors")
        self._bound(pairs, _MIN_PAIR, "metadata keys")
        self.metadata = self._read_metadata(pairs)
        self.tensors = self._read_tensors(tensors, self._alignment())

    # ---- reading, each step bounded by the file

    def _fail(self, message: str) -> NoReturn:
        raise ValueError(f"{self._path}: {self._where}: {message}")

    def _need(self, count: int) -> int:
        """Moves past ``count`` bytes that must be there; returns where they start."""
        start = self._at
        if count > self._limit - start:
            if self._limit < self._size:
                self._fail(
                    f"the header runs past {MAX_HEADER_BYTES} bytes; want less: this is no model "
                    "file that the reader knows"
                )
            self._fail(
                f"cut short: got {self._size - start} bytes at offset {start}, want {count}; "
                "fetch the file again"
            )
        self._at = start + count
        return start

    def _scalar(self, code: str) -> Any:
        return struct.unpack_from("<" + code, self._data, self._need(struct.calcsize(code)))[0]

    def _bound(self, count: int, unit: int, what: str) -> None:
        room = (self._limit - self._at) // unit
        if count > room:
            self._fail(
                f"got {count} {what}, want at most the {room} for which the file has room; "
                "it is cut short or damaged: fetch it again"
            )

    def _string(self) -> str:
        length = self._scalar("Q")
        start = self._need(length)
        try:
            return self._data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            self._fail(f"got a string that is not UTF-8 at offset {start} ({error.reason})")

    # ---- sections

    def _read_version(self) -> int:
        magic = self._data[: len(_MAGIC)]
        self._need(len(_MAGIC))
        if magic not in (_MAGIC, _MAGIC[::-1]):
            self._fail(f"got magic {magic!r}, want {_MAGIC!r}: this is no GGUF file")
        version: int = self._scalar("I")
        # A big-endian writer keeps the magic's byte order or swaps it too; the version tells.
        if magic != _MAGIC or version & 0xFFFF == 0:
            self._fail(
                "got a byte-swapped (big-endian) file, want a little-endian one; convert it with "
                "the gguf package: gguf-convert-endian FILE little"
            )
        if version not in _VERSIONS:
            self._fail(f"got GGUF version {version}, want 2 or 3; convert the model again")
        return version

    def _read_metadata(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for index in range(count):
            self._where = f"metadata key {index} of {count}"
            key = self._string()
            self._where = f"metadata key {key!r}"
            if key in metadata:
                self._fail("got it twice, want each key once")
            metadata[key] = self._value(self._scalar("I"), depth=0)
        return metadata

    def _value(self, kind: int, depth: int) -> Any:
        self._spend(1)
        if kind == _STRING:
            return self._string()
        if kind == _BOOL:
            return self._bool(self._scalar("B"))
        if kind == _ARRAY:
            return self._array(depth + 1)
        code = _SCALARS.get(kind)
        if code is None:
            self._fail(f"got value type {kind}, want 0 to 12; the file is damaged")
        return self._scalar(code)

    def _array(self, depth: int) -> list[Any]:
        if depth > MAX_ARRAY_DEPTH:
            self._fail(f"got arrays nested deeper than {MAX_ARRAY_DEPTH}; want fewer levels")
        kind, count = self._scalar("I"), self._scalar("Q")
        if kind in _SCALARS or kind == _BOOL:
            code = _SCALARS.get(kind, "B")
            width = struct.calcsize(code)
            self._bound(count, width, "array elements")
            self._spend(count)
            start = self._need(count * width)
            values = list(struct.unpack_from(f"<{count}{code}", self._data, start))
            return [self._bool(value) for value in values] if kind == _BOOL else values
        if kind not in (_STRING, _ARRAY):
            self._fail(f"got element type {kind}, want 0 to 12; the file is damaged")
        self._bound(count, _MIN_STRING if kind == _STRING else _MIN_ARRAY, "array elements")
        self._spend(count)
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        return [self._array(depth + 1) for _ in range(count)]

    def _bool(self, byte: int) -> bool:
        if byte > 1:
            self._fail(f"got {byte} for a bool, want 0 or 1; the file is damaged")
        return byte == 1

    def _spend(self, count: int) -> None:
        self._values_left -= count
        if self._values_left < 0:
            self._fail(f"got more than {MAX_METADATA_VALUES} metadata values in the file so far")

    def _alignment(self) -> int:
        value = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        self._where = "metadata key 'general.alignment'"
        if type(value) is not int or value < 8 or value & (value - 1):
            self._fail(f"got {value!r}, want a power of two, at least 8")
        return value

    def _read_tensors(self, count: int, alignment: int) -> dict[str, GGUFTensor]:
        infos: dict[str, GGUFTensor] = {}
        for index in range(count):
            self._where = f"tensor info {index} of {count}"
            name = self._string()
            self._where = f"tensor {name!r}"
            if name in infos:
                self._fail("got it twice, want each name once")
            infos[name] = self._tensor_info(name, alignment)

        # Offsets count from the aligned end of the infos.
        base = -(-self._at // alignment) * alignment
        end = base
        tensors = {}
        for info in sorted(infos.values(), key=lambda info: info.offset):
            self._where = f"tensor {info.name!r} ({info.type_name} {list(info.shape)})"
            start = base + info.offset
            if start < end:
                self._fail(
                    f"its data begins at byte {start}, inside the tensor before it, which ends at "
                    f"{end}; want tensors side by side: the file is damaged"
                )
            end = start + info.n_bytes
            if end > self._size:
                self._fail(
                    f"cut short: got a file of {self._size} bytes, want {end} (its data begins at "
                    f"{start}); fetch the file again"
                )
            tensors[info.name] = GGUFTensor(
                info.name, info.type_id, info.type_name, info.shape, info.n_bytes, start
            )
        return {name: tensors[name] for name in infos}

    def _tensor_info(self, name: str, alignment: int) -> GGUFTensor:
        """One tensor info; its offset still counts from the start of the data section."""
        if not name:
            self._fail("got an empty name, want a name; the file is damaged")
        n_dims = self._scalar("I")
        if n_dims > MAX_DIMS:
            self._fail(f"got {n_dims} dimensions, want at most {MAX_DIMS}; the file is damaged")
        shape = tuple(self._scalar("Q") for _ in range(n_dims))[::-1]
        type_id, offset = self._scalar("I"), self._scalar("Q")
        if type_id not in GGML_TYPES:
            self._fail(
                f"got type {type_id}, want one of ggml's known types ({_type_names()}); the file "
                "is damaged, or newer than this reader"
            )
        type_name, block_values, block_bytes = GGML_TYPES[type_id]
        self._where = f"tensor {name!r} ({type_name} {list(shape)})"
        if 0 in shape:
            self._fail("got a dimension of 0, want 1 or more; the file is damaged")
        last = shape[-1] if shape else 1
        if last % block_values:
            self._fail(
                f"got {last} values a row, want a multiple of {block_values}, the block of "
                f"{type_name}"
            )
        n_bytes = math.prod(shape) // block_values * block_bytes
        if n_bytes > self._size:
            self._fail(
                f"got {n_bytes} bytes of data, want at most the file's {self._size}; it is cut "
                "short or damaged: fetch it again"
            )
        if offset % alignment:
            self._fail(f"got offset {offset}, want a multiple of the alignment, {alignment}")
        return GGUFTensor(name, type_id, type_name, shape, n_bytes, offset)


def _type_names() -> str:
    return ", ".join(name for name, _, _ in GGML_TYPES.values())
