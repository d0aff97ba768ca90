"""What each plan of an NVFP4 projection of many tokens costs, and the header that says so.

    python -m microbench.linear_plans --output docs/results/h200    # measures the plans, on a GPU
    python -m microbench.linear_plans --header                      # csrc/cuda/linear_costs.h

A plan is the tokens of a tile and how many CTAs share its columns. The costs are fitted to the
times by least squares, relative ones; the kernels' choice is the plan whose cost is the least. Only
plans whose tiles leave a quarter of the GPU idle are measured in shares, so that all of them run at
once.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from flint_kernels import results
from flint_kernels.backends import cuda, native_many
from microbench.cases import decode, randn
from microbench.cases.decode import Pool
from microbench.timer import Replay, Timer

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "docs" / "results" / "h200" / "linear_plans.json"
HEADER = ROOT / "csrc" / "cuda" / "linear_costs.h"

TILES = (64, 128, 256)
SHARES = (1, 2, 3, 4, 5, 6)
TOKENS = (64, 128, 256, 512, 1024)
ROW_TILE, STEP = 128, 256  # rows of weights of a tile, columns of a step
COSTS = ("start", "step", "tile", "shared", "share")
_LAUNCHES = 40
_CASE = re.compile(r"tile=(\d+) shares=(\d+) M=(\d+) N=(\d+) K=(\d+)")


def sizes() -> tuple[tuple[int, int], ...]:
    m = decode.MODEL
    return (
        (m.qkv_rows, m.hidden),
        (m.hidden, m.heads * m.dim),
        (2 * m.dense, m.hidden),
        (m.hidden, m.dense),
    )


def plans(rows: int, features: int, columns: int, processors: int) -> Iterator[tuple[int, int]]:
    for tile in TILES:
        tiles = -(-rows // tile) * -(-features // ROW_TILE)
        for shares in SHARES:
            alone = shares == 1 and tiles <= 3 * processors
            if alone or (1 < shares <= columns // STEP and 4 * tiles * shares <= 3 * processors):
                yield tile, shares


def measure(device: torch.device) -> list[results.Row]:
    timer = Timer(11)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    rows = []
    for features, columns in sizes():

        def weights(index: int, size: tuple[int, int] = (features, columns)) -> dict[str, Tensor]:
            return decode.weights("w", "nvfp4", device, index, *size, scales=(1,))

        pool = Pool(weights, device)
        for tokens in TOKENS:
            x = [randn(device, index, tokens, columns) for index in range(4)]
            replays = {
                f"tile={tile} shares={shares} M={tokens} N={features} K={columns}": Replay(
                    [launch(x[i % 4], pool[i], (tile, shares)) for i in range(_LAUNCHES)]
                )
                for tile, shares in plans(tokens, features, columns, processors)
            }
            times = timer.time(replays)
            more = {"checkpoint": "nvfp4", "processors": processors}
            for case, us in times.items():
                rows.append(results.row("linear_plan", case, "us", us, **more))
    return rows


def launch(x: Tensor, weight: dict[str, Tensor], plan: tuple[int, int]):  # type: ignore[no-untyped-def]
    def call() -> Tensor:
        out = native_many.linear(x, *weight.values(), (), native_many.ROUNDED, plan=plan)
        if out is NotImplemented:
            raise RuntimeError(f"plan: got {plan}, which there is not for {tuple(x.shape)}")
        found: Tensor = out
        return found

    return call


def parts(case: str, processors: int) -> tuple[int, list[float]]:
    """The tile, and how often each of COSTS is in the time of a case."""
    match = _CASE.fullmatch(case)
    if match is None:
        raise ValueError(f"case: got {case!r}, want tile=T shares=S M=M N=N K=K")
    tile, shares, tokens, features, columns = map(int, match.groups())
    steps = columns // STEP
    if shares > 1:
        return tile, [1, -(-steps // shares), 0, 1, shares]
    pairs = -(-tokens // tile) * -(-features // (2 * ROW_TILE))
    rounds = -(-pairs // (processors // 2))
    return tile, [1, rounds * steps, rounds - 1, 0, 0]


def fitted(rows: Sequence[results.Row]) -> dict[int, dict[str, int]]:
    """Nanoseconds of each of COSTS, by tile."""
    found = {}
    for tile in TILES:
        counts, times = [], []
        for row in rows:
            if row["bench"] == "linear_plan":
                of_tile, count = parts(row["case"], row["processors"])
                if of_tile == tile:
                    counts.append(count)
                    times.append(row["median"] * 1e3)
        time = torch.tensor(times, dtype=torch.float64)
        matrix = torch.tensor(counts, dtype=torch.float64) / time[:, None]
        solution = torch.linalg.lstsq(matrix, torch.ones(len(times), 1, dtype=torch.float64))
        costs = solution.solution.flatten().tolist()
        found[tile] = {n: max(0, round(c / 10) * 10) for n, c in zip(COSTS, costs, strict=True)}
    return found


def header(costs: dict[int, dict[str, int]]) -> str:
    lines = [
        f"    {{{', '.join(str(value) for value in (tile, *cost.values()))}}},"
        for tile, cost in costs.items()
    ]
    return "\n".join(
        [
            "// Written by `python -m microbench.linear_plans --header` from the rows of",
            "// docs/results/h200/linear_plans.json: what a product of many tokens costs by how it",
            "// is cut, in nanoseconds. No torch here.",
            "#pragma once",
            "",
            "namespace flint::cuda {",
            "",
            "// Of tiles of so many tokens: a launch, each step of 256 columns of a CTA, each tile",
            "// of a CTA but its first; and CTAs that share a tile's columns, once and for each.",
            "struct LinearCosts {",
            f"  int tokens, {', '.join(COSTS)};",
            "};",
            "",
            "inline constexpr LinearCosts kLinearCosts[] = {",
            *lines,
            "};",
            "",
            "}  // namespace flint::cuda",
            "",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m microbench.linear_plans", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--header", action="store_true", help=f"writes {HEADER.name}")
    parser.add_argument("--output", type=Path, metavar="FOLDER")
    parser.add_argument("--commit", help="of the tree, where it is run without its git history")
    options = parser.parse_args(arguments)
    if options.header:
        rows = json.loads(ROWS.read_text(encoding="utf-8"))["rows"]
        HEADER.write_text(header(fitted(rows)), encoding="utf-8")
        return 0
    if not torch.cuda.is_available():
        parser.error("no GPU: torch.cuda.is_available() is false; these kernels run on a GPU only")
    device = torch.device("cuda", torch.cuda.current_device())
    if (reason := cuda.why_not(device)) is not None:
        parser.error(f"nothing of this project to time: {reason}")
    with torch.no_grad():
        rows = measure(device)
    print(header(fitted(rows)))
    if options.output:
        meta = results.describe("cuda", options.commit)
        results.write(options.output / ROWS.name, rows, meta)
    return 0


if __name__ == "__main__":
    sys.exit(main())
