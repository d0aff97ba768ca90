"""Rows of one run beside the stored rows of another."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flint_kernels.results import Row

LARGER_IS_BETTER = ("tok/s", "GB/s", "TFLOP/s")
"""Metrics of speed; all others are times."""

Key = tuple[str, str, str, str]


@dataclass(frozen=True)
class Comparison:
    """A row that both runs have.

    ratio: how many times as fast as the stored run, by the medians.
    verdict: "faster" or "slower" where the two spreads (20th to 80th percentile) do not overlap,
        else "same".
    """

    now: Row
    stored: Row
    ratio: float
    verdict: str


def key(row: Row) -> Key:
    """What makes two rows measurements of the same thing."""
    return row["bench"], row["case"], row["checkpoint"], row["metric"]


def compare(now: Sequence[Row], stored: Sequence[Row]) -> list[Comparison]:
    """The rows of `now` that `stored` has too, in the order of `now`."""
    before = {key(row): row for row in stored}
    return [_compared(row, before[key(row)]) for row in now if key(row) in before]


def _compared(now: Row, stored: Row) -> Comparison:
    if now["metric"] in LARGER_IS_BETTER:
        ratio = now["median"] / stored["median"]
        faster, slower = now["p20"] > stored["p80"], now["p80"] < stored["p20"]
    else:
        ratio = stored["median"] / now["median"]
        faster, slower = now["p80"] < stored["p20"], now["p20"] > stored["p80"]
    return Comparison(now, stored, ratio, "faster" if faster else "slower" if slower else "same")


def read(path: Path) -> list[Row]:
    """All rows of a result file, or of the result files in a folder.

    Raises:
        FileNotFoundError: there is none.
        ValueError: a file is no result file.
    """
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise FileNotFoundError(
            f"--compare: got {path}, where there is no result file; want one, or a folder of them, "
            "as --output writes"
        )
    return [row for file in files for row in _rows(file)]


def _rows(file: Path) -> Iterator[Row]:
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
        for row in rows:
            key(row), row["median"], row["p20"], row["p80"]
        yield from rows
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"--compare: got {file}, which is no result file ({error!r}); want one as --output "
            "writes"
        ) from error


HEAD = ("bench", "case", "metric", "now", "stored", "times as fast", "")


def lines(comparisons: Sequence[Comparison]) -> list[tuple[str, ...]]:
    """The cells of a table, with `HEAD` over them."""
    return [
        (
            found.now["bench"],
            f"{found.now['case']} {found.now['checkpoint']}".rstrip(),
            found.now["metric"],
            f"{found.now['median']:.4g}",
            f"{found.stored['median']:.4g}",
            f"{found.ratio:.3f}",
            "" if found.verdict == "same" else found.verdict,
        )
        for found in comparisons
    ]
