"""Requests over a paged cache for tests of decode attention, on any device."""

from __future__ import annotations

from typing import Any

import op_samples
import torch
from op_samples import BF16, int32
from torch import Tensor

from flint_kernels import ops
from flint_kernels.backends import native_attention
from flint_kernels.reference import attention as reference

DIM = native_attention.HEAD_DIM


def randn(device: str, *shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device=device) * scale).to(BF16)


class Case:
    """Requests of given lengths over pages in shuffled order; what none may read is NaN or wild."""

    def __init__(
        self,
        lengths: list[int],
        device: str,
        *,
        page: int = 16,
        layout: str = "hnd",
        window: int = 0,
        width: int = 0,
        kv_heads: int = 4,
        seed: int = 0,
    ) -> None:
        self.window, self.page = window, page
        pages = [-(-length // page) for length in lengths]
        # Page 0 and the last ones belong to nobody.
        blocks = sum(pages) + 3
        self.k, self.v = caches(device, layout, blocks, page, kv_heads, seed)
        order = torch.randperm(sum(pages), generator=op_samples.rng(seed)) + 1
        table = torch.full((len(lengths), max(width, *pages, 1)), 2**31 - 1, dtype=torch.int32)
        unread = torch.ones(blocks, page, dtype=torch.bool)
        for row, (length, mine) in enumerate(zip(lengths, order.split(pages), strict=True)):
            first = max(0, length - window) if window else 0
            seen = torch.arange(first, length)
            unread[mine[seen // page], seen % page] = False
            table[row, first // page : len(mine)] = mine[first // page :].to(torch.int32)
        for cache in (self.k, self.v):
            cache[unread.to(device)] = torch.nan
        self.table = table.to(device)
        self.lengths = int32(*lengths).to(device)
        heads = kv_heads * native_attention.GROUP
        self.q = randn(device, len(lengths), heads, DIM, seed=seed + 9)
        self.sinks = randn(device, heads, seed=seed + 10).float()

    def run(self, rows: slice = slice(None), **options: Any) -> Tensor:
        return ops.attention_decode(
            self.q[rows], self.k, self.v, self.table[rows], self.lengths[rows], self.sinks,
            self.window, **options,
        )  # fmt: skip

    def reference(self, dtype: torch.dtype) -> Tensor:
        tensors = [tensor.to(dtype) for tensor in (self.q, self.k, self.v)]
        return reference.attention_decode(
            *tensors, self.table, self.lengths, self.sinks, self.window, None
        )

    def assert_near_the_oracle(self, got: Tensor) -> None:
        """At most 1.1 of the distance that plain PyTorch at BF16 has; zeros without keys."""
        truth, plain = self.reference(torch.float32), self.reference(BF16)
        assert bool(got.isfinite().all())
        some = self.lengths > 0
        assert not got[~some].any()
        if not bool(some.any()):
            return
        error = relative_error(got[some], truth[some])
        assert error <= 1.1 * relative_error(plain[some], truth[some])
        # And no single head may hide behind the others: of each, some ulps.
        difference = (got.float() - truth).norm(dim=-1)
        assert bool((difference <= 2**-6 * truth.norm(dim=-1).clamp_min(1e-3)).all())


def relative_error(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm of `want`, in fp64."""
    got, want = got.to(torch.float64), want.to(torch.float64)
    return float((got - want).norm() / want.norm())


def caches(
    device: str, layout: str, blocks: int, page: int, kv_heads: int, seed: int
) -> tuple[Tensor, ...]:
    """As `op_samples.caches`, filled on the device."""
    made = []
    memory: dict[int, Tensor] = {}
    for index, one in enumerate(op_samples.caches(layout, 1, page, kv_heads, DIM)):
        base = one.untyped_storage().data_ptr()
        size = one.untyped_storage().nbytes() // 2
        if base not in memory:
            memory[base] = randn(device, blocks, size, seed=seed + index)
        made.append(
            memory[base].as_strided(
                (blocks, *one.shape[1:]), (size, *one.stride()[1:]), one.storage_offset()
            )
        )
    return tuple(made)
