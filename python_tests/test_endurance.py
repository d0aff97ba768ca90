"""The endurance run in small, on the CPU: what it counts, and that it finds what it looks for."""

from __future__ import annotations

import pytest
import run_endurance
import torch
from run_endurance import PART, Lane, endure

from flint_kernels.loading import load
from flint_kernels.model import Flint, PagedKVCache
from flint_kernels.model.buffers import DecodeBuffers

STEPS = 200


@pytest.fixture(scope="module")
def model() -> Flint:
    return load("flint-tiny", device="cpu", max_positions=run_endurance.POSITIONS)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_endurance, "LONGEST_STAY", 40)


def all_compared(model: Flint) -> tuple[dict[str, float], list[str]]:
    return endure(model, STEPS, lanes=2, share=1.0, graphs=False)


def test_nothing_is_found_where_nothing_is_wrong(model: Flint) -> None:
    counts, found = all_compared(model)
    assert not found
    assert counts["steps"] >= STEPS
    assert counts["steps"] < counts["tokens"] <= run_endurance.LIVE * counts["steps"]
    assert counts["requests compared"] == counts["requests"] > PART
    assert counts["GPU bytes grown"] == 0


def test_the_share_is_about_what_is_sampled(model: Flint) -> None:
    counts, _ = endure(model, STEPS, share=0.2, graphs=False)
    assert 0 < counts["requests compared"] < 0.6 * counts["requests"]


def test_a_table_that_is_not_renewed_is_found(
    model: Flint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request's pages as they were when it came."""
    plain = DecodeBuffers.show

    def stale(self: DecodeBuffers, requests: list[int], growth: int, *tables: object) -> None:
        plain(self, requests, self._growth if self._growth >= 0 else growth, *tables)  # type: ignore[arg-type]

    monkeypatch.setattr(DecodeBuffers, "show", stale)
    _, found = all_compared(model)
    assert any("requests differ" in problem for problem in found)


def test_a_counter_that_is_stuck_is_found(model: Flint) -> None:
    lane = Lane(model, 0, graphs=False)
    while lane.step(0.0, accept=lane.steps < 5):
        pass
    assert not lane.problems()
    with torch.inference_mode():
        lane.decoder._steps[1].launch.workspace[17] = 1
    assert lane.problems() == ["graph of 1: a counter of its workspace is not zero"]


def test_a_page_that_is_lost_is_found(model: Flint, monkeypatch: pytest.MonkeyPatch) -> None:
    lane = Lane(model, 0, graphs=False)
    monkeypatch.setattr(PagedKVCache, "release", lambda self, request: None)
    while lane.step(0.0, accept=lane.steps < 5):
        pass
    assert lane.problems() == ["cache: a request or a page is not free"]


def test_memory_that_grows_is_found(model: Flint, monkeypatch: pytest.MonkeyPatch) -> None:
    used = iter(range(0, 10 * run_endurance.SPREAD, run_endurance.SPREAD // 2))
    monkeypatch.setattr(run_endurance, "memory", lambda device: (0, next(used)))
    _, found = endure(model, 20, share=0.0, graphs=False)
    assert len(found) == PART - 3
    assert "bytes more on the GPU" in found[0]


def test_a_difference_of_one_bit_is_one() -> None:
    one, two = (run_endurance.Request([1], 1, True) for _ in range(2))
    for request in (one, two):
        request.tokens = torch.tensor([3, 4])
        request.logits = torch.tensor([0.0, 1.0])
    assert run_endurance.same(one, two)
    two.logits = torch.tensor([-0.0, 1.0])
    assert not run_endurance.same(one, two)
