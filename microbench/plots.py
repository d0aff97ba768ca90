"""Draws result rows as SVG: the time of each kernel between its floor and its best peer.

Lengths are relative to the peer, since kernels of 1 and of 100 microseconds share a picture. The
same rows give the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape

Row = dict[str, Any]

WIDTH, MARGIN, TOP, LINE, BAR = 900, 20, 84, 40, 14
NAMES, TRACK, FIGURES = 250, 400, 190  # widths of the columns
LIMIT = 1.5  # of the peer's time: the track's right end; a longer bar ends in an arrow

# An opaque card, so that the picture reads the same on a light page and on a dark one.
STYLE = """
  text { font-family: Helvetica, Arial, 'DejaVu Sans', sans-serif; fill: #1f2328; }
  .title { font-size: 17px; font-weight: bold; }
  .note { font-size: 12px; fill: #57606a; }
  .name { font-size: 12.5px; }
  .figure { font-size: 12.5px; font-weight: bold; }
  .card { fill: #ffffff; stroke: #d0d7de; }
  .ours { fill: #0b57a4; }
  .spread { stroke: #1f2328; stroke-width: 1.5; }
  .floor { stroke: #c4560a; stroke-width: 3; }
  .peer { stroke: #8c959f; stroke-width: 1.5; stroke-dasharray: 4 3; }
"""


def chart(title: str, rows: Sequence[Row]) -> str:
    """An SVG with a line for each row; rows whose metric is a time in `us` and that have a peer.

    Raises ValueError for a row without a peer, which has nothing to be measured by.
    """
    for row in rows:
        if not row["peer"] or row["metric"] != "us":
            raise ValueError(
                f"rows: got {row['bench']} {row['case']} with metric {row['metric']!r} and peer "
                f"{row['peer']!r}, want times in 'us' with a peer; leave others out"
            )
    bottom = TOP + LINE * len(rows)
    height = bottom + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        text(MARGIN, 34, "title", title),
        text(
            MARGIN,
            54,
            "note",
            "Bars: median time, relative to the best peer; whisker: 20th to 80th percentile; "
            "orange: the floor by the bytes moved.",
        ),
    ]
    for index, row in enumerate(rows):
        parts += bar(TOP + LINE * index, row)
    peer = x_of(1.0)
    parts += [
        line("peer", peer, TOP - 8, peer, bottom),
        text(peer, bottom + 18, "note", "best peer", "middle"),
        text(x_of(0.0), bottom + 18, "note", "0", "middle"),
    ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def bar(y: float, row: Row) -> list[str]:
    """Name, bar and figures of a row, in the `LINE` units below y."""
    peer, middle = row["peer_median"], y + LINE / 2
    ends = [row[key] / peer for key in ("median", "p20", "p80", "floor")]
    ours, low, high, floor = (x_of(end) for end in ends)
    top, start = middle - BAR / 2, x_of(0.0)
    beyond = ' <tspan class="note">→</tspan>' if ends[0] > LIMIT else ""
    parts = [
        text(MARGIN, middle - 3, "name", row["bench"]),
        text(MARGIN, middle + 12, "note", " ".join([row["case"], row["checkpoint"]]).strip()),
        f'<rect class="ours" x="{start:.1f}" y="{top:.1f}" width="{ours - start:.1f}" '
        f'height="{BAR}"/>',
        line("spread", low, middle, high, middle),
    ]
    if row["floor"]:
        parts.append(line("floor", floor, top - 3, floor, top + BAR + 3))
    x = MARGIN + NAMES + TRACK + 16
    time = f"{number(row['median'])} µs{beyond}"
    parts += [
        f'<text x="{x}" y="{middle - 3:.1f}" class="figure">{time}</text>',
        text(x, middle + 12, "note", f"{row['peer']} {number(peer)}"),
    ]
    return parts


def number(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def x_of(relative: float) -> float:
    """The place on the track of a time over the peer's."""
    return MARGIN + NAMES + TRACK * min(relative, LIMIT) / LIMIT


def text(x: float, y: float, css: str, content: str, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" class="{css}" text-anchor="{anchor}">'
        f"{escape(content)}</text>"
    )


def line(css: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path class="{css}" d="M {x1:.1f} {y1:.1f} L {x2:.1f} {y2:.1f}"/>'
