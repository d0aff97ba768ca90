"""Writes a `Flint` as a checkpoint: ModelOpt NVFP4 or BF16 safetensors, or NVFP4 GGUF.

What `load` reads back is equal to the bit (a GGUF scale of -0 alone becomes +0).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flint_kernels.formats.repack import modelopt_to_gguf
from flint_kernels.loading.names import Kind, Target, checkpoint_tensors, hf_targets
from flint_kernels.loading.progress import progress_bar
from flint_kernels.loading.safetensors import INDEX_NAME
from flint_kernels.model.config import FlintConfig
from flint_kernels.model.flint import Flint

if TYPE_CHECKING:
    import numpy as np

MAX_SHARD_BYTES = 4 << 30
GGUF_ARCHITECTURE = "flint"

PathLike = str | os.PathLike[str]


def save_modelopt(
    model: Flint,
    folder: PathLike,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: bool | None = None,
) -> None:
    """ModelOpt NVFP4 safetensors and config.json into `folder`, which is made if need be.

    One file, or shards with an index where there is more than `max_shard_bytes`; a shard is in
    host memory while it is written. `progress`: whether to show a bar on stderr; None: where that
    is a terminal.

    Raises:
        ValueError: `model` is not NVFP4.
    """
    _want_format(model, "nvfp4")
    _save_safetensors(model, Path(folder), max_shard_bytes, progress)


def save_bf16(
    model: Flint,
    folder: PathLike,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: bool | None = None,
) -> None:
    """BF16 safetensors and config.json into `folder`; as `save_modelopt`, for a BF16 model."""
    _want_format(model, "bf16")
    _save_safetensors(model, Path(folder), max_shard_bytes, progress)


def save_gguf(model: Flint, path: PathLike, *, progress: bool | None = None) -> None:
    """An NVFP4 GGUF file, and its config.json in the same folder; one tensor at a time.

    Norms, router and embedding are written as BF16, sinks as F32. `progress` as in `save_modelopt`.

    Raises:
        ImportError: the `gguf` package is not installed.
        ValueError: `model` is not NVFP4, a width is no multiple of 64, or a block scale has a sign
            or is NaN, which GGUF cannot hold.
    """
    _want_format(model, "nvfp4")
    try:
        import gguf
    except ImportError as error:
        raise ImportError(
            "save_gguf: got no package 'gguf', want version 0.19 or later; "
            "install it with: pip install 'gguf>=0.19'"
        ) from error

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Under another name until it is whole: a broken-off write must not pass for a checkpoint.
    partial = path.with_name(path.name + ".partial")
    writer = gguf.GGUFWriter(partial, GGUF_ARCHITECTURE)
    try:
        for name, target in _gguf_tensors(model.config):
            shape, kind = _gguf_form(target, name.endswith(".scale"))
            element = _numpy_type(kind)
            n_bytes = math.prod(shape) * element.itemsize
            writer.add_tensor_info(
                name, shape, element, n_bytes, raw_dtype=gguf.GGMLQuantizationType[kind]
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        parameters = _parameters(model)
        n_bytes = sum(parameter.nbytes for parameter in parameters.values())
        with progress_bar(path.name, n_bytes, progress) as advance:
            for name, target in _gguf_tensors(model.config):
                data = _gguf_data(target, name, parameters)
                writer.write_tensor_data(data)
                advance(data.nbytes)
    except BaseException:
        writer.close()
        partial.unlink(missing_ok=True)
        raise
    writer.close()
    partial.replace(path)
    write_config(model.config, path.parent)


def write_config(config: FlintConfig, folder: Path) -> None:
    """config.json, as `FlintConfig.from_json_file` reads it."""
    text = json.dumps(config.to_dict(), indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def _want_format(model: Flint, weight_format: str) -> None:
    if model.weight_format != weight_format:
        raise ValueError(
            f"model: got weight format {model.weight_format!r}, want {weight_format!r}; a saver "
            "writes what there is and converts nothing"
        )


def _parameters(model: Flint) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


# --------------------------------------------------------------------------- safetensors


def _save_safetensors(
    model: Flint, folder: Path, max_shard_bytes: int, progress: bool | None
) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    shards = _shards(model, max_shard_bytes)
    weight_map: dict[str, str] = {}
    parameters = _parameters(model)
    n_bytes = sum(parameter.nbytes for parameter in parameters.values())
    with progress_bar(folder.name, n_bytes, progress) as advance:
        for number, names in enumerate(shards, start=1):
            file = f"model-{number:05}-of-{len(shards):05}.safetensors"
            if len(shards) == 1:
                file = "model.safetensors"
            tensors = {
                name: view.cpu().contiguous()
                for name, view in _hf_views(model, parameters)
                if name in names
            }
            save_file(tensors, str(folder / file), metadata={"format": "pt"})
            weight_map |= dict.fromkeys(tensors, file)
            advance(sum(tensor.nbytes for tensor in tensors.values()))
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(p.nbytes for p in model.parameters())},
            "weight_map": weight_map,
        }
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    write_config(model.config, folder)


def _hf_views(model: Flint, parameters: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """HF name and view of every tensor that a file of the model's format has."""
    for name, target in hf_targets(model.config).items():
        for path, view in target.views(parameters, model.weight_format).items():
            yield name + path.removeprefix(target.path), view


def _shards(model: Flint, max_shard_bytes: int) -> list[set[str]]:
    """The names that go into each file, in the order of the forward pass."""
    shards: list[set[str]] = [set()]
    filled = 0
    for name, view in _hf_views(model, _parameters(model)):
        if shards[-1] and filled + view.nbytes > max_shard_bytes:
            shards.append(set())
            filled = 0
        shards[-1].add(name)
        filled += view.nbytes
    return shards


# --------------------------------------------------------------------------- GGUF


def _gguf_tensors(config: FlintConfig) -> Iterator[tuple[str, Target]]:
    """GGUF name and target of every tensor, each linear followed by its `.scale`."""
    for tensor in checkpoint_tensors(config):
        yield tensor.gguf, tensor.target
        if tensor.target.kind is Kind.LINEAR:
            yield tensor.gguf.removesuffix("weight") + "scale", tensor.target


def _gguf_form(target: Target, is_scale: bool) -> tuple[tuple[int, ...], str]:
    """Shape in values for F32, in bytes for packed types (as the gguf package wants it)."""
    if is_scale:
        return (target.shape[:1] if target.expert is not None else (1,)), "F32"
    *lead, columns = target.shape
    if target.kind is Kind.LINEAR:
        if columns % 64:
            raise ValueError(
                f"model: got {columns} input features in {target.path}, want a multiple of 64, "
                "the block of GGUF's NVFP4; save it with save_modelopt"
            )
        return (*lead, columns // 64 * 36), "NVFP4"
    if target.kind is Kind.BF16:
        return (*lead, columns * 2), "BF16"
    return target.shape, "F32"


def _gguf_data(target: Target, name: str, parameters: dict[str, Tensor]) -> np.ndarray[Any, Any]:
    if name.endswith(".scale"):
        return target.weight_scale_2(parameters).cpu().reshape(-1).numpy()
    weight = target.weight(parameters).cpu().contiguous()
    if target.kind is Kind.LINEAR:
        scale = target.weight_scale(parameters).cpu().contiguous()
        return modelopt_to_gguf(weight, scale, name=name).numpy()
    if target.kind is Kind.BF16:
        return weight.view(torch.uint8).numpy()
    return weight.numpy()


def _numpy_type(kind: str) -> np.dtype[Any]:
    import numpy as np

    return np.dtype(np.float32 if kind == "F32" else np.uint8)
