"""The GPU body of the library's decode attention.

It takes what the reference body takes, and the output's buffer where there is one. It returns
NotImplemented, with nothing written, where the kernels do not take the call: a general body has to.
They read nothing back, so a CUDA graph can hold them at any lengths, and a request's bits follow
from that request alone: not from its batchmates, nor from the width of its block table.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flint_kernels.backends import native_decode
from flint_kernels.ops.workspace import make_workspace

_native = torch.ops.flint_native

ARCHITECTURES = native_decode.ARCHITECTURES

GROUP = 8
"""Query heads of a KV head that the kernels are made for."""
HEAD_DIM = 128
LEAST_PAGE = 16
"""Tokens of a page: this, or a power of two above it."""
MOST_REQUESTS = 256


def takes(q: Tensor, k_cache: Tensor) -> bool:
    """Whether q [B, Hq, D] and a cache [blocks, page_size, Hkv, D] are of the form, and on a GPU,
    that the kernels are made for. Strides and addresses that are no multiples of 16 bytes are still
    left to the general body."""
    requests, heads, head_dim = q.shape
    page, kv_heads = k_cache.shape[1], k_cache.shape[2]
    return (
        q.dtype == torch.bfloat16
        and 0 < requests <= MOST_REQUESTS
        and heads == GROUP * kv_heads
        and head_dim == HEAD_DIM
        and page >= LEAST_PAGE
        and page & (page - 1) == 0
        and native_decode._runs_on(q.device.index)
    )


def attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    sinks: Tensor | None,
    window: int,
    scale: float | None,
    workspace: Tensor | None = None,
    enable_pdl: bool = False,
    out: Tensor | None = None,
) -> Any:
    if not takes(q, k_cache):
        return NotImplemented
    ahead, enable_pdl = native_decode._read_ahead(enable_pdl, block_table, seq_lens)
    launched_out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    launched = _native.attention_decode_cuda_out(
        q if q.stride(2) == 1 else q.contiguous(),
        k_cache,
        v_cache,
        *ahead,
        None if sinks is None else sinks.contiguous(),
        window,
        HEAD_DIM**-0.5 if scale is None else scale,
        make_workspace(q.device) if workspace is None else workspace,
        launched_out,
        enable_pdl,
    )
    return launched_out if launched else NotImplemented
