"""DecodeLoop without a GPU: its tokens, what is under way, stop tokens, pages, errors.

Its steps run eagerly here; that what is replayed is right is for the GPU tests.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import tiny
import torch

from flint_kernels.generation import GraphDecoder, SamplingParams, generate
from flint_kernels.generation.loop import LAG
from flint_kernels.model import OutOfPagesError, PagedKVCache, calls


def decoder_of(cache: PagedKVCache) -> GraphDecoder:
    return GraphDecoder(tiny.tiny_model(), cache, graphs=False)


def prefilled(cache: PagedKVCache, lengths: Sequence[int]) -> tuple[list[int], torch.Tensor]:
    """Requests of that many tokens and the next token of each, greedily."""
    model, requests, ids = tiny.tiny_model(), [], []
    with torch.inference_mode():
        for length in lengths:
            request = cache.add()
            tokens = tiny.random_tokens(length, seed=length)
            ids.append(model(tokens, cache.plan([request], [length]), cache).argmax(-1))
            requests.append(request)
    return requests, torch.cat(ids)


@torch.inference_mode()
def step_by_step(
    cache: PagedKVCache, ids: torch.Tensor, requests: list[int], params: list[SamplingParams],
    seeds: list[int], steps: int,
) -> list[list[int]]:  # fmt: skip
    """The same by steps that the host plans, each row drawn by itself."""
    found = []
    for _ in range(steps):
        batch = cache.plan_decode(requests)
        logits = tiny.tiny_model()(ids, batch, cache)
        ids = torch.cat(
            [
                calls.sample(
                    logits[row : row + 1],
                    torch.tensor([0.0 if p.greedy else p.temperature]),
                    torch.tensor([p.top_k], dtype=torch.int32),
                    torch.tensor([p.top_p]),
                    torch.tensor([seeds[row]]),
                    batch.positions[row : row + 1].to(torch.int64) + 1,
                )
                for row, p in enumerate(params)
            ]
        )
        found.append(ids.tolist())
    return found


PARAMS = [SamplingParams(), SamplingParams(greedy=True), SamplingParams(top_k=3, temperature=2.0)]
SEEDS = [3, 0, 2**62]


@pytest.mark.parametrize("all_candidates", [False, True])
@pytest.mark.parametrize("lengths", [[5], [30, 1, 63], [15, 16, 47]])
def test_tokens_are_those_of_single_steps(lengths: list[int], all_candidates: bool) -> None:
    """Across pages, round the windows' rings, and padded: three requests take four rows."""
    count, steps = len(lengths), 40
    params = [SamplingParams(top_k=0, top_p=0.9)] * count if all_candidates else PARAMS[:count]
    cache, other = (tiny.tiny_model().make_cache(4, 1000) for _ in range(2))
    requests, ids = prefilled(cache, lengths)
    want = step_by_step(*((other, prefilled(other, lengths)[1], requests)), params, SEEDS, steps)

    loop = decoder_of(cache).loop(count)
    loop.start(ids, requests, params, SEEDS[:count])
    got: list[list[int]] = []
    launched = 0
    while len(got) < steps:
        while launched < steps and loop.under_way <= LAG:
            loop.launch()
            launched += 1
        got.append(loop.take())
    assert got == want
    assert len({token for tokens in got for token in tokens}) > 10
    assert [cache.length(r) for r in requests] == [other.length(r) for r in requests]
    for one, two in zip(cache.layers, other.layers, strict=True):
        for a, b in zip(one, two, strict=True):
            assert torch.equal(a.view(torch.int16), b.view(torch.int16))


def test_how_far_ahead_it_is_launched_changes_nothing() -> None:
    found = []
    for ahead in (0, 1, LAG):
        cache = tiny.tiny_model().make_cache(1)
        requests, ids = prefilled(cache, [20])
        loop = decoder_of(cache).loop(1)
        loop.start(ids, requests, PARAMS[:1], SEEDS[:1])
        tokens = []
        for _ in range(20):
            while loop.under_way <= ahead:
                loop.launch()
            tokens.append(loop.take())
        found.append(tokens)
    assert found[0] == found[1] == found[2]


def test_a_loop_starts_anew_with_other_requests() -> None:
    cache, other = (tiny.tiny_model().make_cache(4, 1000) for _ in range(2))
    requests, ids = prefilled(cache, [8, 33, 20, 9])
    prefilled(other, [8, 33, 20, 9])
    loop = decoder_of(cache).loop(3)
    for chosen in ([0, 1, 2, 3], [2, 0, 3]):
        rows = [requests[i] for i in chosen]
        params = [PARAMS[i % 3] for i in chosen]
        seeds = [7 * i for i in chosen]
        loop.start(ids[chosen], rows, params, seeds)
        for _ in range(3):
            loop.launch()
        got = [loop.take() for _ in range(3)]
        assert got == step_by_step(other, ids[chosen], rows, params, seeds, 3)


def test_rows_that_no_request_has_any_more_keep_nothing() -> None:
    """Neither settings, which the promise of the others might forbid, nor tokens of their own."""
    cache = tiny.tiny_model().make_cache(4, 1000)
    requests, ids = prefilled(cache, [8, 33, 20, 9])
    decoder = decoder_of(cache)
    loop = decoder.loop(4)
    every = [SamplingParams(top_k=0, top_p=0.9)] * 4
    loop.start(ids, requests, every, [1, 2, 3, 4])
    loop.launch()
    tokens = torch.tensor(loop.take())
    loop.start(tokens[:2], requests[:2], [SamplingParams(top_k=5)] * 2, [1, 2])
    loop.launch()
    assert len(loop.take()) == 2
    assert loop._step.ids[2:].tolist() == [0, 0]


def test_a_request_is_decoded_until_it_is_full() -> None:
    longest = tiny.tiny_model().max_positions
    cache, other = (tiny.tiny_model().make_cache(1) for _ in range(2))
    requests, ids = prefilled(cache, [longest - 4])
    want = step_by_step(other, prefilled(other, [longest - 4])[1], requests, PARAMS[:1], [3], 4)
    loop = decoder_of(cache).loop(1)
    loop.start(ids, requests, PARAMS[:1], [3])
    for _ in range(4):
        loop.launch()
    assert [loop.take() for _ in range(4)] == want
    with pytest.raises(ValueError, match=str(longest)):
        loop.launch()


def test_after_a_start_that_failed_nothing_is_launched() -> None:
    cache = tiny.tiny_model().make_cache(2)
    requests, ids = prefilled(cache, [20])
    loop = decoder_of(cache).loop(2)
    loop.start(ids, requests, PARAMS[:1], SEEDS[:1])
    loop.launch()
    loop.take()
    with pytest.raises(ValueError, match="requests"):
        loop.start(ids.repeat(2), requests * 2, PARAMS[:1] * 2, SEEDS[:1] * 2)
    with pytest.raises(RuntimeError, match="launch: got no requests"):
        loop.launch()
    assert cache.length(requests[0]) == 21


def test_held_pages_are_there_and_nothing_else_is_taken() -> None:
    cache = tiny.tiny_model().make_cache(2, 160)
    (first, second), _ = prefilled(cache, [20, 5])
    cache.hold([first, second], [70, 16])
    assert [len(cache.page_ids(request)) for request in (first, second)] == [5, 1]
    assert [cache.length(request) for request in (first, second)] == [20, 5]
    cache.hold([first], [1])  # has more already
    before = cache.page_ids(first)
    cache.plan([first], [50])
    assert cache.page_ids(first) == before
    with pytest.raises(OutOfPagesError):
        cache.hold([first, second], [110, 80])
    with pytest.raises(ValueError, match="at most 512"):
        cache.hold([second], [513])
    with pytest.raises(ValueError, match="live request"):
        cache.hold([9], [1])
    assert [len(cache.page_ids(request)) for request in (first, second)] == [5, 1]
    cache.release(first)
    assert cache.free_pages == 9


# In the loop of generation.


def prompts(count: int) -> list[list[int]]:
    return [tiny.random_tokens(n, seed=n).tolist() for n in itertools.islice((1, 40, 7, 66), count)]


@pytest.mark.parametrize("count", [1, 3])
def test_stop_tokens_end_a_request_and_no_other(count: int) -> None:
    """At every place in turn, some of them among the steps that are under way at another's end."""
    model = tiny.tiny_model()
    params = [SamplingParams(seed=i, max_new_tokens=14) for i in range(count)]
    free = generate(model, prompts(count), params)
    for stop in sorted(set(free[0].tokens))[:6]:
        stopping = [
            SamplingParams(seed=i, max_new_tokens=14, stop_token_ids=[stop] if i != 1 else [])
            for i in range(count)
        ]
        want = generate(model, prompts(count), stopping)
        cache = model.make_cache(4, 1000)
        got = generate(model, prompts(count), stopping, decoder=decoder_of(cache))
        assert got == want
        assert got[0].finish_reason == "stop"
        assert cache.requests == [] and cache.free_pages == cache.pages


def test_requests_that_wait_come_in_as_others_leave() -> None:
    model = tiny.tiny_model()
    params = [SamplingParams(seed=i, max_new_tokens=n) for i, n in enumerate((9, 3, 20, 1))]
    want = generate(model, prompts(4), params)
    decoder = decoder_of(model.make_cache(2, 200))
    assert generate(model, prompts(4), params, decoder=decoder, max_batch=2, chunk=16) == want


def test_broken_off_it_leaves_nothing_under_way() -> None:
    model = tiny.tiny_model()
    decoder = decoder_of(model.make_cache(2))
    from flint_kernels.generation import Generation

    generation = Generation(model, prompts(2), SamplingParams(seed=1), decoder=decoder)
    tokens = iter(generation)
    for _ in range(7):
        next(tokens)
    tokens.close()  # type: ignore[attr-defined]
    assert decoder.loop(2).under_way == 0
    assert decoder.cache.requests == []
    assert {c.finish_reason for c in generation.completions()} == {"abandoned"}


# Errors.


def test_errors() -> None:
    cache = tiny.tiny_model().make_cache(2, 64)
    requests, ids = prefilled(cache, [20])
    decoder = decoder_of(cache)
    with pytest.raises(ValueError, match="requests: got 3; want 1 to 2"):
        decoder.loop(3)
    loop = decoder.loop(1)
    assert decoder.loop(1) is loop
    with pytest.raises(RuntimeError, match="take: got no step under way; want one"):
        loop.take()
    with pytest.raises(RuntimeError, match="launch: got no requests; want those of a start"):
        loop.launch()
    for some in (ids.expand(2), ids[0], ids.float()):
        with pytest.raises(ValueError, match=r"input_ids: got .*; want int32 or int64 of shape"):
            loop.start(some, requests, PARAMS[:1], SEEDS[:1])
    with pytest.raises(ValueError, match="params, seeds: got 1 and 3; want 1 each"):
        loop.start(ids, requests, PARAMS[:1], SEEDS)
    loop.start(ids, requests, PARAMS[:1], SEEDS[:1])
    for _ in range(LAG + 1):
        loop.launch()
    with pytest.raises(RuntimeError, match=f"launch: got {LAG + 1} steps under way; want at most"):
        loop.launch()
    with pytest.raises(RuntimeError, match=f"start: got {LAG + 1} steps under way; want none"):
        loop.start(ids, requests, PARAMS[:1], SEEDS[:1])
    for _ in range(64 - 20 - LAG - 1):
        loop.take()
        loop.launch()
    loop.take()
    with pytest.raises(OutOfPagesError):
        loop.launch()
    assert cache.length(requests[0]) == 64
