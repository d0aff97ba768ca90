"""`load`: a checkpoint of any format to a `Flint` on any device.

Three steps, in this order whatever the format: check every tensor of the files against the config;
make the module, which is when device memory is taken; fill it tensor by tensor.
"""

from __future__ import annotations

from contextlib import closing

import torch

from flint_kernels.loading.checkpoint import Checkpoint
from flint_kernels.loading.gguf import GGUFCheckpoint
from flint_kernels.loading.progress import progress_bar
from flint_kernels.loading.safetensors import SafetensorsCheckpoint
from flint_kernels.loading.source import Files, Source, find, read_config
from flint_kernels.loading.transfer import SLICE_BYTES, Transfer
from flint_kernels.memory import needing, room_for, size
from flint_kernels.model.config import FlintConfig
from flint_kernels.model.flint import Flint


def load(
    source: Source,
    *,
    device: torch.device | str = "cpu",
    config: FlintConfig | None = None,
    max_positions: int | None = None,
    progress: bool | None = None,
) -> Flint:
    """Loads a checkpoint: NVFP4 GGUF, BF16 safetensors or ModelOpt NVFP4 safetensors.

    Host memory beside the module is bounded: the file is mapped, not read, and on its way to an
    accelerator passes through one buffer of 64 MiB (or one expert, where that is larger).

    Args:
        source: "flint-tiny" or "flint-tiny-bf16" (they come with the package), a .gguf or
            .safetensors file, or a folder with one .gguf file or with safetensors.
        device: where the module's tensors are to be.
        config: the model's shape; None: the config.json beside the weights.
        max_positions: the longest request to be served, see `Flint`; None: the config's.
        progress: whether to show a bar on stderr; None: where stderr is a terminal.

    Raises:
        FileNotFoundError, OSError: a file is not there or cannot be read.
        ValueError: the files do not fit the config or are damaged, naming tensor, type and
            expectation, ten tensors at most. All of it is found before device memory is taken,
            but for what shows when a tensor is read: a block scale of 0xFF in a GGUF file, and
            values that are NaN or infinite (a sink may be -inf).
        MemoryError: the model does not fit on the device; the message says what it needs. Nothing
            of it is kept.
    """
    files = find(source)
    config = read_config(files) if config is None else config
    with closing(open_checkpoint(files, config)) as checkpoint:
        model = allocate(config, checkpoint.weight_format, device, max_positions)
        _fill(model, checkpoint, progress)
    return model


def load_into(model: Flint, source: Source, *, progress: bool | None = None) -> None:
    """Fills a model that was made for this checkpoint: its config and its weight format.

    Args and errors as in `load`; and ValueError where the checkpoint has the other weight format.
    """
    with closing(open_checkpoint(find(source), model.config)) as checkpoint:
        if checkpoint.weight_format != model.weight_format:
            raise ValueError(
                f"source: got {source}, which has {checkpoint.weight_format} weights; want "
                f"{model.weight_format}, the model's"
            )
        _fill(model, checkpoint, progress)


def open_checkpoint(files: Files, config: FlintConfig) -> Checkpoint:
    """The files, checked against the config; no weight is read yet."""
    if files.is_gguf:
        return GGUFCheckpoint(files.weights[0], config)
    return SafetensorsCheckpoint(files.weights, files.path, config)


def allocate(
    config: FlintConfig,
    weight_format: str,
    device: torch.device | str,
    max_positions: int | None,
) -> Flint:
    """The one place of the loaders that takes device memory."""
    shape = Flint(config, weight_format, "meta", max_positions)
    needed = sum(t.nbytes for t in (*shape.parameters(), *shape.buffers()))
    with room_for(needed, "model", device):
        return Flint(config, weight_format, device, max_positions)


def _fill(model: Flint, checkpoint: Checkpoint, progress: bool | None) -> None:
    transfer = Transfer(model)
    need = f"{checkpoint.source}: {size(SLICE_BYTES)} of host memory are needed beside the module"
    bar = progress_bar(checkpoint.source.name, checkpoint.n_bytes, progress)
    with needing(need), bar as advance:
        for n_bytes in checkpoint.read(transfer):
            advance(n_bytes)
