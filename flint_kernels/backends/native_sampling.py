"""The GPU body of the library's sampling, for rows of few candidates.

It returns NotImplemented, with nothing written, where the kernels do not take the call: a general
body has to. They read nothing back, so a CUDA graph can hold them, and give the same token for the
same row in any batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flint_kernels.backends.native_cuda import _rows

_native = torch.ops.flint_native

ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a", "sm_120a")


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seed: Tensor,
    offset: Tensor,
    enable_pdl: bool = False,
    max_top_k: int = 0,
    tokens_out: Tensor | None = None,
) -> Any:
    """Up to 32 candidates a row, as max_top_k promises it."""
    if max_top_k == 0 or logits.shape[0] == 0:
        return NotImplemented
    settings = [value.contiguous() for value in (temperature, top_k, top_p, seed, offset)]
    rows = logits.shape[0]
    tokens = tokens_out
    if tokens is None:
        tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    launched = _native.sample_cuda_out(_rows(logits), *settings, max_top_k, tokens, enable_pdl)
    return tokens if launched else NotImplemented
