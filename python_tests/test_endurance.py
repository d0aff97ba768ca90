"""The endurance run in small, on the CPU: what it counts, and that it finds what it looks for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import run_endurance
import torch
from run_endurance import LIVE, PART, Lane, Request, endure

from flint_kernels.loading import load
from flint_kernels.model import Flint, PagedKVCache
from flint_kernels.model.buffers import DecodeBuffers

STEPS, STAY = 200, 40


@pytest.fixture(scope="module")
def model() -> Flint:
    return load("flint-tiny", device="cpu", max_positions=run_endurance.POSITIONS)


def all_compared(model: Flint) -> tuple[dict[str, float], list[str]]:
    return endure(model, STEPS, lanes=2, share=1.0, graphs=False, stay=STAY)


def test_nothing_is_found_where_nothing_is_wrong(model: Flint) -> None:
    counts, found = all_compared(model)
    assert not found
    assert counts["steps"] >= STEPS
    assert counts["steps"] < counts["tokens"] <= run_endurance.LIVE * counts["steps"]
    assert counts["requests compared"] == counts["requests"] > PART
    assert counts["GPU bytes grown"] == 0


def test_a_reference_has_no_more_rows_than_what_it_judges(
    model: Flint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU more than eight go to other kernels, whose bits are others. So do two and one."""
    rows: list[int] = []
    monkeypatch.setattr(
        run_endurance.Slow, "_step", lambda self, given, ids: rows.append(len(given))
    )
    monkeypatch.setattr(run_endurance, "difference", lambda one, two: "")
    alone = ([False, True], [False, False])
    requests = [Request([1], 2, True, alone=alone[number > 0]) for number in range(2 * LIVE + 1)]
    run_endurance.Slow(model).differing(requests)
    # 8, 8 and 1 requests, the one with company; the first of all makes its last step alone.
    assert rows == [8, 1, 7, 8, 8, 2, 2]


def test_the_share_is_about_what_is_sampled(model: Flint) -> None:
    counts, _ = endure(model, STEPS, share=0.2, graphs=False, stay=STAY)
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
    assert any("is another" in problem for problem in found)


def test_a_counter_that_is_stuck_is_found(model: Flint) -> None:
    lane = Lane(model, 0, graphs=False, stay=STAY)
    while lane.step(0.0, accept=lane.steps < 5):
        pass
    assert not lane.problems()
    with torch.inference_mode():
        lane.decoder._steps[1].launch.workspace[17] = 1
    assert lane.problems() == ["graph of 1: a counter of its workspace is not zero"]


def test_a_page_that_is_lost_is_found(model: Flint, monkeypatch: pytest.MonkeyPatch) -> None:
    lane = Lane(model, 0, graphs=False, stay=STAY)
    monkeypatch.setattr(PagedKVCache, "release", lambda self, request: None)
    while lane.step(0.0, accept=lane.steps < 5):
        pass
    assert lane.problems() == ["cache: a request or a page is not free"]


def test_memory_that_grows_is_found(model: Flint, monkeypatch: pytest.MonkeyPatch) -> None:
    used = iter(range(0, 10 * run_endurance.SPREAD, run_endurance.SPREAD // 2))
    monkeypatch.setattr(run_endurance, "memory", lambda device: (0, next(used)))
    _, found = endure(model, 20, share=0.0, graphs=False, stay=STAY)
    assert len(found) == PART - 3
    assert "bytes more on the GPU" in found[0]


def ended(tokens: list[int], logits: list[float]) -> Request:
    request = Request([1], len(tokens) - 1, True, alone=[True] * (len(tokens) - 1))
    request.tokens, request.logits = torch.tensor(tokens), torch.tensor(logits)
    return request


@pytest.mark.parametrize(
    ("two", "says"),
    [
        (ended([3, 4], [0.0, 1.0]), ""),
        (ended([3, 4], [-0.0, 1.0]), "1 of the last logits differ"),
        (ended([3, 5], [0.0, 1.0]), "token 1, drawn alone, is another"),
    ],
)
def test_a_difference_of_one_bit_is_one(two: Request, says: str) -> None:
    found = run_endurance.difference(ended([3, 4], [0.0, 1.0]), two)
    assert found.endswith(says) and bool(found) == bool(says)


def test_processes_share_the_steps(tmp_path: Path) -> None:
    """Each with other requests; their counts add up, and the larger growth is what counts."""
    output = tmp_path / "rows.json"
    arguments = [
        "--device",
        "cpu",
        "--steps",
        "60",
        "--workers",
        "2",
        "--share",
        "0",
        "--stay",
        "10",
    ]
    assert run_endurance.main([*arguments, "--output", str(output)]) == 0
    rows = json.loads(output.read_text(encoding="utf-8"))["rows"]
    counts = {row["metric"]: row["median"] for row in rows}
    assert counts["steps"] >= 60 and counts["failures"] == 0 and counts["processes"] == 2
    one = {"steps": 30.0, "GPU bytes grown": 0.0, "process bytes grown": 5.0, "s": 2.0}
    two = {"steps": 31.0, "GPU bytes grown": 7.0, "process bytes grown": 1.0, "s": 1.0}
    assert run_endurance.together([one, two]) == {
        "steps": 61.0, "GPU bytes grown": 7.0, "process bytes grown": 5.0, "s": 2.0,
    }  # fmt: skip
