"""`flint-kernels bench`: the benchmarks of this machine, beside a stored run.

The benchmarks are no part of the package: they lie in `microbench`, in the source tree.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flint_kernels.results import Row

_TREE = Path(__file__).parents[2]


def add_parser(subparsers: Any) -> None:
    """Defines the arguments of `bench`."""
    parser = subparsers.add_parser(
        "bench",
        help="measure this machine, beside a stored run",
        description="On a GPU: every kernel beside its peers and its floor. On the CPU: the "
        "import, the first token and the speed of decoding flint-tiny. Needs the source tree and a "
        "machine that does nothing else.",
    )
    parser.add_argument("--device", help="default: an accelerator that the ops have bodies for")
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="a benchmark by name; may be repeated"
    )
    parser.add_argument(
        "--repetitions", type=int, metavar="N", help="of each (default: 31 on a GPU, 7 on the CPU)"
    )
    parser.add_argument(
        "--tokens", type=int, default=256, metavar="N", help="of each generation on the CPU"
    )
    parser.add_argument(
        "--compare", type=Path, metavar="PATH", help="a result file, or a folder of them"
    )
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="writes result files there")
    parser.add_argument(
        "--json", action="store_true", help="one JSON object at the end in place of tables"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints, compares. Returns 0, or 1 where a benchmark failed."""
    from flint_kernels import results
    from flint_kernels.cli.device import choose_device

    device = choose_device(arguments.device)
    compare = microbench("compare")
    stored = compare.read(arguments.compare) if arguments.compare else None
    measure = _on_gpu if device.type == "cuda" else _on_cpu
    meta = results.describe(device)
    files, failures = measure(arguments)
    rows = [row for found in files.values() for row in found]
    if arguments.output:
        for name, found in files.items():
            results.write(arguments.output / f"{name}.json", found, meta)
    comparisons = None if stored is None else compare.compare(rows, stored)
    for failure in failures:
        sys.stderr.write(f"FAILED {failure}\n")
    if arguments.json:
        report: dict[str, Any] = {"meta": meta, "rows": rows, "failures": failures}
        if comparisons is not None:
            report["comparisons"] = [
                {"row": compare.key(found.now), "ratio": found.ratio, "verdict": found.verdict}
                for found in comparisons
            ]
        sys.stdout.write(json.dumps(report) + "\n")
        return 1 if failures else 0
    kernels = microbench("kernels")
    if device.type == "cuda":
        tables = [kernels.aligned([kernels.HEAD, *map(kernels.line, rows)])]
    else:
        tables = [kernels.aligned([_HEAD, *map(_line, rows)])]
    if comparisons is not None:
        tables.append(kernels.aligned([compare.HEAD, *compare.lines(comparisons)]))
        missing = len(rows) - len(comparisons)
        tables.append(f"{len(comparisons)} rows compared, {missing} without a stored one")
    sys.stdout.write("\n\n".join(tables) + "\n")
    return 1 if failures else 0


def microbench(module: str) -> Any:
    """A module of the benchmarks; ValueError where this is an installation without them."""
    if not (_TREE / "microbench" / "__init__.py").is_file():
        raise ValueError(
            f"bench: got an installation in {_TREE} without the benchmarks; want the source tree: "
            "install it with `pip install --no-build-isolation -e .`"
        )
    if str(_TREE) not in sys.path:
        sys.path.append(str(_TREE))
    return importlib.import_module(f"microbench.{module}")


_HEAD = ("bench", "case", "metric", "median", "p20", "p80")


def _line(row: Row) -> tuple[str, ...]:
    case = f"{row['case']} {row['checkpoint']}".rstrip()
    figures = (f"{row[name]:.4g}" for name in _HEAD[3:])
    return row["bench"], case, row["metric"], *figures


Measured = tuple["dict[str, list[Row]]", list[str]]


def _on_gpu(arguments: argparse.Namespace) -> Measured:
    import torch

    from flint_kernels.backends import cuda

    reason = cuda.why_not(torch.device("cuda"))
    if reason is not None:
        raise ValueError(f"--device: got a GPU without kernels of this project to time. {reason}")
    cases, kernels, timer = (microbench(name) for name in ("cases", "kernels", "timer"))
    registry = cases.load()
    names = [name for name in registry if name not in cases.ON_REQUEST]
    names = _chosen(arguments.only, names, sorted(registry))
    with torch.no_grad():
        found: Measured = kernels.run(names, timer.Timer(_repetitions(arguments, 31)))
    return found


def _repetitions(arguments: argparse.Namespace, default: int) -> int:
    repetitions: int = default if arguments.repetitions is None else arguments.repetitions
    if repetitions < 1:
        raise ValueError(f"--repetitions: got {repetitions}, want at least 1")
    return repetitions


def _on_cpu(arguments: argparse.Namespace) -> Measured:
    cpu = microbench("cpu")
    names = ("import", *cpu.CHECKPOINTS)
    files: dict[str, list[Row]] = {}
    repetitions = _repetitions(arguments, 7)
    chosen = _chosen(arguments.only, names, names)
    for index, name in enumerate(chosen):
        _say(f"{index + 1} of {len(chosen)}: {name}, {repetitions} times")
        if name == "import":
            files["import"] = cpu.import_rows(repetitions)
        else:
            rows = cpu.generate_rows(name, repetitions, arguments.tokens)
            files["generate"] = files.get("generate", []) + rows
    return files, []


def _chosen(only: list[str] | None, default: Any, known: Any) -> list[str]:
    for name in only or []:
        if name not in known:
            raise ValueError(f"--only: got {name!r}; want one of {', '.join(known)}.")
    return only or list(default)


def _say(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(text + "\n")
