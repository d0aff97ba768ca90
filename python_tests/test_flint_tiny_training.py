"""How flint-tiny is made: corpus, tokenizer, model, quantisation, training loop, export."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from flint_kernels.flint_tiny import corpus, data, export, model, quantization, tensors, train
from flint_kernels.flint_tiny.tokenizer import END_OF_TEXT, END_OF_TEXT_ID, train_tokenizer
from flint_kernels.formats import nvfp4

CONFIG = model.tiny_config()
SOURCE = Path(model.__file__).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(iter([SOURCE] * 2), vocabulary_size=400)


@pytest.fixture(scope="module")
def parameters() -> model.Parameters:
    return model.initial_parameters(CONFIG, 0, torch.device("cpu"))


# ------------------------------------------------------------------ corpus and tokenizer


@settings(max_examples=50, deadline=None)
@given(text=st.text())
def test_tokenizer_round_trips_any_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_tokenizer_has_the_promised_size_and_special_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == 400
    assert tokenizer.token_to_id(END_OF_TEXT) == END_OF_TEXT_ID


def test_tokenizer_refuses_too_little_text() -> None:
    with pytest.raises(ValueError, match=r"vocabulary of .* wanted 2048"):
        train_tokenizer(iter(["x = 1"]))


def test_corpus_is_complete_disjoint_and_reproducible(tmp_path: Path) -> None:
    root = tmp_path / "lib" / "python3.99"
    for name in ["sysconfig/__init__.py", "site-packages/a.py", "encodings/b.py"]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("outside = 1\n" if name != "sysconfig/__init__.py" else SOURCE)
    (root / "_sysconfigdata__linux_.py").write_text("outside = 1\n")
    (root / "latin.py").write_bytes(b"# \xe9\n")
    for index in range(200):
        (root / f"module_{index}.py").write_text(f"value = {index}\r\n" + SOURCE[: 20 * index])
    documents = corpus.read_standard_library(root)
    assert list(documents) == sorted(documents) and len(documents) == 201
    assert not any("outside" in text or "\r" in text for text in documents.values())
    first = corpus.build(root, tmp_path / "first", vocabulary_size=400)
    assert first == corpus.build(root, tmp_path / "second", vocabulary_size=400)
    assert sum(first["files"].values()) == 201 and min(first["files"].values()) > 0
    tokenizer = Tokenizer.from_file(str(tmp_path / "first" / "tokenizer.json"))
    texts = []
    for part in corpus.PARTS:
        packed = np.load(tmp_path / "first" / f"{part}.npy", allow_pickle=False)
        assert packed.dtype == np.uint16 and packed[0] == packed[-1] == END_OF_TEXT_ID
        whole = tokenizer.decode(packed.tolist(), skip_special_tokens=False)
        texts += whole.split(END_OF_TEXT)[1:-1]
    assert sorted(texts) == sorted(documents.values())


def test_corpus_refuses_a_folder_that_is_no_library(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no CPython standard library"):
        corpus.read_standard_library(tmp_path)


def test_batches_see_every_window_once_an_epoch_with_targets_one_ahead() -> None:
    tokens = torch.arange(1000, dtype=torch.int32)
    stream = data.batches(tokens, batch=3, length=10, seed=0)
    starts = []
    for _ in range(33):
        inputs, targets = next(stream)
        assert inputs.shape == (3, 10) and bool((targets == inputs + 1).all())
        starts += inputs[:, 0].tolist()
    assert len(set(starts)) == 99


def test_windows_predict_each_token_once() -> None:
    found = data.windows(torch.arange(101, dtype=torch.int32), 10, None)
    assert found[:, 1:].flatten().tolist() == list(range(1, 101))
    assert bool((found[:, 1:] == found[:, :-1] + 1).all())


def test_batches_refuse_a_corpus_shorter_than_two_windows() -> None:
    with pytest.raises(ValueError, match="wanted at least 21"):
        next(data.batches(torch.arange(20), 1, 10, 0))


# ------------------------------------------------------------------ the training model


def test_shapes_are_those_of_the_architecture() -> None:
    count = sum(math.prod(shape) for shape in model.parameter_shapes(CONFIG).values())
    assert count == CONFIG.parameter_count() == 5_109_432


@pytest.mark.parametrize("window", [0, 17])
def test_attention_equals_the_plain_formula(window: int) -> None:
    torch.manual_seed(0)
    length, heads, dim = 64, 4, 8
    q = torch.randn(2, length, heads, dim)
    k, v = torch.randn(2, length, dim), torch.randn(2, length, dim)
    sink = torch.randn(heads)
    if window:
        found = model.window_attention(q, k, v, sink, window)
    else:
        found = model.full_attention(q, k, v, sink)
    for position in (0, 1, 15, 16, 17, 33, 63):
        first = max(0, position - window + 1) if window else 0
        keys, values = k[:, first : position + 1], v[:, first : position + 1]
        weights = torch.exp(torch.einsum("bhd,bkd->bhk", q[:, position], keys) * dim**-0.5)
        weights = weights / (weights.sum(-1, keepdim=True) + sink.exp()[:, None])
        expected = torch.einsum("bhk,bkd->bhd", weights, values).flatten(1)
        # fp32 sums of at most 64 terms of order 1: far below 1e-5.
        torch.testing.assert_close(found[:, position], expected, atol=1e-5, rtol=1e-5)


def test_routing_selects_six_by_logit_and_renormalises() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, CONFIG.hidden_size)
    gate = torch.randn(CONFIG.num_experts, CONFIG.hidden_size) * 3
    weights, balance, load = model.route(x, gate, CONFIG)
    logits = x @ gate.T
    assert bool(((weights > 0).sum(-1) == 6).all())
    scores, selected = logits.topk(6, dim=-1)
    expected = scores.sigmoid() / scores.sigmoid().sum(-1, keepdim=True)
    torch.testing.assert_close(weights.gather(-1, selected), expected)
    torch.testing.assert_close(load.sum(), torch.tensor(1.0))
    assert balance > 0


def test_experts_equal_their_sum_one_by_one(parameters: model.Parameters) -> None:
    torch.manual_seed(0)
    prefix = "model.layers.2."
    weights = {k.removeprefix(prefix): v for k, v in parameters.items() if k.startswith(prefix)}
    x = torch.randn(1, 4, CONFIG.hidden_size)
    found, _, _ = model.moe(x, weights, CONFIG)
    routing, _, _ = model.route(x, weights["mlp.gate.weight"], CONFIG)
    parts = ("gate_proj", "up_proj", "down_proj")
    expected = model.swiglu(x, *(weights[f"mlp.shared_expert.{part}.weight"] for part in parts))
    for expert in range(CONFIG.num_experts):
        matrices = (weights[f"mlp.experts.{part}.weight"][expert] for part in parts)
        expected = expected + routing[..., expert, None] * model.swiglu(x, *matrices)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_later_tokens_and_padding_change_nothing(parameters: model.Parameters) -> None:
    forward = model.TinyForward(CONFIG, torch.float32, compile_blocks=False)
    tokens = torch.randint(2048, (1, 128), generator=torch.Generator().manual_seed(0))
    whole = forward.logits(parameters, tokens)
    part = forward.logits(parameters, tokens[:, :70])
    torch.testing.assert_close(whole[:, :70], part, atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="70 tokens a sequence, wanted a multiple of 64"):
        forward.hidden(parameters, tokens[:, :70])


# ------------------------------------------------------------------ quantisation


def test_straight_through_grid_is_that_of_the_format_to_the_bit() -> None:
    torch.manual_seed(0)
    ordinary = torch.randn(32, 64)
    tiny_blocks = torch.randn(4, 32)
    tiny_blocks[1] *= 1e-7
    tiny_blocks[2] = 0
    experts = torch.randn(3, 8, 64) * torch.tensor([1.0, 10.0, 1e-3])[:, None, None]
    steps = torch.linspace(-6, 6, 16 * 193).reshape(193, 16)
    weights = [ordinary, tiny_blocks, experts, torch.zeros(2, 16), steps]
    leaves = [weight.requires_grad_() for weight in weights]
    for weight, found in zip(leaves, quantization.fake_quantize(leaves), strict=True):
        matrices = weight.detach().reshape(-1, *weight.shape[-2:])
        expected = torch.stack([nvfp4.dequantize(*nvfp4.quantize(m)) for m in matrices])
        assert bool((found.reshape(expected.shape) == expected).all())
        (found * 3).sum().backward()
        assert weight.grad is not None and bool((weight.grad == 3).all())


def test_files_hold_exactly_what_the_student_computes_with(
    parameters: model.Parameters, tmp_path: Path
) -> None:
    tensors.save_nvfp4(parameters, tmp_path / "nvfp4.safetensors")
    tensors.save_bf16(parameters, tmp_path / "bf16.safetensors")
    for expected, found in (
        (
            quantization.student_parameters(parameters),
            tensors.load_nvfp4(tmp_path / "nvfp4.safetensors"),
        ),
        (
            quantization.teacher_parameters(parameters),
            tensors.load_bf16(tmp_path / "bf16.safetensors"),
        ),
    ):
        assert found.keys() == expected.keys()
        assert all(bool((found[name] == expected[name]).all()) for name in expected)


# ------------------------------------------------------------------ training and export


def arguments_of(folder: Path, *more: str) -> list[str]:
    words = "--device cpu --no-compile --batch 2 --length 64 --eval-windows 2 --sample-tokens 2"
    return ["--data", str(folder), "--output", str(folder / "run"), *words.split(), *more]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """What `corpus` writes, of a few hundred tokens with a period that a model learns at once."""
    folder = tmp_path_factory.mktemp("flint_tiny")
    for part in corpus.PARTS:
        np.save(folder / f"{part}.npy", np.resize(np.arange(10, dtype=np.uint16), 400))
    corpus.save_tokenizer(tokenizer, folder)
    (folder / "corpus.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def finished_run(folder: Path) -> Path:
    train.run(train.parse(arguments_of(folder, "--steps", "12", "--qat-steps", "3")))
    return folder / "run"


def test_training_learns_and_logs(finished_run: Path) -> None:
    record = json.loads((finished_run / "training_log.json").read_text())
    assert record["parameters"] == 5_109_432
    losses = [point["validation_loss"] for point in record["training"]]
    assert losses[-1] < losses[0] - 1.0
    assert record["final"]["nvfp4"]["held_out"]["loss"] < losses[0]
    # BF16 keeps 8 bits of each weight: its loss is the master's within a few thousandths.
    master, bf16 = (record["final"][name]["held_out"]["loss"] for name in ("fp32_master", "bf16"))
    assert abs(master - bf16) < 0.05


def test_export_reads_back_equal_and_is_small(folder: Path, finished_run: Path) -> None:
    output = folder / "checkpoint"
    size = export.export(folder, finished_run, output)
    assert size <= 16_000_000
    for kind in ("bf16", "nvfp4"):
        fields = json.loads((output / kind / "config.json").read_text())
        assert model.FlintConfig.from_dict(fields) == CONFIG
        assert fields["model_type"] == "flint" and fields["rope_theta"] == 10000.0

    path = output / "nvfp4" / export.GGUF_FILE
    content = bytearray(path.read_bytes())
    content[-1000] ^= 0x11
    path.write_bytes(content)
    with pytest.raises(ValueError, match="differs from"):
        export.check_gguf(CONFIG, path, finished_run)


def test_export_refuses_weights_of_another_model(folder: Path, finished_run: Path) -> None:
    other = folder / "other"
    (other / "bf16").mkdir(parents=True)
    tensors.save_bf16({"lm_head.weight": torch.zeros(2, 2)}, other / "bf16" / "model.safetensors")
    with pytest.raises(ValueError, match="are not flint-tiny's"):
        export.export(folder, other, folder / "nowhere")


def test_divergence_goes_back_thrice_then_raises(folder: Path) -> None:
    arguments = train.parse(arguments_of(folder))
    programs = train.Programs(CONFIG, compiled=False)
    start = model.initial_parameters(CONFIG, 0, torch.device("cpu"))
    values = data.load_tokens(folder / "train.npy", torch.device("cpu"))
    parts = {part: data.windows(values, 64, 1) for part in ("validation", "held_out")}

    def broken(p: model.Parameters, *_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss = p["lm_head.weight"].sum() * float("nan")
        return loss, loss.detach()

    stage = train.Stage(
        name="training",
        minutes=1.0,
        steps=1000,
        peak_rate=1e-3,
        weight_decay=0.0,
        schedule=train.Schedule(0.1, 0.5),
        patience=1,
        loss=broken,
        view=lambda p: {name: value.detach() for name, value in p.items()},
    )
    with pytest.raises(RuntimeError, match="diverged 4 times"):
        train.Fit(stage, start, programs, {"train": values, **parts}, arguments).run()


def test_schedule_rises_stays_and_falls_also_when_told_to() -> None:
    schedule = train.Schedule(warm_up=0.1, fall=0.4)
    assert schedule.factor(0.0) < 0.02 and schedule.factor(0.3) == 1.0
    assert schedule.factor(0.8) == pytest.approx(0.5) and schedule.factor(1.0) == 0.0
    schedule.fall_now(0.3)
    assert schedule.factor(0.5) == pytest.approx(0.5)
    assert schedule.finished(0.71) and not schedule.finished(0.69)
