"""The GPU body of the library's prefill attention.

It takes what the reference body takes, and the output's buffer where there is one. It returns
NotImplemented, with nothing written, where the kernel does not take the call: a general body has
to. It reads nothing back, so a CUDA graph can hold it at any lengths, and a row's bits follow from
its own request alone: not from its batchmates, nor from the width of its block table.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flint_kernels.backends import native_many
from flint_kernels.ops.workspace import make_workspace

_native = torch.ops.flint_native

ARCHITECTURES = native_many.ARCHITECTURES

GROUP = 8
"""Query heads of a KV head that the kernel is made for."""
HEAD_DIM = 128
PAGE_UNIT = 16
"""Tokens of a page: a multiple of this."""
MOST_REQUESTS = 1024


def takes(q: Tensor, k: Tensor, cu_seqlens: Tensor, k_cache: Tensor | None = None) -> bool:
    """Whether q [T, Hq, D], k [T, Hkv, D], offsets [B + 1] and a cache [blocks, page_size, Hkv, D],
    or none, are of the form, and on a GPU, that the kernel is made for. A cache whose strides or
    address are no multiples of 16 bytes is still left to the general body."""
    rows, heads, head_dim = q.shape
    return (
        q.dtype == torch.bfloat16
        and rows > 0
        and heads == GROUP * k.shape[1]
        and head_dim == HEAD_DIM
        and cu_seqlens.shape[0] - 1 <= MOST_REQUESTS
        and (k_cache is None or (k_cache.shape[1] % PAGE_UNIT == 0 and k_cache.numel() > 0))
        and native_many._runs_on(q.device.index)
    )


def _rows(x: Tensor) -> Tensor:
    """x [T, H, D] as copies of boxes can read it: contiguous elements, rows and heads that start at
    multiples of 16 bytes."""
    strides = [x.stride(i) for i in (0, 1) if x.shape[i] > 1]  # 0 is none that a box can have
    aligned = all(s > 0 and s % 8 == 0 for s in strides) and x.data_ptr() % 16 == 0
    return x if x.stride(2) == 1 and aligned else x.clone(memory_format=torch.contiguous_format)


def attention_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    k_cache: Tensor | None,
    v_cache: Tensor | None,
    block_table: Tensor | None,
    context_lens: Tensor | None,
    sinks: Tensor | None,
    window: int,
    scale: float | None,
    max_query_len: int | None,
    workspace: Tensor | None = None,
    enable_pdl: bool = False,
    out: Tensor | None = None,
) -> Any:
    if not takes(q, k, cu_seqlens, k_cache):
        return NotImplemented
    launched_out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    launched = _native.attention_prefill_cuda_out(
        _rows(q),
        _rows(k),
        _rows(v),
        cu_seqlens.contiguous(),
        k_cache,
        v_cache,
        None if block_table is None else block_table.contiguous(),
        None if context_lens is None else context_lens.contiguous(),
        None if sinks is None else sinks.contiguous(),
        window,
        HEAD_DIM**-0.5 if scale is None else scale,
        make_workspace(q.device) if workspace is None else workspace,
        launched_out,
        enable_pdl,
    )
    return launched_out if launched else NotImplemented
