"""Dense projections with NVFP4 or BF16 weights, and the LM head."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flint_kernels.ops._check import Checker
from flint_kernels.ops._declare import Spec, op


@op(
    "nvfp4_linear(Tensor x, Tensor weight, Tensor weight_scale, Tensor weight_scale_2, "
    "int[]? shard_sizes=None, *, bool enable_pdl=False) -> Tensor",
    outputs=("out",),
)
def nvfp4_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_scale_2: torch.Tensor,
    shard_sizes: Sequence[int] | None = None,
    *,
    enable_pdl: bool = False,
) -> Spec:
    """`round(weight_scale_2 * sum(x * (e2m1 * e4m3)))`: W4A16, no bias.

    Args:
        x: [..., K], bfloat16 or float32, K a multiple of 16; any strides.
        weight: [N, K / 2] uint8, two E2M1 codes a byte, the even column in the low nibble.
        weight_scale: [N, K / 16] float8_e4m3fn.
        weight_scale_2: float32, the global scale: [] or [1], or [S] with one for each shard.
        shard_sizes: the S numbers of rows that the shards of a fused projection have (q, k, v or
            gate, up), in order; their sum is N. Needed where weight_scale_2 has more than one.
        enable_pdl: launch with programmatic dependent launch (GPU only).

    Returns: [..., N], the dtype of x, contiguous.
    """
    check = Checker("nvfp4_linear", "x", x)
    check.rows("x", x)
    shards = [[], [1]] if shard_sizes is None else [[], [1], [len(shard_sizes)]]
    check.nvfp4("weight", weight, weight_scale, weight_scale_2, [None], x.shape[-1], shards)
    if shard_sizes is not None and (
        sum(shard_sizes) != weight.shape[0] or any(size < 0 for size in shard_sizes)
    ):
        check.fail(
            "shard_sizes",
            list(shard_sizes),
            f"sizes that add up to {weight.shape[0]}, the rows of weight",
            "Name every shard of the fused projection, in order.",
        )
    return Spec((*x.shape[:-1], weight.shape[0]), x.dtype)


@op(
    "bf16_linear(Tensor x, Tensor weight, *, bool enable_pdl=False) -> Tensor",
    outputs=("out",),
)
def bf16_linear(x: torch.Tensor, weight: torch.Tensor, *, enable_pdl: bool = False) -> Spec:
    """`round(sum(x * weight))`: no bias.

    Args:
        x: [..., K], bfloat16 or float32; any strides.
        weight: [N, K], bfloat16 (float32 is taken too where x is float32).
        enable_pdl: launch with programmatic dependent launch (GPU only).

    Returns: [..., N], the dtype of x, contiguous.
    """
    check = Checker("bf16_linear", "x", x)
    check.rows("x", x)
    check.weight("weight", weight, x, [None, x.shape[-1]])
    return Spec((*x.shape[:-1], weight.shape[0]), x.dtype)


def _half_rows(check: Checker, weight: torch.Tensor) -> int:
    if weight.shape[0] % 2 != 0:
        check.fail(
            "weight", f"{weight.shape[0]} rows", "an even number", "Gate rows first, then up rows."
        )
    return weight.shape[0] // 2


@op(
    "nvfp4_linear_silu_and_mul(Tensor x, Tensor weight, Tensor weight_scale, "
    "Tensor weight_scale_2, *, bool enable_pdl=False) -> Tensor",
    outputs=("out",),
)
def nvfp4_linear_silu_and_mul(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_scale_2: torch.Tensor,
    *,
    enable_pdl: bool = False,
) -> Spec:
    """`silu_and_mul(nvfp4_linear(x, gate | up))` in one launch; gate and up are rounded between.

    Args:
        x: [..., K], bfloat16 or float32; any strides.
        weight, weight_scale: as in `nvfp4_linear`, N = 2 * I rows: gate, then up.
        weight_scale_2: float32: [] or [1], or [2]: gate's and up's.
        enable_pdl: launch with programmatic dependent launch (GPU only).

    Returns: [..., I], the dtype of x, contiguous.
    """
    check = Checker("nvfp4_linear_silu_and_mul", "x", x)
    check.rows("x", x)
    check.nvfp4("weight", weight, weight_scale, weight_scale_2, [None], x.shape[-1], [[], [1], [2]])
    return Spec((*x.shape[:-1], _half_rows(check, weight)), x.dtype)


@op(
    "bf16_linear_silu_and_mul(Tensor x, Tensor weight, *, bool enable_pdl=False) -> Tensor",
    outputs=("out",),
)
def bf16_linear_silu_and_mul(
    x: torch.Tensor, weight: torch.Tensor, *, enable_pdl: bool = False
) -> Spec:
    """`silu_and_mul(bf16_linear(x, gate | up))` in one launch; gate and up are rounded between.

    Args:
        x: [..., K], bfloat16 or float32; any strides.
        weight: [2 * I, K], gate rows, then up rows.
        enable_pdl: launch with programmatic dependent launch (GPU only).

    Returns: [..., I], the dtype of x, contiguous.
    """
    check = Checker("bf16_linear_silu_and_mul", "x", x)
    check.rows("x", x)
    check.weight("weight", weight, x, [None, x.shape[-1]])
    return Spec((*x.shape[:-1], _half_rows(check, weight)), x.dtype)


@op(
    "nvfp4_lm_head(Tensor x, Tensor weight, Tensor weight_scale, Tensor weight_scale_2, *, "
    "bool enable_pdl=False) -> Tensor",
    outputs=("logits_out",),
)
def nvfp4_lm_head(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_scale_2: torch.Tensor,
    *,
    enable_pdl: bool = False,
) -> Spec:
    """Logits in fp32, never rounded: `weight_scale_2 * sum(x * (e2m1 * e4m3))`.

    Args:
        x: [..., K], bfloat16 or float32, the normed hidden state; any strides.
        weight, weight_scale, weight_scale_2: as in `nvfp4_linear`, one global scale;
            N = vocabulary.
        enable_pdl: launch with programmatic dependent launch (GPU only).

    Returns: [..., vocabulary] float32, contiguous.
    """
    check = Checker("nvfp4_lm_head", "x", x)
    check.rows("x", x)
    check.nvfp4("weight", weight, weight_scale, weight_scale_2, [None], x.shape[-1], [[], [1]])
    return Spec((*x.shape[:-1], weight.shape[0]), torch.float32)


@op(
    "bf16_lm_head(Tensor x, Tensor weight, *, bool enable_pdl=False) -> Tensor",
    outputs=("logits_out",),
)
def bf16_lm_head(x: torch.Tensor, weight: torch.Tensor, *, enable_pdl: bool = False) -> Spec:
    """Logits in fp32, never rounded: `sum(x * weight)`.

    Args:
        x: [..., K], bfloat16 or float32, the normed hidden state; any strides.
        weight: [vocabulary, K], bfloat16.
        enable_pdl: launch with programmatic dependent launch (GPU only).

    Returns: [..., vocabulary] float32, contiguous.
    """
    check = Checker("bf16_lm_head", "x", x)
    check.rows("x", x)
    check.weight("weight", weight, x, [None, x.shape[-1]])
    return Spec((*x.shape[:-1], weight.shape[0]), torch.float32)
