"""Times whole forwards of the full-size model, as CUDA graphs of one forward each.

    python -m microbench.forward --output docs/results/h200
    python -m microbench.forward decode=1@100000 prefill=8192 --checkpoint nvfp4 --profile

Cases are NAME=[N*]Q[@K], parts apart by commas: Q new tokens of each of N requests, K tokens in the
KV cache after the step. Without any: those of microbench/forward/case.py. Weights are synthetic and
made on the GPU. Each case is timed with the experts that the router names, and with balanced ones
("balanced"); head and sampling are no part of it. Run it on a GPU that does nothing else.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

from flint_kernels import results
from flint_kernels.backends import cuda
from microbench import roofs
from microbench.forward import case as cases
from microbench.forward import profile
from microbench.forward.case import Case
from microbench.forward.timing import free, full_size, kernel_rows, measure
from microbench.kernels import HEAD, aligned, line
from microbench.timer import Timer


def run(
    checkpoints: Sequence[str], chosen: Sequence[Case], rounds: int, *, shows_profile: bool
) -> tuple[list[results.Row], dict[str, list[profile.Kernel]], list[str]]:
    """Rows, kernels by checkpoint and case, and what failed; a failure does not stop the others."""
    device = torch.device("cuda", torch.cuda.current_device())
    start = time.monotonic()
    roof, rows = roofs.measure(Timer(rounds))
    profiles: dict[str, list[profile.Kernel]] = {}
    failures = []
    for checkpoint in checkpoints:
        model = full_size(checkpoint, device)
        for case in chosen:
            label = f"{case.text} {checkpoint}"
            try:
                measured, kernels = measure(model, case, Timer(rounds), roof)
                rows += measured
                profiles[label] = kernels
                if shows_profile:
                    layers = model.config.num_hidden_layers
                    print(f"\n{label}\n{aligned(padded(profile.table(kernels, layers)))}")
            except Exception:
                failures.append(f"{label}:\n{traceback.format_exc()}")
            free()
            print(f"{time.monotonic() - start:6.1f} s  {label}", file=sys.stderr, flush=True)
        del model
        free()
    return rows, profiles, failures


def padded(lines: Sequence[Sequence[str]]) -> list[list[str]]:
    width = max(len(cells) for cells in lines)
    return [[*cells, *[""] * (width - len(cells))] for cells in lines]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m microbench.forward", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("case", nargs="*", help="NAME=[N*]Q[@K],... as vLLM's users know it")
    parser.add_argument("--checkpoint", choices=("nvfp4", "bf16"), action="append", metavar="NAME")
    parser.add_argument("--profile", action="store_true", help="the time of every kernel")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="writes forward.json there")
    parser.add_argument("--rounds", type=int, default=31, metavar="N", help="timed replays of each")
    parser.add_argument("--commit", help="of the tree, where it is run without its git history")
    options = parser.parse_args(arguments)
    try:
        chosen = [cases.parse(text) for text in options.case or cases.DEFAULT]
    except ValueError as error:
        parser.error(str(error))
    if not torch.cuda.is_available():
        parser.error("no GPU: torch.cuda.is_available() is false; a forward is timed on a GPU only")
    reason = cuda.why_not(torch.device("cuda"))
    if reason is not None:
        parser.error(f"nothing of this project to time: {reason}")
    with torch.inference_mode():
        rows, profiles, failures = run(
            options.checkpoint or ["nvfp4", "bf16"],
            chosen,
            options.rounds,
            shows_profile=options.profile,
        )
    if options.output:
        meta = results.describe("cuda", options.commit)
        results.write(options.output / "forward.json", rows, meta)
        if options.profile:
            kernels = [
                row for label, found in profiles.items() for row in kernel_rows(label, found)
            ]
            results.write(options.output / "forward_kernels.json", kernels, meta)
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    print(aligned([HEAD, *map(line, rows)]))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
