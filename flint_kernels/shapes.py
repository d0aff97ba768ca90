"""Shapes that several layers take apart in the same way."""

from __future__ import annotations

import torch


def flat_rows(x: torch.Tensor) -> torch.Tensor:
    """x [..., K] as [M, K]. `reshape(-1, K)` has no answer where K is 0, and K may be."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])
