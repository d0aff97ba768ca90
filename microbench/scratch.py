"""How much memory a forward of 8,192 tokens has in use at its peak, beside weights and cache.

    python -m microbench.scratch --output docs/results/h200

The weights are synthetic. What a layer takes is given back after it, so a few layers of every kind
have the peak of all; the head, which takes the last row alone, is not among them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from flint_kernels import results
from flint_kernels.loading import synthetic
from flint_kernels.model import FlintConfig
from microbench.forward.case import parse
from microbench.forward.step import Step
from microbench.forward.timing import free

CASE = "prefill=8192"
LAYERS = 7  # two dense ones, and full attention and windows after them


def shortened(config: FlintConfig, layers: int) -> FlintConfig:
    kept = [i for i in config.no_rope_layer_indices if i < layers]
    return replace(
        config,
        num_hidden_layers=layers,
        layer_types=config.layer_types[:layers],
        no_rope_layer_indices=tuple(kept),
    )


def measure(checkpoint: str, device: torch.device, case: str = CASE) -> results.Row:
    config = shortened(FlintConfig.flint_40b(), LAYERS)
    model = synthetic(config, checkpoint, device=device)
    step = Step(model, parse(case))
    step.forward()  # what is made once, is made
    free()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step.forward()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - held
    rows = step.case.tokens
    return results.row(
        "scratch", f"prefill M={rows}", "bytes", [peak], checkpoint=checkpoint, layers=LAYERS
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m microbench.scratch", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--output", type=Path, metavar="FOLDER")
    parser.add_argument("--commit", help="of the tree, where it is run without its git history")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("no GPU: torch.cuda.is_available() is false; this size needs one")
    device = torch.device("cuda", torch.cuda.current_device())
    rows = []
    with torch.inference_mode():
        for checkpoint in ("nvfp4", "bf16"):
            rows.append(measure(checkpoint, device))
            free()
    for row in rows:
        print(f"{row['case']} {row['checkpoint']}: {row['median'] / 2**20:.0f} MiB")
    if options.output:
        results.write(
            options.output / "scratch.json", rows, results.describe("cuda", options.commit)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
