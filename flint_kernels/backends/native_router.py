"""The GPU body of the library's choice of experts, for any number of tokens.

It returns NotImplemented, with nothing written, where the kernel does not take the call: a general
body has to. It reads nothing back, so a CUDA graph can hold it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flint_kernels.backends.native_cuda import _rows

_native = torch.ops.flint_native

ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a", "sm_120a")


def router_topk(
    logits: Tensor,
    top_k: int,
    renormalize: bool,
    enable_pdl: bool = False,
    topk_weights_out: Tensor | None = None,
    topk_ids_out: Tensor | None = None,
) -> Any:
    """BF16 logits of up to 1,024 experts, and up to 32 choices."""
    if logits.dtype != torch.bfloat16 or logits.numel() == 0:
        return NotImplemented
    shape, device = (logits.shape[0], top_k), logits.device
    weights, ids = topk_weights_out, topk_ids_out
    weights = torch.empty(shape, dtype=torch.float32, device=device) if weights is None else weights
    ids = torch.empty(shape, dtype=torch.int32, device=device) if ids is None else ids
    launched = _native.router_topk_cuda_out(
        _rows(logits), top_k, renormalize, weights, ids, enable_pdl
    )
    return (weights, ids) if launched else NotImplemented
