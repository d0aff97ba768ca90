"""PagedKVCache: where tokens lie, what it costs, and that requests never share a page."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tiny import chunked, random_tokens, tiny_model

from flint_kernels.model import FlintConfig, OutOfPagesError, PagedKVCache
from flint_kernels.ops import workspace_bytes

CONFIG = FlintConfig(
    num_hidden_layers=3,
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=96,
    max_position_embeddings=512,
    intermediate_size=96,
    num_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=48,
    layer_types=("sliding_attention", "full_attention", "sliding_attention"),
    sliding_window=33,
)


def test_bytes_of_the_full_model_at_262144_tokens() -> None:
    """7 GiB for the 14 full layers; the 35 window layers and the tables are a constant.

    A window of 513 needs ceil(512 / 16) + 1 = 33 pages of 16 tokens, whatever the length.
    """
    config = FlintConfig.flint_40b()
    cache = PagedKVCache(config, device="meta")
    token_of_a_layer = 2 * 4 * 128 * 2  # K and V, heads, head_dim, bytes
    window_layers = 35 * 33 * 16 * token_of_a_layer
    tables = 2 * 262144 // 16 * 4
    workspace = workspace_bytes("cpu")
    assert 14 * 262144 * token_of_a_layer == 7 << 30
    assert cache.bytes() == (7 << 30) + window_layers + tables + workspace
    assert cache.bytes() - (7 << 30) == 37_994_496  # 36.2 MiB

    longer = PagedKVCache(config, max_positions=2 * 262144, device="meta")
    grown = longer.bytes() - cache.bytes()
    assert grown == (7 << 30) + tables, "the window layers' share does not grow with the length"


@pytest.mark.parametrize("page_size", [16, 32, 128])
def test_layout_is_heads_first_in_a_page(page_size: int) -> None:
    cache = PagedKVCache(CONFIG, max_requests=2, tokens=300, page_size=page_size, device="cpu")
    ring_pages = -(-32 // page_size) + 1
    assert cache.ring_pages == ring_pages
    pages = {0: 2 * ring_pages, 1: -(-300 // page_size), 2: 2 * ring_pages}
    for layer, (k, v) in enumerate(cache.layers):
        assert k.shape == v.shape == (pages[layer], page_size, 2, 32)
        assert k.permute(0, 2, 1, 3).is_contiguous() and v.permute(0, 2, 1, 3).is_contiguous()
        assert k.dtype == torch.bfloat16
        assert k.untyped_storage().data_ptr() != v.untyped_storage().data_ptr()


def test_decode_plan() -> None:
    cache = PagedKVCache(CONFIG, max_requests=2, tokens=256)
    first, second = cache.add(), cache.add()
    cache.plan([second], [40])
    cache.plan([first], [7])
    batch = cache.plan_decode([second, first])
    assert batch.positions.tolist() == [40, 7]
    assert batch.seq_lens.tolist() == [41, 8]
    pages = cache.page_ids(second)
    assert len(pages) == 3 and len(cache.page_ids(first)) == 1
    assert batch.slots.tolist() == [pages[2] * 16 + 8, cache.page_ids(first)[0] * 16 + 7]
    assert batch.block_table[0, :3].tolist() == list(pages)
    for row, position in enumerate([40, 7]):
        page, offset = divmod(position, 16)
        assert batch.slots[row] == batch.block_table[row, page] * 16 + offset
        assert batch.window_slots[row] == batch.window_block_table[row, page] * 16 + offset
    assert all(field.dtype == torch.int32 for field in batch)


def test_prefill_plan_of_a_mixed_batch() -> None:
    cache = PagedKVCache(CONFIG, max_requests=3, tokens=512)
    requests = [cache.add() for _ in range(3)]
    cache.plan(requests[:2], [20, 5])
    batch = cache.plan(requests, [1, 70, 3], wants_logits=[True, False, True])
    assert batch.cu_seqlens.tolist() == [0, 1, 71, 74]
    assert batch.context_lens.tolist() == [20, 5, 0]
    assert batch.seq_lens.tolist() == [21, 75, 3]
    assert batch.positions.tolist() == [20, *range(5, 75), *range(3)]
    assert batch.last_rows.tolist() == [0, 73]
    assert batch.max_query_len == 128 and batch.no_slots.numel() == 0
    assert len(set(batch.slots.tolist())) == 74

    # Of the 70 new tokens, a query at position 75 or later sees those from 75 - 32 on.
    cached = [slot for slot in batch.window_slots.tolist() if slot >= 0]
    assert len(cached) == len(set(cached)) == 1 + 32 + 3
    rows = [5 + row for row, slot in enumerate(batch.window_slots[1:71].tolist()) if slot >= 0]
    assert rows == list(range(43, 75))


@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("window", [1, 2, 16, 17, 18, 33, 65])
def test_the_ring_keeps_exactly_what_the_window_sees(window: int, page_size: int) -> None:
    """Simulates the writes: at every position the slots of the whole window hold its tokens."""
    config = dataclasses.replace(CONFIG, sliding_window=window, max_position_embeddings=1024)
    cache = PagedKVCache(config, max_requests=2, page_size=page_size)
    cache.add()
    request = cache.add()
    held: dict[int, int] = {}  # slot -> position

    def check(batch, position: int) -> None:
        table = batch.window_block_table[0].tolist()
        for seen in range(max(0, position - window + 1), position):
            assert held[table[seen // page_size] * page_size + seen % page_size] == seen

    for count in (1, 3, 40, 120, 17):
        batch = cache.plan([request], [count])
        # The chunk's first query reads the past before the chunk is written.
        check(batch, int(batch.positions[0]))
        slots = batch.window_slots.tolist()
        held.update({s: p for s, p in zip(slots, batch.positions.tolist(), strict=True) if s >= 0})
        for _ in range(page_size + 3):
            decode = cache.plan_decode([request])
            position = int(decode.positions[0])
            held[int(decode.window_slots[0])] = position
            check(decode, position)
    lowest = request * cache.ring_pages * page_size
    assert all(lowest <= slot < lowest + cache.ring_pages * page_size for slot in held)


def test_out_of_pages_says_needed_and_available_and_changes_nothing() -> None:
    cache = PagedKVCache(CONFIG, max_requests=2, tokens=64)
    first, second = cache.add(), cache.add()
    cache.plan([first], [40])
    with pytest.raises(OutOfPagesError, match=r"1 free pages of 4; want 2") as raised:
        cache.plan([first, second], [9, 1])
    assert "Release" in str(raised.value)
    assert (cache.length(first), cache.length(second), cache.free_pages) == (40, 0, 1)
    cache.release(first)
    cache.plan([second], [64])
    assert cache.free_pages == 0


def test_errors_leave_the_cache_as_it_was() -> None:
    cache = PagedKVCache(CONFIG, max_requests=1, max_positions=32)
    request = cache.add()
    with pytest.raises(RuntimeError, match="max_requests: got one more than 1"):
        cache.add()
    with pytest.raises(ValueError, match=r"33 tokens more .* at most 32 \(max_positions\)"):
        cache.plan([request], [33])
    with pytest.raises(ValueError, match="no request twice"):
        cache.plan([request, request], [1, 1])
    with pytest.raises(ValueError, match="counts: got 0 for request"):
        cache.plan([request], [0])
    with pytest.raises(ValueError, match="counts: got 2 values; want 1"):
        cache.plan([request], [1, 1])
    with pytest.raises(ValueError, match=r"wants_logits: got 2 values; want 1, .* one length"):
        cache.plan([request], [5], [True, False])
    with pytest.raises(ValueError, match="wants_logits: got 0 values; want 1"):
        cache.plan([request], [5], [])
    with pytest.raises(TypeError, match=r"counts: got 1\.5; want an integer"):
        cache.plan([request], [1.5])  # type: ignore[list-item]
    assert (cache.length(request), cache.page_ids(request), cache.free_pages) == (0, (), 2)
    with pytest.raises(ValueError, match="requests: got 5; want a live request"):
        cache.plan_decode([5])
    cache.plan([request], [32])
    with pytest.raises(ValueError, match="max_positions"):
        cache.plan_decode([request])
    assert cache.length(request) == 32
    cache.release(request)
    for call in (cache.release, cache.length, cache.page_ids):
        with pytest.raises(ValueError, match="live request"):
            call(request)
    assert (cache.free_pages, cache.free_requests) == (2, 1)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("page_size", 8),
        ("page_size", 24),
        ("page_size", 256),
        ("max_requests", 0),
        ("tokens", -1),
        ("tokens", 1 << 31),
        ("max_positions", 0),
    ],
)
def test_arguments_out_of_range(argument: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{argument}: got .*want"):
        PagedKVCache(CONFIG, device="meta", **{argument: value})


def test_without_window_or_without_full_layers() -> None:
    no_window = dataclasses.replace(CONFIG, sliding_window=None)
    cache = PagedKVCache(no_window, tokens=64)
    assert cache.ring_pages == 0 and {k.shape[0] for k, _ in cache.layers} == {4}
    assert cache.plan([cache.add()], [3]).window_slots.tolist() == [-1] * 3

    only_window = dataclasses.replace(CONFIG, layer_types=("sliding_attention",) * 3)
    cache = PagedKVCache(only_window, tokens=0)
    batch = cache.plan([cache.add()], [300])  # no pool, so none can run out
    assert cache.pages == 0 and set(batch.slots.tolist()) == {-1}


@pytest.mark.parametrize("length", [1, 16, 40, 100, 200])
@torch.inference_mode()
def test_a_copy_goes_on_as_its_original_does(length: int) -> None:
    """In the same cache and in a longer one, whose rings lie elsewhere; neither sees the other."""
    model = tiny_model()
    prompt, after = random_tokens(length), random_tokens(90, seed=1)
    narrow = PagedKVCache(model.config, max_requests=3, max_positions=length + 2)
    wide = PagedKVCache(model.config, max_requests=2, max_positions=400)
    wide.add()
    request = narrow.add()
    model.prefill(prompt, narrow.plan([request], [length]), narrow)
    same, other = narrow.copy(request), wide.copy(request, narrow)

    step = model(after[:1], narrow.plan_decode([request]), narrow)
    assert torch.equal(step, model(after[:1], narrow.plan_decode([same]), narrow))
    want = chunked(model, torch.cat([prompt, after]), [length, 1, 60, 29])[length:]
    batch = wide.plan([other], [90])
    assert torch.equal(model.logits(model.prefill(after, batch, wide)), want)
    assert narrow.length(same) == length + 1 and wide.length(other) == length + 90


def test_what_cannot_be_copied_changes_nothing() -> None:
    cache = PagedKVCache(CONFIG, max_requests=2, tokens=48)
    request = cache.add()
    cache.plan([request], [40])
    with pytest.raises(OutOfPagesError, match="want 3 for this step"):
        cache.copy(request)
    assert (cache.free_requests, cache.free_pages) == (1, 0)
    short = PagedKVCache(CONFIG, max_positions=32)
    with pytest.raises(ValueError, match="max_positions"):
        short.copy(request, cache)
    assert short.free_requests == 1
    with pytest.raises(ValueError, match="requests: got 7; want a live request"):
        cache.copy(7)
    with pytest.raises(ValueError, match="source: got a cache of another form"):
        PagedKVCache(CONFIG, page_size=32).copy(request, cache)


def test_an_empty_request_is_copied_too() -> None:
    cache = PagedKVCache(CONFIG, max_requests=2, tokens=48)
    assert cache.length(cache.copy(cache.add())) == 0


class Requests(RuleBasedStateMachine):
    """Random lives of requests: no page is shared, none is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = PagedKVCache(CONFIG, max_requests=4, tokens=320)
        self.lengths: dict[int, int] = {}

    @precondition(lambda self: len(self.lengths) < 4)
    @rule()
    def add(self) -> None:
        request = self.cache.add()
        assert request not in self.lengths
        self.lengths[request] = 0

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.lengths)))
        self.cache.release(request)
        del self.lengths[request]

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        some = st.lists(st.sampled_from(sorted(self.lengths)), min_size=1, unique=True)
        requests = data.draw(some)
        counts = [data.draw(st.integers(1, 120)) for _ in requests]
        grown = [self.lengths[r] + c for r, c in zip(requests, counts, strict=True)]
        held = sum(len(self.cache.page_ids(request)) for request in requests)
        try:
            batch = self.cache.plan(requests, counts)
        except OutOfPagesError:
            assert sum(-(-length // 16) for length in grown) - held > self.cache.free_pages
            return
        except ValueError:
            assert max(grown) > 512
            return
        self.lengths.update(zip(requests, grown, strict=True))
        self.check_slots(requests, batch)

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.lengths)))
        pages = -(-self.lengths[request] // 16)
        try:
            new = self.cache.copy(request)
        except OutOfPagesError:
            assert pages > self.cache.free_pages
            return
        except RuntimeError:
            assert len(self.lengths) == 4
            return
        assert new not in self.lengths
        self.lengths[new] = self.lengths[request]

    @precondition(lambda self: self.lengths)
    @rule()
    def decode(self) -> None:
        requests = sorted(self.lengths)
        try:
            batch = self.cache.plan_decode(requests)
        except (OutOfPagesError, ValueError):
            return
        for request in requests:
            self.lengths[request] += 1
        self.check_slots(requests, batch)

    def check_slots(self, requests: list[int], batch) -> None:
        """Every slot lies in a page that its own request's table row names."""
        slots = batch.slots.tolist()
        assert len(set(slots)) == len(slots)
        for row, request in enumerate(requests):
            used = -(-self.lengths[request] // 16)
            assert batch.block_table[row, :used].tolist() == list(self.cache.page_ids(request))
        owned = {page for request in requests for page in self.cache.page_ids(request)}
        assert {slot // 16 for slot in slots} <= owned

    @invariant()
    def nothing_is_shared_or_lost(self) -> None:
        held = [page for request in self.lengths for page in self.cache.page_ids(request)]
        assert len(held) == len(set(held))
        assert len(held) + self.cache.free_pages == self.cache.pages == 20
        assert len(held) == sum(-(-length // 16) for length in self.lengths.values())
        assert self.cache.requests == sorted(self.lengths)
        assert self.cache.free_requests == 4 - len(self.lengths)
        for request, length in self.lengths.items():
            assert self.cache.length(request) == length


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
