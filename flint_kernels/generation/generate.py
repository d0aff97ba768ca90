"""The generation loop: continuous batching over a paged KV cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flint_kernels.arguments import integer, token_ids
from flint_kernels.generation.graph import GraphDecoder
from flint_kernels.generation.loop import LAG
from flint_kernels.generation.sampling import Sampler, SamplingParams, check_token
from flint_kernels.model.cache import PagedKVCache
from flint_kernels.model.flint import Flint
from flint_kernels.ops import value_checks_enabled


@dataclass(frozen=True)
class Completion:
    """What came of a request.

    Attributes:
        tokens: the new tokens, a stop token not among them.
        finish_reason: "stop" (a stop token), "length" (max_new_tokens), or "abandoned" (the
            iteration was broken off or raised an error); "" before any of these.
        seed: of its draws: given again, it gives the same tokens again.
    """

    tokens: list[int]
    finish_reason: str
    seed: int


@dataclass(eq=False)
class _Request:
    """A prompt on its way; `cached` counts tokens of prompt + tokens that the cache holds."""

    index: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    tokens: list[int] = field(default_factory=list)
    slot: int = -1  # its number in the cache
    cached: int = 0
    finish_reason: str = ""

    @property
    def longest(self) -> int:
        """Tokens it may come to have in the cache; the last one drawn is never written."""
        return len(self.prompt) + self.params.max_new_tokens - 1

    @property
    def prefilling(self) -> bool:
        return self.cached < len(self.prompt)

    def accept(self, token: int) -> bool:
        """Takes a drawn token; whether it is part of the result."""
        if token in self.params.stop_token_ids:
            self.finish_reason = "stop"
            return False
        self.tokens.append(token)
        if len(self.tokens) == self.params.max_new_tokens:
            self.finish_reason = "length"
        return True


class Generation:
    """Generates for several prompts at once; iterate over it, once, for (request, token) pairs.

    Requests join as soon as a place and pages for all their tokens are free, and leave when they
    end. A prompt is taken in chunks, beside which the other requests go on. A request's tokens
    depend on its prompt, settings and seed, and not on its batchmates as far as the ops are
    row-invariant (on the CPU in BF16: to the bit).

    On a CUDA device steps in which every request decodes are a `DecodeLoop`'s, as far as the
    buckets of its `GraphDecoder` go: they are launched a few ahead of the tokens that are yielded.

    Args:
        model: a loaded model.
        prompts: token ids of each request, at least one each.
        params: settings for all, or one for each. One seed for all makes equal prompts give equal
            texts.
        chunk: prompt tokens of a step, all requests together.
        max_batch: requests that run at once.
        cache: to use in place of one made to fit; its requests are released at the end.
        graphs: on a CUDA device, replay decode steps as CUDA graphs. False runs the same steps
            eagerly and gives the same tokens, as FLINT_KERNELS_CHECK_VALUES does, which reads
            values back. On the CPU it changes nothing.
        decoder: of `model`, to use the graphs that it has captured; `cache` is then its cache, and
            `graphs` is not looked at.

    Raises:
        ValueError: a prompt is empty, has an id outside the vocabulary, or does not fit into the
            model's positions or the cache with its max_new_tokens; or the decoder is of another
            model or cache.
        TypeError: an argument of a wrong type, such as ids that are no integers.
        RuntimeError: a second iteration; requests of others leave no room in `cache`.
    """

    def __init__(
        self,
        model: Flint,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chunk: int = 512,
        max_batch: int = 8,
        cache: PagedKVCache | None = None,
        graphs: bool = True,
        decoder: GraphDecoder | None = None,
    ) -> None:
        for name, value in (("chunk", chunk), ("max_batch", max_batch)):
            if integer(name, value, "1 or more") < 1:
                raise ValueError(f"{name}: got {value}; want 1 or more.")
        self._requests = _make_requests(model, prompts, params)
        self._model = model
        self._chunk = chunk
        self._max_batch = max_batch
        if decoder is not None:
            _check_decoder(decoder, model, cache)
            cache = decoder.cache
        self._cache = _make_cache(model, self._requests, max_batch) if cache is None else cache
        if decoder is None and model.device.type == "cuda":
            graphs = graphs and not value_checks_enabled()
            decoder = GraphDecoder(model, self._cache, graphs=graphs)
        self._decoder = decoder
        self._begun = False
        self._waiting: deque[_Request] = deque(self._requests)
        self._running: list[_Request] = []
        self._reserved = 0  # pages that the running requests may come to hold
        # Of the step before: while the batch stays the same, its tensors serve again.
        self._rows: list[_Request] = []
        self._sampler: Sampler | None = None
        self._drawn: Tensor | None = None
        for request in self._requests:
            _check_fits(request, self._cache)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        if self._begun:
            raise RuntimeError(
                "Generation: got a second iteration; want one: its tokens come once. They are in "
                "completions(); make another Generation to generate again."
            )
        self._begun = True
        return self._run()

    def _run(self) -> Iterator[tuple[int, int]]:
        try:
            while self._waiting or self._running:
                self._admit()
                yield from self._loop() if self._loops() else self._step()
        finally:
            for request in self._running:
                self._cache.release(request.slot)
            for request in (*self._running, *self._waiting):
                request.finish_reason = "abandoned"
            self._running.clear()
            self._waiting.clear()

    def completions(self) -> list[Completion]:
        """What each request came to; complete once the iteration has ended."""
        return [
            Completion(request.tokens, request.finish_reason, request.seed)
            for request in self._requests
        ]

    def _admit(self) -> None:
        """Lets waiting requests in, in order, while there is room for all they may need."""
        cache = self._cache
        if not self._waiting:
            return
        held = sum(len(cache.page_ids(request.slot)) for request in self._running)
        free = cache.free_pages + held - self._reserved
        while self._waiting and len(self._running) < self._max_batch and cache.free_requests:
            pages = cache.pages_for(self._waiting[0].longest)
            if pages > free:
                break
            free -= pages
            self._reserved += pages
            request = self._waiting.popleft()
            request.slot = cache.add()
            self._running.append(request)
        if not self._running:
            raise RuntimeError(
                f"cache: got {cache.free_requests} free places and {cache.free_pages} free pages; "
                f"want 1 and {cache.pages_for(self._waiting[0].longest)} for the next request. "
                "Release the requests that were added elsewhere, or leave the cache out."
            )

    def _leave(self, request: _Request) -> None:
        self._cache.release(request.slot)
        self._reserved -= self._cache.pages_for(request.longest)
        self._running.remove(request)

    def _step(self) -> Iterator[tuple[int, int]]:
        rows, tokens = self._forward()
        for token in tokens:
            check_token(token)
        for request, token in zip(rows, tokens, strict=True):
            accepted = request.accept(token)
            if request.finish_reason:
                self._leave(request)
            if accepted:
                yield request.index, token

    def _loops(self) -> bool:
        """Whether the next steps are alike: of these requests, a token each."""
        if self._decoder is None or any(request.prefilling for request in self._running):
            return False
        return 0 < len(self._running) <= self._decoder.largest

    def _loop(self) -> Iterator[tuple[int, int]]:
        """Steps of the running requests until one of them ends, launched ahead of their tokens.

        A request that ends by a stop token is drawn for in a few steps more, whose tokens nobody
        gets; how many does not depend on when the tokens come.
        """
        assert self._decoder is not None
        rows = list(self._running)
        loop = self._decoder.loop(len(rows))
        slots = [request.slot for request in rows]
        self._cache.hold(slots, [request.longest for request in rows])
        ids = torch.tensor([request.tokens[-1] for request in rows])
        loop.start(ids, slots, [r.params for r in rows], [r.seed for r in rows])
        left = min(r.params.max_new_tokens - len(r.tokens) for r in rows)
        self._rows = []  # what `_forward` kept of the step before is old
        try:
            while True:
                while left > 0 and loop.under_way <= LAG:
                    loop.launch()
                    left -= 1
                    for request in rows:
                        request.cached += 1
                if loop.under_way == 0:
                    break
                tokens = loop.take()
                drawn = zip(rows, tokens, strict=True)
                for request, token in [pair for pair in drawn if not pair[0].finish_reason]:
                    check_token(token)
                    accepted = request.accept(token)
                    if request.finish_reason:
                        left = 0
                    if accepted:
                        yield request.index, token
        finally:
            while loop.under_way:  # broken off
                loop.take()
        for request in rows:
            if request.finish_reason:
                self._leave(request)

    @torch.inference_mode()
    def _forward(self) -> tuple[list[_Request], list[int]]:
        """One pass of the model; the requests that got a token, and their tokens."""
        if any(request.prefilling for request in self._running):
            rows, logits, positions = self._prefill()
        else:
            rows, logits, positions = self._decode()
        if not rows:  # chunks within prompts alone: nothing is drawn
            return [], []
        if self._sampler is None or rows != self._rows:
            params, seeds = [r.params for r in rows], [r.seed for r in rows]
            self._sampler = Sampler(params, seeds, self._cache.device)
            self._rows = rows
        self._drawn = self._sampler(logits, positions.to(torch.int64) + 1)
        return rows, self._drawn.tolist()

    def _decode(self) -> tuple[list[_Request], Tensor, Tensor]:
        """A token of every request; these, their logits, and the positions of their tokens."""
        rows = list(self._running)
        if rows == self._rows and self._drawn is not None:
            input_ids = self._drawn  # on the device already
        else:
            input_ids = self._ids([request.tokens[-1] for request in rows])
        slots = [request.slot for request in rows]
        if self._decoder is not None and len(rows) <= self._decoder.largest:
            step = self._decoder(input_ids, slots)
            logits, positions = step.logits, step.positions
        else:
            batch = self._cache.plan_decode(slots)
            logits, positions = self._model(input_ids, batch, self._cache), batch.positions
        for request in rows:
            request.cached += 1
        return rows, logits, positions

    def _prefill(self) -> tuple[list[_Request], Tensor, Tensor]:
        """Decoding requests go on with one token each; the others share the chunk in order.

        Returns: the requests that get a token, their logits, and the positions of their last
            tokens; of no request, the last two are no more than tensors.
        """
        budget = self._chunk
        taking, ids, counts = [], [], []
        for request in self._running:
            if request.prefilling:
                new = request.prompt[request.cached : request.cached + budget]
                budget -= len(new)
            else:
                new = [request.tokens[-1]]
            if new:
                taking.append(request)
                counts.append(len(new))
                ids.extend(new)
                request.cached += len(new)
        wanted = [not request.prefilling for request in taking]
        slots = [request.slot for request in taking]
        batch = self._cache.plan(slots, counts, wanted)
        rows = [request for request in taking if not request.prefilling]
        if not rows:
            return rows, self._model.prefill(self._ids(ids), batch, self._cache), batch.positions
        logits = self._model(self._ids(ids), batch, self._cache)
        return rows, logits, batch.positions[batch.last_rows]

    def _ids(self, ids: list[int]) -> Tensor:
        return torch.tensor(ids, dtype=torch.int64).to(self._cache.device, non_blocking=True)


def generate(
    model: Flint,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    chunk: int = 512,
    max_batch: int = 8,
    cache: PagedKVCache | None = None,
    graphs: bool = True,
    decoder: GraphDecoder | None = None,
    on_token: Callable[[int, int], None] | None = None,
) -> list[Completion]:
    """Runs a `Generation` to its end.

    Args:
        model, prompts, params, chunk, max_batch, cache, graphs, decoder: as `Generation` takes
            them.
        on_token: called with (request, token) for every token as it comes.

    Returns: one `Completion` a prompt, in order.

    Raises:
        ValueError: as `Generation`.
    """
    generation = Generation(
        model,
        prompts,
        params,
        chunk=chunk,
        max_batch=max_batch,
        cache=cache,
        graphs=graphs,
        decoder=decoder,
    )
    for request, token in generation:
        if on_token is not None:
            on_token(request, token)
    return generation.completions()


def _make_requests(
    model: Flint,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams] | None,
) -> list[_Request]:
    if params is None:
        params = SamplingParams()
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    if len(each) != len(prompts):
        raise ValueError(
            f"params: got {len(each)} settings; want one, or {len(prompts)}: one a prompt."
        )
    vocabulary = model.config.vocab_size
    requests = []
    for index, (prompt, settings) in enumerate(zip(prompts, each, strict=True)):
        ids = token_ids(f"prompts[{index}]", prompt)
        if not ids:
            raise ValueError(
                f"prompts[{index}]: got no tokens; want at least one, such as the token that "
                "begins a text."
            )
        if min(ids) < 0 or max(ids) >= vocabulary:
            raise ValueError(
                f"prompts[{index}]: got ids from {min(ids)} to {max(ids)}; want ids in "
                f"[0, {vocabulary}). Is this the model's own tokenizer?"
            )
        total = len(ids) + settings.max_new_tokens
        if total > model.max_positions:
            raise ValueError(
                f"prompts[{index}]: got {len(ids)} tokens and {settings.max_new_tokens} to come "
                f"(max_new_tokens); want at most {model.max_positions} in all. Shorten one of "
                "them, or load the model with more max_positions."
            )
        requests.append(_Request(index, ids, settings, settings.resolved_seed()))
    return requests


def _make_cache(model: Flint, requests: list[_Request], max_batch: int) -> PagedKVCache:
    """Room for the largest `max_batch` requests at once, and no more."""
    places = max(1, min(len(requests), max_batch))
    page_size = 16
    sizes = sorted((-(-r.longest // page_size) * page_size for r in requests), reverse=True)
    return PagedKVCache(
        model.config,
        max_requests=places,
        tokens=sum(sizes[:places]),
        page_size=page_size,
        max_positions=max(sizes, default=1),
        dtype=model.compute_dtype,
        device=model.device,
    )


def _check_decoder(decoder: GraphDecoder, model: Flint, cache: PagedKVCache | None) -> None:
    if decoder.model is not model:
        raise ValueError("decoder: got one of another model; want one made with `model`.")
    if cache is not None and cache is not decoder.cache:
        raise ValueError(
            "cache: got another cache than the decoder's; want the decoder's, decoder.cache. Leave "
            "the cache out."
        )


def _check_fits(request: _Request, cache: PagedKVCache) -> None:
    if request.longest > cache.max_positions or cache.pages_for(request.longest) > cache.pages:
        raise ValueError(
            f"cache: got room for {min(cache.max_positions, cache.pages * cache.page_size)} tokens "
            f"of one request; want {request.longest} for prompts[{request.index}] and its "
            "max_new_tokens. Make the cache larger, or leave it out."
        )
