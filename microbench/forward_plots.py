"""Draws rows of whole forwards as SVG: time against context, requests and tokens of a prompt, and
the ablation. The same rows give the same bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from microbench.plots import MARGIN, STYLE, WIDTH, Row, line, number, text

TOP, PANEL, GAP, AXIS = 84, 220, 40, 34
COLOURS = {"nvfp4": "#0b57a4", "bf16": "#c4560a"}
NAMES = {"nvfp4": "NVFP4", "bf16": "BF16"}
BAR, LINE, LABELS = 14, 24, 210


@dataclass(frozen=True)
class Panel:
    """Points (x, microseconds, floor) of each checkpoint; both axes are logarithmic."""

    title: str
    points: dict[str, list[tuple[float, float, float]]]


def curves(title: str, panels: Sequence[Panel]) -> str:
    """An SVG with the panels side by side: lines are medians, dashed ones floors."""
    height = TOP + PANEL + AXIS + 12
    width = (WIDTH - 2 * MARGIN - (len(panels) - 1) * GAP) / len(panels)
    note = "Milliseconds, both axes logarithmic. Lines: medians; dashed: floors by bytes and FLOP."
    parts = head(title, note, height)
    shown = [name for name in COLOURS if any(name in panel.points for panel in panels)]
    for place, name in enumerate(shown):
        x = WIDTH - 170 + 90 * place
        parts.append(
            f'<path d="M {x} 30 h 20" stroke="{COLOURS[name]}" stroke-width="2.5" fill="none"/>'
        )
        parts.append(text(x + 26, 34, "note", NAMES[name]))
    for place, panel in enumerate(panels):
        parts += drawn(panel, MARGIN + place * (width + GAP) + 30, width - 54)
    return "\n".join([*parts, "</svg>"]) + "\n"


def drawn(panel: Panel, left: float, width: float) -> list[str]:
    points = [point for own in panel.points.values() for point in own]
    xs = sorted({x for x, _, _ in points})
    low = math.log(min(min(y, floor) for _, y, floor in points) / 1.3)
    high = math.log(max(y for _, y, _ in points) * 1.3)
    first, last = math.log(xs[0]), math.log(xs[-1])

    def across(x: float) -> float:
        return left + width * (math.log(x) - first) / ((last - first) or 1.0)

    def down(y: float) -> float:
        return TOP + PANEL * (1 - (math.log(y) - low) / (high - low))

    bottom = TOP + PANEL
    parts = [
        text(left - 30, TOP - 10, "name", panel.title),
        line("peer", left, bottom, left + width, bottom),
    ]
    parts += [text(across(x), bottom + 18, "note", compact(x), "middle") for x in xs]
    for name, own in panel.points.items():
        stroke = f'stroke="{COLOURS[name]}" fill="none"'
        ordered = sorted(own)
        for column, style in ((1, 'stroke-width="2.5"'), (2, 'stroke-dasharray="4 3"')):
            path = " L ".join(f"{across(p[0]):.1f} {down(p[column]):.1f}" for p in ordered)
            parts.append(f'<path d="M {path}" {stroke} {style}/>')
        for x, y, _ in ordered:
            dot = f'<circle cx="{across(x):.1f}" cy="{down(y):.1f}" r="3" fill="{COLOURS[name]}"/>'
            parts += [dot, text(across(x), down(y) - 7, "note", number(y / 1e3), "middle")]
    return parts


def compact(value: float) -> str:
    return f"{value / 1000:.0f}K" if value >= 10_000 else f"{value:.0f}"


def steps(title: str, groups: Sequence[tuple[str, Sequence[Row]]]) -> str:
    """An SVG with a bar for each step of each group; lengths are relative to its first one."""
    lines = sum(len(rows) + 1.5 for _, rows in groups)
    height = int(TOP + LINE * lines)
    parts = head(title, "Bars: median time of a forward, relative to the stock stack.", height)
    y = float(TOP)
    track = WIDTH - 2 * MARGIN - LABELS - 150
    for name, rows in groups:
        parts.append(text(MARGIN, y + 4, "name", name))
        y += LINE * 0.8
        longest = max(row["median"] for row in rows)
        for row in rows:
            wide = track * row["median"] / longest
            label = row["case"].split(":", 1)[1]
            gain = rows[0]["median"] / row["median"]
            times = f"{number(row['median'] / 1e3)} ms, {gain:.2f} times"
            parts += [
                text(MARGIN + 14, y + 5, "note", label),
                f'<rect class="ours" x="{MARGIN + LABELS}" y="{y - 7:.1f}" width="{wide:.1f}" '
                f'height="{BAR}"/>',
                text(MARGIN + LABELS + wide + 8, y + 5, "figure", times),
            ]
            y += LINE
        y += LINE * 0.7
    return "\n".join([*parts, "</svg>"]) + "\n"


def head(title: str, note: str, height: int) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        text(MARGIN, 34, "title", title),
        text(MARGIN, 54, "note", note),
    ]
