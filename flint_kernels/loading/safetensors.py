"""BF16 and ModelOpt NVFP4 safetensors, one file or sharded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flint_kernels.formats.nvfp4 import check_modelopt_scales
from flint_kernels.json_files import read_json
from flint_kernels.loading.check import Entry, Expected, Found, match
from flint_kernels.loading.names import Kind, checkpoint_tensors, hf_targets
from flint_kernels.loading.transfer import Transfer, check_global_scale
from flint_kernels.model.linear import check_nvfp4_width

if TYPE_CHECKING:
    from torch import Tensor

    from flint_kernels.model.config import FlintConfig

INDEX_NAME = "model.safetensors.index.json"

REMAP_BYTES = 64 << 20
"""How much of a file is mapped in before the mapping is renewed."""
# The kernel maps in what is around a page too, 64 KiB as a rule.
_READ_AHEAD_BYTES = 64 << 10

_TYPE_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "U8": 1, "F8_E4M3": 1}
_HINTS = {
    ".input_scale": "it belongs to FP4 activations, and this package computes W4A16 only",
    ".k_scale": "the KV cache is BF16",
    ".v_scale": "the KV cache is BF16",
    ".bias": "no op adds a bias",
    "_scale_inv": "FP8 checkpoints are not supported",
}
# A config that asks for so many tensors more than the files have belongs to another checkpoint
# (or to nobody): the list of what is missing would help no one and may be huge.
_MAX_MISSING = 100_000


class SafetensorsCheckpoint:
    """Safetensors files that fit a config; ModelOpt NVFP4 where block scales are among them.

    Args:
        files: the file, or all shards.
        source: the file or folder that errors name.
        config: the model's shape.

    Raises:
        ValueError: a file is damaged; a tensor is missing, unexpected, twice or of a wrong type or
            shape; a block scale is NaN or a global scale not finite and above 0. `read` finds
            values that are NaN or infinite.
        OSError: a file cannot be opened.
    """

    def __init__(self, files: Sequence[Path], source: Path, config: FlintConfig) -> None:
        self.source = source
        self._shards = {file: _Shard(file) for file in files}
        found = [tensor for shard in self._shards.values() for tensor in shard.found()]
        modelopt = any(tensor.name.endswith((".weight_scale", "_scale_2")) for tensor in found)
        self.weight_format = "nvfp4" if modelopt else "bf16"
        _refuse_hopeless(config, len(found), source)
        expected = modelopt_tensors(config) if modelopt else bf16_tensors(config)
        self._entries = match(expected, found, source, _HINTS)
        self.n_bytes = sum(entry.found.n_bytes for entry in self._entries)
        self._check_scales()

    def read(self, transfer: Transfer) -> Iterator[int]:
        for entry in self._entries:
            target, tensor = entry.expected.target, self._tensor(entry)
            if entry.expected.role == "weight_scale":
                transfer.block_scales(target, tensor)
            elif entry.expected.role == "weight_scale_2":
                transfer.global_scale(target, tensor)
            else:
                transfer.values(target, tensor, _where(entry))
            yield entry.found.n_bytes

    def close(self) -> None:
        self._shards.clear()

    def _check_scales(self) -> None:
        """Scales are a ninth of an NVFP4 file, and a bad one is known before a module is made."""
        for entry in self._entries:
            if entry.expected.role == "weight_scale":
                check_modelopt_scales(self._tensor(entry), _where(entry))
            elif entry.expected.role == "weight_scale_2":
                check_global_scale(self._tensor(entry), _where(entry))

    def _tensor(self, entry: Entry) -> Tensor:
        return self._shards[entry.found.file].tensor(entry.found.name)


def _where(entry: Entry) -> str:
    return f"{entry.found.file}: tensor {entry.found.name!r}"


class _Shard:
    """One open file; its errors name it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = self._open()

    def _open(self) -> Any:
        from safetensors import SafetensorError, safe_open

        self._resident = 0
        try:
            return safe_open(str(self._path), framework="pt", device="cpu")
        except SafetensorError as error:
            raise ValueError(
                f"{self._path}: got a damaged safetensors file ({error}); fetch it again"
            ) from error

    def found(self) -> Iterator[Found]:
        """What the header says, in the order of the data."""
        for name in self._file.offset_keys():
            part = self._file.get_slice(name)
            shape, kind = tuple(part.get_shape()), part.get_dtype()
            n_bytes = math.prod(shape) * _TYPE_BYTES.get(kind, 0)
            yield Found(name, kind, shape, n_bytes, self._path)

    def tensor(self, name: str) -> Tensor:
        """A view of the mapped file: nothing is read before it is used.

        Pages read through a mapping count as the process's memory, so now and then a new mapping
        takes the place of the old one, which ends when its last tensor does.
        """
        if self._resident > REMAP_BYTES:
            self._file = self._open()
        try:
            tensor: Tensor = self._file.get_tensor(name)
        except Exception as error:  # SafetensorError, where the file has been changed meanwhile
            raise ValueError(
                f"{self._path}: tensor {name!r}: cannot be read ({error}); fetch the file again"
            ) from error
        self._resident += tensor.nbytes + _READ_AHEAD_BYTES
        return tensor


def bf16_tensors(config: FlintConfig) -> dict[str, Expected]:
    """HF name -> what a BF16 checkpoint of this config has under it."""
    return {
        name: Expected(
            ("BF16",) if target.kind is Kind.LINEAR else ("BF16", "F32"), (target.shape,), target
        )
        for name, target in hf_targets(config).items()
    }


def modelopt_tensors(config: FlintConfig) -> dict[str, Expected]:
    """HF name -> what a ModelOpt NVFP4 checkpoint of this config has under it.

    Raises ValueError where a width of the config is no multiple of 16.
    """
    expected = {}
    for name, target in hf_targets(config).items():
        if target.kind is not Kind.LINEAR:
            expected[name] = Expected(("BF16", "F32"), (target.shape,), target)
            continue
        rows, columns = target.shape
        check_nvfp4_width(name, columns)
        expected[name] = Expected(("U8",), ((rows, columns // 2),), target)
        expected[f"{name}_scale"] = Expected(
            ("F8_E4M3",), ((rows, columns // 16),), target, "weight_scale"
        )
        expected[f"{name}_scale_2"] = Expected(("F32",), ((), (1,)), target, "weight_scale_2")
    return expected


def shard_files(folder: Path) -> list[Path]:
    """The files that `model.safetensors.index.json` of a folder names, in order.

    Raises:
        ValueError: the index is no JSON, has no `weight_map`, or names a file that is not
            directly in the folder.
        FileNotFoundError: a shard is not there.
    """
    index = folder / INDEX_NAME
    try:
        content = read_json(index)
    except ValueError as error:
        raise ValueError(
            f"{index}: got text that is no index ({error}); want JSON with a 'weight_map'; "
            "fetch it again"
        ) from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(
            f"{index}: got no 'weight_map', want an object of tensor names and file names"
        )
    files: dict[Path, None] = {}
    for name in weight_map.values():
        files[_shard_path(folder, index, name)] = None
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"{file}: got no such file, but {index} names it; fetch it")
    return list(files)


def _shard_path(folder: Path, index: Path, name: object) -> Path:
    # An index comes with the files and must not make us read others.
    plain = isinstance(name, str) and Path(name).name == name and "\\" not in name
    if not plain or not str(name).endswith(".safetensors"):
        raise ValueError(
            f"{index}: got the shard name {name!r}, want the plain name of a .safetensors file in "
            "the same folder; do not use this checkpoint"
        )
    return folder / str(name)


def _refuse_hopeless(config: FlintConfig, found: int, source: Path) -> None:
    wanted = 0
    for tensor in checkpoint_tensors(config):
        wanted += tensor.target.shape[0] if isinstance(tensor.target.expert, slice) else 1
    if wanted > found + _MAX_MISSING:
        raise ValueError(
            f"{source}: got {found} tensors, want at least {wanted} for this config; is "
            "config.json that of this checkpoint?"
        )
