"""A `Flint` in the other weight format. Both ways change the weights.

From one NVFP4 file format to the other nothing needs converting: a model is the same whichever of
the two it was loaded from, and `flint_kernels.loading.export` writes either.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from flint_kernels import ops
from flint_kernels.loading.progress import progress_bar
from flint_kernels.model.flint import Flint
from flint_kernels.model.linear import BF16Linear, NVFP4Linear
from flint_kernels.model.mlp import BF16Experts, NVFP4Experts


@torch.no_grad()
def to_nvfp4(model: Flint, *, progress: bool | None = None) -> Flint:
    """A BF16 model rounded to NVFP4: each part of a linear, and each expert, by itself.

    Nothing is trained or calibrated. A part's global scale is its largest value / (6 * 448), a
    block's scale its largest value / 6 over that, each weight the nearest of the block's 15.

    Raises:
        ValueError: the model is not BF16, or a width is no multiple of 16.
    """
    return _convert(model, "bf16", "nvfp4", progress)


@torch.no_grad()
def to_bf16(model: Flint, *, progress: bool | None = None) -> Flint:
    """An NVFP4 model in BF16: e2m1 * e4m3 * global scale, rounded once.

    Raises:
        ValueError: the model is not NVFP4.
    """
    return _convert(model, "nvfp4", "bf16", progress)


def _convert(model: Flint, source: str, target: str, progress: bool | None) -> Flint:
    if model.weight_format != source:
        raise ValueError(
            f"model: got weight format {model.weight_format!r}, want {source!r}; it is in the "
            "other one already"
        )
    result = Flint(model.config, target, model.device, model.max_positions)
    n_bytes = sum(parameter.nbytes for parameter in model.parameters())
    with progress_bar(f"to {target}", n_bytes, progress) as advance:
        for name, module in result.named_modules():
            held = model.get_submodule(name)
            _convert_module(held, module)
            advance(sum(parameter.nbytes for parameter in held.parameters(recurse=False)))
    return result


def _convert_module(source: nn.Module, target: nn.Module) -> None:
    """The module's own parameters; those of modules in it are theirs."""
    if isinstance(target, NVFP4Linear) and isinstance(source, BF16Linear):
        _quantize_parts(source.weight, target.shards, *target.operands())
    elif isinstance(target, BF16Linear) and isinstance(source, NVFP4Linear):
        target.weight.copy_(_dequantized(source.operands(), target.shards))
    elif isinstance(target, NVFP4Experts) and isinstance(source, BF16Experts):
        for weight, packed, parts in _experts(source, target):
            _quantize_parts(weight, parts, *packed)
    elif isinstance(target, BF16Experts) and isinstance(source, NVFP4Experts):
        for weight, packed, parts in _experts(target, source):
            weight.copy_(_dequantized(packed, parts))
    else:
        for name, parameter in target.named_parameters(recurse=False):
            parameter.copy_(source.get_parameter(name))


Packed = tuple[Tensor, Tensor, Tensor]


def _experts(bf16: BF16Experts, nvfp4: NVFP4Experts) -> Iterator[tuple[Tensor, Packed, list[int]]]:
    """Each expert's gate and up, then its down: BF16, NVFP4, and the rows of each part."""
    inner = bf16.w2.shape[2]
    for name, parts in (("w13", [inner, inner]), ("w2", [bf16.w2.shape[1]])):
        packed = (getattr(nvfp4, name + end) for end in ("", "_scale", "_scale_2"))
        for weight, *tensors in zip(getattr(bf16, name), *packed, strict=True):
            yield weight, tuple(tensors), parts


def _quantize_parts(
    weight: Tensor, parts: list[int], codes: Tensor, scale: Tensor, scale_2: Tensor
) -> None:
    """Rows of `parts`, one under the other, with a global scale each."""
    rows = zip(
        weight.split(parts),
        codes.split(parts),
        scale.split(parts),
        scale_2.reshape(-1).split(1),
        strict=True,
    )
    for values, into_codes, into_scale, into_scale_2 in rows:
        new_codes, new_scale, new_scale_2 = ops.nvfp4_quantize(values)
        into_codes.copy_(new_codes)
        into_scale.view(torch.uint8).copy_(new_scale.view(torch.uint8))
        into_scale_2.copy_(new_scale_2)


def _dequantized(held: Packed, parts: list[int]) -> Tensor:
    codes, scale, scale_2 = held
    rows = zip(codes.split(parts), scale.split(parts), scale_2.reshape(-1).split(1), strict=True)
    return torch.cat([ops.nvfp4_dequantize(*part, dtype=torch.bfloat16) for part in rows])
