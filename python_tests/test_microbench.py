"""The parts of the benchmarks that need no GPU: statistics, plans, bytes, rows, tables, plots.

The benchmarked calls run here too, on the CPU: kernels and peers have to compute the same thing,
and a chain has to be one.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from flint_kernels import ops, results
from microbench import cases, kernels, plots, roofline, tables
from microbench.cases import (
    Group,
    Subject,
    activation,
    attention,
    attention_prefill,
    decode,
    kv_write,
    moe_layer,
    moe_layer_chain,
    norm,
    prefill,
    sweep,
)
from microbench.roofs import Roofs
from microbench.timer import Launch, Plan, fitting, interleaved, plan, rotated

CPU = torch.device("cpu")
L2 = 60 * 2**20


# ---------------------------------------------------------------------------------- the timer


@pytest.mark.parametrize("launch_bytes", [1, 12_288, 500_000, 4_200_000, 67_000_000, 10**9])
def test_launches_find_a_cold_l2(launch_bytes: int) -> None:
    found = plan(launch_bytes, L2)
    assert 2 <= found.sets <= found.launches
    # Either the sets do not fit, or none is used twice in a replay.
    assert found.sets * launch_bytes > 3 * L2 or found.sets == found.launches


def test_no_more_sets_than_a_cold_l2_needs() -> None:
    found = plan(4_200_000, L2)
    assert (found.sets - 1) * 4_200_000 <= 3 * L2 < found.sets * 4_200_000


def test_a_replay_is_long_beside_what_starts_it_and_short_enough_for_many() -> None:
    assert plan(12_288, L2).launches == 512
    assert plan(302_000_000, L2).launches == 13  # of about 75 us each
    assert plan(2**32, L2).launches == 4
    assert plan(4 * 10**8, L2, launch_flop=10**12).launches == 4  # bound by arithmetic


@pytest.mark.parametrize("sizes", [(0, L2), (-1, L2), (10, 0)])
def test_a_plan_without_bytes_is_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"launch_bytes, l2_bytes: got .* want positive"):
        plan(*sizes)


def test_rotation_uses_every_set_in_order() -> None:
    assert rotated("abc", 7) == list("abcabca")
    assert rotated("a", 2) == ["a", "a"]


def test_subjects_take_turns_and_warm_rounds_do_not_count() -> None:
    order: list[str] = []
    clock = itertools.count()

    def sample(name: str) -> float:
        order.append(name)
        return float(next(clock))

    samples = {name: partial(sample, name) for name in ("a", "b", "c")}
    taken = interleaved(samples, rounds=3, warm_rounds=1)
    assert "".join(order) == "abc" + "cba" + "abc" + "cba"
    assert taken == {"a": [5.0, 6.0, 11.0], "b": [4.0, 7.0, 10.0], "c": [3.0, 8.0, 9.0]}


def test_long_replays_get_fewer_rounds() -> None:
    assert fitting(31, 1000.0, 3.0) == 31
    assert fitting(31, 250_000.0, 3.0) == 12
    assert fitting(31, 5e6, 3.0) == 5


# ------------------------------------------------------------------------------------- rows


def group_of(*subjects: Subject, **more: Any) -> Group:
    return Group("op", 4_000_000, lambda index: index, subjects, **more)


def nothing(_: object) -> tuple[torch.Tensor, ...]:
    return ()


def test_rows_have_the_best_peer_and_the_floor() -> None:
    group = group_of(
        Subject("flint", nothing, "M=1"),
        Subject("flint pdl", nothing, "M=1 pdl"),
        Subject("slow", nothing),
        Subject("quick", nothing),
    )
    times = {
        "flint": [2.0, 1.0, 3.0],
        "flint pdl": [1.5, 1.5, 1.5],
        "slow": [9.0] * 3,
        "quick": [4.0, 5.0, 3.0],
    }
    floor = Roofs(bytes_a_us=4e6, flop_a_us=8e8).floor_us(group.bytes)
    plain, pdl = kernels.rows_of(group, times, floor, launches=8, sets=2)
    assert (plain["bench"], plain["case"], plain["metric"]) == ("op", "M=1", "us")
    assert (plain["median"], plain["floor"]) == (2.0, 1.0)
    assert (plain["p20"], plain["p80"]) == (1.4, 2.6)
    assert (plain["peer"], plain["peer_median"]) == ("quick", 4.0)
    assert plain["peers"] == {"slow": 9.0, "quick": 4.0}
    assert (plain["bytes"], plain["launches"], plain["sets"]) == (4_000_000, 8, 2)
    assert (pdl["case"], pdl["median"], pdl["peer"]) == ("M=1 pdl", 1.5, "quick")


def test_a_row_without_a_peer_says_so() -> None:
    group = group_of(Subject("flint", nothing, "M=1"))
    [row] = kernels.rows_of(group, {"flint": [1.0]}, 0.5, launches=8, sets=2)
    assert (row["peer"], row["peer_median"], row["peers"]) == ("", 0.0, {})


def test_the_floor_is_that_of_the_resource_that_binds() -> None:
    roofs = Roofs(bytes_a_us=4e6, flop_a_us=8e8)
    assert roofs.floor_us(8_000_000) == 2.0
    assert roofs.floor_us(8_000_000, 4 * 10**9) == 5.0


def test_printed_lines_show_rate_roof_and_peer_in_columns() -> None:
    row = results.row("op", "M=1", "us", [2.0], floor=1.0, peer="quick", peer_median=5.0,
                      bytes=4_000_000, flop=0)  # fmt: skip
    cells = dict(zip(kernels.HEAD, kernels.line(row), strict=True))
    assert (cells["rate"], cells["% roof"], cells["x peer"]) == ("2000 GB/s", "50.0", "2.50")
    product = kernels.line({**row, "flop": 10**9})
    assert "500 TFLOP/s" in product
    roof = results.row("roof", "copy, 1 MiB", "GB/s", [4321.0])
    printed = kernels.aligned([kernels.HEAD, kernels.line(row), kernels.line(roof)]).splitlines()
    assert "4321 GB/s" in printed[2]
    assert printed[0].index("rate") + len("rate") == printed[1].index("GB/s") + len("GB/s")


# ------------------------------------------------------------------------ what is benchmarked


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[Group]]:
    """Groups of a benchmark on the CPU with up to 8 rows; no peer is compiled."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(kv_write, "POSITIONS", 1024)
    monkeypatch.setattr(decode, "MODEL", decode.TINY)
    monkeypatch.setattr(prefill, "ROWS", (5, 8))
    monkeypatch.setattr(moe_layer, "ROWS", (5,))
    monkeypatch.setattr(sweep, "ROWS", (1, 4))
    monkeypatch.setattr(attention, "CASES", ((1, 90, 0), (3, 200, 33)))
    monkeypatch.setattr(attention_prefill, "CASES", ((8, 0, 0), (8, 0, 3), (5, 40, 0)))
    registry = cases.load()

    def of(name: str) -> list[Group]:
        found = list(registry[name](CPU))
        return [group for group in found if int(re.split("[MBQ]=", group.label)[1].split()[0]) <= 8]

    return of


BENCHES = sorted(set(cases.load()) - cases.ON_REQUEST)
ROW_KERNELS = ["fused_add_rms_norm", "qk_norm_rope_kv_write", "rms_norm", "silu_and_mul"]
DECODE_KERNELS = [
    "ll_dense_down", "ll_dense_gate_up", "ll_down", "ll_gate_up", "ll_norm", "ll_o", "ll_qkv",
    "ll_router", "lm_head",
]  # fmt: skip
PREFILL_KERNELS = ["experts_around", "experts_down", "experts_gate_up", "linear", "moe_layer"]
ATTENTION = ["attention_decode"]
PREFILL_ATTENTION = ["attention_prefill"]
SWEEP = "sweep"
LAYERS = "moe_layer_chain"  # a chain that is one launch: nothing of it is linked to another
KERNELS = sorted(ROW_KERNELS + DECODE_KERNELS + ATTENTION)


def test_the_benchmarks_are_those_of_the_kernels() -> None:
    assert sorted([*KERNELS, *PREFILL_KERNELS, *PREFILL_ATTENTION, LAYERS, SWEEP]) == BENCHES
    assert {"rms_norm_plans", f"{LAYERS}_without_attention"} == cases.ON_REQUEST
    kernels_json = [name for name, file in cases.FILES.items() if file == "kernels"]
    assert sorted(kernels_json) == sorted([*ROW_KERNELS, "rms_norm_plans"])
    assert set(cases.FILES.values()) == {
        "kernels", "decode_kernels", "prefill_kernels", "attention", "sweep",
    }  # fmt: skip


@pytest.mark.parametrize("name", BENCHES)
def test_kernels_and_peers_compute_the_same(
    name: str, groups: Callable[[str], list[Group]]
) -> None:
    found = groups(name)
    assert found
    for group in found:
        usable, problems = cases.checked(group)
        assert not problems
        assert [subject.name for subject in usable.subjects] == [
            subject.name for subject in group.subjects
        ]


@pytest.mark.parametrize("name", KERNELS)
def test_cases_are_named_once_and_chains_have_both_launches(
    name: str, groups: Callable[[str], list[Group]]
) -> None:
    named = [(s.case, group.checkpoint) for group in groups(name) for s in group.subjects if s.case]
    assert len(set(named)) == len(named)
    for case, checkpoint in named:
        if case.endswith(" pdl"):
            assert (case.removesuffix(" pdl"), checkpoint) in named
            assert (case.replace(" pdl", " chain"), checkpoint) in named
    assert any(case.endswith(" pdl") for case, _ in named)
    if name in DECODE_KERNELS:
        wanted = {f"M={rows}{mode}" for rows in (1, 8) for mode in ("", " pdl", " chain")}
        assert set(named) == {(case, of) for case in wanted for of in ("nvfp4", "bf16")}


def chains(found: list[Group]) -> Iterator[tuple[Group, Subject]]:
    for group in found:
        for subject in group.subjects:
            if group.chained and subject.case:
                yield group, subject


@pytest.mark.parametrize("name", KERNELS)
def test_each_launch_of_a_chain_depends_on_the_first(
    name: str, groups: Callable[[str], list[Group]]
) -> None:
    def last_output(group: Group, subject: Subject, change: bool) -> torch.Tensor:
        # A few rows of a decode step are linked by memory: other rows of the next launch depend.
        sets = [group.make(index) for index in range(4 if name in ROW_KERNELS else 2)]
        if change:
            inputs = {"qk_norm_rope_kv_write": "qkv", "attention_decode": "q"}
            first = getattr(sets[0], inputs.get(name, "x"))
            first *= -1
        outputs = [subject.call(buffers) for buffers in subject.arrange(sets)]
        return outputs[-1][0]

    for group, subject in chains(groups(name)):
        assert not torch.equal(
            last_output(group, subject, False), last_output(group, subject, True)
        ), group.label


@pytest.mark.parametrize("name", KERNELS)
def test_values_of_a_chain_neither_die_nor_explode(
    name: str, groups: Callable[[str], list[Group]]
) -> None:
    for checkpoint in ("", "nvfp4", "bf16"):
        found = [each for each in chains(groups(name)) if each[0].checkpoint == checkpoint]
        for group, subject in found[:1]:
            sets = subject.arrange([group.make(index) for index in range(512)])
            for buffers in sets:
                [first, *_] = subject.call(buffers)
            assert 0.1 < float(first.float().std()) < 10


@pytest.mark.parametrize("name", DECODE_KERNELS)
def test_a_chains_launch_reads_the_memory_that_the_one_before_it_wrote(
    name: str, groups: Callable[[str], list[Group]]
) -> None:
    for group, subject in chains(groups(name)):
        plain = [group.make(index) for index in range(3)]
        for before, after in itertools.pairwise(subject.arrange(plain)):
            read = {key: after.arguments[key] for key in plain[0].links}
            for tensor in read.values():
                assert any(shares_memory(tensor, out) for out in before.outputs.values())
                assert not any(shares_memory(tensor, out) for out in after.outputs.values())


def shares_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes


def test_the_last_logits_are_the_last_row(groups: Callable[[str], list[Group]]) -> None:
    """Where the head's chain takes its inputs from: every other element is 0."""
    for group, subject in chains(groups("lm_head")):
        [first, second] = subject.arrange([group.make(index) for index in range(2)])
        subject.call(first)
        assert not second.x[:, ::2].any()
        odd = first.x[-1, 1::2].repeat(len(second.x))
        assert torch.equal(second.x[:, 1::2].flatten(), odd)


def test_experts_have_their_turn() -> None:
    for rows in (1, 8):
        ids = [decode.choice(rows, index, CPU) for index in range(300)]
        assert all(each.unique().numel() == rows * 6 for each in ids)
        assert torch.equal(ids[0].flatten(), ids[0].flatten().sort().values)
        apart = decode.FLINT.experts // (rows * 6)
        assert torch.cat(ids[:apart]).unique().numel() == apart * rows * 6


def test_pools_hold_more_than_an_l2(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def make(index: int) -> dict[str, torch.Tensor]:
        made.append(index)
        return {"weight": torch.full((1000,), index, dtype=torch.uint8)}

    monkeypatch.setattr(decode, "l2_bytes", lambda _: 10_000)
    pool = decode.Pool(make, CPU)
    taken = [int(pool[index]["weight"][0]) for index in range(40)]
    assert made == list(range(31))
    assert taken == [index % 31 for index in range(40)]
    monkeypatch.setattr(decode, "l2_bytes", lambda _: 10)
    assert [int(decode.Pool(make, CPU)[index]["weight"][0]) for index in range(4)] == [0, 1, 0, 1]


@pytest.mark.parametrize("checkpoint", ["nvfp4", "bf16"])
def test_the_layers_depend_on_each_other(
    checkpoint: str, groups: Callable[[str], list[Group]]
) -> None:
    """A change of the first residual reaches the end, and each layer's weights play a part."""
    [small, large] = [g for g in groups(LAYERS) if g.checkpoint == checkpoint]
    assert small.bytes < large.bytes < 8 * small.bytes
    subject = small.subjects[0]
    chain = small.make(0)
    assert len(chain.plan) == 7 * decode.TINY.layers
    want = [output.clone() for output in subject.call(chain)]
    assert all(torch.equal(a, b) for a, b in zip(want, subject.call(chain), strict=True))
    for output in want:
        assert 0.1 < float(output.float().std()) < 30
    for _, arguments, _ in chain.plan:
        for name, value in arguments.items():
            if name in ("weight", "w13", "w2", "k_cache", "router_weight"):
                kept = value.clone()
                value.zero_()
                got = subject.call(chain)
                assert not all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), name
                value.copy_(kept)
    chain.plan[0][1]["residual"].mul_(-1)
    assert not torch.equal(subject.call(chain)[1], want[1])


@pytest.mark.parametrize("attends", [True, False])
def test_what_o_takes_in_a_chain(attends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "MODEL", decode.TINY)
    layers = moe_layer_chain.Layers("bf16", CPU)
    plan = moe_layer_chain.Chain(layers, 1, attends=attends).plan
    assert len(plan) == (6 + attends) * decode.TINY.layers
    before = next(index for index, step in enumerate(plan) if step[0] == "bf16_linear") - 1
    assert (plan[before][0] == "attention_decode") == attends
    taken = plan[before + 1][1]["x"]
    assert taken.data_ptr() == plan[before][2]["out" if attends else "q_out"].data_ptr()


@pytest.fixture
def two_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """`broken`, which fails after its first group, and `good`; rows in a file each; no GPU."""

    def broken(_: torch.device) -> Iterator[Group]:
        yield group_of(Subject("flint", lambda _: (torch.ones(3),), "M=1"))
        raise MemoryError("too many layers")

    def good(_: torch.device) -> Iterator[Group]:
        yield group_of(Subject("flint", lambda _: (torch.ones(3),), "M=8"), checkpoint="bf16")

    roof = results.row("roof", "copy, 1 MiB", "GB/s", [4000.0])
    monkeypatch.setattr(cases, "REGISTRY", {"broken": broken, "good": good})
    monkeypatch.setattr(cases, "FILES", {"broken": "one", "good": "two"})
    monkeypatch.setattr(cases, "ON_REQUEST", set())
    monkeypatch.setattr(cases, "load", lambda: cases.REGISTRY)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernels.cuda, "why_not", lambda _: None)
    monkeypatch.setattr(kernels.results, "describe", lambda *_: META)
    monkeypatch.setattr(kernels.roofs, "measure", lambda _: (Roofs(4e6, 8e8), [roof]))
    monkeypatch.setattr(kernels, "Timer", lambda _: UntimedTimer())


@pytest.mark.usefixtures("two_benchmarks")
def test_a_benchmark_that_cannot_be_made_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kernels.main(["--output", str(tmp_path)]) == 1
    found = {path.name: json.loads(path.read_text("utf-8")) for path in tmp_path.iterdir()}
    for name, case in (("one.json", "M=1"), ("two.json", "M=8")):
        assert found[name]["meta"] == META
        assert [row["case"] for row in found[name]["rows"]] == ["copy, 1 MiB", case]
    printed = capsys.readouterr()
    assert "too many layers" in printed.err
    assert "op     M=8 bf16" in printed.out


@pytest.mark.usefixtures("two_benchmarks")
def test_the_benchmarks_of_one_file(tmp_path: Path) -> None:
    assert kernels.main(["--file", "two", "--output", str(tmp_path)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["two.json"]


def test_a_chain_of_norms_is_the_op_after_the_op() -> None:
    sets = norm.chained([norm.make(2, CPU, index) for index in range(3)])
    launch = norm.in_chain(partial(norm.fused_add_rms_norm, enable_pdl=True))
    for buffers in sets:
        last = launch(buffers)
    x, residual = sets[0].x, sets[0].residual
    for buffers in sets:
        x, residual = ops.fused_add_rms_norm(x, residual, buffers.weight, norm.EPS)
    assert torch.equal(last[0], x)
    assert torch.equal(last[1], residual)


def test_outputs_of_a_chain_are_views_of_the_next_input() -> None:
    gates = activation.chained([activation.make_neutral(64, CPU, index) for index in range(3)])
    act = gates[0].act
    assert act is not None
    assert act.is_contiguous()
    assert act.data_ptr() == gates[1].x[:, 64:].data_ptr()
    table = torch.ones(64, kv_write.DIM)
    linked = kv_write.chained([kv_write.make(8, table, index) for index in range(3)])
    q, k = linked[1].q, linked[1].k
    assert q is not None
    assert k is not None
    assert q.is_contiguous()
    assert k.is_contiguous()
    assert q.data_ptr() == linked[2].qkv.data_ptr()
    assert k.data_ptr() == q.data_ptr() + q.nbytes
    assert k.data_ptr() + k.nbytes < linked[2].qkv.data_ptr() + linked[2].qkv.nbytes


@pytest.mark.parametrize("rows", [1, 8, 8192])
def test_slots_are_those_of_a_cache(rows: int) -> None:
    buffers = kv_write.make(rows, torch.ones(16384, kv_write.DIM), index=1)
    assert buffers.slots.unique().numel() == rows
    assert int(buffers.slots.min()) >= 0
    assert int(buffers.slots.max()) < buffers.k_cache.shape[0] * kv_write.PAGE
    assert buffers.positions.unique().numel() == rows  # each reads a row of the table
    assert buffers.k_cache.stride(1) == kv_write.DIM  # HND: the tokens of a head side by side


def test_bytes_are_counted_from_the_tensors(groups: Callable[[str], list[Group]]) -> None:
    """Each input once, each output once; of table and caches, the rows that are touched."""
    buffers = norm.make(8, CPU, 0)
    [normed] = norm.rms_norm(buffers, enable_pdl=False)
    read = buffers.x.nbytes + buffers.weight.nbytes
    assert norm.rms_norm_bytes(8) == read + normed.nbytes
    outputs = norm.fused_add_rms_norm(buffers, enable_pdl=False)
    read += buffers.residual.nbytes
    assert norm.fused_add_rms_norm_bytes(8) == read + sum(output.nbytes for output in outputs)

    gates = groups("silu_and_mul")[0]
    x = gates.make(0).x
    assert gates.bytes == x.nbytes + ops.silu_and_mul(x).nbytes

    table = torch.ones(64, kv_write.DIM)
    heads = kv_write.make(8, table, 0)
    q, k, *_ = kv_write.kernel(heads)
    small = (heads.qkv, heads.q_weight, heads.k_weight, heads.positions, heads.slots, q, k)
    cached = 2 * k.nbytes  # k and v
    assert kv_write.launch_bytes(8) == sum(t.nbytes for t in small) + table[:8].nbytes + cached


def test_what_computes_something_else_is_not_timed() -> None:
    group = group_of(
        Subject("flint", lambda _: (torch.ones(3),), "M=1"),
        Subject("peer", lambda _: (torch.full((3,), 1.05),)),
    )
    with pytest.raises(
        RuntimeError, match=r"op M=1: output 0 of flint is 0\.0476 from that of peer"
    ):
        cases.checked(group)
    nan = replace(group, subjects=[Subject("flint", lambda _: (torch.tensor([torch.nan]),), "M=1")])
    with pytest.raises(RuntimeError, match="output 0 of flint is nan"):
        cases.checked(nan)


def test_a_peer_that_cannot_run_is_left_out_and_named() -> None:
    def broken(_: object) -> tuple[torch.Tensor, ...]:
        raise RuntimeError("no compiler")

    ours = Subject("flint", lambda _: (torch.ones(3),), "M=1")
    usable, problems = cases.checked(group_of(ours, Subject("peer", broken)))
    assert list(usable.subjects) == [ours]
    assert problems == ["op M=1: peer peer cannot run: no compiler"]
    with pytest.raises(RuntimeError, match="no compiler"):
        cases.checked(group_of(replace(ours, call=broken)))


class UntimedTimer:
    """Runs every launch, in place of a replay."""

    def plan(self, launch_bytes: int, launch_flop: int = 0) -> Plan:
        return Plan(launches=5, sets=3)

    def measure(
        self, subjects: dict[str, list[Launch]], *, hot: bool = False
    ) -> dict[str, list[float]]:
        assert {len(launches) for launches in subjects.values()} == {5}
        for launches in subjects.values():
            for launch in launches:
                launch()
        return {name: [1.0] for name in subjects}


@pytest.mark.parametrize("name", BENCHES)
def test_every_group_is_measured_from_buffers_to_rows(
    name: str, groups: Callable[[str], list[Group]]
) -> None:
    roofs = Roofs(bytes_a_us=4e6, flop_a_us=8e8)
    for group in groups(name):
        rows, problems = kernels.measure(group, UntimedTimer(), roofs)  # type: ignore[arg-type]
        assert not problems
        assert [row["case"] for row in rows] == [s.case for s in group.subjects if s.case]
        for row in rows:
            assert row["sets"] == (1 if group.hot else 5 if group.chained else 3)
            assert row["floor"] == group.bytes / 4e6
            assert row["checkpoint"] == group.checkpoint
            if name in ROW_KERNELS:
                assert set(row["peers"]) == {"torch", "torch.compile"}
            else:
                # Of a window and of a past, prefill attention's only peer is FlashAttention-3.
                alone = name == "attention_prefill" and row["case"] != "Q=8 K=8 W=0"
                assert (row["peer"] == "") == (alone or name in (LAYERS, "moe_layer", SWEEP))


@pytest.mark.skipif(torch.cuda.is_available(), reason="what happens without a GPU")
def test_the_command_says_that_it_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        kernels.main(["--only", "rms_norm"])
    assert "no GPU" in capsys.readouterr().err


# -------------------------------------------------------------------------- tables and plots

META = {
    "gpu": "NVIDIA H200", "cpu": "", "threads": 16, "driver": "1", "cuda": "13.0",
    "torch": "2.11.0", "triton": "3.6.0", "python": "3.12", "commit": "0123456789abcdef",
    "date": "2026-01-01",
}  # fmt: skip


def made_up_rows() -> list[results.Row]:
    more = {"peer": "torch", "peer_median": 4.0, "bytes": 1, "flop": 0}
    return [
        results.row("roof", "copy, 1 MiB", "GB/s", [4000.0]),
        results.row("rms_norm", "M=1", "us", [1.2, 1.3, 1.4], floor=0.003, **more),
        results.row("rms_norm", "M=1 hot", "us", [1.0], floor=0.003, **more),
        results.row("rms_norm", "M=64 pdl", "us", [1.1], floor=0.1, **more),
        results.row("silu_and_mul", "M=8192 D=6144", "us", [8.0], floor=3.0, **more),
    ]


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of results with a kernels.json of made-up figures."""
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    for name in ("KERNELS", "FORWARD", "ABLATION", "ROOFLINE"):
        monkeypatch.setattr(tables, f"{name}_PLOT", tmp_path / f"{name}.svg")
    results.write(tmp_path / "h200" / "kernels.json", made_up_rows(), META)
    return tmp_path


def test_without_rows_tables_say_so_and_there_is_no_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    for name in (
        "kernels", "kernel-headlines", "roof", "decode-kernels-nvfp4", "decode-kernels-bf16",
        "layer-chain", "prefill-kernels", "attention", "attention-prefill",
    ):  # fmt: skip
        assert tables.TABLES[name]() == "*Not measured in this version.*"
    assert set(tables.drawings().values()) == {None}


def test_tables_are_made_of_rows(measured: Path) -> None:
    table = tables.TABLES["kernels"]()
    assert "| `rms_norm` | M=1 | 1.3 (1.24 to 1.36) | 0.003 | 0% | torch: 4 | 3.08 |" in table
    assert "| `silu_and_mul` | M=8192 D=6144 | 8 (8 to 8) | 3 | 38% | torch: 4 | 0.50 |" in table
    assert table.startswith("![Kernels on one NVIDIA H200, time relative to the best peer](images/")
    assert "commit 0123456789ab." in table
    assert "4e+03" not in table  # the roofs have a table of their own
    assert "| copy, 1 MiB | GB/s | 4000 (4000 to 4000) |" in tables.TABLES["roof"]()
    headlines = tables.TABLES["kernel-headlines"]()
    assert headlines.count("| `") == 2
    assert "hot" not in headlines


def test_tables_of_decoding_are_made_of_rows(measured: Path) -> None:
    more = {"peer": "torch.mm", "peer_median": 9.0, "bytes": 1, "flop": 0}
    rows = [
        results.row("roof", "copy, 1 MiB", "GB/s", [4000.0]),
        results.row("ll_o", "M=1 pdl", "us", [3.0], floor=1.2, checkpoint="nvfp4", **more),
        results.row("ll_o", "M=1 pdl", "us", [6.0], floor=4.0, checkpoint="bf16", **more),
        results.row("moe_layer_chain", "M=1 layers=49", "us", [980.0], floor=294.0,
                    checkpoint="nvfp4"),
        results.row("moe_layer_chain", "M=8 layers=49 plain", "us", [1470.0], floor=294.0,
                    checkpoint="bf16"),
    ]  # fmt: skip
    results.write(measured / "h200" / "decode_kernels.json", rows, META)
    nvfp4, bf16 = (tables.TABLES[f"decode-kernels-{name}"]() for name in ("nvfp4", "bf16"))
    assert "| `ll_o` | M=1 pdl | 3 (3 to 3) | 1.2 | 40% | torch.mm: 9 | 3.00 |" in nvfp4
    assert "| `ll_o` | M=1 pdl | 6 (6 to 6) | 4 | 67% | torch.mm: 9 | 1.50 |" in bf16
    assert nvfp4.count("ll_o") == 1
    assert "moe_layer_chain" not in nvfp4
    chain = tables.TABLES["layer-chain"]()
    assert "| NVFP4 | 1 | yes | 980 (980 to 980) | 294 | 30% | 20 |" in chain
    assert "| BF16 | 8 | no | 1470 (1470 to 1470) | 294 | 20% | 30 |" in chain
    assert "commit 0123456789ab." in chain


def test_the_table_of_prefill_is_made_of_rows(measured: Path) -> None:
    more = {"peer": "torch.mm", "peer_median": 9.0, "bytes": 1}
    rows = [
        results.row("roof", "copy, 1 MiB", "GB/s", [4000.0]),
        results.row("linear", "M=64 N=8 K=8", "us", [10.0], floor=5.0, flop=40_000_000, **more),
        results.row("experts_around", "M=64", "us", [3.0], floor=1.5, flop=0, **more),
    ]
    results.write(measured / "h200" / "prefill_kernels.json", rows, META)
    table = tables.TABLES["prefill-kernels"]()
    assert "| `linear` | M=64 N=8 K=8 | 10 (10 to 10) | 4 | 50% | torch.mm: 9 | 0.90 |" in table
    assert "| `experts_around` | M=64 | 3 (3 to 3) |  | 50% | torch.mm: 9 | 3.00 |" in table
    assert "commit 0123456789ab." in table


def test_the_tables_of_attention_are_made_of_rows(measured: Path) -> None:
    more = {"peer": "FlashAttention-3", "peer_median": 9.0, "bytes": 1}
    rows = [
        results.row("attention_decode", "B=1 L=8 W=0", "us", [3.0], floor=1.5, flop=0, **more),
        results.row("attention_prefill", "Q=8 K=8 W=0", "us", [10.0], floor=5.0, flop=40_000_000,
                    **more),
    ]  # fmt: skip
    results.write(measured / "h200" / "attention.json", rows, META)
    decode, prefill = (tables.TABLES[name]() for name in ("attention", "attention-prefill"))
    assert "| `attention_decode` | B=1 L=8 W=0 | 3 (3 to 3) |" in decode
    line = "| `attention_prefill` | Q=8 K=8 W=0 | 10 (10 to 10) | 4 | 50% | FlashAttention-3: 9 |"
    assert line in prefill
    assert "prefill" not in decode and "decode" not in prefill


def test_the_plot_shows_cases_by_their_own_launches(measured: Path) -> None:
    drawing = tables.drawings()[tables.KERNELS_PLOT]
    assert drawing is not None
    root = ElementTree.fromstring(drawing)
    space = "{http://www.w3.org/2000/svg}"
    names = [each.text for each in root.iter(f"{space}text") if each.get("class") == "name"]
    assert names == ["rms_norm", "silu_and_mul"]  # neither the hot case nor M=64
    bars = [float(bar.get("width", "")) for bar in root.iter(f"{space}rect")][1:]
    scale = plots.x_of(1.0) - plots.x_of(0.0)
    assert bars[0] == pytest.approx(scale * 1.3 / 4, abs=0.1)
    assert bars[1] == pytest.approx(scale * plots.LIMIT, abs=0.1)  # twice the peer, cut off
    assert "→" in drawing


def prefill_rows() -> list[results.Row]:
    """Ceilings of 4 TB/s and 800 TFLOP/s; a product of 100 FLOP a byte at half of its roof."""
    more = {"peer": "torch.mm", "peer_median": 9.0}
    return [
        results.row("roof", "copy, 1 MiB", "GB/s", [4000.0]),
        results.row("roof", "copy, 2 MiB", "GB/s", [3000.0]),
        results.row("roof", "bf16 matmul", "TFLOP/s", [800.0]),
        results.row("linear", "M=64", "us", [10.0], flop=2 * 10**9, bytes=2 * 10**7, **more),
        results.row("experts_around", "M=64", "us", [3.0], flop=0, bytes=10, **more),
    ]


def test_the_roofline_puts_a_kernel_where_its_rate_and_intensity_are(measured: Path) -> None:
    results.write(measured / "h200" / "prefill_kernels.json", prefill_rows(), META)
    drawing = tables.drawings()[tables.ROOFLINE_PLOT]
    assert drawing is not None
    assert tables.TABLES["prefill-kernels"]().startswith("![Kernels of many tokens")
    root = ElementTree.fromstring(drawing)
    space = "{http://www.w3.org/2000/svg}"
    marks = root.findall(f"{space}circle")
    assert [mark.findtext(f"{space}title") for mark in marks] == [
        "linear M=64: 200 TFLOP/s",
        "linear",  # of the legend: what has no operations is not drawn
    ]
    [path] = [p.get("d", "") for p in root.iter(f"{space}path") if p.get("class") == "roof"]
    corners = [tuple(map(float, part.split())) for part in path.removeprefix("M ").split(" L ")]
    (left, bottom), (ridge, top), (right, flat) = corners
    assert top == flat < bottom
    # The field is of 100 to 1000 FLOP a byte, and 100 to 1000 TFLOP/s; the ridge is at 200.
    assert (right - ridge) / (right - left) == pytest.approx(math.log10(1000 / 200), abs=0.01)
    assert float(marks[0].get("cx", "")) == pytest.approx(left, abs=0.2)
    share = (bottom - float(marks[0].get("cy", ""))) / (bottom - top)
    assert share == pytest.approx(math.log10(200 / 400) / math.log10(800 / 400), abs=0.01)


def test_a_roofline_without_rows_or_ceilings_is_none(measured: Path) -> None:
    assert tables.drawings()[tables.ROOFLINE_PLOT] is None
    rows = [row for row in prefill_rows() if row["metric"] != "GB/s"]
    results.write(measured / "h200" / "prefill_kernels.json", rows, META)
    assert tables.drawings()[tables.ROOFLINE_PLOT] is None
    with pytest.raises(ValueError, match="rows: got 0; want at least one"):
        roofline.chart("title", [], 1.0, 1.0)


def test_the_same_rows_draw_the_same_bytes() -> None:
    rows = tables.plotted(made_up_rows())
    assert plots.chart("a < b", rows) == plots.chart("a < b", json.loads(json.dumps(rows)))
    ElementTree.fromstring(plots.chart("a < b", rows))


def test_a_row_that_has_no_peer_is_not_drawn() -> None:
    row = results.row("op", "M=1", "us", [1.0])
    with pytest.raises(ValueError, match=r"rows: got op M=1 .* want times in 'us' with a peer"):
        plots.chart("title", [row])
