"""The arithmetic that all reference bodies share: what makes a row's bits its own.

"round" is the conversion to the dtype of the activations: BF16 rounds to nearest even; FP32
leaves the value as it is, which makes the same functions the oracle.

In BF16 a row of the output never depends on the rows beside it, to the bit. Element-wise
IEEE operations and sums over the last dimension have that property by themselves. A BLAS product
does not (its blocking depends on the number of rows), nor does a vectorised exponential (its
scalar tail lies elsewhere), so those two are called a row at a time.
"""

from __future__ import annotations

import torch


def matmul_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [M, K] times weight [N, K] transposed -> [M, N] fp32, accumulated in fp32."""
    # Contiguous: BLAS sums a transposed weight in another order.
    weight = weight.to(torch.float32, memory_format=torch.contiguous_format)
    if x.dtype == torch.float32:
        return x @ weight.T
    rows = [torch.mv(weight, row) for row in aligned_rows(x)]
    return torch.stack(rows) if rows else weight.new_empty(0, weight.shape[0])


def aligned(x: torch.Tensor) -> torch.Tensor:
    """x, or its copy, on a 64-byte boundary: a BLAS may sum in another order at another one."""
    return x if x.data_ptr() % 64 == 0 else x.clone()


def aligned_rows(x: torch.Tensor) -> list[torch.Tensor]:
    """The rows of x [M, K] in fp32, each on a 64-byte boundary."""
    rows = x.to(torch.float32, memory_format=torch.contiguous_format).unbind(0)
    return [aligned(row) for row in rows]


def exp_rows(x: torch.Tensor) -> torch.Tensor:
    """exp of [M, D] fp32, a row at a time on a CPU."""
    if x.shape[0] <= 1 or x.is_cuda:
        return torch.exp(x)
    return torch.stack([torch.exp(row) for row in x.unbind(0)])


def rms_normalise(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`(x * rsqrt(mean(x^2) + eps)) * weight` over the last dimension, all in fp32."""
    mean_square = x.square().mean(dim=-1, keepdim=True)
    return x * torch.rsqrt(mean_square + eps) * weight.to(torch.float32)


def silu(gate: torch.Tensor) -> torch.Tensor:
    """`g / (1 + exp(-g))` of [M, D] fp32, exact exponential and division: -inf gives NaN."""
    return gate / (1.0 + exp_rows(-gate))


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """`1 / (1 + exp(-x))` of [M, D] fp32."""
    return 1.0 / (1.0 + exp_rows(-x))
