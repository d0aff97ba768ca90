"""NVFP4 codes to values."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flint_kernels.backends.triton.launch import launch
from flint_kernels.backends.triton.numerics import e2m1, e4m3

_BYTES = 1024  # codes of a program


@triton.jit(do_not_specialize=["count"])
def dequantize_kernel(codes, scales, scale_2, out, count, BLOCK: tl.constexpr):
    """out [2 * count] = round(e2m1 * e4m3 [* scale_2]); a scale serves 8 bytes of codes."""
    byte = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = byte < count
    packed = tl.load(codes + byte, mask=inside, other=0).to(tl.int32)
    scale = e4m3(tl.load(scales + byte // 8, mask=inside, other=0).to(tl.int32))
    low, high = e2m1(packed & 15) * scale, e2m1(packed >> 4) * scale
    if scale_2 is not None:
        factor = tl.load(scale_2)
        low, high = low * factor, high * factor
    dtype: tl.constexpr = out.dtype.element_ty
    tl.store(out + 2 * byte, low.to(dtype), mask=inside)
    tl.store(out + 2 * byte + 1, high.to(dtype), mask=inside)


def dequantize(
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_scale_2: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """uint8 [..., K / 2] and float8_e4m3fn [..., K / 16] -> [..., K] in `dtype`."""
    shape = (*weight.shape[:-1], 2 * weight.shape[-1])
    out = torch.empty(shape, dtype=dtype, device=weight.device)
    launch(
        dequantize_kernel,
        triton.cdiv(weight.numel(), _BYTES),
        {
            "codes": weight.contiguous(),
            "scales": weight_scale.contiguous().view(torch.uint8),
            "scale_2": weight_scale_2,
            "out": out,
            "count": weight.numel(),
            "BLOCK": _BYTES,
        },
    )
    return out
