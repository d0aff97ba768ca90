"""Chunks over a paged past for tests of prefill attention, on any device."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import op_samples
import torch
from attention_case import caches, randn, relative_error
from op_samples import int32
from torch import Tensor

from flint_kernels import ops
from flint_kernels.backends import native_prefill
from flint_kernels.reference import attention as reference

DIM = native_prefill.HEAD_DIM
_BLOCK = 128  # queries that the plain path takes together


class PrefillCase:
    """Requests, each (tokens of the past, tokens of the chunk), over pages in shuffled order; what
    none may read is NaN or wild."""

    def __init__(
        self,
        requests: list[tuple[int, int]],
        device: str,
        *,
        page: int = 16,
        layout: str = "hnd",
        window: int = 0,
        width: int = 0,
        kv_heads: int = 4,
        past: bool = True,
        seed: int = 0,
    ) -> None:
        self.window, self.page, self.requests = window, page, requests
        bounds = [0, *accumulate(chunk for _, chunk in requests)]
        self.cu_seqlens = int32(*bounds).to(device)
        pages = [-(-context // page) for context, _ in requests]
        blocks = sum(pages) + 3  # page 0 and the last ones belong to nobody
        order = torch.randperm(sum(pages), generator=op_samples.rng(seed)) + 1
        table = torch.full((len(requests), max(width, *pages, 1)), 2**31 - 1, dtype=torch.int32)
        unread = torch.ones(blocks, page, dtype=torch.bool)
        for row, ((context, _), mine) in enumerate(zip(requests, order.split(pages), strict=True)):
            first = max(0, context - window + 1) if window else 0
            if first >= context:
                continue
            seen = torch.arange(first, context)
            unread[mine[seen // page], seen % page] = False
            table[row, first // page : len(mine)] = mine[first // page :].to(torch.int32)
        self.k_cache, self.v_cache = caches(device, layout, blocks, page, kv_heads, seed)
        for cache in (self.k_cache, self.v_cache):
            cache[unread.to(device)] = torch.nan
        self.table = table.to(device)
        self.context_lens = int32(*(context for context, _ in requests)).to(device)
        heads = kv_heads * native_prefill.GROUP
        self.q = randn(device, bounds[-1], heads, DIM, seed=seed + 9)
        # As the module has it: v is a part of a wider row.
        wide = randn(device, bounds[-1], kv_heads, 2 * DIM, seed=seed + 11)
        self.k = randn(device, bounds[-1], kv_heads, DIM, seed=seed + 12)
        self.v = wide[..., DIM:]
        self.sinks = randn(device, heads, seed=seed + 10).float()
        self.has_past = past

    @property
    def past(self) -> tuple[Tensor | None, ...]:
        if not self.has_past:
            return (None,) * 4
        return self.k_cache, self.v_cache, self.table, self.context_lens

    def run(self, **options: Any) -> Tensor:
        return ops.attention_prefill(
            self.q, self.k, self.v, self.cu_seqlens, *self.past, self.sinks, self.window, **options
        )

    def alone(self, row: int, **options: Any) -> Tensor:
        """Request `row` without the others."""
        begin, end = self.bounds(row)
        past = self.past
        if self.has_past:
            past = (
                self.k_cache,
                self.v_cache,
                *(t[row : row + 1] for t in past[2:] if t is not None),
            )
        return ops.attention_prefill(
            self.q[begin:end], self.k[begin:end], self.v[begin:end],
            int32(0, end - begin).to(self.q.device), *past, self.sinks, self.window, **options,
        )  # fmt: skip

    def bounds(self, row: int) -> tuple[int, int]:
        begin, end = list(pairwise(self.cu_seqlens.tolist()))[row]
        return begin, end

    def reference(self, dtype: torch.dtype) -> Tensor:
        """The arithmetic of the reference in `dtype`, many queries together."""
        out = torch.empty(self.q.shape, dtype=dtype, device=self.q.device)
        for rows, result in self._blocks(dtype):
            out[rows] = result
        return out

    def _blocks(self, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        for row, (context, chunk) in enumerate(self.requests):
            begin, _ = self.bounds(row)
            oldest = max(0, context - self.window + 1) if self.window else 0
            keys, values = (x[begin : begin + chunk].float() for x in (self.k, self.v))
            if oldest < context and chunk:
                pages = (self.k_cache, self.v_cache), self.table[row], oldest, context
                past_k, past_v = reference.gather_pages(*pages)
                keys, values = torch.cat([past_k, keys]), torch.cat([past_v, values])
            oldest = min(oldest, context)
            for start in range(0, chunk, _BLOCK):
                stop = min(start + _BLOCK, chunk)
                position = context + start
                first = max(oldest, position - self.window + 1) if self.window else oldest
                seen = slice(first - oldest, context + stop - oldest)
                rows = slice(begin + start, begin + stop)
                yield rows, reference.attend(
                    self.q[rows].to(dtype), keys[seen], values[seen], position, first, self.sinks,
                    self.window, DIM**-0.5,
                )  # fmt: skip

    def assert_near_the_oracle(self, got: Tensor) -> None:
        """At most 1.1 of the distance that plain PyTorch at BF16 has."""
        truth, plain = self.reference(torch.float32), self.reference(torch.bfloat16)
        assert got.shape == truth.shape
        if got.numel() == 0:
            return
        assert bool(got.isfinite().all())
        assert relative_error(got, truth) <= 1.1 * relative_error(plain, truth)
        # And no single head may hide behind the others: of each, some ulps.
        difference = (got.float() - truth).norm(dim=-1)
        assert bool((difference <= 2**-6 * truth.norm(dim=-1).clamp_min(1e-3)).all())
