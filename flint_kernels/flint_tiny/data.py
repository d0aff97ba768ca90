"""Batches for training and windows for evaluation, from the packed token files of `corpus`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


def load_tokens(path: Path, device: torch.device) -> Tensor:
    """The uint16 token file `path` as int32 [tokens] on `device`."""
    tokens = np.load(path, allow_pickle=False)
    return torch.from_numpy(tokens.astype(np.int32)).to(device)


def batches(tokens: Tensor, batch: int, length: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (inputs, targets), int64 [batch, length] each, targets one token ahead.

    Each epoch cuts `tokens` into windows from a new random offset and shuffles them: every token
    is seen once an epoch, with another context each time.
    """
    if len(tokens) < 2 * length + 1:
        raise ValueError(
            f"tokens: {len(tokens)} of them, wanted at least {2 * length + 1} for windows of "
            f"{length}; use a longer corpus or a smaller length"
        )
    random = np.random.default_rng(seed)
    ahead = torch.arange(length + 1, device=tokens.device)
    pending = np.empty(0, dtype=np.int64)
    while True:
        while len(pending) < batch:
            starts = np.arange(random.integers(length), len(tokens) - length, length)
            pending = np.concatenate((pending, random.permutation(starts)))
        starts, pending = pending[:batch], pending[batch:]
        # A copy from pageable memory waits for the GPU: pin it, so that steps queue up.
        index = torch.from_numpy(starts.copy())
        if tokens.is_cuda:
            index = index.pin_memory()
        index = index.to(tokens.device, non_blocking=True)
        window = tokens[index[:, None] + ahead].long()
        yield window[:, :-1], window[:, 1:]


def windows(tokens: Tensor, length: int, limit: int | None) -> Tensor:
    """Consecutive windows [n, length + 1] int64 that overlap by one token; a short tail is dropped.

    So each token but the first is predicted once, from the window's tokens before it. `limit`
    keeps the first windows only.
    """
    return tokens.unfold(0, length + 1, length)[:limit].long()
