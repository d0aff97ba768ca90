"""Times tokens end to end: forward, head, sampling and the next step's inputs, one graph a token.

    python -m microbench.forward.token --output docs/results/h200
    python -m microbench.forward.token decode=1@90000 --steps 10000 --long-run

Cases are those of `microbench.forward` whose requests decode. Tokens are drawn with the model's own
settings (temperature 1.0, top-p 0.95, top-k 20) and come to the host as they would to a user. A
figure is the time from a step's end to the next one's, K tokens in the cache at the first.

With --long-run the run of a case is one, of --steps tokens: its rows are the times of the first and
of the last thousand, each beside the floor at its length, and what memory was in use.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from flint_kernels import results
from flint_kernels.generation import GraphDecoder, SamplingParams
from flint_kernels.generation.loop import LAG
from flint_kernels.model import Flint
from microbench import roofs
from microbench.forward import case as cases
from microbench.forward import work
from microbench.forward.case import Case, Request
from microbench.forward.step import filled_cache
from microbench.forward.timing import free, full_size
from microbench.kernels import HEAD, aligned, line
from microbench.roofs import Roofs
from microbench.timer import Timer

BENCH = "token"
LONG_RUN = "long_run"
DEFAULT = ("decode=1@4096", "decode=1@100000", "decode8=8*1@100000")
_WARM = 20  # steps that are not counted
_PART = 50  # steps of one sample


class Mark:
    """A place in the stream of steps; on the CPU, whose steps are over when they return, a time."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self._event is not None:
            self._event.record()
        self._seconds = time.perf_counter()

    def since(self, other: Mark) -> float:
        """Microseconds from the other one to this."""
        if self._event is None or other._event is None:
            return (self._seconds - other._seconds) * 1e6
        self._event.synchronize()
        return other._event.elapsed_time(self._event) * 1e3


@dataclass
class Run:
    """What a loop gave: microseconds a token by parts of `_PART` steps, and all tokens."""

    times: list[float]
    tokens: list[list[int]]
    memory: list[int]  # bytes in use at the end of each part


def run(model: Flint, case: Case, steps: int) -> Run:
    """Decodes `steps` tokens of each of the case's requests, K tokens in the cache at the first."""
    room = grown(case, steps + _WARM)
    # A cache with room for what comes; its requests get the length that the case names.
    cache = filled_cache(model, room)
    for request in cache.requests:
        cache.release(request)
    requests = [cache.add() for _ in case.requests]
    for request, wanted in zip(requests, case.requests, strict=True):
        if wanted.length > 1:
            cache.plan([request], [wanted.length - 1])
    cache.hold(requests, [request.length for request in room.requests])
    graphs = model.device.type == "cuda"
    decoder = GraphDecoder(model, cache, buckets=[len(requests)], graphs=graphs)
    loop = decoder.loop(len(requests))
    ids = torch.arange(len(requests)) + 17
    loop.start(ids, requests, [SamplingParams()] * len(requests), list(range(len(requests))))
    tokens: list[list[int]] = []
    marks: list[Mark] = []
    memory: list[int] = []
    launched, total = 0, _WARM + steps
    while len(tokens) < total:
        while launched < total and loop.under_way <= LAG:
            loop.launch()
            launched += 1
            if launched >= _WARM and (launched - _WARM) % _PART == 0:
                marks.append(Mark(model.device))
                memory.append(torch.cuda.memory_allocated())
        tokens.append(loop.take())
    times = [last.since(first) / _PART for first, last in pairwise(marks)]
    return Run(times, tokens, memory[1:])


def floor_of(model: Flint, case: Case, roof: Roofs) -> float:
    """Bytes of forward and head; of experts as many as the rows can take at most."""
    config = model.config
    most = min(config.num_experts, case.tokens * config.num_experts_per_tok)
    experts = [0 if config.is_dense(i) else most for i in range(config.num_hidden_layers)]
    body, head = work.of_forward(model, case, experts), work.head(model, case.tokens)
    return roof.floor_us(body.bytes + head.bytes, body.flop + head.flop)


def check_tokens(found: Run, vocabulary: int) -> None:
    """Raises RuntimeError where a step had no token, or always the same one."""
    tokens = [token for step in found.tokens for token in step]
    if min(tokens) < 0 or max(tokens) >= vocabulary or len(set(tokens)) < 2:
        raise RuntimeError(f"tokens: got ids from {min(tokens)} to {max(tokens)}, want drawn ones")


def long_run_rows(
    model: Flint, case: Case, found: Run, steps: int, roof: Roofs
) -> list[results.Row]:
    """Tokens, and the times of the first and of the last thousand of them.

    The floors are those of the thousands' middle tokens: their difference is what the growth of the
    cache explains.
    """
    parts = max(1, 1000 // _PART)
    done = len(found.times) * _PART
    middles = {"first": _WARM + parts * _PART // 2, "last": _WARM + done - parts * _PART // 2}
    times = {"first": found.times[:parts], "last": found.times[-parts:]}
    of = {"checkpoint": model.weight_format}
    rows = [
        results.row(
            LONG_RUN,
            f"{case.text} {name} thousand",
            "us",
            times[name],
            floor=floor_of(model, grown(case, middles[name]), roof),
            **of,
        )
        for name in times
    ]
    growth = max(found.memory) - min(found.memory)
    more = {"bytes_of_drift": growth, "tokens_drawn": len({t for s in found.tokens for t in s})}
    return [*rows, results.row(LONG_RUN, case.text, "steps", [steps], **of, **more)]


def grown(case: Case, steps: int) -> Case:
    """The case after so many steps."""
    return Case(case.text, tuple(Request(1, r.length + steps) for r in case.requests))


def measure(model: Flint, case: Case, steps: int, roof: Roofs) -> results.Row:
    """The row of a case."""
    found = run(model, case, steps)
    check_tokens(found, model.config.vocab_size)
    of = {"checkpoint": model.weight_format, "floor": floor_of(model, case, roof)}
    return results.row(BENCH, case.text, "us", found.times, **of)


def long_run(model: Flint, case: Case, steps: int, roof: Roofs) -> list[results.Row]:
    """The rows of a long run."""
    found = run(model, case, steps)
    check_tokens(found, model.config.vocab_size)
    return long_run_rows(model, case, found, steps, roof)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m microbench.forward.token", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("case", nargs="*", help="NAME=[N*]1[@K],...")
    parser.add_argument("--checkpoint", choices=("nvfp4", "bf16"), action="append", metavar="NAME")
    parser.add_argument("--steps", type=int, default=1000, metavar="N")
    parser.add_argument("--long-run", action="store_true", help="one long run of each case")
    parser.add_argument("--output", type=Path, metavar="FOLDER")
    parser.add_argument("--commit", help="of the tree, where it is run without its git history")
    options = parser.parse_args(arguments)
    try:
        chosen = [cases.parse(text) for text in options.case or DEFAULT]
        for case in chosen:
            if not case.decodes:
                raise ValueError(f"case: got {case.text!r}; want requests of one token each.")
    except ValueError as error:
        parser.error(str(error))
    if not torch.cuda.is_available():
        parser.error("no GPU: torch.cuda.is_available() is false; tokens are timed on a GPU only")
    device = torch.device("cuda", torch.cuda.current_device())
    with torch.inference_mode():
        roof, rows = roofs.measure(Timer(15))
        for checkpoint in options.checkpoint or ["nvfp4", "bf16"]:
            model = full_size(checkpoint, device)
            for case in chosen:
                start = time.monotonic()
                if options.long_run:
                    rows += long_run(model, case, options.steps, roof)
                else:
                    rows.append(measure(model, case, options.steps, roof))
                seconds = time.monotonic() - start
                print(f"{seconds:6.1f} s  {case.text} {checkpoint}", file=sys.stderr, flush=True)
                free()
            del model
            free()
    if options.output:
        name = "long_run" if options.long_run else "token"
        results.write(
            options.output / f"{name}.json", rows, results.describe("cuda", options.commit)
        )
    print(aligned([HEAD, *map(line, rows)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
