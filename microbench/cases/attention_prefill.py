"""Prefill attention with Flint's heads: 8,192 tokens fresh, in a window layer, and behind a past.

FlashAttention-3 competes where FLASH_ATTENTION_3 names a library that has it with sinks (see
attention.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from flint_kernels import ops
from microbench.cases import Group, Outputs, Subject, attention, bench, generator, randn
from microbench.cases.attention import DIM, HEADS, KV_HEADS, PAGE

# Tokens of the chunk, tokens of the past, window.
CASES = ((8192, 0, 0), (8192, 0, 513), (8192, 100_000, 0))


@dataclass(frozen=True)
class Buffers:
    q: Tensor  # [T, 32, 128]
    k: Tensor  # [T, 4, 128]
    v: Tensor
    cu_seqlens: Tensor  # [0, T]
    k_cache: Tensor  # past and chunk in pages, as a peer reads them that takes no chunk beside
    v_cache: Tensor
    block_table: Tensor
    context_lens: Tensor
    sinks: Tensor  # of values that BF16 has
    past: int
    window: int
    workspace: Tensor
    out: Tensor


def make(tokens: int, past: int, window: int, device: torch.device, index: int) -> Buffers:
    k, v = (randn(device, 8 * index + i, tokens, KV_HEADS, DIM) for i in (1, 2))
    pages = -(-(past + tokens) // PAGE) if past else 1
    caches = [attention.cached(device, 8 * index + 3 + 2 * i, pages) for i in range(2)]
    order = torch.randperm(pages, generator=generator(device, index), device=device)
    if past:
        positions = torch.arange(past, past + tokens, device=device)
        at = order[positions // PAGE], positions % PAGE
        caches[0][at], caches[1][at] = k, v
    return Buffers(
        randn(device, 8 * index, tokens, HEADS, DIM),
        k,
        v,
        torch.tensor([0, tokens], dtype=torch.int32, device=device),
        caches[0],
        caches[1],
        order.int()[None],
        torch.tensor([past], dtype=torch.int32, device=device),
        randn(device, 8 * index + 7, HEADS).float(),
        past,
        window,
        attention.workspace(device),
        torch.empty(tokens, HEADS, DIM, dtype=torch.bfloat16, device=device),
    )


def launch_bytes(tokens: int, past: int) -> int:
    """Each query, each key and value and each output once."""
    return 2 * DIM * (2 * tokens * HEADS + 2 * (tokens + past) * KV_HEADS)


def launch_flop(tokens: int, past: int, window: int) -> int:
    """Two products of a query and a head for each key that the query sees."""
    seen = sum(min(past + i + 1, window or past + i + 1) for i in range(tokens))
    return 4 * DIM * HEADS * seen


def arguments(b: Buffers) -> tuple[Tensor | int | None, ...]:
    cache = (b.k_cache, b.v_cache, b.block_table, b.context_lens) if b.past else (None,) * 4
    return b.q, b.k, b.v, b.cu_seqlens, *cache, b.sinks, b.window


def kernel(b: Buffers) -> Outputs:
    """The kernel alone, into a given buffer."""
    if b.q.is_cuda:
        launched = torch.ops.flint_native.attention_prefill_cuda_out(
            *arguments(b), DIM**-0.5, b.workspace, b.out, False
        )
        assert launched
    else:
        ops.attention_prefill(*arguments(b), out=b.out)
    return (b.out,)


def general(b: Buffers) -> Outputs:
    """This project's body in Triton, for any heads and any head_dim."""
    from flint_kernels.backends import gpu_general

    return (gpu_general.attention_prefill(*arguments(b), None, None),)


def dense(b: Buffers) -> Outputs:
    """torch's attention of a fresh chunk."""
    q, k, v = (x.transpose(0, 1)[None] for x in (b.q, b.k, b.v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return (out[0].transpose(0, 1),)


def flash_attention_3(b: Buffers) -> Outputs:
    tokens = b.q.shape[0]
    none = (None,) * 3
    window = (b.window - 1, 0) if b.window else (-1, -1)
    if b.past:
        k, v, table = b.k_cache, b.v_cache, b.block_table
        offsets = (b.cu_seqlens, None, None, None, b.context_lens + tokens)
    else:
        k, v, table = b.k, b.v, None
        offsets = (b.cu_seqlens, b.cu_seqlens, None, None, None)
    out = attention.fa3()(
        b.q, k, v, None, None, None, None, *offsets, tokens, b.past + tokens, table, None, None,
        *none, *none, DIM**-0.5, True, *window, 0.0, True, None, 0, None, 0, b.sinks.bfloat16(), 1,
        0, None,
    )[0]  # fmt: skip
    return (out,)


@bench("attention_prefill", file="attention")
def _(device: torch.device) -> Iterator[Group]:
    for tokens, past, window in CASES:
        case = f"Q={tokens} K={past + tokens} W={window}"
        subjects = [Subject("flint", kernel, case)]
        if attention.FA3_LIBRARY in os.environ:
            subjects.append(Subject("FlashAttention-3", flash_attention_3))
        if not past and not window:
            subjects.append(Subject("torch SDPA, without sinks", dense, part=True))
        # Behind a long past the general body would take up the time of all others.
        if device.type == "cuda" and not past:
            subjects.append(Subject("general body", general))
        yield Group(
            "attention_prefill",
            launch_bytes(tokens, past),
            partial(make, tokens, past, window, device),
            subjects,
            flop=launch_flop(tokens, past, window),
        )
