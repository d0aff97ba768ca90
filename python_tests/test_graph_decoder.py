"""GraphDecoder without a GPU: plans in static buffers, padding, buckets, errors.

Its steps run eagerly here (graphs=False), or with a stand-in for the capture, which replays by
running the step again. That what is replayed is right is for the GPU tests.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from flint_kernels.generation import GraphDecoder, SamplingParams, generate, graph, loop
from flint_kernels.model import OutOfPagesError, PagedKVCache, calls

GREEDY = SamplingParams(greedy=True, seed=0, max_new_tokens=12)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs on the CPU: the outputs stay where they are, and a replay writes them anew."""

    def capture(step: Callable[[], Any], _: torch.device) -> tuple[Callable[[], None], Any]:
        step()
        outputs = step()

        def replay() -> None:
            for held, new in zip(outputs, step(), strict=True):
                held.copy_(new)

        return replay, outputs

    monkeypatch.setattr(graph, "capture", capture)
    monkeypatch.setattr(loop, "capture", capture)
    monkeypatch.setattr(graph, "_check_devices", lambda *_: None)


def _cache_bits(cache: PagedKVCache) -> list[Tensor]:
    return [tensor.view(torch.int16).clone() for layer in cache.layers for tensor in layer]


def _same(one: list[Tensor], two: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


# Plans in buffers that stay.


def test_a_plan_into_buffers_is_the_plan_and_padding() -> None:
    plain, static = (PagedKVCache(tiny.CONFIG, max_requests=4, tokens=512) for _ in range(2))
    buffers = static.make_decode_buffers(4)
    pointers = [field.data_ptr() for field in buffers.batch]
    for cache in (plain, static):
        for _ in range(4):
            cache.add()
        cache.plan([0, 1, 2, 3], [15, 3, 60, 31])
    for requests in ([2, 0], [0, 1, 2, 3], [0, 1, 2, 3], [3], [0, 1], [2, 0], [2, 0]):
        want = plain.plan_decode(requests)
        got = static.plan_decode(requests, into=buffers)
        count = len(requests)
        assert got is buffers.batch
        for name, field in got._asdict().items():
            assert torch.equal(field[:count], getattr(want, name)), name
        assert got.positions[count:].tolist() == got.seq_lens[count:].tolist() == [0] * (4 - count)
        assert got.slots[count:].tolist() == got.window_slots[count:].tolist() == [-1] * (4 - count)
    assert [field.data_ptr() for field in buffers.batch] == pointers
    assert all(pointer % 16 == 0 for pointer in pointers)
    assert all(field.dtype == torch.int32 and field.is_contiguous() for field in buffers.batch)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8])
def test_fresh_buffers_are_padding_throughout(rows: int) -> None:
    batch = PagedKVCache(tiny.CONFIG, max_requests=8, tokens=16).make_decode_buffers(rows).batch
    assert batch.positions.tolist() == batch.seq_lens.tolist() == [0] * rows
    assert batch.slots.tolist() == batch.window_slots.tolist() == [-1] * rows
    assert batch.block_table.shape == batch.window_block_table.shape == (rows, 512 // 16)


def test_tables_follow_growth_and_new_owners_of_a_number() -> None:
    """Pages of a released request go to another in another order; its number, too, is given
    again."""
    cache = PagedKVCache(tiny.CONFIG, max_requests=2, tokens=160)
    buffers = cache.make_decode_buffers(2)
    first, second = cache.add(), cache.add()
    for step in range(70):
        table = cache.plan_decode([second, first], into=buffers).block_table
        for row, request in enumerate((second, first)):
            pages = cache.page_ids(request)
            assert table[row, : len(pages)].tolist() == list(pages), step
        if step == 40:
            cache.release(first)
            cache.plan([second], [17])
            first = cache.add()
            cache.plan([first], [20])


def test_tables_are_copied_only_where_they_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PagedKVCache(tiny.CONFIG, max_requests=2, tokens=160)
    buffers = cache.make_decode_buffers(2)
    requests = [cache.add(), cache.add()]
    copies: list[int] = []
    select = torch.index_select

    def counting(*arguments: Any, **keywords: Any) -> Tensor:
        copies.append(1)
        return select(*arguments, **keywords)

    monkeypatch.setattr(torch, "index_select", counting)
    counts = []
    for _ in range(18):
        copies.clear()
        cache.plan_decode(requests, into=buffers)
        counts.append(len(copies))
    assert counts == [2, *[0] * 15, 1, 0]


def test_errors_of_plans_into_buffers_change_nothing() -> None:
    cache, other = (PagedKVCache(tiny.CONFIG, max_requests=3, tokens=48) for _ in range(2))
    requests = [cache.add() for _ in range(3)]
    buffers = cache.make_decode_buffers(2)
    with pytest.raises(ValueError, match="requests: got 3 requests; want at most 2"):
        cache.plan_decode(requests, into=buffers)
    with pytest.raises(ValueError, match="into: got buffers of another cache; want"):
        cache.plan_decode(requests, into=other.make_decode_buffers(3))
    cache.plan([requests[0]], [48])
    before = [field.clone() for field in buffers.batch]
    with pytest.raises(OutOfPagesError):
        cache.plan_decode(requests[:2], into=buffers)
    assert [cache.length(request) for request in requests] == [48, 0, 0]
    assert _same(before, list(buffers.batch))


# The decoder.


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("weight_format", ["nvfp4", "bf16"])
@pytest.mark.parametrize("graphs", [True, False])
@torch.inference_mode()
def test_steps_equal_the_model_s_while_requests_come_and_go(
    weight_format: str, graphs: bool
) -> None:
    """Past the ring of 48 tokens, across pages and buckets; on the CPU padding moves no bit."""
    model = tiny.tiny_model(weight_format)
    plain, static = (model.make_cache(max_requests=5) for _ in range(2))
    decoder = GraphDecoder(model, static, graphs=graphs)
    assert decoder.buckets == (1, 2, 4, 5) and decoder.largest == 5
    live: dict[int, int] = {}  # request -> its next token
    schedule = {0: [40], 6: [1, 30], 20: [7, 60], 40: [3]}  # step -> lengths of prompts that join
    leaves = {30: 1, 36: 0, 50: 2, 54: 3}  # step -> which of the live
    used = set()
    for step in range(60):
        for length in schedule.get(step, []):
            prompt = tiny.random_tokens(length, seed=step)
            for cache in (plain, static):
                request = cache.add()
                logits = model(prompt, cache.plan([request], [length]), cache)
            live[request] = int(logits.argmax())
        if step in leaves:
            request = list(live)[min(leaves[step], len(live) - 1)]
            del live[request]
            plain.release(request)
            static.release(request)
        requests, ids = list(live), torch.tensor(list(live.values()))
        batch = plain.plan_decode(requests)
        want = model.decode(ids, batch, plain)
        got = decoder(ids if step % 2 else ids.to(torch.int32), requests)
        assert torch.equal(got.hidden, want), step
        assert torch.equal(got.logits, model.logits(want)), step
        assert torch.equal(got.positions, batch.positions)
        live = dict(zip(requests, got.logits.argmax(-1).tolist(), strict=True))
        used.add(len(requests))
    assert used >= {1, 2, 3, 4, 5}
    assert _same(_cache_bits(plain), _cache_bits(static))


@pytest.mark.usefixtures("stand_in")
@torch.inference_mode()
def test_capturing_disturbs_no_live_request_and_no_page() -> None:
    model = tiny.tiny_model()
    cache = model.make_cache(max_requests=8, tokens=512)
    for layer in cache.layers:
        for tensor in layer:
            tensor.fill_(float("nan"))  # whoever reads it would show it
    request = cache.add()
    model(tiny.random_tokens(20), cache.plan([request], [20]), cache)
    before = _cache_bits(cache)
    decoder = GraphDecoder(model, cache)
    decoder.capture()
    assert _same(before, _cache_bits(cache))
    assert (cache.length(request), cache.requests) == (20, [request])
    for rows in decoder.buckets:
        hidden, logits = decoder._step(rows).run()  # padding alone
        assert hidden.shape == (rows, 64) and logits.shape == (rows, 96)
        assert logits.isfinite().all()
    assert _same(before, _cache_bits(cache))


@pytest.mark.parametrize("count", [1, 3, 5])
def test_padding_rows_write_nothing(count: int) -> None:
    """Each live row writes its one slot of every layer's K and V, and nothing else changes."""
    model = tiny.tiny_model()
    cache = model.make_cache(max_requests=8)
    requests = [cache.add() for _ in range(8)]
    model(tiny.random_tokens(8 * 20), cache.plan(requests, [20] * 8), cache)
    before = _cache_bits(cache)
    decoder = GraphDecoder(model, cache, graphs=False, buckets=[8])
    decoder(tiny.random_tokens(count), requests[-count:])
    for old, new in zip(before, _cache_bits(cache), strict=True):
        changed = (old != new).any(dim=3).any(dim=2)  # [pages, page_size]
        assert int(changed.sum()) == count


def test_buckets_are_the_smallest_that_hold_a_batch() -> None:
    model = tiny.tiny_model()
    cache = model.make_cache(max_requests=9, tokens=16 * 9)
    requests = [cache.add() for _ in range(9)]
    decoder = GraphDecoder(model, cache, graphs=False)
    assert decoder.buckets == (1, 2, 4, 8)
    captured = []
    for count in (3, 8, 1, 2, 5, 4):
        decoder(torch.zeros(count, dtype=torch.int64), requests[:count])
        captured.append(list(decoder._steps))
    assert captured == [[4], [4, 8], [4, 8, 1], *[[4, 8, 1, 2]] * 3]
    for most, want in ((1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (8, (1, 2, 4, 8))):
        cache = model.make_cache(max_requests=most, tokens=16)
        assert GraphDecoder(model, cache, graphs=False).buckets == want
    decoder = GraphDecoder(model, model.make_cache(9, 16), graphs=False, buckets=[9, 3, 3])
    assert decoder.buckets == (3, 9)


def test_each_bucket_has_everything_of_its_own() -> None:
    model = tiny.tiny_model()
    cache = model.make_cache(max_requests=2, tokens=32)
    decoder = GraphDecoder(model, cache, graphs=False)
    decoder.capture()
    tensors = [cache.workspace, cache.block_table, cache.window_block_table]
    for rows in (1, 2):
        step = decoder._steps[rows]
        tensors += [step.launch.workspace, step.ids, *step.buffers.batch]
    places = {tensor.data_ptr() for tensor in tensors}
    assert len(places) == len(tensors)


class Spy:
    """Records workspace and enable_pdl of every call of an op by the layers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, dict[str, Any]]] = []
        for name, op in vars(calls).items():
            if isinstance(op, torch._ops.OpOverload):
                monkeypatch.setattr(calls, name, self._recording(name, op))

    def _recording(self, name: str, op: Any) -> Callable[..., Any]:
        takes = {argument.name for argument in op._schema.arguments}

        def call(*arguments: Any, **keywords: Any) -> Any:
            known = {"workspace": None, "enable_pdl": False} | keywords
            self.seen.append((name, {key: known[key] for key in known if key in takes}))
            return op(*arguments, **keywords)

        return call


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("weight_format", ["nvfp4", "bf16"])
@torch.inference_mode()
def test_graphs_pass_their_workspace_and_pdl_to_every_op(
    weight_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.tiny_model(weight_format)
    cache = model.make_cache(max_requests=2, tokens=64)
    request = cache.add()
    spy = Spy(monkeypatch)

    def runs(step: Callable[[], Any], workspace: Tensor, pdl: bool) -> None:
        spy.seen.clear()
        step()
        assert len(spy.seen) == 4 * 7 + 2  # seven ops a layer, the last norm and the head
        for name, options in spy.seen:
            assert options.get("workspace", workspace) is workspace, name
            assert options["enable_pdl"] == pdl, name

    ids = torch.zeros(1, dtype=torch.int64)
    for graphs, pdl in ((True, True), (True, False), (False, True)):
        decoder = GraphDecoder(model, cache, graphs=graphs, enable_pdl=pdl)
        decoder.capture()
        own = decoder._steps[1].launch.workspace
        runs(lambda d=decoder: d(ids, [request]), own, pdl and graphs)
    runs(lambda: model(ids, cache.plan_decode([request]), cache), cache.workspace, False)
    spy.seen.clear()
    model(ids, cache.plan([request], [1]), cache)
    assert spy.seen
    assert not any(options["enable_pdl"] for _, options in spy.seen if "enable_pdl" in options)


# Errors.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "model: got one on cpu; want one on a CUDA device"),
        ({"buckets": [1, 4]}, r"buckets: got \[1, 4\]; want at least one, and each 1 to 3"),
        ({"buckets": [0]}, r"buckets: got \[0\]; want"),
        ({"buckets": []}, r"buckets: got \[\]; want at least one"),
    ],
)
def test_argument_errors(arguments: dict[str, Any], message: str) -> None:
    model = tiny.tiny_model()
    with pytest.raises(ValueError, match=message):
        GraphDecoder(model, model.make_cache(3, 16), **arguments)


def test_a_bucket_of_a_wrong_type() -> None:
    model = tiny.tiny_model()
    with pytest.raises(TypeError, match=r"buckets: got 1\.5; want an integer, 1 to 3"):
        GraphDecoder(model, model.make_cache(3, 16), buckets=[1.5])  # type: ignore[list-item]


def test_a_cache_of_another_device() -> None:
    cache = PagedKVCache(tiny.CONFIG, device="meta")
    with pytest.raises(ValueError, match="cache: got one on meta; want one on cpu, where the mod"):
        GraphDecoder(tiny.tiny_model(), cache, graphs=False)


@pytest.mark.parametrize(
    ("ids", "requests", "message"),
    [
        (torch.zeros(0, dtype=torch.int64), [], "requests: got 0; want 1 to 2, the largest bucket"),
        (torch.zeros(3, dtype=torch.int64), [0, 1, 2], "requests: got 3; want 1 to 2"),
        (torch.zeros(1, dtype=torch.int64), [0, 1], r"input_ids: got torch.int64 of shape \[1\]"),
        (torch.zeros(1, 1, dtype=torch.int64), [0], r"input_ids: got .* of shape \[1, 1\]"),
        (torch.zeros(1), [0], r"input_ids: got torch.float32 of shape \[1\]; want int32 or int64"),
        (torch.zeros(1, dtype=torch.int64), [7], "requests: got 7; want a live request"),
        (torch.zeros(2, dtype=torch.int64), [1, 1], r"requests: got \[1, 1\]; want no request tw"),
    ],
)
def test_errors_of_a_step_change_nothing(ids: Tensor, requests: list[int], message: str) -> None:
    model = tiny.tiny_model()
    cache = model.make_cache(max_requests=3, tokens=48)
    for _ in range(3):
        cache.add()
    decoder = GraphDecoder(model, cache, graphs=False, buckets=[1, 2])
    before = _cache_bits(cache)
    with pytest.raises(ValueError, match=message):
        decoder(ids, requests)
    assert [cache.length(request) for request in range(3)] == [0, 0, 0]
    assert _same(before, _cache_bits(cache))


def test_a_model_whose_tensors_have_moved_is_refused() -> None:
    model = copy.deepcopy(tiny.tiny_model())
    cache = model.make_cache(tokens=16)
    request = cache.add()
    decoder = GraphDecoder(model, cache, graphs=False)
    ids = torch.zeros(1, dtype=torch.int64)
    decoder(ids, [request])
    model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()}, assign=True)
    with pytest.raises(RuntimeError, match="model: got tensors that have moved"):
        decoder(ids, [request])
    assert cache.length(request) == 1


# In generation.


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("graphs", [True, False])
def test_generation_by_a_decoder_gives_the_same_tokens(graphs: bool) -> None:
    """Six prompts through a batch of up to five, of which the buckets hold three; sampled."""
    model = tiny.tiny_model()
    prompts = [tiny.random_tokens(n, seed=n).tolist() for n in (1, 40, 7, 66, 20, 33)]
    params = [
        SamplingParams(seed=9 + i, max_new_tokens=n) for i, n in enumerate((9, 5, 24, 3, 9, 1))
    ]
    want = generate(model, prompts, params)
    decoder = GraphDecoder(model, model.make_cache(5), graphs=graphs, buckets=[1, 3])
    for _ in range(2):
        assert generate(model, prompts, params, max_batch=5, decoder=decoder, chunk=32) == want
        assert decoder.cache.requests == []
    assert set(decoder._loops) == {1, 3}
    assert generate(model, prompts, params, graphs=False) == want


def test_a_decoder_of_others_is_refused() -> None:
    model, prompts = tiny.tiny_model(), [[1, 2]]
    decoder = GraphDecoder(model, model.make_cache(tokens=64), graphs=False)
    with pytest.raises(ValueError, match="decoder: got one of another model"):
        generate(tiny.tiny_model("bf16"), prompts, GREEDY, decoder=decoder)
    with pytest.raises(ValueError, match="cache: got another cache than the decoder's"):
        generate(model, prompts, GREEDY, decoder=decoder, cache=model.make_cache(tokens=64))
    own = generate(model, prompts, GREEDY, decoder=decoder, cache=decoder.cache)
    assert own == generate(model, prompts, GREEDY)
    longer = dataclasses.replace(GREEDY, max_new_tokens=70)
    with pytest.raises(ValueError, match="cache: got room for 64 tokens"):
        generate(model, prompts, longer, decoder=decoder)
