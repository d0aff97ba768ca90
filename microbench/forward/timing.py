"""The rows of a case: its forward as a CUDA graph, with both routings, and its kernels."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from functools import partial

import torch

from flint_kernels import results
from flint_kernels.loading import synthetic
from flint_kernels.model import Flint, FlintConfig
from microbench.forward import profile, work
from microbench.forward.case import Case
from microbench.forward.step import ROUTINGS, Step
from microbench.roofs import Roofs
from microbench.timer import Replay, Timer

BENCH = "forward"
AT_MOST_S = 3.0  # what timed replays of a case may take: forwards of many tokens get fewer


def measure(
    model: Flint, case: Case, timer: Timer, roof: Roofs
) -> tuple[list[results.Row], list[profile.Kernel]]:
    """The rows of a case, and the kernels of its forward as the router routes."""
    step = Step(model, case)
    replays = {routing: Replay([partial(step.forward, routing)]) for routing in ROUTINGS}
    times = timer.time(replays, at_most_s=AT_MOST_S)
    kernels = profile.record(replays["natural"].run)
    rows = []
    for routing in ROUTINGS:
        needed = work.of_forward(model, case, step.experts(routing))
        rows.append(
            results.row(
                BENCH,
                case.text if routing == "natural" else f"{case.text} {routing}",
                "us",
                times[routing],
                checkpoint=model.weight_format,
                floor=roof.floor_us(needed.bytes, needed.flop),
                bytes=needed.bytes,
                flop=needed.flop,
            )
        )
    count = results.row(BENCH, case.text, "kernels", [len(kernels)], checkpoint=model.weight_format)
    return [*rows, count], kernels


def kernel_rows(label: str, kernels: Sequence[profile.Kernel]) -> list[results.Row]:
    """A row for each kernel and grid of a profile; `label` is case and checkpoint."""
    case, checkpoint = label.rsplit(" ", 1)
    return [
        results.row(
            "forward_kernels",
            case,
            "us",
            [found.median],
            checkpoint=checkpoint,
            kernel=found.name,
            grid=list(found.grid),
            launches=found.count,
            added=found.added,
        )
        for found in profile.lines(kernels)
    ]


def full_size(checkpoint: str, device: torch.device) -> Flint:
    return synthetic(FlintConfig.flint_40b(), checkpoint, device=device)


def free() -> None:
    """Gives back what a case or a model held: the next one may need all of the memory."""
    gc.collect()
    torch.cuda.empty_cache()
