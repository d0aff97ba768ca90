"""NVFP4 GGUF: checked by its header, then repacked from the mapped file into the module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flint_kernels.formats.gguf import GGUFFile
from flint_kernels.loading.check import Entry, Expected, Found, match
from flint_kernels.loading.names import Kind, gguf_targets
from flint_kernels.loading.transfer import Transfer, check_global_scale

if TYPE_CHECKING:
    from flint_kernels.model.config import FlintConfig

_FP4_ACTIVATIONS_KEY = "general.tensor_extra.prec_a4"
_HINTS = {
    ".input_scale": "it belongs to FP4 activations, and this package computes W4A16 only",
    ".bias": "no op adds a bias",
}


class GGUFCheckpoint:
    """One NVFP4 GGUF file that fits a config.

    Raises:
        ValueError: the file is damaged; a tensor is missing (its `.scale` too), unexpected, twice
            or of a wrong type or shape; a global scale is not finite and above 0; FP4 activations
            are asked for. `read` finds the rest: a block scale of 0xFF, values that are NaN or
            infinite.
        OSError: the file cannot be opened.
    """

    weight_format = "nvfp4"

    def __init__(self, path: Path, config: FlintConfig) -> None:
        self.source = path
        self._file = GGUFFile(path)
        try:
            _refuse_fp4_activations(self._file.metadata, path)
            self._entries = _match(self._file, path, config)
            self._check_global_scales()
        except BaseException:
            self.close()
            raise
        self.n_bytes = sum(entry.found.n_bytes for entry in self._entries)

    def read(self, transfer: Transfer) -> Iterator[int]:
        for entry in self._entries:
            name, target = entry.found.name, entry.expected.target
            if entry.expected.role == "weight_scale_2":
                transfer.global_scale(target, self._file.tensor(name))
            elif target.kind is Kind.LINEAR:
                transfer.gguf_blocks(target, self._file.raw(name), self._where(name))
            else:
                transfer.values(target, self._file.tensor(name), self._where(name))
            self._file.release(name)
            yield entry.found.n_bytes

    def close(self) -> None:
        self._file.close()

    def _check_global_scales(self) -> None:
        for entry in self._entries:
            if entry.expected.role == "weight_scale_2":
                name = entry.found.name
                check_global_scale(self._file.tensor(name), self._where(name))

    def _where(self, name: str) -> str:
        return f"{self.source}: tensor {name!r}"


def expected_tensors(config: FlintConfig) -> dict[str, Expected]:
    """GGUF name -> what an NVFP4 file of this config has under it."""
    expected = {}
    for name, target in gguf_targets(config).items():
        if target.kind is not Kind.LINEAR:
            expected[name] = Expected(("F32", "BF16"), (target.shape,), target)
            continue
        expected[name] = Expected(("NVFP4",), (target.shape,), target)
        # One value, which GGUF may write with or without a dimension, or one for each expert.
        shapes = (target.shape[:1],) if target.expert is not None else ((1,), ())
        companion = name.removesuffix("weight") + "scale"
        expected[companion] = Expected(("F32",), shapes, target, "weight_scale_2")
    return expected


def _match(file: GGUFFile, path: Path, config: FlintConfig) -> list[Entry]:
    by_offset = sorted(file.tensors.values(), key=lambda tensor: tensor.offset)
    found = (
        Found(tensor.name, tensor.type_name, tensor.shape, tensor.n_bytes, path)
        for tensor in by_offset
    )
    return match(expected_tensors(config), found, path, _HINTS)


def _refuse_fp4_activations(metadata: dict[str, Any], path: Path) -> None:
    marks = metadata.get(_FP4_ACTIVATIONS_KEY)
    entries = marks if isinstance(marks, list) else [marks]
    if any(entries):
        raise ValueError(
            f"{path}: metadata key {_FP4_ACTIVATIONS_KEY!r}: got {sum(map(bool, entries))} of "
            f"{len(entries)} entries set, want none: it marks tensors made for FP4 activations, "
            "and this package computes W4A16 only; use the W4A16 file of the model"
        )
