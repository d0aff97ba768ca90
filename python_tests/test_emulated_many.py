"""The kernels around the experts of many tokens, from their own sources, on the CPU (see
`test_emulated_attention`): entries in the order of their experts, rows brought together, and the
combination. The products themselves are the tensor cores'."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from emulated import compiled, pointer
from op_samples import randn
from torch import Tensor

TILE_FIELDS = 4  # expert, first, count, and a counter


@pytest.fixture(scope="session")
def library() -> Any:
    found = compiled("many")
    found.emulated_order_words.restype = ctypes.c_int64
    return found


def choices(tokens: int, top_k: int, experts: int, kind: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = tokens, top_k
    if kind == "one":
        return torch.full(shape, experts - 1, dtype=torch.int32)
    if kind == "unequal":
        return (torch.rand(shape, generator=generator) ** 4 * experts).int()
    return torch.randint(-2, experts + 2, shape, generator=generator).int()  # skipped ones, too


class Order:
    """What the kernels make of `ids`: entry, place, and tiles [count, 4]."""

    def __init__(self, library: Any, ids: Tensor, experts: int, tile: int, step: int) -> None:
        self.entries = ids.numel()
        words = library.emulated_order_words(ctypes.c_int64(self.entries), experts, tile)
        self.memory = torch.full((words + 4,), -9, dtype=torch.int32)
        self.memory = self.memory[(-self.memory.data_ptr() // 4) % 4 :]  # 16-byte aligned
        library.emulated_order(
            pointer(ids), *ids.shape, experts, tile, step, pointer(self.memory), self.entries
        )
        padded = -(-self.entries // 4) * 4
        self.entry = self.memory[: self.entries]
        self.place = self.memory[padded : padded + self.entries]
        count = int(self.memory[2 * padded])
        first = 2 * padded + 4
        self.tiles = self.memory[first : first + TILE_FIELDS * count].view(count, TILE_FIELDS)


@pytest.mark.parametrize("kind", ["any", "unequal", "one"])
@pytest.mark.parametrize(
    ("tokens", "experts", "tile", "step"),
    [(1, 7, 8, 8), (170, 256, 32, 32), (171, 256, 32, 32), (500, 512, 256, 32)],
)
def test_entries_are_in_the_order_of_their_experts(
    library: Any, tokens: int, experts: int, tile: int, step: int, kind: str
) -> None:
    """Of up to 1,024 entries by one kernel, of more by three."""
    ids = choices(tokens, 6, experts, kind, tokens)
    order = Order(library, ids, experts, tile, step)
    flat = ids.flatten()
    named = (flat >= 0) & (flat < experts)
    ranked = torch.where(named, flat, experts).argsort(stable=True)[: int(named.sum())]
    assert torch.equal(order.entry[: len(ranked)].long(), ranked)
    place = torch.full((len(flat),), -1)
    place[ranked] = torch.arange(len(ranked))
    assert torch.equal(order.place.long(), place)
    tiles, first = [], 0
    for expert, count in enumerate(torch.bincount(flat[named], minlength=experts).tolist()):
        pieces = -(-count // tile)
        each = -(-count // pieces) if pieces else 0
        size = -(-each // step) * step
        tiles += [[expert, first + i * size, min(size, count - i * size), 0] for i in range(pieces)]
        first += count
    assert order.tiles.tolist() == tiles


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(("row_tiles", "clusters"), [(1, 1), (4, 1), (4, 3), (3, 4), (32, 2)])
def test_rows_are_there_when_a_tile_is_read(
    library: Any, row_tiles: int, clusters: int, together: bool
) -> None:
    """With fewer CTAs than share a tile's rows, and one pair after the other: none waits for one
    that has not started. The counters are zero again: a second time gives the same."""
    tokens, top_k, experts, width = 90, 6, 3, 256
    ids = choices(tokens, top_k, experts, "unequal", 1)
    order = Order(library, ids, experts, 256, 32)
    x = randn(tokens, width + 8, seed=2)
    for seed in (1, 2):
        rows = torch.full((ids.numel(), width), torch.nan, dtype=torch.bfloat16)
        library.emulated_gather(
            pointer(x), ctypes.c_int64(x.stride(0)), width, tokens, top_k, experts,
            pointer(order.memory), row_tiles, clusters, int(together), pointer(rows), seed,
        )  # fmt: skip
        assert torch.equal(rows, x[order.entry.long() // top_k, :width])
        assert order.tiles[:, 3].tolist() == [0] * len(order.tiles)


@pytest.mark.parametrize("top_k", [1, 6, 9])
@pytest.mark.parametrize("shares", [False, True])
def test_the_combination(library: Any, top_k: int, shares: bool) -> None:
    tokens, experts, hidden = 11, 5, 264
    ids = choices(tokens, top_k, experts, "any", 3)
    weights = torch.rand(tokens, top_k)
    outputs = randn(tokens * top_k, hidden, seed=4)
    skipped = (ids < 0) | (ids >= experts)
    outputs.view(tokens, top_k, hidden)[skipped] = torch.nan
    weights[skipped] = torch.nan
    shared = randn(tokens, hidden, seed=5) if shares else None
    out = torch.empty(tokens, hidden, dtype=torch.bfloat16)
    library.emulated_combine(
        pointer(ids), tokens, top_k, experts, pointer(weights), pointer(outputs), pointer(shared),
        pointer(out), hidden, 6,
    )  # fmt: skip
    sums = torch.zeros(tokens, hidden)
    for choice in range(top_k):
        part = weights[:, choice, None] * outputs.view(tokens, top_k, hidden)[:, choice].float()
        sums += torch.where(skipped[:, choice, None], 0.0, part)
    want = sums.bfloat16()
    if shared is not None:
        want = (want.float() + shared.float()).bfloat16()
    torch.testing.assert_close(out, want, rtol=2**-7, atol=2**-9)
