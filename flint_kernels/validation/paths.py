"""The two ways in which a model reads a text: all at once, and token by token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flint_kernels.model.flint import Flint

HiddenStates = Callable[[Flint, Tensor], Tensor]


def prefill(model: Flint, tokens: Tensor) -> Tensor:
    """`tokens` [B, T] in one step; the final hidden states [B, T, H] in the compute dtype."""
    requests, length = tokens.shape
    cache = model.make_cache(requests, requests * _whole_pages(length))
    batch = cache.plan([cache.add() for _ in range(requests)], [length] * requests)
    return model.prefill(tokens.flatten(), batch, cache).view(requests, length, -1)


def decode(model: Flint, tokens: Tensor) -> Tensor:
    """`tokens` [B, T] one at a time, as generation would; hidden states as `prefill`'s.

    The B sequences are requests of one batch; the given tokens are fed whatever the model says.
    """
    requests, length = tokens.shape
    cache = model.make_cache(requests, requests * _whole_pages(length))
    numbers = [cache.add() for _ in range(requests)]
    hidden = torch.empty(
        (requests, length, model.config.hidden_size),
        dtype=model.compute_dtype,
        device=model.device,
    )
    for position in range(length):
        batch = cache.plan_decode(numbers)
        hidden[:, position] = model.decode(tokens[:, position], batch, cache)
    return hidden


PATHS: dict[str, HiddenStates] = {"prefill": prefill, "decode": decode}


def _whole_pages(length: int, page_size: int = 16) -> int:
    return -(-length // page_size) * page_size
