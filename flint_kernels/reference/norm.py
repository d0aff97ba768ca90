"""Norms and the SiLU gate: `flint_kernels/ops/norm.py` says what they compute."""

from __future__ import annotations

import torch

from flint_kernels.reference.numerics import rms_normalise, silu
from flint_kernels.shapes import flat_rows


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, **_: object) -> torch.Tensor:
    return rms_normalise(x.contiguous().to(torch.float32), weight, eps).to(x.dtype)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, **_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x.contiguous().to(torch.float32) + residual.contiguous().to(torch.float32)
    normed = rms_normalise(total, weight, eps).to(x.dtype)
    # In FP32 mode nothing is rounded, and the sum itself is the new residual.
    return normed, total.to(x.dtype)


def silu_and_mul(x: torch.Tensor, **_: object) -> torch.Tensor:
    rows = flat_rows(x).to(torch.float32)
    gate, up = rows.chunk(2, dim=1)
    act = (silu(gate) * up).to(x.dtype)
    return act.reshape(*x.shape[:-1], x.shape[-1] // 2)
