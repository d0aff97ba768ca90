"""The costs of the plans of a projection: fitted to times, written as a header, and the sweep."""

from __future__ import annotations

import json

import pytest

from flint_kernels import results
from microbench import linear_plans
from microbench.cases import sweep

PROCESSORS = 132
COSTS = {
    64: {"start": 4800, "step": 1300, "tile": 1800, "shared": 500, "share": 180},
    128: {"start": 6000, "step": 1600, "tile": 3700, "shared": 900, "share": 130},
    256: {"start": 7900, "step": 2300, "tile": 6400, "shared": 1600, "share": 60},
}


def rows_that_cost(costs: dict[int, dict[str, int]]) -> list[results.Row]:
    rows = []
    for features, columns in linear_plans.sizes():
        for tokens in linear_plans.TOKENS:
            for tile, shares in linear_plans.plans(tokens, features, columns, PROCESSORS):
                case = f"tile={tile} shares={shares} M={tokens} N={features} K={columns}"
                _, counts = linear_plans.parts(case, PROCESSORS)
                time = sum(n * c for n, c in zip(counts, costs[tile].values(), strict=True)) / 1e3
                rows.append(results.row("linear_plan", case, "us", [time], processors=PROCESSORS))
    return rows


def test_costs_are_found_again_in_the_times_that_they_make() -> None:
    assert linear_plans.fitted(rows_that_cost(COSTS)) == COSTS


def test_what_is_in_a_time() -> None:
    """o of 256 tokens: 16 tiles of rows. In tiles of 128 tokens 32, a CTA each; 3 shares of 16
    steps have 6 at most. 4 tiles of 64 tokens of the 96 of gate and up: 384 for 132."""
    assert linear_plans.parts("tile=128 shares=3 M=256 N=2048 K=4096", PROCESSORS) == (
        128,
        [1, 6, 0, 1, 3],
    )
    assert linear_plans.parts("tile=64 shares=1 M=256 N=12288 K=2048", PROCESSORS) == (
        64,
        [1, 3 * 8, 2, 0, 0],
    )
    with pytest.raises(ValueError, match="case: got 'M=1'"):
        linear_plans.parts("M=1", PROCESSORS)


def test_the_header_is_that_of_the_rows() -> None:
    """Without rows: that there are none stands in it."""
    written = linear_plans.HEADER.read_text(encoding="utf-8")
    if linear_plans.ROWS.is_file():
        rows = json.loads(linear_plans.ROWS.read_text(encoding="utf-8"))["rows"]
        assert written == linear_plans.header(linear_plans.fitted(rows))
    else:
        assert "// There are no such rows yet" in written


def test_where_a_sweep_is_uneven() -> None:
    def row(case: str, us: float) -> results.Row:
        return results.row("sweep", case, "us", [us])

    even = [("a N=5 M=1", 5.0), ("a N=5 M=2", 4.8), ("a N=5 M=1024", 5), ("a N=5 M=2048", 11)]
    assert sweep.unevenness([row(*point) for point in even]) == []
    falls, doubles = [("b M=64", 9.0), ("b M=128", 8.5)], [("c M=256", 4.0), ("c M=512", 8.1)]
    assert sweep.unevenness([row(*point) for point in [*falls, *doubles, *even]]) == [
        "b: M=64 9.0 us, M=128 8.5 us",
        "c: M=256 4.0 us, M=512 8.1 us",
    ]
