"""Times a forward with a stock stack of kernels, and with this project's in its place step by step.

    python -m microbench.ablation --output docs/results/h200

Steps and the stock stack: microbench/forward/stacks.py. Decode at 100,000 tokens and a prompt of
8,192, both checkpoints, all in one run: latency of the forward as a CUDA graph, and its kernels.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flint_kernels import results
from flint_kernels.model import Flint
from microbench.forward import case as cases
from microbench.forward import profile
from microbench.forward.case import Case
from microbench.forward.stacks import STEPS, description, stack
from microbench.forward.step import Step
from microbench.forward.timing import AT_MOST_S, free, full_size
from microbench.kernels import HEAD, aligned, line
from microbench.timer import Replay, Timer

BENCH = "ablation"
DEFAULT = ("decode=1@100000", "prefill=8192")
# Of final hidden states, with the same experts for all: a guard against timing something else. How
# far the stacks are apart by their roundings stands in the rows.
_AGREEMENT = 0.1


def forward_of(step: Step, number: int, routing: str = "natural") -> Callable[[], Tensor]:
    """The forward by the kernels of a step."""

    def forward() -> Tensor:
        with stack(number):
            return step.forward(routing, enable_pdl=number == len(STEPS) - 1)

    return forward


def measure(model: Flint, case: Case, timer: Timer) -> list[results.Row]:
    """Two rows a step.

    Raises ValueError for a prompt on top of a past, which the stock stack cannot attend to, and
    RuntimeError where a step computes something else than the last one.
    """
    check_case(case)
    step = Step(model, case)
    apart = distances(step)
    replays = {}
    kernels = {}
    for number, name in enumerate(STEPS):
        replays[name] = Replay([forward_of(step, number)])
        kernels[name] = len(profile.record(replays[name].run))
    times = timer.time(replays, at_most_s=2 * AT_MOST_S)
    rows = []
    for number, name in enumerate(STEPS):
        label = f"{case.text} step={number}:{name}"
        more: dict[str, Any] = {"checkpoint": model.weight_format}
        if number == 0:
            more["stock"] = description(model.weight_format)
        rows.append(results.row(BENCH, label, "us", times[name], distance=apart[number], **more))
        rows.append(results.row(BENCH, label, "kernels", [kernels[name]], **more))
    return rows


def check_case(case: Case) -> None:
    """Raises ValueError where the stock stack's attention does not take the case."""
    if not case.decodes and any(request.new < request.length for request in case.requests):
        raise ValueError(
            f"case: got {case.text!r}, which has a prompt on top of a past; want requests of one "
            "token each, or prompts without a past"
        )


def distances(step: Step) -> list[float]:
    """How far the hidden states of each step's stack are from the last one's, relatively.

    Raises RuntimeError where that is as far as another computation would be.
    """
    want = forward_of(step, len(STEPS) - 1, "balanced")().float()
    found = []
    for number, name in enumerate(STEPS):
        got = forward_of(step, number, "balanced")().float()
        found.append(float((got - want).norm() / want.norm()))
        if not found[-1] < _AGREEMENT:
            raise RuntimeError(
                f"{step.case.text} step {number} ({name}): its hidden states are {found[-1]:.3g} "
                f"from those of the last step, relatively; want less than {_AGREEMENT}"
            )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m microbench.ablation", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("case", nargs="*", help="as those of microbench.forward; without a past")
    parser.add_argument("--checkpoint", choices=("nvfp4", "bf16"), action="append", metavar="NAME")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="writes ablation.json there")
    parser.add_argument("--rounds", type=int, default=31, metavar="N", help="timed replays of each")
    parser.add_argument("--commit", help="of the tree, where it is run without its git history")
    options = parser.parse_args(arguments)
    try:
        chosen = [cases.parse(text) for text in options.case or DEFAULT]
        for case in chosen:
            check_case(case)
    except ValueError as error:
        parser.error(str(error))
    if not torch.cuda.is_available():
        parser.error("no GPU: torch.cuda.is_available() is false; a forward is timed on a GPU only")
    device = torch.device("cuda", torch.cuda.current_device())
    start = time.monotonic()
    rows: list[results.Row] = []
    failures = []
    with torch.inference_mode():
        for checkpoint in options.checkpoint or ["nvfp4", "bf16"]:
            model = full_size(checkpoint, device)
            for case in chosen:
                label = f"{case.text} {checkpoint}"
                try:
                    rows += measure(model, case, Timer(options.rounds))
                except Exception:
                    failures.append(f"{label}:\n{traceback.format_exc()}")
                free()
                seconds = time.monotonic() - start
                print(f"{seconds:6.1f} s  {label}", file=sys.stderr, flush=True)
            del model
            free()
    if options.output:
        meta = results.describe("cuda", options.commit)
        results.write(options.output / "ablation.json", rows, meta)
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    print(aligned([HEAD, *map(line, rows)]))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
