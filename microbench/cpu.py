"""Measures what the CPU path costs: the import, the first token, the speed of decoding.

    python -m microbench.cpu --output docs/results/cpu

Each repetition is a process of its own, as a user's first call is: nothing is warm but the files.
Run it on a machine that does nothing else, from a clean tree.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from flint_kernels import results

CHECKPOINTS = {"nvfp4": "flint-tiny", "bf16": "flint-tiny-bf16"}

IMPORT = """
import time, torch
start = time.perf_counter()
import flint_kernels
print(time.perf_counter() - start)
"""


def python(*arguments: str) -> str:
    """What this Python prints when it is run with `arguments`."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def import_rows(repetitions: int) -> list[results.Row]:
    seconds = [float(python("-c", IMPORT)) for _ in range(repetitions)]
    return [results.row("import", "flint_kernels beyond torch", "s", seconds)]


def generate_rows(checkpoint: str, repetitions: int, tokens: int) -> list[results.Row]:
    """Continues the command's default prompt, each time with another seed."""
    runs = [generation(CHECKPOINTS[checkpoint], seed, tokens) for seed in range(repetitions)]
    measured = {
        "first_token_s": [run["first_token_seconds"] for run in runs],
        "tok/s": [run["tokens_per_second"] for run in runs],
    }
    return [
        results.row("generate", "flint-tiny library", metric, values, checkpoint=checkpoint)
        for metric, values in measured.items()
    ]


def generation(name: str, seed: int, tokens: int) -> dict[str, Any]:
    """The report of one `flint-kernels generate`; a text that ends at once says nothing of speed.

    Raises RuntimeError where fewer than half of the tokens came.
    """
    options = ["--json", "--seed", str(seed), "--max-new-tokens", str(tokens), "--device", "cpu"]
    report: dict[str, Any] = json.loads(
        python("-m", "flint_kernels.cli", "generate", name, *options)
    )
    if len(report["tokens"]) * 2 < tokens:
        raise RuntimeError(
            f"generate: got {len(report['tokens'])} tokens with seed {seed}, want at least "
            f"{tokens // 2}; the text ended early, so take other seeds or fewer tokens"
        )
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--repetitions", type=int, default=7, metavar="N")
    parser.add_argument("--tokens", type=int, default=256, metavar="N", help="of each generation")
    arguments = parser.parse_args()
    meta = results.describe("cpu")
    rows = import_rows(arguments.repetitions)
    results.write(arguments.output / "import.json", rows, meta)
    rows = []
    for checkpoint in CHECKPOINTS:
        rows += generate_rows(checkpoint, arguments.repetitions, arguments.tokens)
    results.write(arguments.output / "generate.json", rows, meta)


if __name__ == "__main__":
    main()
