"""All figures of the full-size model in one process, which makes each model once.

    python -m microbench.forward.suite --output docs/results/h200
    python -m microbench.forward.suite --part ablation --part validate --checkpoint nvfp4

Parts: forward (with its profile), token, ablation, long-run, validate. Each file is written as
soon as there are rows for it, so that what was measured is there whatever comes of the rest.
Loading is `microbench.load`'s.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from flint_kernels import results
from flint_kernels.backends import cuda
from flint_kernels.model import Flint
from microbench import ablation, roofs
from microbench.forward import case as cases
from microbench.forward import timing, token, validate
from microbench.forward.timing import free, full_size, kernel_rows
from microbench.kernels import HEAD, aligned, line
from microbench.roofs import Roofs
from microbench.timer import Timer


@dataclass(frozen=True)
class Options:
    rounds: int = 31
    steps: int = 1000  # tokens that are timed
    long: int = 10_000  # of the long run
    cases: tuple[str, ...] = ()  # of the forwards; none: all of them
    roof: Roofs | None = None


# File and row, one after the other.
Rows = Iterator[tuple[str, results.Row]]


def forwards(model: Flint, options: Options) -> Rows:
    assert options.roof is not None
    for text in options.cases or cases.DEFAULT:
        case = cases.parse(text)
        rows, kernels = timing.measure(model, case, Timer(options.rounds), options.roof)
        yield from (("forward", row) for row in rows)
        label = f"{text} {model.weight_format}"
        yield from (("forward_kernels", row) for row in kernel_rows(label, kernels))
        free()


def tokens(model: Flint, options: Options) -> Rows:
    assert options.roof is not None
    for text in token.DEFAULT:
        yield "token", token.measure(model, cases.parse(text), options.steps, options.roof)
        free()


def ablations(model: Flint, options: Options) -> Rows:
    for text in ablation.DEFAULT:
        case = cases.parse(text)
        rows = ablation.measure(model, case, Timer(options.rounds))
        yield from (("ablation", row) for row in rows)
        free()


def long_run(model: Flint, options: Options) -> Rows:
    assert options.roof is not None
    if model.weight_format == "nvfp4":
        case = cases.parse("decode=1@90000")
        rows = token.long_run(model, case, options.long, options.roof)
        yield from (("long_run", row) for row in rows)


def validation(model: Flint, options: Options) -> Rows:
    sizes = validate.Sizes()
    for found in (validate.memory(model, sizes), validate.measure(model, sizes)):
        yield from (("validate_full", row) for row in found)
        free()


PARTS: dict[str, Callable[[Flint, Options], Rows]] = {
    "forward": forwards,
    "token": tokens,
    "ablation": ablations,
    "long-run": long_run,
    "validate": validation,
}


class Files:
    """Rows by file, each written anew as it grows."""

    def __init__(self, folder: Path | None, commit: str | None, first: list[results.Row]) -> None:
        self.rows: dict[str, list[results.Row]] = {}
        self._folder = folder
        self._meta = results.describe("cuda", commit) if folder else {}
        self._first = first  # of the roofs, in the files whose floors are counted from them

    def add(self, name: str, row: results.Row) -> None:
        if name not in self.rows:
            self.rows[name] = list(self._first) if name in ("forward", "token", "long_run") else []
        self.rows[name].append(row)

    def write(self) -> None:
        if self._folder is not None:
            for name, rows in self.rows.items():
                results.write(self._folder / f"{name}.json", rows, self._meta)


def run(
    model: Flint, parts: Sequence[str], options: Options, files: Files, start: float
) -> list[str]:
    """What failed; a failure does not stop the other parts."""
    failures = []
    for part in parts:
        try:
            for name, row in PARTS[part](model, options):
                files.add(name, row)
                files.write()
                if row["metric"] != "kernels" and name != "forward_kernels":
                    label = f"{row['case']} {row['checkpoint']} {row['metric']}"
                    seconds = time.monotonic() - start
                    print(f"{seconds:6.1f} s  {label} {row['median']:.5g}", file=sys.stderr)
        except Exception:
            failures.append(f"{part} {model.weight_format}:\n{traceback.format_exc()}")
        free()
    return failures


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m microbench.forward.suite", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--part", choices=tuple(PARTS), action="append")
    parser.add_argument("--checkpoint", choices=("nvfp4", "bf16"), action="append", metavar="NAME")
    parser.add_argument("--case", action="append", metavar="CASE", help="a forward; else all")
    parser.add_argument("--rounds", type=int, default=Options.rounds, metavar="N")
    parser.add_argument("--steps", type=int, default=Options.steps, metavar="N")
    parser.add_argument("--output", type=Path, metavar="FOLDER")
    parser.add_argument("--commit", help="of the tree, where it is run without its git history")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("no GPU: torch.cuda.is_available() is false; this size needs one")
    device = torch.device("cuda", torch.cuda.current_device())
    reason = cuda.why_not(device)
    if reason is not None:
        parser.error(f"nothing of this project to time: {reason}")
    start = time.monotonic()
    parts = given.part or list(PARTS)
    failures = []
    with torch.inference_mode():
        roof, first = None, []
        if {"forward", "token", "long-run"} & set(parts):
            roof, first = roofs.measure(Timer(15))
        files = Files(given.output, given.commit, first)
        for checkpoint in given.checkpoint or ["nvfp4", "bf16"]:
            model = full_size(checkpoint, device)
            options = Options(given.rounds, given.steps, cases=tuple(given.case or ()), roof=roof)
            failures += run(model, parts, options, files, start)
            del model
            free()
    tabled = ("forward", "token", "ablation", "long_run")
    rows = [row for name in tabled for row in files.rows.get(name, [])]
    print(aligned([HEAD, *map(line, rows)]))
    print(validate.table(files.rows.get("validate_full", [])))
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
