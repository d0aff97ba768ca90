"""Registers a body for CPU tensors under every op.

The plain PyTorch bodies of `flint_kernels.reference` are complete: they need nothing built, they
are what every other body is tested against, and with FP32 inputs they are the oracle. Where the
C++ library is there, BF16 calls of the ops that it has, and sampling, go to `native_cpu` instead.
Which of the two it is stays the same for the whole process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flint_kernels.backends import native, native_cpu
from flint_kernels.ops import REGISTRY, implement
from flint_kernels.reference import (
    attention,
    experts,
    kv_write,
    linear,
    low_latency,
    norm,
    nvfp4,
    sampling,
)

_FAMILIES = (attention, experts, kv_write, linear, low_latency, norm, nvfp4, sampling)


def register() -> None:
    """One body a declared op: the reference's, or a choice between it and the native one."""
    for name in REGISTRY:
        if name not in native_cpu.NAMES:
            implement(name, "CPU", reference_body(name))
        else:
            choice = _choice(name, native_cpu.body(name), reference_body(name))
            shortcut = native_cpu.shortcut(name, _library_in_use)
            implement(name, "CPU", choice, out_body=choice, shortcut=shortcut)


def reference_body(name: str) -> Callable[..., Any]:
    """The plain PyTorch body of op `name`; it takes the op's arguments by name."""
    bodies = (getattr(family, name, None) for family in _FAMILIES)
    body: Callable[..., Any] = next(body for body in bodies if body is not None)
    return body


def _library_in_use() -> bool:
    """The one question that both a body and its shortcut ask."""
    return native.is_available()


def _choice(
    name: str, fast: Callable[..., Any], reference: Callable[..., Any]
) -> Callable[..., Any]:
    outputs = REGISTRY[name].outputs

    def body(**arguments: Any) -> Any:
        # The first argument of every op is its activations; FP32 ones ask for the oracle.
        activations = next(iter(arguments.values()))
        if native_cpu.takes(name, activations) and _library_in_use():
            return fast(**arguments)
        # The reference bodies take no buffers: what they return is copied.
        return reference(**{k: v for k, v in arguments.items() if k not in outputs})

    return body
