"""Generation: draws, batches, chunks, stops, and text without broken characters."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from flint_kernels import cli
from flint_kernels.generation import (
    Generation,
    SamplingParams,
    TextStream,
    generate,
    stream_text,
)
from flint_kernels.generation.sampling import Sampler
from flint_kernels.loading import load
from flint_kernels.loading.names import checkpoint_tensors

GREEDY = SamplingParams(greedy=True, seed=0, max_new_tokens=12)


def _prompt(length: int, seed: int) -> list[int]:
    return tiny.random_tokens(length, seed).tolist()


def _greedy_by_prefill(prompt: list[int], count: int) -> list[int]:
    """The definition: the whole text again for every token."""
    tokens = list(prompt)
    for _ in range(count):
        logits = tiny.one_shot(tiny.tiny_model(), torch.tensor(tokens))
        tokens.append(int(logits[-1].argmax()))
    return tokens[len(prompt) :]


def test_greedy_is_the_argmax_of_the_whole_text() -> None:
    prompt = _prompt(50, seed=1)
    completion = generate(tiny.tiny_model(), [prompt], GREEDY, chunk=16)[0]
    assert completion.tokens == _greedy_by_prefill(prompt, 12)
    assert completion.finish_reason == "length"


@pytest.mark.parametrize("chunk", [3, 16, 512])
@pytest.mark.parametrize("max_batch", [1, 2, 8])
def test_result_does_not_depend_on_batchmates_or_chunks(chunk: int, max_batch: int) -> None:
    """Prompts of several lengths that join and leave at different steps, sampled."""
    model = tiny.tiny_model()
    prompts = [_prompt(length, seed=length) for length in (1, 40, 7, 66)]
    params = [SamplingParams(seed=100 + i, max_new_tokens=n) for i, n in enumerate((9, 5, 14, 3))]
    alone = [generate(model, [p], s)[0] for p, s in zip(prompts, params, strict=True)]
    together = generate(model, prompts, params, chunk=chunk, max_batch=max_batch)
    assert together == alone
    assert [len(completion.tokens) for completion in together] == [9, 5, 14, 3]


def test_seed_decides_the_draws() -> None:
    model, prompt = tiny.tiny_model(), _prompt(20, seed=2)
    params = SamplingParams(seed=5, max_new_tokens=16)
    twice = generate(model, [prompt, prompt], params)
    assert twice[0].tokens == twice[1].tokens
    other = generate(model, [prompt], dataclasses.replace(params, seed=6))[0]
    assert other.tokens != twice[0].tokens

    unseeded = dataclasses.replace(params, seed=None)
    first, second = generate(model, [prompt] * 2, unseeded)
    assert first.seed != second.seed
    again = generate(model, [prompt], dataclasses.replace(params, seed=first.seed))[0]
    assert again.tokens == first.tokens


def test_draws_follow_the_distribution() -> None:
    """4,000 positions of one seed against the softmax of the logits: no token off by 5 sigma."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0])
    count = 4000
    sampler = Sampler(
        [SamplingParams(temperature=1.5, top_p=1.0, top_k=4)] * count,
        [3] * count,
        torch.device("cpu"),
    )
    tokens = sampler(logits.expand(count, 5).contiguous(), torch.arange(count))
    kept = torch.softmax(logits[:4] / 1.5, dim=0)
    shares = torch.bincount(tokens, minlength=5) / count
    sigma = (kept * (1 - kept) / count).sqrt()
    assert ((shares[:4] - kept).abs() < 5 * sigma).all() and shares[4] == 0


def test_stop_token_ends_a_request_and_is_not_returned() -> None:
    prompt = _prompt(30, seed=3)
    free = generate(tiny.tiny_model(), [prompt], GREEDY)[0].tokens
    stop = free[5]
    params = dataclasses.replace(GREEDY, stop_token_ids=[stop])
    completion = generate(tiny.tiny_model(), [prompt], params)[0]
    assert completion.tokens == free[: free.index(stop)]
    assert completion.finish_reason == "stop"


def test_tokens_come_one_by_one_and_in_order() -> None:
    prompts = [_prompt(10, seed=4), _prompt(3, seed=5)]
    seen: list[tuple[int, int]] = []
    completions = generate(
        tiny.tiny_model(), prompts, GREEDY, on_token=lambda r, t: seen.append((r, t))
    )
    for index, completion in enumerate(completions):
        assert [token for request, token in seen if request == index] == completion.tokens
    # The two run side by side: neither waits for the other to end.
    assert {request for request, _ in seen[:4]} == {0, 1}


def test_requests_wait_for_pages_and_release_them() -> None:
    """A pool for one request at a time serves five; it is empty at the end."""
    model = tiny.tiny_model()
    prompts = [_prompt(20 + i, seed=i) for i in range(5)]
    cache = model.make_cache(max_requests=3, tokens=48)
    waited = generate(model, prompts, GREEDY, cache=cache)
    assert waited == [generate(model, [prompt], GREEDY)[0] for prompt in prompts]
    assert (cache.requests, cache.free_pages) == ([], 3)


def test_abandoned_iteration_releases_its_requests() -> None:
    model = tiny.tiny_model()
    cache = model.make_cache(max_requests=2)
    tokens = iter(Generation(model, [_prompt(5, 0), _prompt(6, 1)], GREEDY, cache=cache))
    next(tokens)
    assert len(cache.requests) == 2
    tokens.close()
    assert cache.requests == [] and cache.free_pages == cache.pages


def test_broken_off_requests_say_so() -> None:
    """One request has ended, one is running and one waits when the reader has enough."""
    params = [dataclasses.replace(GREEDY, max_new_tokens=n) for n in (1, 9, 9)]
    prompts = [_prompt(5, seed) for seed in range(3)]
    generation = Generation(tiny.tiny_model(), prompts, params, max_batch=2)
    tokens = iter(generation)
    assert [next(tokens)[0], next(tokens)[0]] == [0, 1]
    assert [c.finish_reason for c in generation.completions()] == ["length", "", ""]
    tokens.close()
    completions = generation.completions()
    assert [c.finish_reason for c in completions] == ["length", "abandoned", "abandoned"]
    assert [len(c.tokens) for c in completions] == [1, 1, 0]


def test_a_second_iteration_is_an_error_and_not_an_empty_one() -> None:
    generation = Generation(tiny.tiny_model(), [_prompt(5, 0)], GREEDY)
    assert len(list(generation)) == 12
    with pytest.raises(RuntimeError, match="got a second iteration; want one"):
        iter(generation)


def test_cache_held_by_others_is_an_error_and_not_a_wait() -> None:
    model = tiny.tiny_model()
    cache = model.make_cache(max_requests=1)
    cache.add()
    with pytest.raises(RuntimeError, match="cache: got 0 free places"):
        generate(model, [_prompt(5, 0)], GREEDY, cache=cache)


@pytest.mark.parametrize(
    ("prompts", "arguments", "message"),
    [
        ([[]], {}, r"prompts\[0\]: got no tokens"),
        ([[1], [2, 96]], {}, r"prompts\[1\]: got ids from 2 to 96; want ids in \[0, 96\)"),
        ([[-1]], {}, r"prompts\[0\]: got ids from -1"),
        ([[1] * 501], {}, r"prompts\[0\]: got 501 tokens and 12 to come"),
        ([[1]], {"chunk": 0}, "chunk: got 0; want 1 or more"),
        ([[1]], {"max_batch": 0}, "max_batch: got 0; want 1 or more"),
        ([[1]], {"params": [GREEDY, GREEDY]}, "params: got 2 settings; want one, or 1"),
        (
            [[1] * 40],
            {"cache": tiny.PagedKVCache(tiny.CONFIG, tokens=48)},
            r"cache: got room for 48 tokens .* want 51 for prompts\[0\]",
        ),
    ],
)
def test_argument_errors(prompts, arguments, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(tiny.tiny_model(), prompts, **({"params": GREEDY} | arguments))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("temperature", float("nan")),
        ("temperature", 1e300),  # infinite in fp32
        ("temperature", 10**400),
        ("temperature", 1e-60),  # 0 in fp32, which would be greedy
        ("top_p", 1e-60),
        ("top_p", float("nan")),
        ("top_k", -1),
        ("top_k", 1 << 31),
        ("seed", -1),
        ("seed", 1 << 63),
        ("max_new_tokens", 0),
    ],
)
def test_sampling_errors(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name}: got .*want"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", "0.5"),
        ("top_p", None),
        ("top_k", 2.5),
        ("top_k", None),
        ("seed", 1.5),
        ("seed", "a"),
        ("max_new_tokens", 2.5),
        ("max_new_tokens", True),
        ("stop_token_ids", 3),
        ("stop_token_ids", "ab"),
        ("stop_token_ids", [1, 2.5]),
        ("greedy", "no"),
    ],
)
def test_sampling_settings_of_a_wrong_type(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"{name}: got .*want"):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


def test_sampling_settings_may_be_numpy_s() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5), top_p=1, top_k=np.int64(3), stop_token_ids=[np.int64(4)]
    )
    assert (type(params.top_k), params.stop_token_ids) == (int, (4,))
    assert params == SamplingParams(temperature=0.5, top_p=1.0, top_k=3, stop_token_ids=(4,))


@pytest.mark.parametrize(
    ("prompts", "arguments", "message"),
    [
        ([[1], [1.7]], {}, r"prompts\[1\]: got 1\.7; want an integer"),
        ([torch.tensor([1.0])], {}, r"prompts\[0\]: got tensor\(1\.\); want an integer"),
        ([["a"]], {}, r"prompts\[0\]: got 'a'; want an integer"),
        (["abc"], {}, r"prompts\[0\]: got 'abc'; want a list"),
        ([1, 2], {}, r"prompts\[0\]: got 1; want a list"),
        ([[1]], {"chunk": 2.5}, r"chunk: got 2\.5; want an integer"),
        ([[1]], {"max_batch": "8"}, "max_batch: got '8'; want an integer"),
    ],
)
def test_arguments_of_a_wrong_type(prompts, arguments, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        generate(tiny.tiny_model(), prompts, GREEDY, **arguments)


def test_prompts_may_be_tensors() -> None:
    ids = tiny.random_tokens(5)
    model = tiny.tiny_model()
    assert generate(model, [ids], GREEDY) == generate(model, [ids.tolist()], GREEDY)


def test_no_prompts_no_work() -> None:
    assert generate(tiny.tiny_model(), []) == []


# Text.


def _byte_tokenizer() -> Tokenizer:
    """Byte-level: 256 single bytes, the merges of a little text, and a special token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["def fünf(): return '€' * 5", "naïve 東京 😀"] * 3, trainer)
    return tokenizer


TOKENIZER = _byte_tokenizer()


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=30) | st.text("aé€😀 \n\N{REPLACEMENT CHARACTER}", max_size=30))
def test_streamed_text_never_breaks_a_character(text: str) -> None:
    pieces = list(stream_text(TOKENIZER.encode(text).ids, TOKENIZER))
    assert "".join(pieces) == text
    assert all(pieces)
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), max_size=40))
def test_streaming_any_tokens_equals_decoding_them_at_once(tokens: list[int]) -> None:
    """A model may well produce bytes that are no UTF-8."""
    assert "".join(stream_text(tokens, TOKENIZER)) == TOKENIZER.decode(tokens)


def test_text_comes_as_soon_as_it_is_certain() -> None:
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("€")[0][0]
    euro = [TOKENIZER.token_to_id(symbol) for symbol in bytes_only]
    assert len(euro) == 3
    stream = TextStream(TOKENIZER)
    letter = TOKENIZER.token_to_id("a")
    assert stream.push(letter) == "a"
    assert [stream.push(token) for token in euro] == ["", "", "€"]
    assert [stream.push(token) for token in euro[:2]] == ["", ""]
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"
    assert stream.finish() == ""


# The command.


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that `load` takes: BF16 safetensors with config and tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoint")
    vocabulary = TOKENIZER.get_vocab_size()
    config = dataclasses.replace(tiny.CONFIG, vocab_size=vocabulary, eos_token_ids=(0,))
    model = tiny.synthetic(config, "bf16", seed=1)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    tensors = {
        name: target.weight(parameters).clone()
        for tensor in checkpoint_tensors(config)
        for name, target in tensor.hf_targets()
    }
    save_file(tensors, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    TOKENIZER.save(str(folder / "tokenizer.json"))
    return folder


def test_command_streams_text_and_reports(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", str(checkpoint), "--prompt", "def f", "--max-new-tokens", "8"]
    arguments += ["--seed", "3", "--device", "cpu"]
    assert cli.main(arguments) == 0
    text, times = capsys.readouterr()
    assert cli.main([*arguments, "--json", "--chunk", "1"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert text == "def f" + report["text"] + "\n"
    assert "tokens/s" in times and "first token after" in times and "loaded in" in times
    prompt = TOKENIZER.encode("def f").ids
    assert report["seed"] == 3 and report["prompt_tokens"] == len(prompt)
    assert report["text"] == TOKENIZER.decode(report["tokens"])

    params = SamplingParams(seed=3, max_new_tokens=8, stop_token_ids=(0,))
    assert report["tokens"] == generate(load(checkpoint), [prompt], params)[0].tokens


def _changed_config(checkpoint: Path, folder: Path, text: str) -> Path:
    """The checkpoint with another config.json."""
    for file in checkpoint.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--top-p", "2"], "top_p: got 2.0; want"),
        (["--temperature", "1e300"], "temperature: got 1e+300; want"),
        (["--max-new-tokens", "512"], "want at most 512"),
        (["--chunk", "0"], "chunk: got 0; want 1 or more"),
        (["--device", "abacus"], "--device: got 'abacus', but torch knows no such device; want"),
        (["--device", ""], "--device: got '', but torch knows no such device"),
        (["--device", "meta"], "--device: got 'meta', but the ops have no bodies for it"),
        (["--device", "mps"], "--device: got 'mps', but the ops have no bodies for it"),
        (["--prompt", os.fsdecode(b"\xff\xfe")], "--prompt: got bytes that are no UTF-8"),
    ],
)
def test_command_s_errors_are_lines_and_not_tracebacks(
    arguments: list[str], message: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", str(checkpoint), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("flint-kernels generate: error: ") and message in error


@pytest.mark.parametrize("command", ["generate", "validate"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": "128"}, "config field 'hidden_size': got '128'; want an integer"),
        ({"eos_token_id": "x"}, "config field 'eos_token_id': got 'x'; want an integer"),
        (None, "config: got list; want the JSON object"),
    ],
)
def test_faults_of_a_config_are_lines_that_name_it(
    command: str,
    change: dict[str, object] | None,
    message: str,
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fields = json.loads((checkpoint / "config.json").read_text())
    text = json.dumps([1] if change is None else fields | change)
    folder = _changed_config(checkpoint, tmp_path, text)
    assert cli.main([command, str(folder)]) == 2
    error = capsys.readouterr().err
    assert message in error and f"config file {folder / 'config.json'}" in error


@pytest.mark.parametrize("command", ["generate", "validate"])
@pytest.mark.parametrize(("device", "gpus"), [("cuda", 0), ("cuda:1", 1)])
def test_a_gpu_that_is_not_there_is_a_line(
    command: str,
    device: str,
    gpus: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert cli.main([command, "--device", device]) == 2
    assert f"--device: got '{device}', but torch sees" in capsys.readouterr().err


def test_command_says_what_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "nothing.gguf"]) == 2
    assert "nothing.gguf" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["no-such-command"])


@pytest.mark.parametrize("fault", [TypeError, RuntimeError, AssertionError, KeyError])
def test_faults_of_ours_keep_their_traceback(
    fault: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: str | None) -> torch.device:
        raise fault("a bug")

    monkeypatch.setattr("flint_kernels.cli.device.choose_device", broken)
    with pytest.raises(fault, match="a bug"):
        cli.main(["generate"])


@pytest.mark.parametrize("where", ["flint_kernels.cli.generate.add_parser", "builtins.__import__"])
def test_ctrl_c_leaves_no_traceback(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the parser is built, and while a command imports what it needs."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(where, interrupt)
    status = cli.main(["generate"])
    monkeypatch.undo()
    assert status == 130
