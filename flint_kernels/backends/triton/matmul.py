"""Rows times an NVFP4, BF16 or FP32 weight, summed in fp32: the dense projections."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flint_kernels.backends.triton.launch import emulating, launch
from flint_kernels.backends.triton.numerics import rounded, weight_tile


@triton.jit(do_not_specialize=["rows"])
def matmul_kernel(
    x,
    weight,
    scales,
    scale_2,
    out,
    rows,
    out_features,
    in_features,
    NVFP4: tl.constexpr,
    PER_COLUMN: tl.constexpr,
    EMULATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out [rows, out_features] = round(scale_2 * x [rows, in_features] . weight^T).

    scale_2 is one fp32 value, or (PER_COLUMN) one a column; BF16 and FP32 weights have none. The
    weight is the left operand, as a tile may have few rows of x, but never few of the weight.
    """
    tiles_n = tl.cdiv(out_features, BLOCK_N)
    m = (tl.program_id(0) // tiles_n) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (tl.program_id(0) % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_inside, n_inside = m < rows, n < out_features
    m, n = m.to(tl.int64), n.to(tl.int64)
    dtype: tl.constexpr = x.dtype.element_ty

    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(0, in_features, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        mask = (column < in_features)[:, None] & m_inside[None, :]
        vectors = tl.load(x + m[None, :] * in_features + column[:, None], mask=mask, other=0)
        matrix = weight_tile(
            weight, scales, n, n_inside, start, in_features, NVFP4, BLOCK_N, BLOCK_K, dtype
        )
        total = tl.dot(matrix, vectors, total, input_precision="ieee")

    if NVFP4:
        if PER_COLUMN:
            total = total * tl.load(scale_2 + n, mask=n_inside, other=0)[:, None]
        else:
            total = total * tl.load(scale_2)
    result = rounded(total, out.dtype.element_ty, EMULATE)
    mask = n_inside[:, None] & m_inside[None, :]
    tl.store(out + m[None, :] * out_features + n[:, None], result, mask=mask)


def matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    scale_2: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    rounds: bool = True,
) -> torch.Tensor:
    """x [M, K] times weight [N, K] (NVFP4 codes [N, K / 2] where there are scales) -> [M, N].

    scale_2: [1] or [N] fp32. `rounds`: whether the output is an activation, which matters in
    emulation alone: otherwise `dtype` says it.
    """
    rows, out_features = x.shape[0], weight.shape[0]
    out = torch.empty(rows, out_features, dtype=dtype, device=x.device)
    block_m, block_n, block_k, warps, stages = tile_sizes(rows, x.dtype)
    launch(
        matmul_kernel,
        triton.cdiv(rows, block_m) * triton.cdiv(out_features, block_n),
        {
            "x": x.contiguous(),
            "weight": weight.contiguous(),
            "scales": None if scales is None else scales.contiguous().view(torch.uint8),
            "scale_2": None if scale_2 is None else scale_2.contiguous(),
            "out": out,
            "rows": rows,
            "out_features": out_features,
            "in_features": x.shape[1],
            "NVFP4": scales is not None,
            "PER_COLUMN": scale_2 is not None and scale_2.numel() > 1,
            "EMULATE": emulating() and rounds,
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "BLOCK_K": block_k,
        },
        warps=warps,
        stages=stages,
    )
    return out


def tile_sizes(rows: int, dtype: torch.dtype) -> tuple[int, int, int, int, int]:
    """BLOCK_M (rows of x), BLOCK_N, BLOCK_K, warps, stages for `rows` rows."""
    if dtype == torch.float32:
        return 16, 32, 32, 4, 2
    if rows <= 16:
        return 16, 32, 128, 4, 4
    if rows <= 64:
        return 64, 64, 64, 4, 3
    return 128, 128, 64, 8, 3
