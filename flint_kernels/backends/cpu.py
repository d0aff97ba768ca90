"""Registers the plain PyTorch bodies for CPU tensors."""

from __future__ import annotations

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
    """One body a declared op, found by its name in the family's reference module."""
    for name in REGISTRY:
        bodies = [getattr(family, name) for family in _FAMILIES if hasattr(family, name)]
        implement(name, "CPU", bodies[-1])
