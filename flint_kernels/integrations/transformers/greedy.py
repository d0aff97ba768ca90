"""Greedy search by the library's own decode loop, where `generate()` asks for nothing beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flint_kernels.generation import DecodeLoop, SamplingParams
from flint_kernels.generation.loop import LAG
from flint_kernels.generation.sampling import check_token
from flint_kernels.integrations.transformers.cache import FlintCache

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer

_GREEDY = SamplingParams(greedy=True)


def loop_for(cache: FlintCache, steps: int) -> DecodeLoop | None:
    """The loop that makes `steps` steps of the cache's rows; None where there is none: on the CPU,
    for more rows than its graphs have, and where the cache would have to grow on the way."""
    decoder, rows = cache.room.decoder, len(cache.requests)
    if decoder is None or rows > decoder.largest:
        return None
    return decoder.loop(rows) if max(cache.lengths) + steps <= cache.room.length else None


def search(
    loop: DecodeLoop,
    cache: FlintCache,
    first: Tensor,
    steps: int,
    *,
    stop_ids: set[int],
    pad: int,
    streamer: BaseStreamer | None,
) -> Tensor:
    """The tokens of each row, `first` [B] and up to `steps` more: [B, tokens], on the host.

    Ends where every row has had one of `stop_ids`; what a row has after its own is `pad`. A few
    steps more than that may have been made in the cache.

    Raises:
        ValueError: a row of logits after the first has no candidate, NaN or -inf alone.
    """
    ended = [False] * len(first)
    columns: list[Tensor] = []

    def take(tokens: list[int]) -> None:
        check_token(min(tokens))
        row = [pad if over else token for token, over in zip(tokens, ended, strict=True)]
        ended[:] = [over or token in stop_ids for token, over in zip(row, ended, strict=True)]
        columns.append(torch.tensor(row))
        if streamer is not None:
            streamer.put(columns[-1])

    take(first.tolist())
    if steps > 0 and not all(ended):
        requests, count = cache.requests, len(ended)
        cache.room.paged.hold(requests, [length + steps for length in cache.lengths])
        loop.start(first, requests, [_GREEDY] * count, [0] * count)
        try:
            while not all(ended):
                while steps > 0 and loop.under_way <= LAG:
                    cache.extend()
                    loop.launch()
                    steps -= 1
                if not loop.under_way:
                    break
                take(loop.take())
        finally:
            while loop.under_way:
                loop.take()
    return torch.stack(columns, dim=1)
