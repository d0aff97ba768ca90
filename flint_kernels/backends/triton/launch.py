"""Launches Triton kernels, and refuses to compile one while a CUDA graph is captured.

Triton compiles at a kernel's first launch with arguments of a kind: dtypes, compile-time
constants, and whether a pointer or an integer is a multiple of 16 or an integer is 1. `launch`
keeps the kinds that it has seen, so that it can tell before a launch whether it would compile.
By convention a kernel's compile-time constants have upper-case names.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_compiled: set[tuple[Any, ...]] = set()
_emulated = False


def launch(
    kernel: Any, programs: int, arguments: dict[str, Any], *, warps: int = 4, stages: int = 2
) -> None:
    """Runs `kernel` in a grid of `programs` on the device of its first tensor.

    Raises RuntimeError inside a graph capture where Triton would have to compile it first.
    """
    if programs == 0:
        return
    _check_dense(kernel, arguments)
    device = next(v.device for v in arguments.values() if isinstance(v, torch.Tensor))
    options = {"num_warps": warps, "num_stages": stages}
    kind = _kind(kernel, device, arguments, options)
    if kind not in _compiled and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{kernel.fn.__name__}: got a call inside a CUDA graph capture for which this kernel "
            "is not compiled, and nothing may compile there; want it compiled before: warm up "
            "first with flint_kernels.warmup(device, config), or make the same call once outside "
            "the capture."
        )
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):  # Triton launches on the current device
            kernel[(programs,)](**arguments, **options)
    else:
        kernel[(programs,)](**arguments, **options)
    _compiled.add(kind)


def _check_dense(kernel: Any, arguments: dict[str, Any]) -> None:
    """Raises ValueError for a tensor of other strides than its kernel goes by: what a kernel knows
    no stride of (`<name>_...`) it takes to be contiguous. Never an error of a caller of an op."""
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and not value.is_contiguous():
            strides = (other for other in arguments if other.startswith(f"{name}_"))
            if next(strides, None) is None:
                raise ValueError(
                    f"{kernel.fn.__name__}: {name} got strides {value.stride()} for shape "
                    f"{list(value.shape)}; want a contiguous tensor. Copy it before the launch."
                )


def _kind(
    kernel: Any, device: torch.device, arguments: dict[str, Any], options: dict[str, int]
) -> tuple[Any, ...]:
    """What decides which compiled variant a call takes; never coarser than Triton's own key."""
    dynamic = getattr(kernel, "do_not_specialize", None) or ()
    parts = [
        value if name.isupper() else _argument_kind(value, name in dynamic)
        for name, value in arguments.items()
    ]
    return (id(kernel), device, *options.values(), *parts)


def _argument_kind(value: Any, dynamic: bool) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int):
        wide = not -(1 << 31) <= value < 1 << 31
        return (wide,) if dynamic else (wide, value == 1, value % 16 == 0)
    return type(value)


def emulating() -> bool:
    """Whether FP32 tensors stand for BF16 ones, so that kernels round them as they would those."""
    return _emulated


@contextmanager
def emulated_bf16() -> Iterator[None]:
    """For tests with Triton's interpreter, which gets BF16 itself wrong: its casts truncate."""
    global _emulated  # noqa: PLW0603
    _emulated = True
    try:
        yield
    finally:
        _emulated = False
