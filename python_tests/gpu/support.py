"""What the GPU tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flint_kernels.ops import REGISTRY

GPU = "cuda"
Bound = dict[str, Any]


def on_gpu(arguments: Bound, activations: torch.dtype | None = None) -> Bound:
    """Copies on the GPU, strides kept; BF16 tensors as `activations` where that is given."""

    def twin(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        dtype = value.dtype
        if dtype == torch.bfloat16 and activations is not None:
            dtype = activations
        room = torch.empty_strided(value.size(), value.stride(), dtype=dtype, device=GPU)
        return room.copy_(value)

    return {name: twin(value) for name, value in arguments.items()}


def call(name: str, arguments: Bound) -> tuple[torch.Tensor, ...]:
    """The op, through the dispatcher."""
    return as_tuple(REGISTRY[name].packet.default(**arguments))


def as_tuple(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else () if result is None else (result,)


def tensors(arguments: Bound) -> dict[str, torch.Tensor]:
    return {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes: NaN equals itself, and +0 is not -0."""
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def captured(step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of `step`, warmed up outside, and what it returns when replayed."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph, result


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the difference over the norm of `want`, in fp64."""
    got, want = got.to(torch.float64), want.to(torch.float64)
    return float((got - want).norm() / want.norm())
