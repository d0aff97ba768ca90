"""`microbench.forward` without a GPU: its notation, its counts, its steps at a small size."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import tiny
import torch

from flint_kernels import results
from flint_kernels.generation import DecodeLoop
from flint_kernels.model.batch import DecodeBatch, PrefillBatch
from microbench import forward_tables, tables
from microbench.forward import __main__ as forward
from microbench.forward import profile, suite, timing, token, work
from microbench.forward.case import DEFAULT, Request, parse
from microbench.forward.step import Step, filled_cache
from microbench.roofs import Roofs

CASES = ("decode=1@100", "decode3=3*1@70", "prefill=90", "chunk=50@120", "mix=40,2*1@64")


# Notation.


@pytest.mark.parametrize(
    "text, requests",
    [
        ("decode=1@100000", [(1, 100000)]),
        ("decode8=8*1@100000", [(1, 100000)] * 8),
        ("prefill=8192", [(8192, 8192)]),
        ("chunk=8192@108192", [(8192, 108192)]),
        ("mix=2048,2*1@8192", [(2048, 2048), (1, 8192), (1, 8192)]),
    ],
)
def test_a_case_is_read_as_vllms_users_write_it(text: str, requests: list[tuple[int, int]]) -> None:
    assert [(r.new, r.length) for r in parse(text).requests] == requests


def test_what_takes_the_decode_path() -> None:
    decodes = {text: parse(text).decodes for text in DEFAULT}
    assert {text for text, does in decodes.items() if does} == {
        text for text in DEFAULT if text.startswith("decode")
    }
    assert parse("mix=2048,32*1@8192").tokens == 2080


@pytest.mark.parametrize(
    "text", ["", "decode", "=1", "decode=", "decode=1@", "decode=0", "decode=2@1", "a=1,,2",
             "a=1*", "a=2x1", "a=-1", "two words=1", "a=0*1", "a=2000*1"],
)  # fmt: skip
def test_other_notation_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"case: got .*; want"):
        parse(text)


# Work.


@pytest.mark.parametrize("window", [0, 1, 5, 13, 100])
@pytest.mark.parametrize("request_", [Request(1, 1), Request(1, 40), Request(7, 7), Request(9, 30)])
def test_keys_are_counted_as_a_mask_would(request_: Request, window: int) -> None:
    first = request_.length - request_.new
    want = sum(
        min(position + 1, window) if window else position + 1
        for position in range(first, request_.length)
    )
    assert work.keys_seen(request_, window) == want


@pytest.mark.parametrize("checkpoint", ["nvfp4", "bf16"])
def test_bytes_are_the_weights_and_the_cache(checkpoint: str) -> None:
    model = tiny.tiny_model(checkpoint)
    everything = [tiny.CONFIG.num_experts] * tiny.CONFIG.num_hidden_layers
    body = sum(p.nbytes for p in model.parameters())
    body -= model.embed_tokens.weight.nbytes + sum(p.nbytes for p in model.lm_head.parameters())
    row = 2 * 2 * 2 * 32  # K and V of 2 heads of 32, BF16
    # Two window layers (33) and two full ones; one token written in each.
    cached = row * (2 * 33 + 2 * 100)
    assert work.of_forward(model, parse("decode=1@100"), everything).bytes == body + cached
    none = work.of_forward(model, parse("decode=1@100"), [0] * 4).bytes
    experts = sum(p.nbytes for name, p in model.named_parameters() if ".mlp.experts." in name)
    assert none == body + cached - experts


def test_operations_are_those_of_the_products() -> None:
    one = work.of_forward(tiny.tiny_model(), parse("decode=1@1"), [0] * 4).flop
    two = work.of_forward(tiny.tiny_model(), parse("decode2=2*1@1"), [0] * 4).flop
    assert two == 2 * one
    config = tiny.CONFIG
    active = config.weight_count() - 2 * config.vocab_size * config.hidden_size
    spared = (config.num_experts - config.num_experts_per_tok) * 3
    active -= 3 * spared * config.hidden_size * config.moe_intermediate_size
    assert one == 2 * active + 4 * 4 * 4 * 32  # and each of 4 heads in 4 layers sees one key


# Steps.


@pytest.mark.parametrize("text", CASES)
def test_a_step_is_that_of_its_case(text: str) -> None:
    case = parse(text)
    step = Step(tiny.tiny_model(), case)
    assert isinstance(step.batch, DecodeBatch if case.decodes else PrefillBatch)
    assert step.batch.seq_lens.tolist() == [request.length for request in case.requests]
    assert step.batch.positions.shape == step.ids.shape == (case.tokens,)
    with torch.inference_mode():
        first, second = step.forward(), step.forward()
    assert first.shape == (case.tokens, tiny.CONFIG.hidden_size)
    assert bool(first.isfinite().all())
    # A chunk on top of a past overwrites what its window layers saw of it.
    assert torch.equal(first, second) == (not text.startswith("chunk"))


def test_the_cache_is_full_and_its_pages_are_out_of_order() -> None:
    cache = filled_cache(tiny.tiny_model(), parse("decode=1@320"))
    pages = cache.page_ids(0)
    assert len(pages) == 20 and list(pages) != sorted(pages)
    assert all(bool((tensor != 0).any(dim=3).all()) for layer in cache.layers for tensor in layer)


def test_routing_is_the_routers_or_balanced() -> None:
    model = tiny.tiny_model()
    step = Step(model, parse("prefill=64"))
    with torch.inference_mode():
        natural, balanced = step.forward(), step.forward("balanced")
        assert not torch.equal(natural, balanced)
        assert torch.equal(natural, step.forward())  # nothing stays behind
        assert step.experts("balanced") == [0, 8, 8, 8]
        few = Step(model, parse("decode2=2*1@40"))
        assert few.experts("balanced") == [0, 6, 6, 6]
        assert all(3 <= used <= 6 for used in few.experts()[1:])
        assert few.experts()[0] == 0


# Profiles.


def event(name: str, start: float, time: float, grid: int = 1) -> dict[str, object]:
    args = {"grid": [grid, 1, 1], "block": [32, 1, 1]}
    return {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": time, "args": args}


def test_kernels_of_a_trace_add_up_to_the_whole() -> None:
    other = {"ph": "X", "cat": "cpu_op", "name": "aten::add", "ts": 1.0, "dur": 9.0}
    trace = {
        "traceEvents": [
            event("void flint::(anonymous namespace)::norm<4>(flint::Norm)", 103.0, 4.0),
            event("void at::native::add<float>(int, f<(a)1>)", 100.0, 2.0),
            event("void flint::(anonymous namespace)::norm<4>(flint::Norm)", 105.0, 4.0),
            other,
        ]
    }
    kernels = profile.kernels_of(trace)
    assert [kernel.name for kernel in kernels] == ["add<float>", "norm<4>", "norm<4>"]
    # The second waits 1 us and runs 4; the third begins before it ends.
    assert profile.added(kernels) == [2.0, 5.0, 2.0]
    first, second = profile.lines(kernels)
    assert (first.name, first.count, first.median, first.added) == ("norm<4>", 2, 4.0, 7.0)
    assert (second.name, second.added) == ("add<float>", 2.0)
    cells = profile.table(kernels, layers=2)
    assert cells[0] == profile.HEAD
    assert cells[-2][:3] == ("all", "", "3") and cells[-2][4:6] == ("9.0", "4.50")


def test_rows_of_a_profile_name_case_and_checkpoint() -> None:
    kernels = profile.kernels_of({"traceEvents": [event("a", 0.0, 2.0, grid=7)]})
    [row] = timing.kernel_rows("decode=1@100 nvfp4", kernels)
    assert (row["case"], row["checkpoint"], row["kernel"]) == ("decode=1@100", "nvfp4", "a")
    assert (row["median"], row["grid"], row["launches"]) == (2.0, [7, 1, 1], 1)
    assert json.dumps(row)


class StandInTimer:
    """Runs each graph's launches once."""

    def time(self, replays: dict[str, Replayed], *, at_most_s: float) -> dict[str, list[float]]:
        assert at_most_s > 0
        for replay in replays.values():
            replay.run()
        return {name: [10.0, 20.0, 30.0] for name in replays}


class Replayed:
    """In the place of a graph."""

    def __init__(self, launches: list[object]) -> None:
        self.launches = launches

    def run(self) -> None:
        for launch in self.launches:
            launch()  # type: ignore[operator]


@pytest.mark.parametrize("text", ["decode=1@64", "mix=20,2*1@40"])
def test_a_case_gives_rows_of_both_routings_and_its_kernels(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "Replay", Replayed)
    kernels = [profile.Kernel("a", (1,), (32,), 0.0, 1.0)] * 5
    monkeypatch.setattr(timing.profile, "record", lambda replay: replay() or kernels)
    roof = Roofs(bytes_a_us=1e6, flop_a_us=1e8)
    with torch.inference_mode():
        rows, found = timing.measure(tiny.tiny_model(), parse(text), StandInTimer(), roof)  # type: ignore[arg-type]
    natural, balanced, count = rows
    assert found == kernels
    assert (natural["bench"], natural["case"], natural["metric"]) == ("forward", text, "us")
    assert (natural["median"], natural["checkpoint"]) == (20.0, "nvfp4")
    assert natural["floor"] == max(natural["bytes"] / 1e6, natural["flop"] / 1e8)
    assert balanced["case"] == f"{text} balanced"
    assert (count["metric"], count["median"], count["case"]) == ("kernels", 5, text)


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(SystemExit):
        forward.main([])
    assert "no GPU" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        forward.main(["decode"])
    assert "case: got 'decode'" in capsys.readouterr().err


# Tokens.


def test_a_run_decodes_from_the_case_s_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token, "_WARM", 3)
    monkeypatch.setattr(token, "_PART", 2)
    model = tiny.tiny_model()
    lengths = []
    start = DecodeLoop.start

    def started(loop: DecodeLoop, ids: object, requests: list[int], *rest: object) -> None:
        start(loop, ids, requests, *rest)  # type: ignore[arg-type]
        lengths.extend(loop._cache.length(request) for request in requests)

    monkeypatch.setattr(DecodeLoop, "start", started)
    found = token.run(model, parse("decode2=2*1@40"), 10)
    assert lengths == [40, 40]  # the first step's tokens among them
    assert len(found.tokens) == 13
    assert len(found.times) == len(found.memory) == 5
    assert all(time > 0 for time in found.times)
    token.check_tokens(found, tiny.CONFIG.vocab_size)
    with pytest.raises(RuntimeError, match="tokens: got ids from -1"):
        token.check_tokens(replace(found, tokens=[[-1]]), tiny.CONFIG.vocab_size)
    roof = Roofs(bytes_a_us=1.0, flop_a_us=1e9)
    rows = token.long_run_rows(model, parse("decode2=2*1@40"), found, 10, roof)
    assert [row["metric"] for row in rows] == ["us", "us", "steps"]
    assert rows[2]["bytes_of_drift"] == 0 and rows[2]["tokens_drawn"] > 3


def test_a_token_s_floor_is_that_of_forward_and_head() -> None:
    model, roof = tiny.tiny_model(), Roofs(bytes_a_us=1.0, flop_a_us=1e9)
    case = parse("decode=1@40")
    body = work.of_forward(model, case, [0, 3, 3, 3]).bytes
    head = sum(p.nbytes for p in model.lm_head.parameters()) + 4 * tiny.CONFIG.vocab_size
    assert token.floor_of(model, case, roof) == body + head


# Tables and plots.


def forward_rows() -> list[dict[str, Any]]:
    rows = []
    for text, time, kernels in (
        ("decode=1@4096", 1000.0, 345),
        ("decode=1@100000", 1700.0, 345),
        ("decode8=8*1@100000", 5200.0, 345),
        ("prefill=512", 40_000.0, 900),
        ("prefill=8192", 120_000.0, 900),
        ("mix=64,2*1@99", 9000.0, 900),
    ):
        for checkpoint in ("nvfp4", "bf16"):
            of = {"checkpoint": checkpoint}
            times = [time, time + 1, time + 2]
            rows.append(results.row("forward", text, "us", times, floor=time / 2, **of))
            rows.append(results.row("forward", f"{text} balanced", "us", [time - 5], **of))
            rows.append(results.row("forward", text, "kernels", [kernels], **of))
    return rows


def test_the_table_of_forwards() -> None:
    lines = forward_tables.forward_lines(forward_rows())
    assert len(lines) == 12
    assert lines[0] == [
        "`decode=1@4096`", "NVFP4", "1001 (1000 to 1002)", "500", "50%", "995", "345",
    ]  # fmt: skip
    assert all(len(line) == len(forward_tables.FORWARD_HEAD) for line in lines)


def test_the_plot_of_forwards_has_a_panel_for_each_axis() -> None:
    drawn = forward_tables.forward_plot(forward_rows(), "GPU")
    assert drawn == forward_tables.forward_plot(forward_rows(), "GPU")
    ElementTree.fromstring(drawn)
    for title in ("context", "requests", "tokens of a fresh prompt"):
        assert title in drawn
    assert "mix" not in drawn
    assert forward_tables.forward_plot([], "GPU") == ""


def test_the_tables_of_kernels_and_tokens() -> None:
    kernels = timing.kernel_rows(
        "decode=1@100000 nvfp4",
        profile.kernels_of({"traceEvents": [event("a", 0, 3.0), event("b", 3.0, 1.0)]}),
    )
    lines = forward_tables.kernel_lines(kernels, "decode=1@100000", "nvfp4")
    assert lines == [
        ["`a`", "1x1x1", "1", "3", "3", "75.0%"],
        ["`b`", "1x1x1", "1", "1", "1", "25.0%"],
    ]
    assert forward_tables.kernel_lines(kernels, "decode=1@100000", "bf16") == []
    row = results.row("token", "decode8=8*1@100", "us", [2000.0], checkpoint="bf16", floor=1000.0)
    [line] = forward_tables.token_lines([row])
    assert line[-1] == "4000" and len(line) == len(forward_tables.TOKEN_HEAD)


def test_headlines_say_when_each_of_their_rows_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meta = {"gpu": "GPU", "cpu": "", "threads": 1, "date": "2026-11-30", "commit": "a" * 40}
    token_meta = meta | {"commit": "b" * 40}
    row = results.row("token", "decode=1@4096", "us", [2000.0], checkpoint="nvfp4", floor=1000.0)
    found = {"forward": (meta, forward_rows()), "token": (token_meta, [row])}
    monkeypatch.setattr(tables, "read", lambda gpu, name: found[name])
    table = tables.forward_headlines()
    assert "a token end to end, `decode=1@4096`" in table
    assert table.count("commit aaaaaaaaaaaa.") == table.count("commit bbbbbbbbbbbb.") == 1
    found["token"] = (meta, [row])
    assert tables.forward_headlines().count("Measured") == 1


def test_the_table_of_a_long_run() -> None:
    model = tiny.tiny_model()
    found = token.Run([10.0] * 20 + [12.0] * 20, [[1], [2]], [5, 5])
    roof = Roofs(bytes_a_us=1e6, flop_a_us=1e12)
    rows = token.long_run_rows(model, parse("decode=1@90"), found, 2000, roof)
    first, last, _ = rows
    # A thousand keys more in the two layers without a window: K and V of two heads of 32, BF16.
    assert last["floor"] - first["floor"] == pytest.approx(2 * 1000 * 2 * 2 * 2 * 32 / 1e6)
    [line] = forward_tables.long_run_lines(rows)
    assert line == ["`decode=1@90`", "NVFP4", "2000", "10", "10.5", "12", "0"]
    assert len(line) == len(forward_tables.LONG_RUN_HEAD)


# The suite.


def test_the_suite_writes_each_file_and_goes_on_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(model: object, options: object) -> Iterator[tuple[str, dict[str, Any]]]:
        yield "forward", results.row("forward", "decode=1@9", "us", [1.0], checkpoint="nvfp4")
        raise ValueError("in the middle")

    def tokens(model: object, options: object) -> Iterator[tuple[str, dict[str, Any]]]:
        yield "token", results.row("token", "decode=1@9", "us", [2.0], checkpoint="nvfp4")

    monkeypatch.setattr(suite.results, "describe", lambda *_: {"gpu": "none"})  # no GPU is needed
    monkeypatch.setitem(suite.PARTS, "forward", breaks)
    monkeypatch.setitem(suite.PARTS, "token", tokens)
    roof = results.row("roof", "copy", "GB/s", [4000.0])
    files = suite.Files(tmp_path, "c", [roof])
    failures = suite.run(tiny.tiny_model(), ["forward", "token"], suite.Options(), files, 0.0)
    assert len(failures) == 1 and "in the middle" in failures[0]
    for name, time in (("forward", 1.0), ("token", 2.0)):
        found = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
        assert found["meta"] == {"gpu": "none"}
        assert [row["median"] for row in found["rows"]] == [4000.0, time]


def test_every_part_of_the_suite_gives_rows_of_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite.cases, "DEFAULT", ("decode=1@40",))
    monkeypatch.setattr(suite.token, "DEFAULT", ("decode=1@40",))
    monkeypatch.setattr(token, "_WARM", 1)
    monkeypatch.setattr(token, "_PART", 2)
    monkeypatch.setattr(timing, "Replay", Replayed)
    monkeypatch.setattr(timing.profile, "record", lambda replay: [])
    monkeypatch.setattr(suite, "Timer", lambda *_: StandInTimer())
    roof = Roofs(bytes_a_us=1e6, flop_a_us=1e8)
    options = suite.Options(steps=4, roof=roof)
    with torch.inference_mode():
        for part in ("forward", "token"):
            found = list(suite.PARTS[part](tiny.tiny_model(), options))
            assert found and {name for name, _ in found} == {part}
            assert all(row["bench"] == part for _, row in found)
