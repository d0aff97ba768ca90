"""Flint in Transformers: generate() gives the library's tokens, whatever cache and batch it has.

On the CPU decode equals prefill to the bit, so a call without a cache, which computes everything
anew at each step, says what every other kind of call has to give.
"""

from __future__ import annotations

import threading

import pytest
import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    TextIteratorStreamer,
    pipeline,
)
from transformers_support import (
    NAMES,
    TEXTS,
    batch,
    folder,
    ids_of,
    library_tokens,
    model_of,
    tokenizer,
)

from flint_kernels.integrations.transformers import FlintCache, FlintConfig, FlintForCausalLM
from flint_kernels.loading import synthetic
from flint_kernels.model import PagedKVCache

GREEDY = {"do_sample": False, "max_new_tokens": 40}


def new_tokens(sequences: torch.Tensor, inputs) -> list[list[int]]:
    return sequences[:, inputs["input_ids"].shape[1] :].tolist()


# ------------------------------------------------------------------------------------- registration


@pytest.mark.parametrize("name", NAMES)
def test_the_auto_classes_give_the_kernels_model(name: str) -> None:
    model = model_of(name)
    assert type(model) is FlintForCausalLM
    assert model.model.weight_format == ("nvfp4" if name == "flint-tiny" else "bf16")
    assert type(model.config) is FlintConfig is type(AutoConfig.from_pretrained(folder(name)))
    assert (model.dtype, model.device.type) == (torch.bfloat16, "cpu")
    assert model.generation_config.top_k == 20, "the folder's generation_config.json"


def test_transformers_own_classes_stay_reachable() -> None:
    own = transformers.FlintForCausalLM
    assert own.__module__.startswith("transformers.") and own is not FlintForCausalLM
    config = transformers.FlintConfig(num_hidden_layers=2, vocab_size=64, hidden_size=64)
    with torch.device("meta"):
        assert type(AutoModelForCausalLM.from_config(config)) is own


def test_a_saved_config_is_the_one_that_was_read(tmp_path) -> None:
    config = model_of().config
    config.save_pretrained(tmp_path)
    assert '"FlintForCausalLM"' in (tmp_path / "config.json").read_text(encoding="utf-8")
    again = AutoConfig.from_pretrained(tmp_path)
    assert again.shape() == config.shape() == model_of().model.config


def test_fewer_positions_make_a_smaller_table() -> None:
    model = AutoModelForCausalLM.from_pretrained(folder("flint-tiny"), max_position_embeddings=64)
    assert model.model.max_positions == len(model.model.cos_sin) == 64
    inputs = batch(TEXTS[0])
    with pytest.raises(ValueError, match="want at most 64"):
        model.generate(**inputs, do_sample=False, max_new_tokens=64)


# ------------------------------------------------------------------------------------------- tokens


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", TEXTS, ids=["short", "medium", "long"])
def test_greedy_tokens_are_the_librarys(name: str, text: str) -> None:
    inputs = batch(text)
    got = new_tokens(model_of(name).generate(**inputs, **GREEDY), inputs)
    assert got == [library_tokens(name, text, 40)]


@pytest.mark.parametrize("name", NAMES)
def test_a_left_padded_batch_changes_no_token(name: str) -> None:
    inputs = batch(*TEXTS)
    assert inputs["attention_mask"].sum(1).unique().numel() == 3
    got = new_tokens(model_of(name).generate(**inputs, **GREEDY), inputs)
    assert got == [library_tokens(name, text, 40) for text in TEXTS]


@pytest.mark.parametrize(
    "options",
    [
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"cache_implementation": "dynamic"},
        {"prefill_chunk_size": 7},
    ],
    ids=lambda options: next(iter(options)) + "-" + str(next(iter(options.values()))),
)
def test_kinds_of_caches_change_no_token(options: dict) -> None:
    inputs = batch(*TEXTS)
    got = new_tokens(
        model_of().generate(**inputs, do_sample=False, max_new_tokens=12, **options), inputs
    )
    assert got == [library_tokens("flint-tiny", text, 40)[:12] for text in TEXTS]


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True},
        {"do_sample": True, "num_return_sequences": 3},
        {"do_sample": False, "num_beams": 4},
        {"do_sample": False, "num_beams": 4, "num_return_sequences": 2, "length_penalty": 2.0},
        {"do_sample": True, "num_beams": 3},
    ],
    ids=["sample", "samples", "beams", "beams-returned", "beam-sample"],
)
def test_a_cache_changes_nothing_of_samples_and_beams(options: dict) -> None:
    inputs = batch(*TEXTS[:2])
    found = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        found.append(
            model_of().generate(**inputs, max_new_tokens=12, use_cache=use_cache, **options)
        )
    assert torch.equal(*found)


def test_beams_that_diverge_beyond_the_window_and_a_page() -> None:
    inputs = batch(TEXTS[0])
    found = [
        model_of().generate(
            **inputs, do_sample=False, num_beams=2, max_new_tokens=60, use_cache=use_cache
        )
        for use_cache in (True, False)
    ]
    assert torch.equal(*found)


def test_a_stop_token_ends_a_row_and_pads_it() -> None:
    first, other = (library_tokens("flint-tiny", text, 40) for text in TEXTS[:2])
    stop = next(token for token in first if token not in other)
    inputs = batch(*TEXTS[:2])
    got = new_tokens(
        model_of().generate(**inputs, **GREEDY, eos_token_id=stop, pad_token_id=0), inputs
    )
    end = first.index(stop) + 1
    assert got[0] == first[:end] + [0] * (40 - end)
    assert got[1] == other


def test_streams() -> None:
    streamer = TextIteratorStreamer(tokenizer(), skip_prompt=True)
    inputs = batch(TEXTS[0])
    thread = threading.Thread(
        target=model_of().generate, kwargs={**inputs, **GREEDY, "streamer": streamer}
    )
    thread.start()
    pieces = [piece for piece in streamer if piece]
    thread.join()
    assert len(pieces) > 5
    assert "".join(pieces) == tokenizer().decode(library_tokens("flint-tiny", TEXTS[0], 40))


def test_a_pipeline_takes_it() -> None:
    generator = pipeline("text-generation", model=model_of(), tokenizer=tokenizer())
    config = GenerationConfig(do_sample=False, max_new_tokens=40, eos_token_id=0, pad_token_id=0)
    [answer] = generator(TEXTS[0], generation_config=config, return_full_text=False)
    want = tokenizer().decode(library_tokens("flint-tiny", TEXTS[0], 40))
    assert answer["generated_text"] == want


# ------------------------------------------------------------------------------------- the cache


@pytest.mark.parametrize("old_name", [False, True])
def test_a_cache_that_is_passed_again_goes_on(old_name: bool) -> None:
    """A second turn, longer than the first call had foreseen, of a padded batch."""
    inputs = batch(*TEXTS)
    first = model_of().generate(**inputs, **GREEDY, return_dict_in_generate=True)
    assert isinstance(first.cache, FlintCache)
    assert first.cache.get_seq_length() == first.sequences.shape[1] - 1
    more = torch.tensor([ids_of("\n\nclass Next:\n")]).expand(3, -1)
    ids = torch.cat([first.sequences, more], 1)
    added = torch.ones(3, ids.shape[1] - inputs["input_ids"].shape[1], dtype=torch.int64)
    second = {"input_ids": ids, "attention_mask": torch.cat([inputs["attention_mask"], added], 1)}
    want = model_of().generate(**second, do_sample=False, max_new_tokens=70)
    name = "past_key_values" if old_name else "cache"
    got = model_of().generate(**second, do_sample=False, max_new_tokens=70, **{name: first.cache})
    assert torch.equal(got, want)


@torch.inference_mode()
def test_a_loop_of_ones_own_makes_the_cache_grow() -> None:
    model, ids = model_of(), torch.tensor([ids_of(TEXTS[1])])
    cache, tokens = None, []
    for _ in range(40):
        out = model(ids, cache=cache)
        ids, cache = out.logits[:, -1].argmax(-1, keepdim=True), out.cache
        tokens.append(int(ids))
    assert tokens == library_tokens("flint-tiny", TEXTS[1], 40)
    assert cache.get_seq_length() == cache.lengths[0] == len(ids_of(TEXTS[1])) + 39


def test_a_step_copies_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The K and V that a call begins with are those that it ends with, in place."""

    def copy(*_: object) -> None:
        raise AssertionError("a cache was copied")

    monkeypatch.setattr(PagedKVCache, "copy", copy)
    model = model_of()
    cache = FlintCache(model.model, max_length=128)
    sequences, pointers = batch(TEXTS[0])["input_ids"], set()
    for _ in range(3):
        sequences = model.generate(sequences, cache=cache, do_sample=False, max_new_tokens=20)
        layers = cache.room.paged.layers
        pointers.add(tuple(tensor.data_ptr() for layer in layers for tensor in layer))
    assert len(pointers) == 1
    assert sequences[0, -60:-20].tolist() == library_tokens("flint-tiny", TEXTS[0], 40)


def test_a_static_cache_is_kept_for_the_next_call() -> None:
    model = AutoModelForCausalLM.from_pretrained(folder("flint-tiny"))
    inputs = batch(*TEXTS[:2])
    options = {"do_sample": False, "cache_implementation": "static"}

    def call(count: int) -> tuple[list[list[int]], FlintCache]:
        out = model.generate(
            **inputs, max_new_tokens=count, **options, return_dict_in_generate=True
        )
        return new_tokens(out.sequences, inputs), out.cache

    want = [library_tokens("flint-tiny", text, 40) for text in TEXTS[:2]]
    tokens, cache = call(40)
    kept = cache.room
    assert tokens == want
    tokens, other = call(40)
    assert tokens == want and other.room is not kept, "the first is still in somebody's hands"
    del cache, other
    tokens, cache = call(20)
    assert tokens == [row[:20] for row in want]
    assert cache.room.length == kept.length
    del cache
    tokens, cache = call(60)
    assert cache.room.length > kept.length, "too small, so made anew"
    del cache
    model.free_static_cache()
    assert model._shelf.take(1, 1) is None


def test_exchanged_rows_keep_their_pages() -> None:
    inputs = batch(*TEXTS)
    cache = model_of().generate(**inputs, **GREEDY, return_dict_in_generate=True).cache
    requests, lengths = cache.requests, cache.lengths
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    assert cache.requests == [requests[2], requests[0], requests[1]]
    assert cache.lengths == [lengths[2], lengths[0], lengths[1]]
    cache.batch_select_indices(torch.tensor([1]))
    assert cache.requests == [requests[0]] and cache.batch_size == 1
    cache.batch_repeat_interleave(5)
    assert cache.lengths == [lengths[0]] * 5 and len(set(cache.requests)) == 5
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.room.paged.requests == []


# ------------------------------------------------------------------------------------- the forward


@torch.inference_mode()
def test_logits_do_not_depend_on_padding() -> None:
    """On either side; at padding they are zero."""
    model = model_of()
    alone = [model(torch.tensor([ids_of(text)])).logits[0] for text in TEXTS]
    for side in ("left", "right"):
        inputs = tokenizer()(list(TEXTS), padding=True, padding_side=side, return_tensors="pt")
        logits = model(**inputs).logits
        for row, want in enumerate(alone):
            real = inputs["attention_mask"][row].bool()
            assert torch.equal(logits[row, real], want)
            assert not logits[row, ~real].any()


@torch.inference_mode()
def test_logits_to_keep() -> None:
    model, inputs = model_of(), batch(*TEXTS[:2])
    every = model(**inputs).logits
    assert every.dtype == torch.float32 and every.shape[2] == 2048
    assert torch.equal(model(**inputs, logits_to_keep=1).logits, every[:, -1:])
    assert torch.equal(model(**inputs, logits_to_keep=3).logits, every[:, -3:])
    columns = torch.tensor([4, 0, -1])
    assert torch.equal(model(**inputs, logits_to_keep=columns).logits, every[:, columns])


@torch.inference_mode()
def test_loss_tuples_and_positions() -> None:
    model, inputs = model_of(), batch(TEXTS[2])
    ids = inputs["input_ids"]
    out = model(**inputs, labels=ids)
    want = torch.nn.functional.cross_entropy(out.logits[0, :-1], ids[0, 1:])
    assert abs(float(out.loss) - float(want)) < 1e-6
    assert model(**inputs, use_cache=False).cache is None
    _, logits, cache = model(**inputs, labels=ids, return_dict=False)
    assert torch.equal(logits, out.logits) and isinstance(cache, FlintCache)
    positions = torch.arange(ids.shape[1])[None]
    assert torch.equal(model(**inputs, position_ids=positions).logits, out.logits)


@torch.inference_mode()
def test_fp32_logits_are_those_of_transformers_own_model() -> None:
    """Two implementations of the model, written apart, neither of which rounds."""
    name = "flint-tiny-bf16"
    own = transformers.FlintForCausalLM.from_pretrained(folder(name), dtype=torch.float32)
    ids = torch.tensor([ids_of(TEXTS[2])])
    want = own.eval()(ids).logits
    oracle = FlintForCausalLM(model_of(name).config, model_of(name).model.oracle())
    got = oracle(ids).logits
    # Hundreds of fp32 roundings in each, summed in other orders; a BF16 one would be 2**-9 = 2e-3.
    assert float((got - want).abs().max() / want.abs().max()) < 1e-4


def test_a_synthetic_model_of_random_weights() -> None:
    config = model_of().config
    model = FlintForCausalLM(config, synthetic(config.shape(), max_positions=256))
    assert model.generate(torch.tensor([[1, 2, 3]]), **GREEDY).shape[0] == 1
