"""The format ops: `flint_kernels/ops/nvfp4.py` declares them, `flint_kernels/formats` has them."""

from __future__ import annotations

import torch

from flint_kernels.formats import nvfp4, repack


def nvfp4_quantize(
    x: torch.Tensor, global_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
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
    return repack.gguf_to_modelopt(blocks)


def modelopt_to_gguf(weight: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
    return repack.modelopt_to_gguf(weight, weight_scale)
