"""A step of the full-size model, ready to be launched again and again.

The model has synthetic weights, made on the GPU. What the cache has of earlier tokens is drawn too:
a prompt of 100,000 tokens would take longer than everything that is measured, and no kernel's time
depends on it. Pages are those of a cache in use, not in order. A step writes the same rows of the
cache at each launch, so every launch has the same to do (on top of a past, a chunk finds in window
layers what it has written itself the time before).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from flint_kernels.model import Flint, PagedKVCache
from flint_kernels.model.batch import DecodeBatch
from flint_kernels.model.calls import Launch
from flint_kernels.ops import make_workspace
from microbench.forward.case import Case

ROUTINGS = ("natural", "balanced")


class Step:
    """One forward: of ids that are drawn, into a cache of its own."""

    def __init__(self, model: Flint, case: Case) -> None:
        self.model, self.case = model, case
        self.cache = filled_cache(model, case)
        requests = self.cache.requests
        if case.decodes:
            self.batch: Any = self.cache.plan_decode(requests)
        else:
            self.batch = self.cache.plan(requests, [request.new for request in case.requests])
        generator = torch.Generator(model.device).manual_seed(1)
        vocabulary = model.config.vocab_size
        self.ids = torch.randint(
            vocabulary, (case.tokens,), generator=generator, device=model.device
        )
        self._workspace = make_workspace(model.device)
        config = model.config
        entries = torch.arange(case.tokens * config.num_experts_per_tok, device=model.device)
        self._in_turn = (entries % config.num_experts).int().view(case.tokens, -1)

    def forward(self, routing: str = "natural", *, enable_pdl: bool = True) -> Tensor:
        """Final hidden states, normed.

        Tokens go to the experts that the router names (natural), or to the next six in turn,
        whatever it says (balanced): so all experts have equally many tokens, as far as that goes.
        No kernel comes or goes by it.
        """
        if routing == "balanced":
            with replaced_ids(self.model, lambda _, ids: self._in_turn):
                return self.forward(enable_pdl=enable_pdl)
        if isinstance(self.batch, DecodeBatch):
            launch = Launch(self._workspace, enable_pdl)
            return self.model.decode(self.ids, self.batch, self.cache, launch)
        return self.model.prefill(self.ids, self.batch, self.cache)

    def experts(self, routing: str = "natural") -> list[int]:
        """How many experts each layer has to read, 0 in dense ones; runs the step once."""
        config = self.model.config
        used = dict.fromkeys(range(config.num_hidden_layers), 0)
        if routing == "balanced":
            count = len(self._in_turn.unique())
            return [0 if config.is_dense(layer) else count for layer in used]

        def count_of(layer: int, ids: Tensor) -> Tensor:
            used[layer] = len(ids.unique())
            return ids

        with replaced_ids(self.model, count_of):
            self.forward()
        return list(used.values())


def filled_cache(model: Flint, case: Case) -> PagedKVCache:
    """A cache with the case's requests, of which all but the new tokens are there."""
    page = 16
    tokens = sum(-(-request.length // page) * page for request in case.requests)
    longest = max(request.length for request in case.requests)
    cache = PagedKVCache(
        model.config,
        max_requests=len(case.requests),
        tokens=tokens,
        page_size=page,
        max_positions=longest,
        dtype=model.compute_dtype,
        device=model.device,
    )
    random.Random(0).shuffle(cache._free_pages)
    for request in case.requests:
        number = cache.add()
        if request.length > request.new:
            cache.plan([number], [request.length - request.new])
    generator = torch.Generator(model.device).manual_seed(2)
    for layer in cache.layers:
        for tensor in layer:
            tensor.normal_(generator=generator)
    return cache


def moe_layers(model: Flint) -> Iterator[tuple[int, Any]]:
    """Number and experts of each layer that has any."""
    for number, layer in enumerate(model.layers):
        if not model.config.is_dense(number):
            yield number, layer.mlp.experts


@contextmanager
def replaced_ids(model: Flint, replace: Callable[[int, Tensor], Tensor]) -> Iterator[None]:
    """Puts `replace(layer, ids)` in the place of the ids that the experts' methods are given."""
    layers = list(moe_layers(model))
    try:
        for number, experts in layers:
            for name, place in _METHODS.items():
                experts.__dict__[name] = _with_ids(getattr(experts, name), place, number, replace)
        yield
    finally:
        for _, experts in layers:
            for name in _METHODS:
                experts.__dict__.pop(name, None)


# The experts' methods, and which of their arguments the ids are.
_METHODS = {"gate_up": 1, "down": 3, "forward": 2}


def _with_ids(
    method: Callable[..., Any], place: int, layer: int, replace: Callable[[int, Tensor], Tensor]
) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        given = list(arguments)
        given[place] = replace(layer, given[place])
        return method(*given)

    return call
