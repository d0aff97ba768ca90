"""Norms and the SiLU gate."""

from __future__ import annotations

import torch

from flint_kernels.ops._check import Checker
from flint_kernels.ops._declare import Spec, op


@op(
    "rms_norm(Tensor x, Tensor weight, float eps=1e-6, *, bool enable_pdl=False) -> Tensor",
    outputs=("out",),
    over={"out": "x"},
)
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, *, enable_pdl: bool = False
) -> Spec:
    """Root-mean-square norm over the last dimension.

    `round((x * rsqrt(mean(x^2) + eps)) * weight)`, everything before the rounding in fp32.

    Args:
        x: [..., D], bfloat16 (float32: the oracle's mode, nothing is rounded); any strides.
        weight: [D], bfloat16 (float32 is taken too where x is float32).
        eps: added to the mean square.
        enable_pdl: launch with programmatic dependent launch (GPU only).

    Returns: [..., D], the dtype of x, contiguous. In the out-variant `out` may be x itself.
    """
    check = Checker("rms_norm", "x", x)
    check.rows("x", x)
    check.weight("weight", weight, x, [x.shape[-1]])
    check.positive("eps", eps)
    return Spec(tuple(x.shape), x.dtype)


@op(
    "fused_add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps=1e-6, *, "
    "bool enable_pdl=False) -> (Tensor, Tensor)",
    outputs=("normed_out", "residual_out"),
    over={"normed_out": "x", "residual_out": "residual"},
)
def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    enable_pdl: bool = False,
) -> tuple[Spec, Spec]:
    """Adds the residual, then norms the sum; the norm sees the sum before it is rounded.

    `s = x + residual` in fp32; `residual_out = round(s)`;
    `normed = round(s * rsqrt(mean(s^2) + eps) * weight)`.

    Args:
        x: [..., D], bfloat16 or float32; any strides.
        residual: as x.
        weight: [D].
        eps: added to the mean square.
        enable_pdl: launch with programmatic dependent launch (GPU only).

    Returns: (normed, residual_out), both as x, contiguous. In the out-variant `normed_out` may be
    x itself and `residual_out` residual itself.
    """
    check = Checker("fused_add_rms_norm", "x", x)
    check.rows("x", x)
    check.tensor("residual", residual, (x.dtype,), list(x.shape))
    check.weight("weight", weight, x, [x.shape[-1]])
    check.positive("eps", eps)
    spec = Spec(tuple(x.shape), x.dtype)
    return spec, spec


@op("silu_and_mul(Tensor x, *, bool enable_pdl=False) -> Tensor", outputs=("out",))
def silu_and_mul(x: torch.Tensor, *, enable_pdl: bool = False) -> Spec:
    """SwiGLU's gate: `round((g / (1 + exp(-g))) * u)` with g, u the two halves of the last dim.

    Exact exponential and division: a gate of -inf gives NaN, as in torch; no flush to zero.

    Args:
        x: [..., 2 * D], bfloat16 or float32, gate first; any strides.
        enable_pdl: launch with programmatic dependent launch (GPU only).

    Returns: [..., D], the dtype of x, contiguous.
    """
    check = Checker("silu_and_mul", "x", x)
    check.rows("x", x)
    if x.shape[-1] % 2 != 0:
        check.fail("x", f"a last dimension of {x.shape[-1]}", "an even one", "Gate, then up.")
    return Spec((*x.shape[:-1], x.shape[-1] // 2), x.dtype)
