"""Times the kernels of this project beside their peers, on a GPU.

    python -m microbench.kernels --output docs/results/h200
    python -m microbench.kernels --file decode_kernels --output docs/results/h200
    python -m microbench.kernels --only rms_norm

Prints a table; with --output it also writes the rows there, in the file of each benchmark
(kernels.json, decode_kernels.json), and the roofs with them. Cases:

    M=1         launches of their own, inputs cold, each after the one before it
    M=1 hot     the same over one set of buffers, which stays in the L2
    M=1 chain   each launch takes the outputs of the one before it; weights cold
    M=1 pdl     the same, with programmatic dependent launch

Peers of a chain find their activations in the L2 as its kernels do, and are launched plainly. Run
it on a GPU that does nothing else, from a clean tree.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from flint_kernels import results
from flint_kernels.backends import cuda
from microbench import cases, roofs
from microbench.cases import Group, Subject
from microbench.roofs import Roofs
from microbench.timer import Launch, Timer, rotated


def measure(group: Group, timer: Timer, roof: Roofs) -> tuple[list[results.Row], list[str]]:
    """The rows of a group, one for each kernel of this project in it; peers that cannot run."""
    group, problems = cases.checked(group)
    plan = timer.plan(group.bytes, group.flop)
    count = 1 if group.hot else plan.launches if group.chained else plan.sets
    sets = [group.make(index) for index in range(count)]
    launches = {
        subject.name: launches_of(subject, rotated(subject.arrange(sets), plan.launches))
        for subject in group.subjects
    }
    times = timer.measure(launches, hot=group.hot)
    floor = roof.floor_us(group.bytes, group.flop)
    return rows_of(group, times, floor, launches=plan.launches, sets=count), problems


def launches_of(subject: Subject, sets: Sequence[cases.Buffers]) -> list[Launch]:
    return [partial(subject.call, buffers) for buffers in sets]


def rows_of(
    group: Group, times_us: dict[str, list[float]], floor_us: float, *, launches: int, sets: int
) -> list[results.Row]:
    """Rows with the fastest peer of the group in each, and all of them under `peers`."""
    peers = {
        subject.name: results.quantile(times_us[subject.name], 0.5)
        for subject in group.subjects
        if not subject.case
    }
    best = min(peers, key=lambda name: peers[name], default="")
    return [
        results.row(
            group.bench,
            subject.case,
            "us",
            times_us[subject.name],
            checkpoint=group.checkpoint,
            **({"note": group.note} if group.note else {}),
            floor=floor_us,
            peer=best,
            peer_median=peers.get(best, 0.0),
            peers=peers,
            bytes=group.bytes,
            flop=group.flop,
            launches=launches,
            sets=sets,
        )
        for subject in group.subjects
        if subject.case
    ]


HEAD = (
    "bench", "case", "us", "p20", "p80", "rate", "floor us", "% roof", "best peer", "peer us",
    "x peer",
)  # fmt: skip


def line(row: results.Row) -> tuple[str, ...]:
    """One line of the printed table; the rate is that of the resource that binds."""
    median, floor, peer = row["median"], row["floor"], row["peer_median"]
    spread = f"{row['p20']:.3f}", f"{row['p80']:.3f}"
    case = f"{row['case']} {row['checkpoint']}".rstrip()
    if row["metric"] != "us":
        return row["bench"], case, "", *spread, f"{median:.0f} {row['metric']}", *[""] * 5
    return (
        row["bench"],
        case,
        f"{median:.3f}",
        *spread,
        rate(row),
        f"{floor:.3f}" if floor else "",
        f"{100 * floor / median:.1f}" if floor else "",
        row["peer"],
        f"{peer:.3f}" if peer else "",
        f"{peer / median:.2f}" if peer else "",
    )


def rate(row: results.Row) -> str:
    """GB/s, or TFLOP/s where the row counts operations; "" where it counts neither."""
    if row.get("flop"):
        return f"{row['flop'] / row['median'] / 1e6:.0f} TFLOP/s"
    return f"{row['bytes'] / row['median'] / 1e3:.0f} GB/s" if row.get("bytes") else ""


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Columns of equal width; the first two are text and start left, the rest end right."""
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index < 2 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        for cells in lines
    )


def run(names: Sequence[str], timer: Timer) -> tuple[dict[str, list[results.Row]], list[str]]:
    """The rows of the named benchmarks for each file, with those of the roofs first, and what
    failed; a failure does not stop the others."""
    device = torch.device("cuda", torch.cuda.current_device())
    start = time.monotonic()
    roof, rows = roofs.measure(timer)
    print(f"{time.monotonic() - start:6.1f} s  roofs", file=sys.stderr, flush=True)
    found = {cases.FILES[name]: list(rows) for name in names}
    failures = []
    for name in names:
        try:
            for group in cases.REGISTRY[name](device):
                try:
                    measured, problems = measure(group, timer, roof)
                    found[cases.FILES[name]] += measured
                    failures += problems
                except Exception:
                    failures.append(f"{group.label}:\n{traceback.format_exc()}")
                seconds = time.monotonic() - start
                print(f"{seconds:6.1f} s  {group.label}", file=sys.stderr, flush=True)
        except Exception:  # in what makes the groups
            failures.append(f"{name}:\n{traceback.format_exc()}")
    return found, failures


def main(arguments: Sequence[str] | None = None) -> int:
    registry = cases.load()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="writes FILE.json there")
    parser.add_argument("--only", choices=sorted(registry), action="append", metavar="NAME")
    parser.add_argument(
        "--file", choices=sorted(set(cases.FILES.values())), help="the benchmarks of this file"
    )
    parser.add_argument("--rounds", type=int, default=31, metavar="N", help="timed replays of each")
    parser.add_argument("--commit", help="of the tree, where it is run without its git history")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("no GPU: torch.cuda.is_available() is false; these kernels run on a GPU only")
    reason = cuda.why_not(torch.device("cuda"))
    if reason is not None:
        parser.error(f"nothing of this project to time: {reason}")
    names = options.only or [
        name
        for name in registry
        if name not in cases.ON_REQUEST and options.file in (None, cases.FILES[name])
    ]
    with torch.no_grad():
        found, failures = run(names, Timer(options.rounds))
    if options.output:
        meta = results.describe("cuda", options.commit)
        for file, rows in found.items():
            results.write(options.output / f"{file}.json", rows, meta)
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    printed = [row for rows in found.values() for row in rows]
    print(aligned([HEAD, *map(line, printed)]))
    print(f"{len(printed)} rows, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
