"""Draws result rows under the roof of their machine as SVG: rate over arithmetic intensity.

Both axes are logarithmic. The roof is of two lines: what the bytes allow, and what the tensor cores
give. A row stands where its own bytes and operations put it. The same rows give the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape

from microbench.plots import STYLE, line, number, text

Row = dict[str, Any]

WIDTH, HEIGHT = 900, 520
LEFT, RIGHT, TOP, BOTTOM = 90, 690, 84, 460  # of the field
# One for each kernel, told apart in grey too.
COLOURS = ("#0b57a4", "#c4560a", "#2f7d32", "#7b3fa0", "#0e7c86", "#8a6d00")
MARKS = ("circle", "square", "diamond")

MORE_STYLE = """
  .grid { stroke: #eaeef2; stroke-width: 1; }
  .roof { stroke: #1f2328; stroke-width: 2; fill: none; }
"""


class Axis:
    """Places of values between two powers of ten, `low` and `high`, on from `start` to `end`."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        self.low = math.floor(math.log10(min(values)))
        self.high = max(math.ceil(math.log10(max(values))), self.low + 1)
        self.start, self.end = start, end

    def place(self, value: float) -> float:
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        return [10.0**power for power in range(self.low, self.high + 1)]


def drawable(rows: Sequence[Row]) -> list[Row]:
    """The rows that have a place: times of kernels that say their operations."""
    return [row for row in rows if row["metric"] == "us" and row.get("flop") and row["bytes"]]


def chart(title: str, rows: Sequence[Row], bytes_a_us: float, flop_a_us: float) -> str:
    """An SVG with a mark for each row.

    Args:
        rows: as `drawable` gives them, at least one.
        bytes_a_us, flop_a_us: the measured ceilings.

    Raises:
        ValueError: no rows, or one that says no operations.
    """
    if not rows or len(drawable(rows)) != len(rows):
        raise ValueError(f"rows: got {len(rows)}; want at least one, each with `flop` and `bytes`")
    ridge = flop_a_us / bytes_a_us
    intensities = [row["flop"] / row["bytes"] for row in rows]
    rates = [row["flop"] / row["median"] for row in rows]
    x = Axis([*intensities, ridge], LEFT, RIGHT)
    y = Axis([rate / 1e6 for rate in [*rates, flop_a_us]], BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}{MORE_STYLE}</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8"/>',
        text(20, 34, "title", title),
        text(20, 54, "note", "TFLOP/s over operations a byte; the line: the measured ceilings."),
    ]
    for tick in x.ticks():
        parts.append(line("grid", x.place(tick), TOP, x.place(tick), BOTTOM))
        parts.append(text(x.place(tick), BOTTOM + 18, "note", f"{tick:g}", "middle"))
    for tick in y.ticks():
        parts.append(line("grid", LEFT, y.place(tick), RIGHT, y.place(tick)))
        parts.append(text(LEFT - 8, y.place(tick) + 4, "note", f"{tick:g}", "end"))
    parts.append(text((LEFT + RIGHT) / 2, BOTTOM + 40, "note", "FLOP a byte", "middle"))
    parts += roof(x, y, bytes_a_us, flop_a_us)
    benches = list(dict.fromkeys(row["bench"] for row in rows))
    for row, intensity, rate in zip(rows, intensities, rates, strict=True):
        index = benches.index(row["bench"])
        name = f"{row['bench']} {row['case']}: {number(rate / 1e6)} TFLOP/s"
        parts.append(mark(index, x.place(intensity), y.place(rate / 1e6), name))
    for index, bench in enumerate(benches):
        at = TOP + 14 + 24 * index
        parts += [mark(index, RIGHT + 24, at - 4, bench), text(RIGHT + 38, at, "name", bench)]
    return "\n".join([*parts, "</svg>"]) + "\n"


def roof(x: Axis, y: Axis, bytes_a_us: float, flop_a_us: float) -> list[str]:
    """The two lines, from where the first one enters the field."""
    ridge = flop_a_us / bytes_a_us
    left = max(10.0**x.low, 10.0**y.low * 1e6 / bytes_a_us)
    corners = [(left, left * bytes_a_us), (ridge, flop_a_us), (10.0**x.high, flop_a_us)]
    path = " L ".join(f"{x.place(i):.1f} {y.place(rate / 1e6):.1f}" for i, rate in corners)
    above = y.place(flop_a_us / 1e6) - 8
    return [
        f'<path class="roof" d="M {path}"/>',
        text(RIGHT, above, "note", f"{number(flop_a_us / 1e6)} TFLOP/s", "end"),
        text(
            x.place(left) + 30,
            y.place(left * bytes_a_us / 1e6) - 8,
            "note",
            f"{number(bytes_a_us / 1e6)} TB/s",
        ),
    ]


def mark(index: int, x: float, y: float, name: str) -> str:
    colour, shape = COLOURS[index % len(COLOURS)], MARKS[index % len(MARKS)]
    style = f'fill="{colour}" fill-opacity="0.85"'
    label = f"<title>{escape(name)}</title>"
    if shape == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" {style}>{label}</circle>'
    turn = f' transform="rotate(45 {x:.1f} {y:.1f})"' if shape == "diamond" else ""
    box = f'x="{x - 4.5:.1f}" y="{y - 4.5:.1f}" width="9" height="9"'
    return f"<rect {box}{turn} {style}>{label}</rect>"
