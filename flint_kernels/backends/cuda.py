"""Registers a body for CUDA tensors under the ops that have a hand-written kernel.

The kernels are in the native library, as machine code for the GPUs that it was built for. Where it
is not there, or has no code for this GPU, the general body (torch and Triton) of the same op runs
instead; and so it does where a kernel does not take the call, as those for a few tokens do not take
many. Which of them it is follows from the call's form, the process and the GPU alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch

from flint_kernels.backends import (
    gpu_general,
    native,
    native_attention,
    native_cuda,
    native_decode,
    native_many,
    native_prefill,
    native_router,
    native_sampling,
)
from flint_kernels.ops import REGISTRY, implement

Body = Callable[..., Any]

# In the order in which they are asked.
_MODULES: tuple[ModuleType, ...] = (
    native_cuda,
    native_decode,
    native_many,
    native_attention,
    native_prefill,
    native_router,
    native_sampling,
)


def register() -> None:
    """A choice between the bodies under each op that has a kernel in the library."""
    for name in REGISTRY:
        fast = fast_bodies(name)
        if fast:
            choice = _choice(name, _first_to_take(fast), gpu_general.general_body(name))
            implement(name, "CUDA", choice, out_body=choice)


def fast_bodies(name: str) -> list[Body]:
    """The bodies of op `name` that launch the library's kernels, in the order in which they are
    asked; none where there is no kernel."""
    return [getattr(module, name) for module in _MODULES if hasattr(module, name)]


def _first_to_take(bodies: Sequence[Body]) -> Body:
    """One body of several: that which does not hand the call back."""
    if len(bodies) == 1:
        return bodies[0]

    def body(**arguments: Any) -> Any:
        for one in bodies:
            result = one(**arguments)
            if result is not NotImplemented:
                return result
        return NotImplemented

    return body


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
