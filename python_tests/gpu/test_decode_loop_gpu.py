"""DecodeLoop on a GPU: its graphs' tokens against steps that the host plans."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import tiny
import torch
from support import GPU

from flint_kernels.generation import Generation, GraphDecoder, SamplingParams, generate
from flint_kernels.generation.loop import LAG
from flint_kernels.loading import load
from flint_kernels.model import Flint, PagedKVCache, calls

pytestmark = pytest.mark.gpu

CHECKPOINTS = ("flint-tiny", "flint-tiny-bf16")
PARAMS = [SamplingParams(), SamplingParams(greedy=True), SamplingParams(top_k=3, temperature=2.0)]


def prefilled(
    model: Flint, cache: PagedKVCache, lengths: Sequence[int]
) -> tuple[list[int], torch.Tensor]:
    requests, ids = [], []
    for length in lengths:
        request = cache.add()
        tokens = tiny.random_tokens(length, seed=length).to(GPU)
        ids.append(model(tokens, cache.plan([request], [length]), cache).argmax(-1))
        requests.append(request)
    return requests, torch.cat(ids)


@pytest.mark.parametrize("all_candidates", [False, True])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@torch.inference_mode()
def test_tokens_are_those_of_steps_that_the_host_plans(
    checkpoint: str, all_candidates: bool
) -> None:
    """90 steps of three requests in four rows, across pages and the window; twice, since a loop
    is started again with other requests."""
    model = load(checkpoint, device=GPU, max_positions=512)
    cache, other = (model.make_cache(max_requests=4, tokens=4 * 400) for _ in range(2))
    decoder, single = GraphDecoder(model, cache), GraphDecoder(model, other)
    loop = decoder.loop(3)
    params = [SamplingParams(top_k=0, top_p=0.9)] * 3 if all_candidates else PARAMS
    for start, seeds in (((70, 3, 31), [3, 0, 2**62]), ((16, 90, 47), [1, 2, 3])):
        requests, ids = prefilled(model, cache, start)
        assert requests == prefilled(model, other, start)[0]
        want, drawn = [], ids
        settings = [
            torch.tensor([0.0 if p.greedy else p.temperature for p in params], device=GPU),
            torch.tensor([p.top_k for p in params], dtype=torch.int32, device=GPU),
            torch.tensor([p.top_p for p in params], device=GPU),
            torch.tensor(seeds, device=GPU),
        ]
        steps = 90
        for _ in range(steps):
            step = single(drawn, requests)
            drawn = calls.sample(step.logits, *settings, step.positions.to(torch.int64) + 1)
            want.append(drawn.tolist())
        loop.start(ids, requests, params, seeds)
        got: list[list[int]] = []
        launched = 0
        while len(got) < steps:
            while launched < steps and loop.under_way <= LAG:
                loop.launch()
                launched += 1
            got.append(loop.take())
        assert got == want
        assert [cache.length(r) for r in requests] == [other.length(r) for r in requests]
        for one, two in zip(cache.layers, other.layers, strict=True):
            for a, b in zip(one, two, strict=True):
                assert torch.equal(a.view(torch.int16), b.view(torch.int16))
        for request in requests:
            cache.release(request)
            other.release(request)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_generation_is_the_same_with_and_without_graphs(checkpoint: str) -> None:
    model = load(checkpoint, device=GPU, max_positions=512)
    prompts = [tiny.random_tokens(n, seed=n).tolist() for n in (1, 40, 7, 66)]
    params = [SamplingParams(seed=9 + i, max_new_tokens=n) for i, n in enumerate((30, 5, 60, 9))]
    want = generate(model, prompts, params, graphs=False)
    assert generate(model, prompts, params) == want
    stop = want[2].tokens[7]
    stopping = [
        SamplingParams(seed=9 + i, max_new_tokens=n, stop_token_ids=[stop])
        for i, n in enumerate((30, 5, 60, 9))
    ]
    one, two = (generate(model, prompts, stopping, graphs=graphs) for graphs in (True, False))
    assert one == two
    assert one[2].finish_reason == "stop"


def test_no_step_waits_for_the_host() -> None:
    """While a kernel holds the stream there are no tokens; the steps are launched all the same."""
    model = load("flint-tiny", device=GPU, max_positions=512)
    cache = model.make_cache(max_requests=1)
    with torch.inference_mode():
        requests, ids = prefilled(model, cache, [20])
        loop = GraphDecoder(model, cache).loop(1)
        cache.hold(requests, [100])
        loop.start(ids, requests, PARAMS[:1], [1])
        loop.launch()
        loop.take()
        torch.cuda._sleep(2_000_000_000)  # about a second
        before = torch.cuda.Event()
        before.record()
        for _ in range(LAG + 1):
            loop.launch()
        assert not before.query()
        tokens = [loop.take() for _ in range(LAG + 1)]
        assert before.query()
        assert all(0 <= token < model.config.vocab_size for [token] in tokens)


def test_a_broken_off_iteration_leaves_the_decoder_usable() -> None:
    model = load("flint-tiny", device=GPU, max_positions=512)
    decoder = GraphDecoder(model, model.make_cache(max_requests=2))
    prompts = [tiny.random_tokens(n, seed=n).tolist() for n in (9, 40)]
    params = SamplingParams(seed=4, max_new_tokens=40)
    tokens = iter(Generation(model, prompts, params, decoder=decoder))
    for _ in range(15):
        next(tokens)
    tokens.close()  # type: ignore[attr-defined]
    assert decoder.cache.requests == []
    want = generate(model, prompts, params, graphs=False)
    assert generate(model, prompts, params, decoder=decoder) == want
