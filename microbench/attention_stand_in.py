"""What stands in the layer chain for window attention, until there is a kernel that takes part in
programmatic dependent launch (PDL).

It reads what the window of 513 tokens has in a layer's cache, 1 MB a request, ahead of the wait,
then q, and merges partial results by the last program that arrives, as a split decode kernel does.
It computes no attention.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

NOTE = "attention is a stand-in that reads the bytes of a window"

_SPLITS = 8  # programs of a KV head
ELEMENTS = 16384  # BF16 that a program reads: 32 programs read 1 MB


@cache
def _kernel() -> Any:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    @triton.jit
    def stand_in(
        k,
        v,
        q,
        partial,
        counters,
        out,
        request_elements,
        splits: tl.constexpr,
        elements: tl.constexpr,
        group_size: tl.constexpr,
        pdl: tl.constexpr,
    ):
        program, request = tl.program_id(0), tl.program_id(1)
        programs = tl.num_programs(0)
        head = program // splits
        half = program // (programs // 2)
        cache_of = v if half == 1 else k
        at = request * request_elements + (program % (programs // 2)) * elements
        read = tl.load(cache_of + at + tl.arange(0, elements))
        if pdl:
            gdc_launch_dependents()
            gdc_wait()
        group = tl.arange(0, group_size)
        row = (request * (programs // splits) + head) * group_size
        mine = tl.load(q + row + group, volatile=True).to(tl.float32)
        total = tl.sum(read.to(tl.float32)) + tl.sum(mine)
        slot = (request * (programs // splits) + head) * splits
        tl.store(partial + slot + program % splits, total)
        arrived = tl.atomic_add(counters + request * (programs // splits) + head, 1, sem="acq_rel")
        if arrived % splits == splits - 1:
            parts = tl.load(partial + slot + tl.arange(0, splits), volatile=True)
            tl.store(out + row + group, (mine + 1e-6 * tl.sum(parts)).to(tl.bfloat16))

    return stand_in


@cache
def _scratch(device: torch.device, requests: int, heads: int) -> tuple[Tensor, Tensor]:
    """Partial sums and counters; the latter count on for ever."""
    partial = torch.empty(requests * heads * _SPLITS, device=device)
    return partial, torch.zeros(requests * heads, dtype=torch.int32, device=device)


def attend(arguments: dict[str, Any], out: Tensor, *, enable_pdl: bool) -> None:
    """As `flint::attention_decode.out` is launched; see the module."""
    q, k, v = arguments["q"], arguments["k_cache"], arguments["v_cache"]
    requests, heads = q.shape[0], k.shape[2]
    partial, counters = _scratch(q.device, requests, heads)
    _kernel()[(heads * _SPLITS, requests)](
        k, v, q, partial, counters, out,
        k.numel() // requests, _SPLITS, ELEMENTS, q.shape[1] // heads * q.shape[2], enable_pdl,
        num_warps=8, launch_pdl=enable_pdl,
    )  # fmt: skip
