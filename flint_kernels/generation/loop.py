"""Decoding without the host in between: a step draws its tokens and plans the next step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from flint_kernels.generation.capture import capture, check_not_capturing
from flint_kernels.generation.sampling import SamplingParams, promised_top_k
from flint_kernels.model import calls
from flint_kernels.model.buffers import DecodeBuffers
from flint_kernels.model.cache import PagedKVCache
from flint_kernels.model.calls import Launch

LAG = 4
"""Steps that are launched ahead of the one whose tokens the host looks at."""

_HISTORY = 2 * LAG  # tokens of a row that the device keeps; more than are ever on their way


class Step(Protocol):
    """A decode step in buffers that stay."""

    buffers: DecodeBuffers
    ids: Tensor  # [rows] int64
    launch: Launch

    def forward(self) -> tuple[Tensor, Tensor]:
        """[rows, H] hidden states and [rows, vocab_size] fp32 logits."""


class DecodeLoop:
    """Decodes the same requests step after step; a `GraphDecoder` makes it.

    Forward, head, sampling, and the next step's ids, positions, slots and lengths are one CUDA
    graph. So the host launches steps ahead, and each step's tokens come to it by a copy beside the
    steps: no step waits for the host. Tokens are those of single steps with the same settings.

        loop.start(first_ids, requests, params, seeds)
        loop.launch()          # as far ahead as one likes, up to `LAG` + 1 under way
        tokens = loop.take()   # of the oldest step, one a request

    Steps belong on one stream, and in one thread at a time. A graph is captured at the first start
    that needs it.

    Args:
        step: its buffers; they are the loop's alone.
        cache: that of the step.
        graphs: False launches the kernels one by one, on the CPU too.
    """

    def __init__(self, step: Step, cache: PagedKVCache, *, graphs: bool) -> None:
        self._step = step
        self._cache = cache
        self._graphs = graphs
        rows, device = step.buffers.rows, step.ids.device
        self._offsets = torch.zeros(rows, dtype=torch.int64, device=device)
        self._history = torch.full((rows, _HISTORY), -1, dtype=torch.int64, device=device)
        self._temperature = torch.zeros(rows, device=device)
        self._top_k = torch.zeros(rows, dtype=torch.int32, device=device)
        self._top_p = torch.ones(rows, device=device)
        self._seed = torch.zeros(rows, dtype=torch.int64, device=device)
        self._replays: dict[int, Callable[[], None]] = {}  # by the promise that `sample` gets
        self._requests: list[int] = []
        self._positions: list[int] = []  # of the tokens that the next step to be taken draws
        self._max_top_k = 0
        self._fresh = False  # whether the next step has been planned by the host
        self._stream = _Stream(self._history, LAG + 1)

    @property
    def under_way(self) -> int:
        """Steps that were launched and not taken yet."""
        return len(self._stream)

    @torch.inference_mode()
    def start(
        self,
        input_ids: Tensor,
        requests: Sequence[int],
        params: Sequence[SamplingParams],
        seeds: Sequence[int],
    ) -> None:
        """Begins with the next token of each request, input_ids[i]; plans the first step.

        Nothing may be under way. Tokens up to the end of the loop are reserved step by step;
        `PagedKVCache.hold` takes their pages beforehand, and spares the loop that.

        Rows without a request are drawn greedily, and all take the same token: their experts are
        the same few.

        Raises:
            ValueError: input_ids, params or seeds are not one for each request; or as
                `PagedKVCache.plan_decode`, which raises OutOfPagesError too. Then another start has
                to come before a launch.
            RuntimeError: steps are under way; or a capture failed.
        """
        if self._stream:
            raise RuntimeError(
                f"start: got {self.under_way} steps under way; want none. Take their tokens first."
            )
        count = len(requests)
        _check_start(input_ids, count, params, seeds)
        self._requests, self._positions, self._fresh = [], [], False  # until all of it is done
        self._max_top_k = promised_top_k(params)
        self._prepare()
        positions = [self._cache.length(request) for request in requests]
        self._cache.plan_decode(requests, into=self._step.buffers)
        self._step.ids[count:].zero_()
        self._step.ids[:count].copy_(input_ids, non_blocking=True)
        positions = [position + 1 for position in positions]
        _send(self._offsets, positions, 0)
        _send(self._temperature, [0.0 if p.greedy else p.temperature for p in params], 0.0)
        _send(self._top_k, [p.top_k for p in params], 0)
        _send(self._top_p, [p.top_p for p in params], 1.0)
        _send(self._seed, seeds, 0)
        self._requests, self._positions, self._fresh = list(requests), positions, True

    @torch.inference_mode()
    def launch(self) -> None:
        """Runs a step.

        Raises:
            RuntimeError: nothing was started; or `LAG` steps and one are under way.
            ValueError, OutOfPagesError: as `PagedKVCache.plan_decode`; nothing has changed.
        """
        if not self._requests:
            raise RuntimeError(
                "launch: got no requests; want those of a start that succeeded. Call start first."
            )
        if self.under_way > LAG:
            raise RuntimeError(
                f"launch: got {self.under_way} steps under way; want at most {LAG} at a launch. "
                "Take the tokens of the oldest one."
            )
        if not self._fresh:
            self._cache.advance_decode(self._requests, self._step.buffers)
        self._fresh = False
        replay = self._replays.get(self._max_top_k)
        if replay is None:
            self._run()
        else:
            replay()
        self._stream.send()

    def take(self) -> list[int]:
        """The tokens of the oldest step, one a request; waits for them. -1: no candidate.

        Raises:
            RuntimeError: no step is under way.
        """
        if not self._stream:
            raise RuntimeError("take: got no step under way; want one. Launch it first.")
        history = self._stream.receive()
        tokens = [history[row][at % _HISTORY] for row, at in enumerate(self._positions)]
        self._positions = [position + 1 for position in self._positions]
        return tokens

    def _prepare(self) -> None:
        """Captures the step where that is to be done, and makes all rows padding before."""
        self._step.buffers.send([], [], [], [])
        if self._graphs and self._max_top_k not in self._replays:
            check_not_capturing(self._step.ids.device)
            self._replays[self._max_top_k], _ = capture(self._run, self._step.ids.device)

    def _run(self) -> tuple[Tensor, ...]:
        step, batch = self._step, self._step.buffers.batch
        _, logits = step.forward()
        tokens = calls.sample(
            logits,
            self._temperature,
            self._top_k,
            self._top_p,
            self._seed,
            self._offsets,
            enable_pdl=step.launch.enable_pdl,
            max_top_k=self._max_top_k,
        )
        calls.decode_advance(
            tokens,
            batch.block_table,
            batch.window_block_table,
            self._cache.page_size,
            step.ids,
            batch.positions,
            batch.slots,
            batch.window_slots,
            batch.seq_lens,
            self._offsets,
            self._history,
            enable_pdl=step.launch.enable_pdl,
        )
        return (tokens,)


class _Stream:
    """Copies of a small tensor to the host, beside what the current stream does next."""

    def __init__(self, tensor: Tensor, places: int) -> None:
        self._tensor = tensor
        self._cuda = tensor.device.type == "cuda"
        self._sent: deque[int] = deque()
        self._next = 0
        shape = (places, *tensor.shape)
        self._host = torch.empty(shape, dtype=tensor.dtype, pin_memory=self._cuda)
        if self._cuda:
            self._side = torch.cuda.Stream(tensor.device)
            self._written = [torch.cuda.Event() for _ in range(places)]
            self._copied = [torch.cuda.Event() for _ in range(places)]

    def __len__(self) -> int:
        return len(self._sent)

    def send(self) -> None:
        place = self._next
        self._next = (place + 1) % len(self._host)
        self._sent.append(place)
        if not self._cuda:
            self._host[place].copy_(self._tensor)
            return
        self._written[place].record(torch.cuda.current_stream(self._tensor.device))
        self._side.wait_event(self._written[place])
        with torch.cuda.stream(self._side):
            self._host[place].copy_(self._tensor, non_blocking=True)
        self._copied[place].record(self._side)

    def receive(self) -> list[list[int]]:
        place = self._sent.popleft()
        if self._cuda:
            self._copied[place].synchronize()
        values: list[list[int]] = self._host[place].tolist()
        return values


def _check_start(
    input_ids: Tensor, count: int, params: Sequence[SamplingParams], seeds: Sequence[int]
) -> None:
    if input_ids.shape != (count,) or input_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"input_ids: got {input_ids.dtype} of shape {tuple(input_ids.shape)}; want int32 or "
            f"int64 of shape ({count},), one token for each of requests."
        )
    if not len(params) == len(seeds) == count:
        raise ValueError(
            f"params, seeds: got {len(params)} and {len(seeds)}; want {count} each, one for each "
            "of requests."
        )


def _send(tensor: Tensor, values: Sequence[float], rest: float) -> None:
    """`values`, and `rest` in the rows behind them, in stream order."""
    cuda = tensor.device.type == "cuda"
    filled = [*values, *[rest] * (len(tensor) - len(values))]
    host = torch.tensor(filled, dtype=tensor.dtype, pin_memory=cuda)
    tensor.copy_(host, non_blocking=True)
