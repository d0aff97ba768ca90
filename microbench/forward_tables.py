"""Tables and plots of whole forwards, from rows under docs/results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from microbench.forward.case import Case, parse
from microbench.forward_plots import Panel, curves, steps
from microbench.plots import number

Row = dict[str, Any]

CHECKPOINTS = {"nvfp4": "NVFP4", "bf16": "BF16"}
# Of a decode forward's lines in the table of kernels; the rest adds little.
KERNELS_OF = ("decode=1@100000", "prefill=8192")
MOST_KERNELS = 14


def cells(row: Row) -> list[str]:
    """Case, checkpoint, time with its spread, floor and share of the roof."""
    floor = row["floor"]
    return [
        f"`{row['case'].removesuffix(' balanced')}`",
        CHECKPOINTS[row["checkpoint"]],
        f"{number(row['median'])} ({number(row['p20'])} to {number(row['p80'])})",
        number(floor) if floor else "",
        f"{100 * floor / row['median']:.0f}%" if floor else "",
    ]


def forward_lines(rows: Sequence[Row]) -> list[list[str]]:
    """A line for each case and checkpoint: as the router routes, balanced, kernels."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        if row["bench"] == "forward":
            case = row["case"].removesuffix(" balanced")
            kind = "kernels" if row["metric"] == "kernels" else row["case"][len(case) :].strip()
            found.setdefault((case, row["checkpoint"]), {})[kind] = row
    return [
        [
            *cells(kinds[""]),
            number(kinds["balanced"]["median"]),
            f"{kinds['kernels']['median']:.0f}",
        ]
        for kinds in found.values()
    ]


FORWARD_HEAD = (
    "case", "checkpoint", "µs (20th to 80th percentile)", "floor, µs", "of the roof",
    "balanced routing, µs", "kernels",
)  # fmt: skip


def kernel_lines(rows: Sequence[Row], case: str, checkpoint: str) -> list[list[str]]:
    """The kernels that add most to one forward."""
    own = [row for row in rows if (row["case"], row["checkpoint"]) == (case, checkpoint)]
    whole = sum(row["added"] for row in own)
    own.sort(key=lambda row: -row["added"])
    return [
        [
            f"`{row['kernel']}`".replace("|", "\\|"),
            "x".join(map(str, row["grid"])),
            str(row["launches"]),
            number(row["median"]),
            number(row["added"]),
            f"{100 * row['added'] / whole:.1f}%",
        ]
        for row in own[:MOST_KERNELS]
    ]


KERNELS_HEAD = ("kernel", "grid", "launches", "µs each", "adds, µs", "share")


def token_lines(rows: Sequence[Row]) -> list[list[str]]:
    return [
        [*cells(row), number(1e6 * parse(row["case"]).tokens / row["median"])]
        for row in rows
        if row["bench"] == "token"
    ]


TOKEN_HEAD = (
    "case", "checkpoint", "µs a step (20th to 80th percentile)", "floor, µs", "of the roof",
    "tokens/s",
)  # fmt: skip


def ablation_groups(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Title and steps in order, for each case and checkpoint."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["bench"] == "ablation" and row["metric"] == "us":
            case = row["case"].split(" ")[0]
            groups.setdefault((case, row["checkpoint"]), []).append(row)
    return [
        (f"{case}, {CHECKPOINTS[checkpoint]}", own) for (case, checkpoint), own in groups.items()
    ]


def ablation_lines(rows: Sequence[Row]) -> list[list[str]]:
    kernels = {
        (row["case"], row["checkpoint"]): row["median"]
        for row in rows
        if row["metric"] == "kernels"
    }
    lines = []
    for title, own in ablation_groups(rows):
        before = own[0]["median"]
        for row in own:
            gain = "" if row is own[0] else f"{100 * (row['median'] / before - 1):+.1f}%"
            before = row["median"]
            lines.append(
                [
                    title,
                    row["case"].split("step=")[1].replace(":", ": "),
                    f"{number(row['median'])} ({number(row['p20'])} to {number(row['p80'])})",
                    gain,
                    f"{kernels[row['case'], row['checkpoint']]:.0f}",
                ]
            )
    return lines


ABLATION_HEAD = ("forward", "step", "µs (20th to 80th percentile)", "change", "kernels")


def stock_stacks(rows: Sequence[Row]) -> str:
    """What step 0 was, for each checkpoint."""
    found = {row["checkpoint"]: row["stock"] for row in rows if "stock" in row}
    return " ".join(f"Stock stack of {CHECKPOINTS[name]}: {what}." for name, what in found.items())


def validation_lines(rows: Sequence[Row]) -> list[list[str]]:
    found: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in rows:
        if row["bench"] == "validate":
            key = row["case"].removeprefix("full synthetic "), row["checkpoint"], row["bodies"]
            found.setdefault(key, {})[row["metric"]] = row
    lines = []
    for (case, checkpoint, bodies), metrics in found.items():
        layers = metrics["error"]["layers"]
        lines.append(
            [
                case,
                CHECKPOINTS[checkpoint],
                bodies,
                *(f"{metrics[name]['median']:.4g}" for name in ("kl_mean", "kl_max", "top1")),
                " / ".join(f"{layers[i]:.4f}" for i in (0, len(layers) // 2, len(layers) - 1)),
            ]
        )
    return lines


VALIDATION_HEAD = (
    "case", "checkpoint", "bodies", "mean KL to FP32", "max KL", "top-1",
    "error after the first / middle / last layer",
)  # fmt: skip


def memory_lines(rows: Sequence[Row]) -> list[list[str]]:
    gib = 1 << 30
    return [
        [f"`{row['case']}`", CHECKPOINTS[row["checkpoint"]]]
        + [f"{value / gib:.2f}" for value in (row["weights"], row["cache"], row["step"])]
        + [f"{row['median'] / gib:.2f}"]
        for row in rows
        if row["bench"] == "memory"
    ]


MEMORY_HEAD = ("step", "checkpoint", "weights, GiB", "cache, GiB", "step, GiB", "peak, GiB")


def load_lines(rows: Sequence[Row]) -> list[list[str]]:
    units = {"s": "s", "GB/s": "GB/s", "bytes": "MiB of host memory beside the module"}
    return [
        [
            row["case"],
            units[row["metric"]],
            number(row["median"] / (1 << 20 if row["metric"] == "bytes" else 1)),
        ]
        for row in rows
        if row["bench"] == "load"
    ]


def long_run_lines(rows: Sequence[Row]) -> list[list[str]]:
    """A line for each run; what its length explains is the growth of the floor."""
    lines = []
    for row in rows:
        if row["bench"] == "long_run" and row["metric"] == "steps":
            name = row["case"]
            first, last = (
                next(other for other in rows if other["case"] == f"{name} {part} thousand")
                for part in ("first", "last")
            )
            explained = first["median"] + last["floor"] - first["floor"]
            lines.append(
                [
                    f"`{name}`",
                    CHECKPOINTS[row["checkpoint"]],
                    f"{row['median']:.0f}",
                    number(first["median"]),
                    number(explained),
                    number(last["median"]),
                    f"{row['bytes_of_drift']}",
                ]
            )
    return lines


LONG_RUN_HEAD = (
    "from", "checkpoint", "tokens", "first thousand, µs a token",
    "explained by the length: last thousand", "last thousand, measured", "bytes of drift",
)  # fmt: skip


# Plots.


def forward_plot(rows: Sequence[Row], gpu: str) -> str:
    """Time against context, requests and tokens of a prompt; "" where there are too few rows."""
    points: dict[str, dict[str, list[tuple[float, float, float]]]] = {}
    for row in rows:
        if row["bench"] != "forward" or row["metric"] != "us" or " " in row["case"]:
            continue
        for panel, x in places(parse(row["case"])):
            point = (x, row["median"], row["floor"])
            points.setdefault(panel, {}).setdefault(row["checkpoint"], []).append(point)
    several = {
        title: own
        for title, own in points.items()
        if max(len({x for x, *_ in series}) for series in own.values()) > 1
    }
    if not several:
        return ""
    panels = [Panel(title, several[title]) for title in sorted(several)]
    return curves(f"Whole forwards on one {gpu}", panels)


def places(case: Case) -> list[tuple[str, float]]:
    """Panels that a case has a point in."""
    requests = case.requests
    lengths = {request.length for request in requests}
    if len(set(requests)) > 1:
        return []
    if not case.decodes:
        fresh = len(requests) == 1 and lengths == {case.tokens}
        return [("prefill: tokens of a fresh prompt", case.tokens)] if fresh else []
    found = []
    if len(requests) == 1:
        found.append(("decode, one request: context", float(requests[0].length)))
    if lengths == {100_000}:
        found.append(("decode at 100,000: requests", float(len(requests))))
    return found


def ablation_plot(rows: Sequence[Row], gpu: str) -> str:
    groups = ablation_groups(rows)
    title = f"A forward by stock kernels, and ours in their place step by step, on one {gpu}"
    return steps(title, groups) if groups else ""
