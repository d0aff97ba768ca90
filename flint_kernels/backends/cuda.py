"""Registers a body for CUDA tensors under the ops that have a hand-written kernel.

The kernels are in the native library, as machine code for the GPUs that it was built for. Where it
is not there, or has no code for this GPU, the general body (torch and Triton) of the same op runs
instead; and so it does where a kernel does not take the call, as those for a few tokens do not take
many. Which of the two it is follows from the call's form, the process and the GPU alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from flint_kernels.backends import (
    gpu_general,
    native,
    native_attention,
    native_cuda,
    native_decode,
)
from flint_kernels.ops import REGISTRY, implement

Body = Callable[..., Any]


def register() -> None:
    """A choice between the two bodies under each op that has a kernel in the library."""
    for name in REGISTRY:
        fast = fast_body(name)
        if fast is not None:
            choice = _choice(name, fast, gpu_general.general_body(name))
            implement(name, "CUDA", choice, out_body=choice)


def fast_body(name: str) -> Body | None:
    """The body of op `name` that launches the library's kernel, or None where there is none."""
    for module in (native_cuda, native_decode, native_attention):
        body: Body | None = getattr(module, name, None)
        if body is not None:
            return body
    return None


def why_not(device: torch.device) -> str | None:
    """Why the library's kernels are not in use on this GPU, or None where they are."""
    return _why_not(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _why_not(index: int) -> str | None:
    if torch.version.cuda is None:
        return "The native library's kernels are for NVIDIA GPUs, and this torch is for others."
    return native.cuda_why_not(torch.cuda.get_device_capability(index), native.driver_cuda())


def _choice(name: str, fast: Body, general: Body) -> Body:
    outputs = REGISTRY[name].outputs

    def body(**arguments: Any) -> Any:
        # The first argument of every op is a tensor. Loading the library waits for the first call,
        # so that importing the package is quick.
        device = next(iter(arguments.values())).device
        if why_not(device) is None:
            result = fast(**arguments)
            if result is not NotImplemented:
                return result
        # The general bodies take no buffers: what they return is copied.
        return general(**{k: v for k, v in arguments.items() if k not in outputs})

    return body
