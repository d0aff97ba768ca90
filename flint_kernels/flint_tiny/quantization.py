"""Straight-through NVFP4: the grid of `formats.nvfp4.quantize`, with gradients.

The forward value is, to the bit, what quantising and dequantising a weight gives; the backward
pass takes rounding for the identity. Scales are recomputed from the weights each time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flint_kernels.flint_tiny.model import Parameters
from flint_kernels.formats.nvfp4 import BLOCK_VALUES, E2M1_MAX, E4M3_MAX


def is_quantized(name: str) -> bool:
    """Whether the parameter `name` is NVFP4 in the quantised checkpoint: linears and the head."""
    return name == "lm_head.weight" or name.endswith("_proj.weight")


def fake_quantize(weights: list[Tensor]) -> list[Tensor]:
    """Round fp32 `weights`, [N, K] or [E, N, K] each (K a multiple of 16), to their NVFP4 grids.

    Each matrix has a global scale of its own. All weights go through one pass over their
    concatenated blocks, because hundreds of small kernels would take longer than the training
    step itself.
    """
    amax = [w.abs().amax((-2, -1)).reshape(-1) for w in weights]
    # Blocks of each matrix: an expert is a matrix of its own.
    counts = []
    for w, maxima in zip(weights, amax, strict=True):
        counts += [w.numel() // BLOCK_VALUES // len(maxima)] * len(maxima)
    device = weights[0].device
    with torch.no_grad():
        blocks = torch.cat([w.reshape(-1, BLOCK_VALUES) for w in weights])
        tensor_amax = torch.cat(amax)
        floor = torch.finfo(torch.float32).tiny
        tensor_scale = (tensor_amax / (E2M1_MAX * E4M3_MAX)).clamp_min(floor)
        tensor_scale = torch.where(tensor_amax > 0, tensor_scale, 1.0)
        repeats = torch.tensor(counts).to(device, non_blocking=True)
        spread = tensor_scale.repeat_interleave(repeats, output_size=sum(counts))[:, None]
        scale = blocks.abs().amax(-1, keepdim=True) / E2M1_MAX / spread
        scale = scale.clamp_max(E4M3_MAX).to(torch.float8_e4m3fn).float()
        step = scale * spread
        ratio = torch.where(step > 0, blocks.abs() / step, 0.0).clamp_max(E2M1_MAX)
        # Three uniform grids make up E2M1: steps of 0.5 up to 2, of 1 up to 4, of 2 up to 6.
        magnitude = torch.where(
            ratio < 2,
            (ratio * 2).round() / 2,
            torch.where(ratio < 4, ratio.round(), (ratio / 2).round() * 2),
        )
        # In this order as `dequantize` has it: the first product is exact, the second rounds.
        values = torch.copysign(magnitude, blocks) * scale * spread
    quantized = values.split([w.numel() // BLOCK_VALUES for w in weights])
    return [straight_through(w, q.view_as(w)) for w, q in zip(weights, quantized, strict=True)]


def straight_through(value: Tensor, rounded: Tensor) -> Tensor:
    """`rounded`, to the bit; its gradient goes to `value`."""
    result: Tensor = _StraightThrough.apply(value, rounded)  # type: ignore[no-untyped-call]
    return result


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, rounded: Tensor) -> Tensor:
        return rounded.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def student_parameters(parameters: Parameters) -> Parameters:
    """The quantised student that fp32 `parameters` stand for, differentiable in all of them.

    Linears and head on their NVFP4 grids, all others on BF16's.
    """
    names = [name for name in parameters if is_quantized(name)]
    values = fake_quantize([parameters[name] for name in names])
    student = dict(zip(names, values, strict=True))
    return {
        name: student[name] if name in student else straight_through(value, as_bf16(value))
        for name, value in parameters.items()
    }


def teacher_parameters(parameters: Parameters) -> Parameters:
    """`parameters` as the BF16 checkpoint holds them, in fp32 and without gradients."""
    return {name: as_bf16(value.detach()) for name, value in parameters.items()}


def as_bf16(value: Tensor) -> Tensor:
    return value.detach().bfloat16().float()
