"""The CPU bodies of BF16 calls, by the C++ library: the arithmetic of `flint_kernels.reference`.

Each is one call of `flint_native::<the op's name>`, which takes all that the op takes, the outputs'
buffers (contiguous, written in place) where there are any, and `checked`. Rows are summed in an
order of their own, so the bits differ from the reference's where a sum's order shows, and like its,
they depend on nothing but the row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

NAMES = frozenset(
    {
        "rms_norm",
        "fused_add_rms_norm",
        "silu_and_mul",
        "nvfp4_linear",
        "bf16_linear",
        "nvfp4_linear_silu_and_mul",
        "bf16_linear_silu_and_mul",
        "nvfp4_lm_head",
        "bf16_lm_head",
        "qk_norm_rope_kv_write",
        "nvfp4_qkv_norm_rope_kv_write",
        "bf16_qkv_norm_rope_kv_write",
        "attention_decode",
        "attention_prefill",
        "router_topk",
        "fused_add_rms_norm_router_topk",
        "nvfp4_routed_experts",
        "bf16_routed_experts",
        "nvfp4_moe_gate_up",
        "bf16_moe_gate_up",
        "nvfp4_moe_down",
        "bf16_moe_down",
        "sample",
    }
)


@cache
def raw(name: str) -> Callable[..., list[Tensor]]:
    """The library's op of that name; its outputs are empty where it leaves the call to Python."""
    op: Callable[..., list[Tensor]] = getattr(torch.ops.flint_native, name).default
    return op


def takes(name: str, activations: Tensor) -> bool:
    """Whether calls with these activations are the library's: sampling has FP32 logits alone."""
    return activations.dtype == (torch.float32 if name == "sample" else torch.bfloat16)


def body(name: str) -> Callable[..., Any]:
    """The body of op `name`, for calls that have passed all checks."""

    def call(*args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, ...]:
        results = raw(name)(*args, **kwargs, checked=True)
        return results[0] if len(results) == 1 else tuple(results)

    return call


def shortcut(name: str, is_available: Callable[[], bool]) -> Callable[..., Sequence[Tensor]]:
    """For `implement`: the library remembers which calls have passed (csrc/torch/call.h).

    `is_available` says whether the library is loaded, and loads it. It is asked at every call, as
    the body's choice is: the two must not go different ways.
    """
    op: Callable[..., list[Tensor]] | None = None

    def call(*args: Any, **kwargs: Any) -> Sequence[Tensor]:
        nonlocal op
        # Loading the library waits for the first call, so that importing the package is quick.
        if not is_available():
            return ()
        if op is None:
            op = raw(name)
        return op(*args, **kwargs)

    return call
