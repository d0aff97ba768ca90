"""CUDA graphs that share nothing, so that two of them may run at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")

_one_at_a_time = threading.Lock()  # torch can have one capture under way in a process


def capture(step: Callable[[], Result], device: torch.device) -> tuple[Callable[[], None], Result]:
    """Captures what `step` does on `device` as a CUDA graph with a memory pool of its own.

    `step` runs twice: once ordinarily, which compiles and sets up what has to be (minutes where
    Triton compiles for the first time on a machine), then for the capture. Both are on a stream
    made for it; the whole device is waited for. The tensors that `step` returns are the graph's
    own: every replay writes them anew.

    Returns: the replay, on the current stream, and what `step` returned. The graph lives as long
        as its replay is referred to; drop it when no replay is under way.

    Raises:
        RuntimeError: what `step` does cannot be captured.
    """
    with _one_at_a_time, torch.cuda.device(device):
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # torch keeps one cuBLAS workspace for each stream, outside a graph's pool or in that of the
        # first graph to be captured on it, and hands out streams again and again: two graphs, or a
        # graph and eager work, would write the same workspace. Forgotten before and after, it is
        # allocated in this graph's pool and used by this graph alone.
        _forget_cublas_workspaces()
        try:
            # Another thread may allocate or wait meanwhile; what this one does is checked.
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                result = step()
        finally:
            _forget_cublas_workspaces()
    return graph.replay, result


def check_not_capturing(device: torch.device) -> None:
    """Raises RuntimeError where the current stream is being captured: nothing can be inside."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "capture: got a stream that is being captured, and a step whose graph is not captured "
            "yet; want one after the other. Call the decoder's capture() before."
        )


def _forget_cublas_workspaces() -> None:
    torch._C._cuda_clearCublasWorkspaces()
