"""The NVFP4 conversions by the fastest body there is: the C++ library, else PyTorch.

The C++ bodies take CPU tensors and use as many threads as torch does
(``torch.set_num_threads``). Signatures, results (bit for bit) and errors are those of
:mod:`flint_kernels.formats.nvfp4`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flint_kernels.backends import native
from flint_kernels.formats import nvfp4


def gguf_to_modelopt(
    blocks: Tensor, *, out: tuple[Tensor, Tensor] | None = None, name: str = "blocks"
) -> tuple[Tensor, Tensor]:
    """See :func:`flint_kernels.formats.nvfp4.gguf_to_modelopt`."""
    if not _native_takes(blocks):
        return nvfp4.gguf_to_modelopt(blocks, out=out, name=name)
    weight, scale = nvfp4.repack_outputs(blocks, out, name)
    bad = torch.ops.flint_native.gguf_to_modelopt_out(
        blocks.contiguous(), weight, scale, torch.get_num_threads()
    )
    if bad >= 0:
        raise nvfp4.bad_gguf_scale(bad, blocks, name)
    return weight, scale


def modelopt_to_gguf(
    weight: Tensor, weight_scale: Tensor, *, out: Tensor | None = None, name: str = "weight_scale"
) -> Tensor:
    """See :func:`flint_kernels.formats.nvfp4.modelopt_to_gguf`."""
    if not _native_takes(weight):
        return nvfp4.modelopt_to_gguf(weight, weight_scale, out=out, name=name)
    blocks = nvfp4.blocks_output(weight, weight_scale, out)
    bad = torch.ops.flint_native.modelopt_to_gguf_out(
        weight.contiguous(), weight_scale.contiguous(), blocks, torch.get_num_threads()
    )
    if bad >= 0:
        raise nvfp4.bad_modelopt_scale(bad, weight_scale, name)
    return blocks


def dequantize(
    weight: Tensor,
    weight_scale: Tensor,
    weight_scale_2: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """See :func:`flint_kernels.formats.nvfp4.dequantize`; the C++ body makes float32."""
    if dtype != torch.float32 or not _native_takes(weight):
        return nvfp4.dequantize(weight, weight_scale, weight_scale_2, dtype, out=out)
    result, scale_2 = nvfp4.dequantize_output(weight, weight_scale, weight_scale_2, dtype, out)
    torch.ops.flint_native.dequantize_out(
        weight.contiguous(), weight_scale.contiguous(), scale_2, result, torch.get_num_threads()
    )
    return result


def _native_takes(tensor: Tensor) -> bool:
    # Not a fake tensor, nor one being traced: the raw ops have no meaning for those.
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and native.is_available()
    )
