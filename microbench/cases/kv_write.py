"""qk_norm_rope_kv_write with Flint's heads and the RoPE of its window layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from flint_kernels import ops
from flint_kernels.model import cos_sin_table
from microbench.cases import Group, Outputs, Subject, bench, compiled, generator, near_one, randn

ROWS = (1, 8, 8192)
CHAINED_ROWS = HOT_ROWS = (1, 8)
HEADS, KV_HEADS, DIM, PAGE = 32, 4, 128, 16
EPS = 1e-6
POSITIONS = 1 << 16  # rows of the table, 33 MB
THETA = 10000.0


@dataclass(frozen=True)
class Buffers:
    qkv: Tensor  # [M, (32 + 2 * 4) * 128]: q, k, v
    q_weight: Tensor  # [128]
    k_weight: Tensor
    cos_sin: Tensor  # [positions, 128] fp32, one for all launches
    positions: Tensor  # [M] int32, each a row of its own
    slots: Tensor  # [M] int32
    k_cache: Tensor  # [blocks, 16, 4, 128], the memory of a block [4, 16, 128] (HND)
    v_cache: Tensor
    q: Tensor | None = None  # [M, 32, 128], the outputs of a chained launch
    k: Tensor | None = None  # [M, 4, 128]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return (
            self.qkv, self.q_weight, self.k_weight, self.cos_sin, self.positions, self.slots,
            self.k_cache, self.v_cache,
        )  # fmt: skip


def cache(blocks: int, device: torch.device, kv_heads: int = KV_HEADS, dim: int = DIM) -> Tensor:
    memory = torch.zeros(blocks, kv_heads, PAGE, dim, dtype=torch.bfloat16, device=device)
    return memory.permute(0, 2, 1, 3)


def make(rows: int, cos_sin: Tensor, index: int) -> Buffers:
    """Up to 8 rows: requests, each with a page of its own. More: consecutive tokens of one."""
    device = cos_sin.device
    random = generator(device, index)
    blocks = rows if rows <= 8 else rows // PAGE
    pages = torch.randperm(blocks, generator=random, device=device)
    if rows <= 8:
        offsets = torch.randint(PAGE, (rows,), generator=random, device=device)
        slots = pages * PAGE + offsets
        start = index * rows
    else:
        slots = (pages[:, None] * PAGE + torch.arange(PAGE, device=device)).flatten()
        start = index * rows
    positions = (start + torch.arange(rows, device=device)) % cos_sin.shape[0]
    return Buffers(
        randn(device, 3 * index, rows, (HEADS + 2 * KV_HEADS) * DIM),
        near_one(device, 3 * index + 1, DIM),
        near_one(device, 3 * index + 2, DIM),
        cos_sin,
        positions.int(),
        slots.int(),
        cache(blocks, device),
        cache(blocks, device),
        torch.empty(rows, HEADS, DIM, dtype=torch.bfloat16, device=device),
        torch.empty(rows, KV_HEADS, DIM, dtype=torch.bfloat16, device=device),
    )


def launch_bytes(rows: int) -> int:
    read = rows * ((HEADS + 2 * KV_HEADS) * DIM * 2 + DIM * 4 + 4 + 4) + 2 * DIM * 2
    written = rows * ((HEADS + KV_HEADS) * DIM * 2 + 2 * KV_HEADS * DIM * 2)
    return read + written


def chained(sets: Sequence[Buffers]) -> list[Buffers]:
    """The q and k of each launch are nine tenths of the next one's qkv, in its order of memory."""
    linked = []
    for before, after in pairwise(sets):
        rows, memory = after.qkv.shape[0], after.qkv.flatten()
        q, k, _ = memory.split([rows * heads * DIM for heads in (HEADS, KV_HEADS, KV_HEADS)])
        q, k = q.view(rows, HEADS, DIM), k.view(rows, KV_HEADS, DIM)
        linked.append(replace(before, q=q, k=k))
    return [*linked, sets[-1]]


def shared_activations(sets: Sequence[Buffers]) -> list[Buffers]:
    return [replace(each, qkv=sets[0].qkv) for each in sets]


def kernel(buffers: Buffers) -> Outputs:
    q, k = ops.qk_norm_rope_kv_write(*buffers.inputs, EPS)
    return q, k, *cached(buffers)


def kernel_into(buffers: Buffers, *, enable_pdl: bool) -> Outputs:
    """The kernel alone, into given buffers: none of the op's Python stands between launches."""
    q, k = buffers.q, buffers.k
    assert q is not None
    assert k is not None
    if q.is_cuda:
        native = torch.ops.flint_native
        native.qk_norm_rope_kv_write_cuda_out(*buffers.inputs, EPS, q, k, enable_pdl)
    else:
        ops.qk_norm_rope_kv_write(*buffers.inputs, EPS, out=(q, k))
    return q, k, *cached(buffers)


def cached(buffers: Buffers) -> Outputs:
    """Views of the whole caches: outputs too, so that they are compared."""
    return buffers.k_cache, buffers.v_cache


def composition(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
) -> tuple[Tensor, Tensor]:
    """The same in ops of torch."""
    rows = qkv.view(qkv.shape[0], -1, DIM)
    q, k, v = rows.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    cos, sin = cos_sin[positions][:, None].chunk(2, dim=-1)
    turned = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        first, second = F.rms_norm(x, (DIM,), weight, EPS).float().chunk(2, dim=-1)
        halves = first * cos - second * sin, second * cos + first * sin
        turned.append(torch.cat(halves, dim=-1).to(qkv.dtype))
    q, k = turned
    block, offset = slots // PAGE, slots % PAGE
    k_cache[block, offset] = k
    v_cache[block, offset] = v
    return q, k


@bench("qk_norm_rope_kv_write")
def _(device: torch.device) -> Iterator[Group]:
    cos_sin = cos_sin_table(POSITIONS, DIM, theta=THETA).to(device)
    compiled_composition = compiled(composition)

    def torch_peer(buffers: Buffers) -> Outputs:
        return *composition(*buffers.inputs), *cached(buffers)

    def compiled_peer(buffers: Buffers) -> Outputs:
        return *compiled_composition(*buffers.inputs), *cached(buffers)

    peers = [Subject("torch", torch_peer), Subject("torch.compile", compiled_peer)]
    for rows in ROWS:
        new = partial(make, rows, cos_sin)
        case, size, name = f"M={rows}", launch_bytes(rows), "qk_norm_rope_kv_write"
        yield Group(name, size, new, [Subject("flint", kernel, case), *peers])
        if rows in HOT_ROWS:
            yield Group(
                name, size, new, [Subject("flint", kernel, f"{case} hot"), *peers], hot=True
            )
        if rows in CHAINED_ROWS:
            subjects = [
                Subject("flint pdl", partial(kernel_into, enable_pdl=True), f"{case} pdl", chained),
                Subject(
                    "flint chain", partial(kernel_into, enable_pdl=False), f"{case} chain", chained
                ),
                *(replace(peer, arrange=shared_activations) for peer in peers),
            ]
            yield Group(name, size, new, subjects, chained=True)
