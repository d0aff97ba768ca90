"""Decode steps as CUDA graphs: a graph for each of a few batch sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flint_kernels.arguments import integer
from flint_kernels.generation.capture import capture, check_not_capturing
from flint_kernels.generation.loop import DecodeLoop
from flint_kernels.model.cache import PagedKVCache
from flint_kernels.model.calls import Launch
from flint_kernels.model.flint import Flint
from flint_kernels.ops import make_workspace

BUCKETS = (1, 2, 4, 8)


class Decoded(NamedTuple):
    """What a step of n requests gives: views of its bucket's buffers, good until the next step."""

    logits: Tensor  # [n, vocab_size] fp32
    hidden: Tensor  # [n, H] final hidden states, normed, in the compute dtype
    positions: Tensor  # [n] int32, of the tokens that were given


class GraphDecoder:
    """Decodes one token for each of up to `largest` requests by replaying a CUDA graph.

    A batch is padded to the smallest bucket that holds it, and every bucket has a graph of its own,
    captured at its first step or by `capture()`. Positions, slots, lengths and page tables are read
    on the device in each replay, so nothing is ever captured again. A step costs the host one
    transfer, one copy of the ids and one launch; and a copy of the tables where a request has taken
    a page or the requests have changed.

    No graph shares anything with another but the weights and the cache: each has its own input
    buffers, workspace, memory pool and outputs. So two decoders, each with its own cache, may run
    on two streams at once. Steps of one decoder, or of one cache, belong on one stream, and in one
    thread at a time. Keep a decoder until its last step has finished.

    The graphs hold the addresses of the model's tensors: move or replace them before, not after.

    Args:
        model: on a CUDA device.
        cache: of that device; the requests are its own, and each step's tokens are written there.
        buckets: numbers of rows, each at most the cache's max_requests; None: 1, 2, 4 and 8, as far
            as that allows.
        graphs: False runs the same padded steps eagerly, on the CPU too: the same bits.
        enable_pdl: launches the graphs' kernels with programmatic dependent launch, where they have
            it. It changes no bits.

    Raises:
        ValueError: a bucket out of range; a cache of another device; or a model that is not on a
            CUDA device, unless graphs is False.
        TypeError: a bucket is no integer.
    """

    def __init__(
        self,
        model: Flint,
        cache: PagedKVCache,
        *,
        buckets: Sequence[int] | None = None,
        graphs: bool = True,
        enable_pdl: bool = True,
    ) -> None:
        self.buckets = _make_buckets(buckets, cache.max_requests)
        _check_devices(model, cache, graphs)
        self.model = model
        self.cache = cache
        self.graphs = graphs
        self._enable_pdl = enable_pdl and graphs
        self._steps: dict[int, _Step] = {}
        self._loops: dict[int, DecodeLoop] = {}
        self._weights = _address(model)

    @property
    def largest(self) -> int:
        """The most requests that a step may have."""
        return self.buckets[-1]

    def capture(self) -> None:
        """Captures the graphs that are not captured yet, so that no step has to wait for it.

        Takes a second or so a graph, and minutes where Triton has to compile first. Live requests
        and the cache stay as they are.

        Raises:
            RuntimeError: as a step's.
        """
        for rows in self.buckets:
            self._step(rows)

    def loop(self, requests: int) -> DecodeLoop:
        """The loop of the smallest bucket that holds that many requests; the same at each call.

        Raises:
            ValueError: it is not 1 to `largest`.
            RuntimeError: the model's tensors have moved since the decoder was made.
        """
        self._check_count(requests)
        self._check_weights()
        rows = self._bucket(requests)
        if rows not in self._loops:
            step = _Step(self.model, self.cache, rows, self._enable_pdl)
            self._loops[rows] = DecodeLoop(step, self.cache, graphs=self.graphs)
        return self._loops[rows]

    @torch.inference_mode()
    def __call__(self, input_ids: Tensor, requests: Sequence[int]) -> Decoded:
        """Plans and runs one step: row i has requests[i]'s next token, input_ids[i].

        Args:
            input_ids: [n] int32 or int64 token ids in [0, vocab_size), on any device.
            requests: live requests of the cache, none twice; 1 to `largest`.

        Raises:
            ValueError: too few or too many requests, other ids than requests, or what
                `PagedKVCache.plan_decode` refuses.
            OutOfPagesError: the cache's pool is too small. In every case nothing has changed.
            RuntimeError: the model's tensors have moved since the graphs were captured; or the
                capture, at a bucket's first step, failed.
        """
        count = len(requests)
        self._check_count(count)
        if input_ids.shape != (count,) or input_ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"input_ids: got {input_ids.dtype} of shape {list(input_ids.shape)}; want int32 or "
                f"int64 of shape [{count}], one id for each of requests."
            )
        step = self._step(self._bucket(count))
        self.cache.plan_decode(requests, into=step.buffers)
        step.take(input_ids)
        hidden, logits = step.run()
        return Decoded(logits[:count], hidden[:count], step.buffers.batch.positions[:count])

    def _bucket(self, count: int) -> int:
        return next(rows for rows in self.buckets if rows >= count)

    def _check_count(self, count: int) -> None:
        if not 1 <= count <= self.largest:
            raise ValueError(
                f"requests: got {count}; want 1 to {self.largest}, the largest bucket. Decode them "
                "in several steps, or make the decoder with a larger bucket."
            )

    def _check_weights(self) -> None:
        if _address(self.model) != self._weights:
            raise RuntimeError(
                "model: got tensors that have moved since the decoder was made; want those whose "
                "addresses its graphs hold. Make another decoder."
            )

    @torch.inference_mode()
    def _step(self, rows: int) -> _Step:
        self._check_weights()
        step = self._steps.get(rows)
        if step is None:
            check_not_capturing(self.model.device)
            step = _Step(self.model, self.cache, rows, self._enable_pdl)
            if self.graphs:
                step.capture()
            self._steps[rows] = step
        return step


class _Step:
    """A step of `rows` rows: what it reads and writes but for weights and cache, and how it runs.

    A new one is padding throughout, so running it to warm up writes no cache and reads none.
    """

    def __init__(self, model: Flint, cache: PagedKVCache, rows: int, enable_pdl: bool) -> None:
        self._model = model
        self._cache = cache
        self.buffers = cache.make_decode_buffers(rows)
        self.ids = torch.zeros(rows, dtype=torch.int64, device=model.device)
        self._count = 0  # rows of ids that are not padding
        self.launch = Launch(make_workspace(model.device), enable_pdl)
        self._replay: Callable[[], None] | None = None
        self._outputs: tuple[Tensor, Tensor] | None = None  # of every replay

    def take(self, ids: Tensor) -> None:
        """Ids of the live rows. The others stay 0: equal rows, which take the same experts."""
        if len(ids) < self._count:
            self.ids[len(ids) :].zero_()
        self._count = len(ids)
        self.ids[: self._count].copy_(ids, non_blocking=True)

    def capture(self) -> None:
        """From here on `run` replays."""
        self._replay, self._outputs = capture(self.forward, self._model.device)

    def run(self) -> tuple[Tensor, Tensor]:
        """[rows, H] final hidden states and [rows, vocab_size] fp32 logits."""
        if self._replay is None or self._outputs is None:
            return self.forward()
        self._replay()
        return self._outputs

    def forward(self) -> tuple[Tensor, Tensor]:
        """What `run` gives, launched one by one."""
        hidden = self._model.decode(self.ids, self.buffers.batch, self._cache, self.launch)
        return hidden, self._model.logits(hidden, self.launch.enable_pdl)


def _make_buckets(buckets: Sequence[int] | None, most: int) -> tuple[int, ...]:
    if buckets is None:
        return tuple(sorted({min(rows, most) for rows in BUCKETS}))
    want = f"1 to {most}, the cache's max_requests"
    numbers = sorted({integer("buckets", rows, want) for rows in buckets})
    if not numbers or numbers[0] < 1 or numbers[-1] > most:
        raise ValueError(f"buckets: got {list(buckets)}; want at least one, and each {want}.")
    return tuple(numbers)


def _check_devices(model: Flint, cache: PagedKVCache, graphs: bool) -> None:
    device, other = model.device, cache.block_table.device
    if graphs and device.type != "cuda":
        raise ValueError(
            f"model: got one on {device}; want one on a CUDA device, which has graphs. Move it, or "
            "pass graphs=False."
        )
    if other != device:
        raise ValueError(
            f"cache: got one on {other}; want one on {device}, where the model is. "
            "model.make_cache() gives one."
        )


def _address(model: Flint) -> int:
    return model.embed_tokens.weight.data_ptr()
