"""Validation: the figures, their intervals, their rows, and the commands that give them."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loading_support import tiny_config
from tokenizers import Tokenizer, models, trainers

from flint_kernels import cli, results
from flint_kernels.backends import cuda
from flint_kernels.cli import info
from flint_kernels.cli import validate as command
from flint_kernels.loading import synthetic
from flint_kernels.loading.export import save_gguf
from flint_kernels.model.flint import Flint
from flint_kernels.ops import REGISTRY
from flint_kernels.validation import compare, paths, result_rows, sequences, summarize, table
from flint_kernels.validation.compare import Comparison, compare_hidden, validate
from flint_kernels.validation.text import held_out_documents, read_documents

CONFIG = tiny_config(eos_token_ids=(0,))
ROW_KEYS = {
    "bench", "case", "checkpoint", "metric", "median", "p20", "p80", "floor", "peer", "peer_median",
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Flint:
    return synthetic(CONFIG, "nvfp4", seed=2, max_positions=64)


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(CONFIG.vocab_size, (3, 25), generator=generator)


@pytest.fixture(scope="module")
def found(model: Flint, tokens: torch.Tensor) -> dict[str, Comparison]:
    return validate(model, tokens, batch=2)


# --------------------------------------------------------------------------- figures


def test_figures_are_those_of_torch(
    model: Flint, tokens: torch.Tensor, found: dict[str, Comparison]
) -> None:
    """Against torch's own cross entropy and KL, from hidden states computed here."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    expected = model.logits(paths.prefill(model.oracle(), inputs)).double()
    got = model.logits(paths.prefill(model, inputs)).double()
    comparison = found["prefill"]

    def nll(logits: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(
            3, 24
        )

    # FP32 products differ in their order between a batch of two and one of three.
    assert torch.allclose(comparison.nll, nll(got), rtol=0, atol=1e-9)
    assert torch.allclose(comparison.nll_fp32, nll(expected), rtol=0, atol=1e-4)
    kl = F.kl_div(
        got.log_softmax(-1), expected.log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)
    assert torch.allclose(comparison.kl, kl, rtol=1e-3, atol=1e-6)
    agree = (expected.argmax(-1) == got.argmax(-1)).double()
    assert torch.equal(comparison.agree, agree)


def test_bf16_differs_from_fp32_and_not_by_much(found: dict[str, Comparison]) -> None:
    kl = found["prefill"].kl
    assert kl.min() > 0 and 1e-6 < kl.mean() < 0.1


def test_decode_equals_prefill_on_the_cpu(found: dict[str, Comparison]) -> None:
    for ours, theirs in zip(
        vars(found["decode"]).values(), vars(found["prefill"]).values(), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_the_fp32_forward_is_at_no_distance_from_itself(model: Flint, tokens: torch.Tensor) -> None:
    found = validate(model.oracle(), tokens)
    assert found["prefill"].kl.abs().max() == 0
    # Decode runs other compositions in FP32: the difference is one of summation order.
    assert found["decode"].kl.abs().max() < 1e-8
    assert summarize(found["prefill"]).top1.value == 1


def test_slices_change_nothing_and_bound_the_logits(
    model: Flint, tokens: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    reference, hidden = paths.prefill(model.oracle(), inputs), paths.prefill(model, inputs)
    whole = compare_hidden(model, reference, hidden, targets)
    rows_seen: list[int] = []
    logits = model.logits

    def observed(states: torch.Tensor) -> torch.Tensor:
        rows_seen.append(len(states))
        return logits(states)

    monkeypatch.setattr(model, "logits", observed)
    monkeypatch.setattr(compare, "SLICE_BYTES", 7 * 8 * CONFIG.vocab_size)
    sliced = compare_hidden(model, reference, hidden, targets)
    assert max(rows_seen) == 7
    for ours, theirs in zip(vars(sliced).values(), vars(whole).values(), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-5)


def test_logits_that_are_no_numbers_are_an_error(tokens: torch.Tensor) -> None:
    broken = synthetic(CONFIG, "nvfp4", max_positions=64)
    broken.norm.weight[3] = float("nan")
    with pytest.raises(ValueError, match="logits that are NaN or infinite from the FP32 forward"):
        validate(broken, tokens, paths=["prefill"])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"paths": ["chunked"]}, "paths: got 'chunked', want some of prefill, decode"),
        ({"batch": 0}, "batch: got 0"),
        ({"tokens": torch.zeros(5, dtype=torch.int64)}, r"tokens: got shape \[5\]"),
        ({"tokens": torch.full((1, 4), 128)}, "ids from 128 to 128, want 0 to 127"),
        ({"tokens": torch.zeros(1, 66, dtype=torch.int64)}, "a context of 65, want at most 64"),
    ],
)
def test_arguments_that_do_not_fit(
    change: dict[str, Any], match: str, model: Flint, tokens: torch.Tensor
) -> None:
    with pytest.raises(ValueError, match=match):
        validate(model, **{"tokens": tokens, **change})


# --------------------------------------------------------------------------- intervals


def comparison_of(nll: torch.Tensor, nll_fp32: torch.Tensor) -> Comparison:
    return Comparison(nll, nll_fp32, (nll - nll_fp32).abs(), (nll < nll_fp32).double())


def test_the_bootstrap_finds_the_standard_error() -> None:
    """For a mean of n normal values the interval is about 1.96 sigma / sqrt(n) on either side."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(400, 1, generator=generator, dtype=torch.float64) + 5
    kl = summarize(comparison_of(values, torch.zeros_like(values))).kl_mean
    error = values.std().item() / 20
    assert kl.value == pytest.approx(values.mean().item())
    # The bootstrap of 2000 resamples knows its 2.5% quantile to some 5% of the standard error.
    assert kl.value - kl.low == pytest.approx(1.96 * error, rel=0.1)
    assert kl.high - kl.value == pytest.approx(1.96 * error, rel=0.1)
    assert kl.low < kl.p20 < kl.value < kl.p80 < kl.high


def test_one_sequence_has_no_interval(found: dict[str, Comparison]) -> None:
    """All its resamples are equal, which would look like certainty."""
    one = Comparison(*(getattr(found["prefill"], f.name)[:1] for f in fields(Comparison)))
    summary = summarize(one)
    assert summary.ppl.value == pytest.approx(one.nll.mean().exp().item())
    assert (summary.ppl.low, summary.ppl.high, summary.kl_mean.p20) == (None, None, None)
    assert "[" not in table({"prefill": summary})
    rows = result_rows("m", "nvfp4", {"prefill": summary})
    assert [row.get("interval_95") for row in rows] == [None] * 4
    assert all(row["p20"] == row["median"] == row["p80"] for row in rows)


def test_the_bootstrap_draws_whole_sequences() -> None:
    """Tokens of a sequence that are all alike count as one, not as sixteen."""
    generator = torch.Generator().manual_seed(0)
    one = torch.randn(100, 1, generator=generator, dtype=torch.float64) + 5
    alone, repeated = (
        summarize(comparison_of(values, torch.zeros_like(values))).kl_mean
        for values in (one, one.expand(100, 16))
    )
    assert repeated.low == pytest.approx(alone.low) and repeated.high == pytest.approx(alone.high)


def test_the_bootstrap_is_paired() -> None:
    """A text whose own spread is large still gives a narrow interval of the ratio."""
    generator = torch.Generator().manual_seed(0)
    reference = torch.randn(50, 8, generator=generator, dtype=torch.float64) + 3
    summary = summarize(comparison_of(reference + 0.01, reference))
    assert summary.ppl.high - summary.ppl.low > 0.1 * summary.ppl.value
    for bound in (summary.ppl_ratio.low, summary.ppl_ratio.value, summary.ppl_ratio.high):
        assert bound == pytest.approx(torch.tensor(0.01).exp().item(), rel=1e-6)


# --------------------------------------------------------------------------- texts


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=30, special_tokens=["<|endoftext|>"])
    tokenizer.train_from_iterator(
        ["import os\n\ndef read(path):\n    return os.fspath(path)\n"], trainer
    )
    return tokenizer


def test_sequences_predict_each_token_once_and_spread_over_the_text(tokenizer: Tokenizer) -> None:
    documents = ["def read(path):\n", "import os\n"]
    ids = [tokenizer.encode(document).ids for document in documents]
    all_ids = [0, *ids[0], 0, *ids[1], 0]
    # More asked for than there is: all whole windows, each begins with the last token of another.
    cut = sequences(tokenizer, documents, context=4, tokens=10_000, end_of_text=0)
    count = (len(all_ids) - 1) // 4
    assert count >= 4
    assert cut.tolist() == [all_ids[4 * i : 4 * i + 5] for i in range(count)]
    # Fewer: at even distances.
    some = sequences(tokenizer, documents, context=4, tokens=8, end_of_text=0)
    assert some.tolist() == [cut[0].tolist(), cut[count // 2].tolist()]
    # A number of tokens that is no multiple of the context is rounded up.
    assert len(sequences(tokenizer, documents, context=4, tokens=5, end_of_text=None)) == 2


@pytest.mark.parametrize(
    ("context", "wanted", "match"),
    [(0, 1, "context: got 0"), (4, 0, "tokens: got 0"), (1000, 1, r"text: got \d+ tokens")],
)
def test_sequences_that_cannot_be(
    context: int, wanted: int, match: str, tokenizer: Tokenizer
) -> None:
    with pytest.raises(ValueError, match=match):
        sequences(tokenizer, ["import os\n"], context=context, tokens=wanted)


def test_the_default_text_is_long_enough() -> None:
    documents, title = held_out_documents()
    assert "held-out" in title and "CPython" in title
    # At about three bytes a token this is far more than the 50,000 tokens of a run.
    assert sum(map(len, documents)) > 300_000


def test_a_text_must_be_utf8(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"text: got .*text\.txt, which is not UTF-8"):
        read_documents(path)


# --------------------------------------------------------------------------- rows and commands


def test_rows_have_the_common_form(found: dict[str, Comparison]) -> None:
    summaries = {path: summarize(comparison) for path, comparison in found.items()}
    rows = result_rows("flint-tiny", "nvfp4", summaries)
    names = {(row["case"], row["metric"]) for row in rows}
    assert names == {
        (f"flint-tiny {path}", metric)
        for path in ("prefill", "decode")
        for metric in ("kl_mean", "kl_max", "top1", "ppl")
    }
    for row in rows:
        assert row.keys() >= ROW_KEYS
        assert row["bench"] == "validate" and row["checkpoint"] == "nvfp4"
        assert row["p20"] <= row["median"] <= row["p80"]
        assert row["tokens"] == 72 and row["context"] == 24
    [perplexity] = [r for r in rows if (r["case"], r["metric"]) == ("flint-tiny decode", "ppl")]
    assert perplexity["peer"] == "fp32"
    assert perplexity["peer_median"] == summaries["decode"].ppl_fp32.value
    low, high = perplexity["interval_95"]
    assert low < perplexity["median"] < high
    assert len(table(summaries).splitlines()) == 3


def parsed(module: Any, *arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    module.add_parser(parser.add_subparsers())
    return parser.parse_args([module.__name__.rpartition(".")[2], *arguments])


def test_validate_command(
    model: Flint, tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_gguf(model, tmp_path / "model.gguf")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = tmp_path / "text.txt"
    text.write_text("import os\n\ndef read(path):\n    return os.fspath(path)\n" * 4)
    output = tmp_path / "results" / "validate.json"
    arguments = parsed(
        command, str(tmp_path / "model.gguf"), "--text", str(text), "--tokens", "30",
        "--context", "15", "--device", "cpu", "--output", str(output),
    )  # fmt: skip
    assert arguments.run(arguments) == 0
    printed = capsys.readouterr().out
    assert "model.gguf (nvfp4) on cpu: 30 tokens in sequences of 15, text.txt" in printed
    assert re.search(r"^prefill .*\n^decode ", printed, re.MULTILINE)
    content = json.loads(output.read_text())
    assert {row["case"] for row in content["rows"]} == {"model prefill", "model decode"}
    assert content["meta"]["text"] == "text.txt" and content["meta"]["gpu"] == ""
    arguments.json = True
    assert arguments.run(arguments) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == content["rows"]


def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def work() -> None:
        raise AssertionError("the work began")

    monkeypatch.setattr("flint_kernels.validation.text.held_out_documents", work)
    (tmp_path / "file").write_text("kept")
    for output in (tmp_path, tmp_path / "file" / "rows.json"):
        assert cli.main(["validate", "--output", str(output)]) == 2
        error = capsys.readouterr().err
        assert f"--output: got {output}, which cannot be written" in error
    command.check_output(tmp_path / "new" / "rows.json")
    command.check_output(tmp_path / "file")
    assert list((tmp_path / "new").iterdir()) == []
    assert (tmp_path / "file").read_text() == "kept"


def test_validate_command_takes_no_device_without_bodies(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for device in ("bogus", "meta"):
        assert cli.main(["validate", "--device", device]) == 2
        assert f"--device: got '{device}', but " in capsys.readouterr().err


def test_packaged_checkpoints_are_one_model_in_rows() -> None:
    assert command.model_name("flint-tiny") == command.model_name("flint-tiny-bf16") == "flint-tiny"
    assert command.model_name("a/flint-40b.gguf") == "flint-40b"
    assert command.model_name("a/flint-40b-bf16/") == "flint-40b-bf16"


def test_validate_asks_for_what_the_documents_say() -> None:
    arguments = parsed(command)
    assert arguments.checkpoints == ["flint-tiny"]
    assert (arguments.tokens, arguments.context, arguments.path) == (50_000, 512, None)


def test_info_command(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = parsed(info, "--json")
    assert arguments.run(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["versions"]["torch"] == torch.__version__
    assert report["native"]["loaded"] == (report["native"]["why_not"] is None)
    assert report["ops"].keys() == REGISTRY.keys()
    assert all("CPU" in bodies for bodies in report["ops"].values())
    assert set(report["environment"]) == {
        "FLINT_KERNELS_CHECK_VALUES",
        "FLINT_KERNELS_NO_NATIVE",
    }

    arguments = parsed(info)
    assert arguments.run(arguments) == 0
    text = capsys.readouterr().out
    assert all(re.search(rf"^  {name} +.*CPU", text, re.MULTILINE) for name in REGISTRY)


def test_info_says_whether_a_gpu_s_kernels_are_in_use(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(cuda, "why_not", lambda device: ["It has none.", None][device.index])
    arguments = parsed(info)
    assert arguments.run(arguments) == 0
    text = capsys.readouterr().out
    assert "  GPU 0: It has none.\n  GPU 1: its kernels are in use\n" in text


def test_results_describe_the_run() -> None:
    meta = results.describe("cpu", commit="abc")
    assert meta["commit"] == "abc" and meta["torch"] == torch.__version__
    assert (meta["gpu"], meta["driver"], meta["cuda"]) == ("", "", "")
    assert meta["cpu"] and re.fullmatch(r"\d{4}-\d\d-\d\d", meta["date"])
    assert {"gpu", "driver", "cuda", "torch", "triton", "commit", "date"} <= meta.keys()


def test_a_row_gives_median_and_spread() -> None:
    row = results.row("bench", "M=1", "us", [5.0, 1.0, 2.0, 3.0, 4.0], floor=0.5)
    assert row.keys() == ROW_KEYS
    assert (row["median"], row["p20"], row["p80"], row["floor"]) == (3.0, 1.8, 4.2, 0.5)
    with pytest.raises(ValueError, match="values: got none for bench M=1 us"):
        results.row("bench", "M=1", "us", [])
