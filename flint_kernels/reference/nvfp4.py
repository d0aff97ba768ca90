"""The format ops: `flint_kernels/ops/nvfp4.py` declares them, `flint_kernels/formats` has them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from flint_kernels.formats import nvfp4, repack


@contextmanager
def errors_of(op: str) -> Iterator[None]:
    """Errors of `flint_kernels.formats`, `argument: got ...`, in the form of the ops' own."""
    try:
        yield
    except ValueError as error:
        argument, _, rest = str(error).partition(": ")
        raise ValueError(f"flint::{op}: argument '{argument}': {rest}") from error


def nvfp4_quantize(
    x: torch.Tensor, global_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    with errors_of("nvfp4_quantize"):
        weight, scale, scale_2 = nvfp4.quantize(x, global_scale)
    # An op must not return one of its inputs.
    return weight, scale, scale_2.clone()


def nvfp4_dequantize(
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_scale_2: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    scale_2 = None if weight_scale_2 is None else weight_scale_2.reshape(())
    return repack.dequantize(weight, weight_scale, scale_2, dtype)


def gguf_to_modelopt(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with errors_of("gguf_to_modelopt"):
        return repack.gguf_to_modelopt(blocks)


def modelopt_to_gguf(weight: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
    with errors_of("modelopt_to_gguf"):
        return repack.modelopt_to_gguf(weight, weight_scale)
