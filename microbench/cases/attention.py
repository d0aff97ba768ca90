"""Decode attention with Flint's heads over a paged cache: contexts of 8K to 262K, and the window.

FlashAttention-3 competes where FLASH_ATTENTION_3 names a library that has it with sinks, such as
vLLM's wheel brings (torch.ops._vllm_fa3_C).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flint_kernels import ops
from microbench.cases import Group, Outputs, Subject, bench, generator, randn

HEADS, KV_HEADS, DIM, PAGE = 32, 4, 128, 16
# Requests, keys of each, window.
CASES = (
    (1, 8192, 0),
    (1, 100_000, 0),
    (1, 262_144, 0),
    (8, 100_000, 0),
    (1, 100_000, 513),
    (8, 100_000, 513),
)
FA3_LIBRARY = "FLASH_ATTENTION_3"


@dataclass(frozen=True)
class Buffers:
    q: Tensor  # [B, 32, 128]
    k_cache: Tensor  # [blocks, 16, 4, 128], the memory of a block [4, 16, 128] (HND)
    v_cache: Tensor
    block_table: Tensor  # [B, pages of the whole context] int32, in shuffled order
    lengths: Tensor  # [B] int32
    sinks: Tensor  # [32] fp32, of values that BF16 has
    window: int
    workspace: Tensor
    out: Tensor  # [B, 32, 128]


@cache
def workspace(device: torch.device) -> Tensor:
    return ops.make_workspace(device)


def pages_held(length: int, window: int) -> int:
    """A window layer's pages are a ring."""
    pages = -(-length // PAGE)
    return min(pages, -(-(window - 1) // PAGE) + 1) if window else pages


def cached(device: torch.device, seed: int, blocks: int) -> Tensor:
    """Values with a mean of their own in each element, which an average over all keys keeps."""
    memory = randn(device, seed, blocks, KV_HEADS, PAGE, DIM)
    memory += randn(device, seed + 1, KV_HEADS, 1, DIM)
    return memory.permute(0, 2, 1, 3)


def make(requests: int, length: int, window: int, device: torch.device, index: int) -> Buffers:
    held = pages_held(length, window)
    random = generator(device, index)
    order = torch.randperm(requests * held, generator=random, device=device)
    entries = torch.arange(-(-length // PAGE), device=device) % held
    return Buffers(
        randn(device, 6 * index, requests, HEADS, DIM),
        cached(device, 6 * index + 1, requests * held),
        cached(device, 6 * index + 3, requests * held),
        order.view(requests, held)[:, entries].int(),
        torch.full((requests,), length, dtype=torch.int32, device=device),
        randn(device, 6 * index + 5, HEADS).float(),
        window,
        workspace(device),
        torch.empty(requests, HEADS, DIM, dtype=torch.bfloat16, device=device),
    )


def launch_bytes(requests: int, length: int, window: int) -> int:
    keys = min(length, window) if window else length
    pages = -(-keys // PAGE)
    each = keys * 2 * KV_HEADS * DIM * 2 + pages * 4 + 4 + 2 * HEADS * DIM * 2
    return requests * each + HEADS * 4


def chained(sets: Sequence[Buffers]) -> list[Buffers]:
    """The output of each launch is the next one's q."""
    return [*(replace(one, out=two.q) for one, two in pairwise(sets)), sets[-1]]


def kernel(buffers: Buffers, *, enable_pdl: bool = False) -> Outputs:
    """The kernel alone, into given buffers: none of the op's Python stands between launches."""
    b = buffers
    call = (b.q, b.k_cache, b.v_cache, b.block_table, b.lengths, b.sinks, b.window)
    if b.q.is_cuda:
        launched = torch.ops.flint_native.attention_decode_cuda_out(
            *call, DIM**-0.5, b.workspace, b.out, enable_pdl
        )
        assert launched
    else:
        ops.attention_decode(*call, out=b.out)
    return (b.out,)


def general(buffers: Buffers) -> Outputs:
    """This project's body in Triton, for any heads and any head_dim."""
    from flint_kernels.backends import gpu_general

    b = buffers
    call = (b.q, b.k_cache, b.v_cache, b.block_table, b.lengths, b.sinks, b.window)
    return (gpu_general.attention_decode(*call, None),)


@cache
def fa3() -> Any:
    torch.ops.load_library(os.environ[FA3_LIBRARY])
    return torch.ops._vllm_fa3_C.fwd


def flash_attention_3(buffers: Buffers) -> Outputs:
    b = buffers
    length = b.block_table.shape[1] * PAGE
    none = (None,) * 3
    window = (b.window - 1, 0) if b.window else (-1, -1)
    out = fa3()(
        b.q[:, None], b.k_cache, b.v_cache, None, None, None, None, *none, None, b.lengths,
        1, length, b.block_table, None, None, *none, *none, DIM**-0.5, True, *window, 0.0, True,
        None, 0, None, 0, b.sinks.bfloat16(), 1, 0, None,
    )[0]  # fmt: skip
    return (out[:, 0],)


def dense(buffers: Buffers) -> Outputs:
    """torch's attention over the same number of keys in one piece."""
    b = buffers
    keys = b.window or int(b.block_table.shape[1] * PAGE)
    shape = (b.q.shape[0], KV_HEADS, -1, DIM)
    k, v = (cache.permute(0, 2, 1, 3).reshape(shape)[:, :, :keys] for cache in
            (b.k_cache, b.v_cache))  # fmt: skip
    out = F.scaled_dot_product_attention(b.q[:, :, None], k, v, enable_gqa=True)
    return (out[:, :, 0],)


@bench("attention_decode", file="attention")
def _(device: torch.device) -> Iterator[Group]:
    peers = [Subject("torch SDPA, dense and without sinks", dense, part=True)]
    if device.type == "cuda":
        peers.append(Subject("general body", general))
    if FA3_LIBRARY in os.environ:
        peers.append(Subject("FlashAttention-3", flash_attention_3))
    for requests, length, window in CASES:
        case = f"B={requests} L={length} W={window}"
        size = launch_bytes(requests, length, window)
        new = partial(make, requests, length, window, device)
        yield Group("attention_decode", size, new, [Subject("flint", kernel, case), *peers])
        subjects = [
            Subject("flint pdl", partial(kernel, enable_pdl=True), f"{case} pdl", chained),
            Subject("flint chain", kernel, f"{case} chain", chained),
            *peers,
        ]
        yield Group("attention_decode", size, new, subjects, chained=True)
