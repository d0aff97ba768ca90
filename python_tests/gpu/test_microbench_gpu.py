"""The timer and the kernel benchmarks on a GPU: what is launched, not how fast it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from microbench import cases, kernels, timer
from microbench.cases import decode
from microbench.roofs import Roofs
from microbench.timer import Timer

pytestmark = pytest.mark.gpu

ROUNDS = 5


@pytest.mark.parametrize("hot", [False, True])
def test_every_launch_of_every_replay_runs(hot: bool) -> None:
    counters = torch.zeros(2, 7, dtype=torch.int32, device="cuda")

    def launches(which: int) -> list[Callable[[], torch.Tensor]]:
        return [lambda cell=cell: cell.add_(1) for cell in counters[which]]

    times = Timer(ROUNDS).measure({"a": launches(0), "b": launches(1)}, hot=hot)
    assert [len(values) for values in times.values()] == [ROUNDS, ROUNDS]
    assert all(value > 0 for values in times.values() for value in values)
    replays = (timer._WARM_ROUNDS + ROUNDS) * (2 if hot else 1)
    # Three launches also run once before the capture; the capture itself runs nothing.
    assert counters.tolist() == [[replays + 1] * 3 + [replays] * 4] * 2


def benches(file: str) -> list[str]:
    return sorted(
        name for name in set(cases.load()) - cases.ON_REQUEST if cases.FILES[name] == file
    )


@pytest.mark.parametrize("name", benches("kernels"))
@torch.no_grad()
def test_rows_of_every_mode(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row: apart, hot, chained and with PDL; the kernels agree with the peers."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    device = torch.device("cuda", torch.cuda.current_device())
    roofs = Roofs(bytes_a_us=4e6, flop_a_us=8e8)
    endings = set()
    for group in cases.REGISTRY[name](device):
        if not group.subjects[0].case.startswith("M=1"):
            continue
        rows, problems = kernels.measure(group, Timer(ROUNDS), roofs)
        assert not problems
        for row in rows:
            assert row["peer"].startswith("torch")
            assert 0 < row["p20"] <= row["median"] <= row["p80"]
            endings.add(row["case"].split()[-1])
    assert {"hot", "chain", "pdl"} < endings


@pytest.mark.parametrize("name", benches("decode_kernels"))
@torch.no_grad()
def test_rows_of_decoding_at_small_sizes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every case and both checkpoints; kernels agree with peers, with and without PDL."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(decode, "MODEL", decode.TINY)
    monkeypatch.setattr(timer, "_MOST_LAUNCHES", 16)  # nothing is measured
    device = torch.device("cuda", torch.cuda.current_device())
    roofs = Roofs(bytes_a_us=4e6, flop_a_us=8e8)
    found = []
    for group in cases.REGISTRY[name](device):
        rows, problems = kernels.measure(group, Timer(ROUNDS), roofs)
        assert not problems
        for row in rows:
            assert 0 < row["p20"] <= row["median"] <= row["p80"]
            assert row["floor"] > 0
            found.append((row["checkpoint"], row["case"]))
    assert len(set(found)) == len(found) == (8 if name == "moe_layer_chain" else 12)
