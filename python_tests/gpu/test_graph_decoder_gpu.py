"""GraphDecoder on a GPU: replays against eager steps, to the bit, and graphs beside each other."""

from __future__ import annotations

import gc
import itertools
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import tiny
import torch
from support import GPU, bits
from torch import Tensor

from flint_kernels.generation import GraphDecoder, SamplingParams, generate
from flint_kernels.loading import load, synthetic
from flint_kernels.model import Flint, PagedKVCache

pytestmark = pytest.mark.gpu

FORMATS = ("nvfp4", "bf16")
CHECKPOINTS = ("flint-tiny", "flint-tiny-bf16")


def tiny_on_gpu(weight_format: str) -> Flint:
    return synthetic(tiny.CONFIG, weight_format, seed=7, device=GPU)


def prompt(length: int, seed: int) -> list[int]:
    return tiny.random_tokens(length, seed).tolist()


def cache_bits(cache: PagedKVCache) -> list[Tensor]:
    return [tensor.view(torch.int16).clone() for layer in cache.layers for tensor in layer]


def same(one: Sequence[Tensor], two: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def prefill(model: Flint, cache: PagedKVCache, tokens: list[int]) -> tuple[int, int]:
    """A new request and the first token after its prompt, greedily."""
    request = cache.add()
    ids = torch.tensor(tokens, device=GPU)
    return request, int(model(ids, cache.plan([request], [len(tokens)]), cache).argmax())


class Requests:
    """The same requests in the caches of two decoders, which step side by side."""

    def __init__(self, one: GraphDecoder, two: GraphDecoder) -> None:
        self.decoders = one, two
        self.live: dict[int, int] = {}  # request -> its next token

    def join(self, tokens: list[int]) -> None:
        (request, token), other = (prefill(d.model, d.cache, tokens) for d in self.decoders)
        assert other == (request, token)
        self.live[request] = token

    def leave(self, request: int) -> None:
        del self.live[request]
        for decoder in self.decoders:
            decoder.cache.release(request)

    def step(self) -> None:
        """Both decode one token of every request, with the same bits; one argmax is taken."""
        requests, ids = list(self.live), torch.tensor(list(self.live.values()), device=GPU)
        one, two = (decoder(ids, requests) for decoder in self.decoders)
        for got, want in zip(one, two, strict=True):
            assert torch.equal(bits(got), bits(want))
        assert len(one.logits) == len(one.hidden) == len(one.positions) == len(requests)
        assert bool(one.logits.isfinite().all())
        self.live = dict(zip(requests, one.logits.argmax(-1).tolist(), strict=True))


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@torch.inference_mode()
def test_equals_eager_while_requests_join_and_leave(checkpoint: str) -> None:
    """150 steps through all buckets; prompts on both sides of the window of 65 tokens."""
    model = load(checkpoint, device=GPU, max_positions=512)
    caches = [model.make_cache(max_requests=8, tokens=8 * 320) for _ in range(2)]
    decoder = GraphDecoder(model, caches[0])
    requests = Requests(decoder, GraphDecoder(model, caches[1], graphs=False))
    random_ = random.Random(1)
    counts = []
    for step in range(150):
        wanted = 1 + (step // 12) % 8 if step < 110 else random_.randint(1, 8)
        while len(requests.live) > wanted or (requests.live and random_.random() < 0.05):
            requests.leave(random_.choice(list(requests.live)))
        while len(requests.live) < wanted:
            requests.join(prompt(random_.randint(1, 120), seed=step + len(requests.live)))
        requests.step()
        counts.append(len(requests.live))
    assert set(counts) == set(range(1, 9))
    assert set(decoder._steps) == {1, 2, 4, 8}
    assert same(*map(cache_bits, caches))


@pytest.mark.parametrize("weight_format", FORMATS)
@torch.inference_mode()
def test_a_full_bucket_equals_the_model_s_own_step(weight_format: str) -> None:
    """Flint.forward of as many rows, unpadded and without a graph; requests in falling order, so
    that their tables are no view of the cache's."""
    model = tiny_on_gpu(weight_format)
    eager, replayed = (model.make_cache(max_requests=8) for _ in range(2))
    decoder = GraphDecoder(model, replayed)
    live: dict[int, int] = {}
    for count in decoder.buckets:
        while len(live) < count:
            tokens = prompt(5 + 9 * len(live), seed=len(live))
            request, token = prefill(model, eager, tokens)
            assert prefill(model, replayed, tokens) == (request, token)
            live[request] = token
        for step in range(30):
            requests = sorted(live, reverse=True)
            ids = torch.tensor([live[request] for request in requests], device=GPU)
            want = model(ids, eager.plan_decode(requests), eager)
            got = decoder(ids, requests)
            assert torch.equal(bits(got.logits), bits(want)), (count, step)
            assert torch.equal(bits(model.logits(got.hidden)), bits(want)), (count, step)
            live = dict(zip(requests, want.argmax(-1).tolist(), strict=True))
    assert same(cache_bits(eager), cache_bits(replayed))


@pytest.mark.parametrize("weight_format", FORMATS)
@torch.inference_mode()
def test_grows_across_pages_and_beyond_the_window(weight_format: str) -> None:
    """One graph from the 2nd token to the 300th: 19 pages, six times round the ring."""
    model = tiny_on_gpu(weight_format)
    caches = [model.make_cache() for _ in range(2)]
    decoder = GraphDecoder(model, caches[0])
    requests = Requests(decoder, GraphDecoder(model, caches[1], graphs=False))
    requests.join(prompt(1, seed=0))
    requests.step()
    graph = decoder._steps[1]._replay
    for _ in range(298):
        requests.step()
    assert caches[0].length(0) == 300
    assert decoder._steps[1]._replay is graph
    assert same(*map(cache_bits, caches))


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("max_batch", [8, 11])
def test_generated_tokens_equal_the_eager_ones(checkpoint: str, max_batch: int) -> None:
    """Greedy and sampled, of several lengths; more than 8 at once go beside the graphs."""
    model = load(checkpoint, device=GPU, max_positions=512)
    prompts = [prompt(1 + 17 * i % 90, seed=i) for i in range(14)]
    params = [
        SamplingParams(greedy=i % 3 == 0, seed=i, max_new_tokens=5 + 13 * i % 60) for i in range(14)
    ]
    want = generate(model, prompts, params, max_batch=max_batch, graphs=False)
    assert generate(model, prompts, params, max_batch=max_batch) == want
    decoder = GraphDecoder(model, model.make_cache(max_batch, tokens=max_batch * 160))
    for _ in range(2):
        assert generate(model, prompts, params, max_batch=max_batch, decoder=decoder) == want


@pytest.mark.parametrize("weight_format", FORMATS)
@torch.inference_mode()
def test_replays_have_the_same_bits(weight_format: str) -> None:
    """A step that is replayed writes what it has written: 100 times, with PDL and without."""
    model = tiny_on_gpu(weight_format)
    results = []
    for pdl in (True, False):
        cache = model.make_cache(max_requests=4)
        requests = [prefill(model, cache, prompt(30 + i, seed=i))[0] for i in range(3)]
        decoder = GraphDecoder(model, cache, enable_pdl=pdl)
        for first in range(40):
            ids = torch.tensor([first, 2 * first, 95 - first], device=GPU)
            step = decoder(ids, requests)
        first_bits = [bits(part).clone() for part in step] + cache_bits(cache)
        for _ in range(100):
            decoder._steps[4].run()
            assert same([*map(bits, step), *cache_bits(cache)], first_bits)
        results.append(first_bits)
    assert same(*results)


@torch.inference_mode()
def test_capture_and_padding_leave_the_cache_untouched() -> None:
    model = tiny_on_gpu("nvfp4")
    cache = model.make_cache(max_requests=8, tokens=8 * 64)
    for layer in cache.layers:
        for tensor in layer:
            tensor.fill_(float("nan"))  # whoever reads it would show it
    requests = [prefill(model, cache, prompt(20, seed=i))[0] for i in range(3)]
    before = cache_bits(cache)
    decoder = GraphDecoder(model, cache)
    decoder.capture()
    assert same(before, cache_bits(cache))
    for rows in decoder.buckets:  # padding alone
        hidden, logits = decoder._steps[rows].run()
        assert bool(hidden.isfinite().all())
        assert bool(logits.isfinite().all())
    assert same(before, cache_bits(cache))
    lengths = [cache.length(request) for request in requests]
    assert lengths == [20, 20, 20]
    for count, rows in ((3, 4), (1, 1), (2, 2), (3, 4)):
        step = decoder(torch.zeros(count, dtype=torch.int64, device=GPU), requests[:count])
        assert bool(step.logits.isfinite().all())
        after = cache_bits(cache)
        for old, new in zip(before, after, strict=True):
            changed = (old != new).any(dim=3).any(dim=2)  # [pages, page_size]
            assert int(changed.sum()) == count, rows
        before = after


@pytest.mark.parametrize("weight_format", FORMATS)
@torch.inference_mode()
def test_buckets_share_no_memory(weight_format: str) -> None:
    model = tiny_on_gpu(weight_format)
    decoder = GraphDecoder(model, model.make_cache(max_requests=8, tokens=8 * 16))
    decoder.capture()
    spans = []
    for step in decoder._steps.values():
        for tensor in (
            step.launch.workspace, step.ids, step.buffers._sent,
            step.buffers.batch.block_table, step.buffers.batch.window_block_table, *step.run(),
        ):  # fmt: skip
            spans.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes))
    spans.sort()
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    pools = {step._replay.__self__.pool() for step in decoder._steps.values()}
    assert len(pools) == len(decoder.buckets)


# ---------------------------------------------------------------------------- beside each other


def rounds(decoder: GraphDecoder, first: int, count: int, steps: int) -> Iterator[Tensor]:
    """`count` times: three prompts, then `steps` greedy steps; the ids of each. Nothing waits."""
    cache = decoder.cache
    for turn in range(count):
        requests = [cache.add() for _ in range(3)]
        prompts = [prompt(10 + 7 * i + turn, seed=first + 10 * turn + i) for i in range(3)]
        ids = torch.tensor([token for tokens in prompts for token in tokens], device=GPU)
        plan = cache.plan(requests, [len(tokens) for tokens in prompts])
        drawn = decoder.model(ids, plan, cache).argmax(-1)
        for _ in range(steps):
            drawn = decoder(drawn, requests).logits.argmax(-1)
            yield drawn
        for request in requests:
            cache.release(request)


@torch.inference_mode()
def replay_concurrently(weight_format: str) -> None:
    """1,000 replays of each of two decoders on two streams, against each of them alone."""
    model = tiny_on_gpu(weight_format)
    decoders = [GraphDecoder(model, model.make_cache(max_requests=4)) for _ in range(2)]
    for decoder in decoders:
        decoder.capture()
    alone = [
        torch.stack(list(rounds(decoder, 100 * i, 4, 250))) for i, decoder in enumerate(decoders)
    ]
    torch.cuda.synchronize()
    assert not torch.equal(*alone)
    streams = [torch.cuda.Stream() for _ in decoders]
    running = [rounds(decoder, 100 * i, 4, 250) for i, decoder in enumerate(decoders)]
    together: list[list[Tensor]] = [[], []]
    for _ in range(1000):
        for stream, steps, ids in zip(streams, running, together, strict=True):
            with torch.cuda.stream(stream):
                ids.append(next(steps))
    torch.cuda.synchronize()
    for want, got in zip(alone, together, strict=True):
        assert torch.equal(torch.stack(got), want)


@torch.inference_mode()
def capture_first() -> None:
    """Nothing has run on the GPU before; nothing is warmed up but by the decoder."""
    for weight_format in FORMATS:
        model = tiny_on_gpu(weight_format)
        caches = [model.make_cache(max_requests=3) for _ in range(2)]
        decoder = GraphDecoder(model, caches[0])
        decoder.capture()
        requests = Requests(decoder, GraphDecoder(model, caches[1], graphs=False))
        for count in range(3):
            requests.join(prompt(20, seed=count))
            for _ in range(5):
                requests.step()


def in_a_process_of_its_own(call: str) -> None:
    """Calls a function of this file; one that is stuck is ended, and fails."""
    folders = [str(Path(__file__).parent), str(Path(tiny.__file__).parent)]
    script = f"import sys; sys.path[:0] = {folders}; import {Path(__file__).stem} as t; t.{call}"
    command = [sys.executable, "-c", f"{script}; print('done')"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert result.stdout.strip() == "done", result.stderr[-5_000:]


@pytest.mark.parametrize("weight_format", FORMATS)
def test_two_decoders_on_two_streams(weight_format: str) -> None:
    in_a_process_of_its_own(f"replay_concurrently({weight_format!r})")


def test_C5_capture_as_the_first_call_of_a_process() -> None:
    in_a_process_of_its_own("capture_first()")


# ----------------------------------------------------------------------------------- errors, memory


def test_a_capture_inside_a_capture_says_what_to_do() -> None:
    model = tiny_on_gpu("nvfp4")
    cache = model.make_cache()
    request = cache.add()
    decoder = GraphDecoder(model, cache)
    ids = torch.zeros(1, dtype=torch.int64, device=GPU)
    torch.cuda.synchronize()
    with (
        pytest.raises(RuntimeError, match=r"Call the decoder's capture\(\) before"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        decoder(ids, [request])
    torch.cuda.synchronize()
    assert cache.length(request) == 0
    assert bool(decoder(ids, [request]).logits.isfinite().all())


def test_value_checks_refuse_graphs_and_generation_goes_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_on_gpu("nvfp4")
    params = SamplingParams(greedy=True, seed=0, max_new_tokens=6)
    want = generate(model, [prompt(9, seed=0)], params)
    monkeypatch.setenv("FLINT_KERNELS_CHECK_VALUES", "1")
    assert generate(model, [prompt(9, seed=0)], params) == want
    cache = model.make_cache()
    decoder = GraphDecoder(model, cache)
    request = cache.add()
    ids = torch.zeros(1, dtype=torch.int64, device=GPU)
    with pytest.raises(RuntimeError, match="unset it for the capture"):
        decoder(ids, [request])
    torch.cuda.synchronize()
    monkeypatch.delenv("FLINT_KERNELS_CHECK_VALUES")
    assert cache.length(request) == 0
    assert bool(decoder(ids, [request]).logits.isfinite().all())


def test_a_model_on_the_cpu_and_a_cache_of_another_device() -> None:
    with pytest.raises(ValueError, match="model: got one on cpu; want one on a CUDA device"):
        GraphDecoder(tiny.tiny_model(), tiny.tiny_model().make_cache(tokens=16))
    with pytest.raises(ValueError, match="cache: got one on cpu; want one on cuda:0"):
        GraphDecoder(tiny_on_gpu("bf16"), tiny.tiny_model("bf16").make_cache(tokens=16))


def test_a_decoder_that_is_gone_leaves_no_memory_behind() -> None:
    """Every generation captures anew; its graphs' pools go with it."""
    model = tiny_on_gpu("bf16")
    params = SamplingParams(greedy=True, seed=0, max_new_tokens=4)
    held = []
    for _ in range(4):
        generate(model, [prompt(9, seed=0), prompt(3, seed=1)], params)
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        held.append(torch.cuda.memory_reserved())
    assert held[1] == held[2] == held[3]
