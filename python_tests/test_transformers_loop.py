"""The decode loop of generate() against Transformers' own, which asks the same model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers_support import TEXTS, batch, library_tokens, model_of, tokenizer

from flint_kernels.generation import DecodeLoop, GraphDecoder
from flint_kernels.integrations.transformers import FlintCache, greedy, loop
from flint_kernels.integrations.transformers.room import Room
from flint_kernels.model import Flint

STOP = library_tokens("flint-tiny", TEXTS[0], 40)[7]
OPTIONS = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 9, "top_p": 0.9},
    "processors": {"repetition_penalty": 1.4, "no_repeat_ngram_size": 3},
    "stop token": {"eos_token_id": [STOP, 1], "pad_token_id": 0},
    "stop string": {"stop_strings": ["\n"], "tokenizer": tokenizer()},
    "returned": {"return_dict_in_generate": True, "eos_token_id": STOP, "pad_token_id": 0},
    "scores": {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
    "static": {"cache_implementation": "static"},
}


class Noted(BaseStreamer):
    def __init__(self) -> None:
        self.pieces: list[list[int]] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.pieces.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended = True


def outcome(rows: int, options: dict) -> tuple[torch.Tensor, torch.Tensor, list[list[int]], int]:
    """Tokens, the random state afterwards, what was streamed, and columns of a returned cache."""
    torch.manual_seed(5)
    streamer = Noted() if rows == 1 else None
    given = {"do_sample": False, "max_new_tokens": 40, **options}
    got = model_of().generate(**batch(*TEXTS[:rows]), **given, streamer=streamer)
    columns = 0
    if not isinstance(got, torch.Tensor):
        columns = got.cache.get_seq_length()
        assert (got.scores is None) == ("output_scores" not in options)
        got = got.sequences
    pieces = []
    if streamer is not None:
        assert streamer.ended
        pieces = streamer.pieces
    return got, torch.get_rng_state(), pieces, columns


def runs_ahead(config: GenerationConfig, cache: FlintCache) -> bool:
    """As on a GPU."""
    return not (config.return_dict_in_generate or cache.is_shared)


def with_decoder(make: Callable[..., Room]) -> Callable[..., Room]:
    """`Room.make` with a decoder as on a GPU, but for the graphs."""

    def made(model: Flint, rows: int, length: int) -> Room:
        paged = make(model, rows, length).paged
        return Room(paged, GraphDecoder(model, paged, graphs=False))

    return made


@pytest.mark.parametrize("mode", ["plain", "ahead", "library"])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", OPTIONS)
def test_equals_transformers_own(
    name: str, rows: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also, as on a GPU, with the next step launched before the answer to the last one is read, and
    with the library's loop, which takes what is greedy and nothing more."""
    options, searches = OPTIONS[name], []
    plain = greedy.search
    monkeypatch.setattr(greedy, "search", lambda *a, **k: searches.append(a) or plain(*a, **k))
    if mode != "plain":
        monkeypatch.setattr(loop, "_may_run_ahead", runs_ahead)
    if mode == "library":
        model_of().free_static_cache()
        monkeypatch.setattr(Room, "make", with_decoder(Room.make))
    ours = outcome(rows, options)
    model_of().free_static_cache()
    assert len(searches) == (mode == "library" and name in ("greedy", "stop token", "static"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "takes", lambda *_: False)
        theirs = outcome(rows, options)
    for got, want in zip(ours, theirs, strict=True):
        assert torch.equal(got, want) if isinstance(got, torch.Tensor) else got == want


def calls_of(monkeypatch: pytest.MonkeyPatch, options: dict) -> int:
    """Steps that the loop makes of one prompt and at most 40 tokens."""
    count = 0
    plain: Callable[..., torch.Tensor] = loop.decode_step

    def counted(*arguments) -> torch.Tensor:
        nonlocal count
        count += 1
        return plain(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "decode_step", counted)
        model_of().generate(**batch(TEXTS[0]), do_sample=False, max_new_tokens=40, **options)
    return count


def test_the_loop_is_in_use_and_makes_one_step_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is where a text ends by itself, and the step after it is under way; not at its length,
    which is known, nor in a cache that others go on with."""
    ends = {"eos_token_id": STOP, "pad_token_id": 0}
    assert calls_of(monkeypatch, {}) == 39
    needed = calls_of(monkeypatch, ends)
    assert 0 < needed < 39
    monkeypatch.setattr(FlintCache, "holds_another_column", True)
    plain = loop._may_run_ahead
    monkeypatch.setattr(
        loop, "_may_run_ahead", lambda config, cache: plain(config, _OnGpu(cache)) is True
    )
    assert calls_of(monkeypatch, {}) == 39
    assert calls_of(monkeypatch, ends) == needed + 1
    assert calls_of(monkeypatch, {**ends, "return_dict_in_generate": True}) == needed
    own = FlintCache(model_of().model, 80)
    assert calls_of(monkeypatch, {**ends, "cache": own}) == needed


class _OnGpu:
    """A cache whose model says that it is on a GPU."""

    def __init__(self, cache: FlintCache) -> None:
        self.is_shared = cache.is_shared
        self.model = self
        self.device = torch.device("cuda")


def test_a_row_without_a_candidate_is_an_error_and_leaves_no_step_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model_of().free_static_cache()
    monkeypatch.setattr(loop, "_may_run_ahead", runs_ahead)
    monkeypatch.setattr(Room, "make", with_decoder(Room.make))
    taken = DecodeLoop.take
    monkeypatch.setattr(DecodeLoop, "take", lambda self: [-1 for _ in taken(self)])
    options = {"do_sample": False, "max_new_tokens": 20, "cache_implementation": "static"}
    with pytest.raises(ValueError, match="logits: got a row of NaN or -inf alone"):
        model_of().generate(**batch(TEXTS[0]), **options)
    monkeypatch.setattr(DecodeLoop, "take", taken)
    got = model_of().generate(**batch(TEXTS[0]), **options)  # in the same pages
    assert got[0].tolist()[-20:] == library_tokens("flint-tiny", TEXTS[0], 40)[:20]
    model_of().free_static_cache()


def test_criteria_of_ones_own_see_every_token() -> None:
    class Until(StoppingCriteria):
        def __init__(self) -> None:
            self.columns: list[int] = []

        def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
            self.columns.append(input_ids.shape[1])
            return torch.full((input_ids.shape[0],), len(self.columns) == 5)

    until, inputs = Until(), batch(TEXTS[0])
    first = inputs["input_ids"].shape[1]
    got = model_of().generate(
        **inputs,
        do_sample=False,
        max_new_tokens=40,
        stopping_criteria=StoppingCriteriaList([until]),
    )
    assert until.columns == list(range(first + 1, first + 6))
    assert got[0, first:].tolist() == library_tokens("flint-tiny", TEXTS[0], 40)[:5]
