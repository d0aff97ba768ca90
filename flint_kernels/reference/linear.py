"""Projections: `flint_kernels/ops/linear.py` says what they compute."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flint_kernels.formats.repack import dequantize
from flint_kernels.reference.norm import silu_and_mul
from flint_kernels.reference.numerics import matmul_rows
from flint_kernels.shapes import flat_rows


def scale_shards(
    sums: torch.Tensor, scale_2: torch.Tensor, shard_sizes: Sequence[int] | None
) -> torch.Tensor:
    """fp32 sums [M, N] times the global scale of each shard's columns."""
    if scale_2.numel() == 1:
        return sums * scale_2.reshape(())
    assert shard_sizes is not None  # the declaration has checked it
    shards = sums.split(list(shard_sizes), dim=1)
    return torch.cat([shard * scale_2[i] for i, shard in enumerate(shards)], dim=1)


def nvfp4_sums(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_scale_2: torch.Tensor,
    shard_sizes: Sequence[int] | None,
) -> torch.Tensor:
    """Unrounded projection [..., N] fp32."""
    rows = flat_rows(x)
    sums = matmul_rows(rows, dequantize(weight, weight_scale))
    return scale_shards(sums, weight_scale_2, shard_sizes).reshape(*x.shape[:-1], weight.shape[0])


def bf16_sums(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Unrounded projection [..., N] fp32."""
    rows = flat_rows(x)
    return matmul_rows(rows, weight).reshape(*x.shape[:-1], weight.shape[0])


def nvfp4_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_scale_2: torch.Tensor,
    shard_sizes: Sequence[int] | None,
    **_: object,
) -> torch.Tensor:
    return nvfp4_sums(x, weight, weight_scale, weight_scale_2, shard_sizes).to(x.dtype)


def bf16_linear(x: torch.Tensor, weight: torch.Tensor, **_: object) -> torch.Tensor:
    return bf16_sums(x, weight).to(x.dtype)


def nvfp4_linear_silu_and_mul(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_scale_2: torch.Tensor,
    **_: object,
) -> torch.Tensor:
    halves = [weight.shape[0] // 2] * 2
    return silu_and_mul(nvfp4_linear(x, weight, weight_scale, weight_scale_2, halves))


def bf16_linear_silu_and_mul(x: torch.Tensor, weight: torch.Tensor, **_: object) -> torch.Tensor:
    return silu_and_mul(bf16_linear(x, weight))


def nvfp4_lm_head(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_scale_2: torch.Tensor,
    **_: object,
) -> torch.Tensor:
    return nvfp4_sums(x, weight, weight_scale, weight_scale_2, None)


def bf16_lm_head(x: torch.Tensor, weight: torch.Tensor, **_: object) -> torch.Tensor:
    return bf16_sums(x, weight)
