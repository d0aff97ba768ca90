"""Decode steps of flint-tiny by the million, with requests that come and go, as result rows.

    python python_tests/run_endurance.py --output docs/results/h200/endurance.json

A step is one decode step of a whole batch, on a GPU the replay of a CUDA graph, of 1 to 8 requests.
Requests begin with a random prompt, which is prefilled, and stay for a random number of greedy
steps; how many are live wanders from 1 to 8, so that every graph is in use and pages change hands
all the time. Lanes are decoders on streams of their own, with caches of their own, that take turns.
--workers shares the steps between processes, each with its own model, lanes and random numbers.

Each tenth of the run ends with no live request, and then

- a sampled 1% of its requests is decoded again, slowly: by the model's own step, op by op without
  graphs, buffers that stay and PDL, in a cache of its own, beside other requests than before. Every
  token and the last logits have to be the same to the bit: the ops promise a row's bits whatever is
  beside it. How many rows there are does count (`docs/numerics.md`): kernels of one row, of two to
  eight and of more sum in orders of their own. So a step that a request made alone is made alone
  again, and one among others among one to seven others;
- every counter of a workspace is to be zero, and every page and request of the caches free;
- torch's memory on the GPU is to be what it was after the first tenth, to the byte, and the
  process's own within 16 MiB.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import multiprocessing
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from flint_kernels import results
from flint_kernels.generation import GraphDecoder
from flint_kernels.loading import load
from flint_kernels.model import Flint, PagedKVCache

Tensor = torch.Tensor

LIVE = 8  # requests at once, at most
LONGEST_PROMPT, LONGEST_STAY = 64, 1000
POSITIONS = 1088  # whole pages of the longest request
PART = 10  # the run is checked so often
SPREAD = 16 << 20  # bytes that the process may come to have more


@dataclass
class Request:
    """A prompt and how many steps follow it; where it was sampled, what came of it as well."""

    prompt: list[int]
    steps: int
    sampled: bool
    slot: int = -1
    done: int = 0  # kept up where it is sampled
    tokens: Tensor | None = None  # [steps + 1]: that of the prompt, and one a step
    logits: Tensor | None = None  # [vocabulary] of the last step
    alone: list[bool] = field(default_factory=list)  # at each step

    def note(self, token: Tensor, logits: Tensor) -> None:
        if self.tokens is None:
            self.tokens = torch.empty(self.steps + 1, dtype=torch.int64, device=token.device)
        self.tokens[self.done] = token
        if self.done == self.steps:
            self.logits = logits.clone()
        self.done += 1


def make_cache(model: Flint, requests: int = LIVE) -> PagedKVCache:
    return model.make_cache(requests, tokens=requests * POSITIONS)


@torch.inference_mode()
def begin(model: Flint, cache: PagedKVCache, request: Request) -> Tensor:
    """Prefills the prompt, alone; the first token, [1] on the device."""
    request.slot, request.done = cache.add(), 0
    ids = torch.tensor(request.prompt, dtype=torch.int64).to(model.device, non_blocking=True)
    logits = model(ids, cache.plan([request.slot], [len(request.prompt)]), cache)
    token: Tensor = logits.argmax(dim=-1)
    if request.sampled:
        request.note(token[0], logits[0])
    return token


@torch.inference_mode()
def advance(logits: Tensor, rows: Sequence[Request]) -> Tensor:
    """The next tokens of all rows, out of a step's logits."""
    drawn: Tensor = logits.argmax(dim=-1)
    for row, request in enumerate(rows):
        if request.sampled:
            request.note(drawn[row], logits[row])
    return drawn


class Lane:
    """A decoder, its cache and its stream, and the requests that are live there."""

    def __init__(self, model: Flint, seed: int, *, graphs: bool, stay: int) -> None:
        self.model = model
        self.stay = stay  # steps of a request, at most
        self.cache = make_cache(model)
        self.decoder = GraphDecoder(model, self.cache, graphs=graphs)
        self.stream = torch.cuda.Stream() if model.device.type == "cuda" else None
        self.random = random.Random(seed)
        self.rows: list[Request] = []
        self.slots: list[int] = []  # of the rows
        self.ends: list[int] = []  # the number of each row's last step
        self.ids = torch.empty(0, dtype=torch.int64, device=model.device)
        self.pause = 0  # steps until the next request comes
        self.requests = self.steps = self.tokens = 0
        self.finished: list[Request] = []  # the sampled ones of this tenth

    def step(self, share: float, *, accept: bool) -> bool:
        """One step, before which a request may come; False where none is live any more."""
        on_stream = torch.cuda.stream(self.stream) if self.stream else contextlib.nullcontext()
        with on_stream:
            self.pause -= 1
            if accept and len(self.rows) < LIVE and (self.pause <= 0 or not self.rows):
                self._come(share)
            if not self.rows:
                return False
            for request in self.rows:
                request.alone.append(len(self.rows) == 1)
            self.ids = advance(self.decoder(self.ids, self.slots).logits, self.rows)
            self.steps += 1
            self.tokens += len(self.rows)
            if self.steps in self.ends:
                self._leave()
        return True

    def _come(self, share: float) -> None:
        draw = self.random
        # Now a few at once, now none for a while: mean stay over mean pause is some 5 requests.
        self.pause = draw.choice((0, 0, draw.randint(1, max(1, self.stay // 2))))
        vocabulary = self.model.config.vocab_size
        request = Request(
            prompt=[draw.randrange(vocabulary) for _ in range(draw.randint(1, LONGEST_PROMPT))],
            steps=draw.randint(1, self.stay),
            sampled=draw.random() < share,
        )
        token = begin(self.model, self.cache, request)
        self.ids = torch.cat([self.ids, token])
        self.rows.append(request)
        self.slots.append(request.slot)
        self.ends.append(self.steps + request.steps)
        self.requests += 1

    def _leave(self) -> None:
        stays = [end > self.steps for end in self.ends]
        for request, stay in zip(self.rows, stays, strict=True):
            if not stay:
                self.cache.release(request.slot)
                if request.sampled:
                    self.finished.append(request)
        kept = torch.tensor([row for row, stay in enumerate(stays) if stay], dtype=torch.int64)
        self.ids = self.ids[kept.to(self.ids.device, non_blocking=True)]
        self.rows = [request for request, stay in zip(self.rows, stays, strict=True) if stay]
        self.slots = [request.slot for request in self.rows]
        self.ends = [end for end in self.ends if end > self.steps]

    def problems(self) -> list[str]:
        """Of a lane without a live request: what did not go back to where it was."""
        found = []
        steps = self.decoder._steps
        spaces = {"cache": self.cache.workspace}
        spaces |= {f"graph of {rows}": step.launch.workspace for rows, step in steps.items()}
        for name, space in spaces.items():
            if space.any():
                found.append(f"{name}: a counter of its workspace is not zero")
        if self.cache.free_requests != LIVE or self.cache.free_pages != self.cache.pages:
            found.append("cache: a request or a page is not free")
        return found


class Slow:
    """The reference: the same requests once more, by the model's own steps."""

    def __init__(self, model: Flint) -> None:
        self.model = model
        self.cache = make_cache(model, requests=LIVE + 1)

    def differing(self, requests: Sequence[Request]) -> list[str]:
        """What came out otherwise, one string a request that did."""
        longest_first = sorted(requests, key=lambda request: -request.steps)
        batches = range(0, len(longest_first), LIVE)
        return [text for at in batches for text in self._batch(longest_first[at : at + LIVE])]

    def _batch(self, requests: Sequence[Request]) -> list[str]:
        twins = [Request(request.prompt, request.steps, True) for request in requests]
        others = Request(
            [0], twins[0].steps, False
        )  # company for one that was not alone, and is now
        ids = {id(twin): begin(self.model, self.cache, twin) for twin in (*twins, others)}
        for step in range(twins[0].steps):
            together = []
            for twin, request in zip(twins, requests, strict=True):
                if step < twin.steps and request.alone[step]:
                    self._step([twin], ids)
                elif step < twin.steps:
                    together.append(twin)
            if together:
                # Never more than a decoder has at once: more rows are summed otherwise again.
                self._step(together if len(together) > 1 else [*together, others], ids)
        for twin in (*twins, others):
            self.cache.release(twin.slot)
        differences = map(difference, requests, twins)
        return [text for text in differences if text]

    @torch.inference_mode()
    def _step(self, rows: Sequence[Request], ids: dict[int, Tensor]) -> None:
        """Takes the next token of each row from `ids`, and leaves the one after it there."""
        batch = self.cache.plan_decode([request.slot for request in rows])
        given = torch.cat([ids[id(request)] for request in rows])
        drawn = advance(self.model(given, batch, self.cache), rows)
        ids.update(
            {id(request): token for request, token in zip(rows, drawn.split(1), strict=True)}
        )


def difference(one: Request, two: Request) -> str:
    """The first token that is another, or that a bit of the last logits is; "" where none is."""
    assert one.tokens is not None and two.tokens is not None
    assert one.logits is not None and two.logits is not None
    name = f"a request of {len(one.prompt)} + {one.steps} tokens, {sum(one.alone)} alone"
    other = torch.nonzero(one.tokens != two.tokens).flatten().tolist()
    if other:
        alone = "alone" if other[0] > 0 and one.alone[other[0] - 1] else "not alone"
        return f"{name}: token {other[0]}, drawn {alone}, is another"
    bits = one.logits.view(torch.int32) != two.logits.view(torch.int32)
    return f"{name}: {int(bits.sum())} of the last logits differ" if bits.any() else ""


def memory(device: torch.device) -> tuple[int, int]:
    """Bytes that torch has handed out on the GPU, and those of the process."""
    on_gpu = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return on_gpu, pages * 4096


def endure(
    model: Flint,
    steps: int,
    *,
    lanes: int = 1,
    share: float = 0.01,
    graphs: bool = True,
    seconds: float = math.inf,
    seed: int = 0,
    stay: int = LONGEST_STAY,
) -> tuple[dict[str, float], list[str]]:
    """Runs at least `steps` steps; what was counted, and what was wrong.

    Args:
        seconds: after which no more requests come, however many steps there were.
        share: of the requests, sampled to be decoded again.
        graphs: False, and on the CPU, makes the steps eagerly.
        seed: another one, other requests.
        stay: steps of a request, at most.
    """
    running = [Lane(model, seed * lanes + lane, graphs=graphs, stay=stay) for lane in range(lanes)]
    slow = Slow(model)
    compared = 0
    found: list[str] = []
    first: tuple[int, int] | None = None
    start = time.perf_counter()
    grown = (0, 0)
    for part in range(1, PART + 1):
        accept = True
        while sum(lane.step(share, accept=accept) for lane in running):
            accept = sum(lane.steps for lane in running) * PART < steps * part
            accept = accept and (time.perf_counter() - start) * PART < seconds * part
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        for lane in running:
            found += [f"part {part}, {problem}" for problem in lane.problems()]
        sampled = [request for lane in running for request in lane.finished]
        found += [f"part {part}, {problem}" for problem in slow.differing(sampled)]
        compared += len(sampled)
        del sampled  # and the logits of each
        for lane in running:
            lane.finished.clear()
        now = memory(model.device)
        first = first or now
        grown = now[0] - first[0], now[1] - first[1]
        if grown[0] != 0 or grown[1] > SPREAD:
            found.append(f"part {part}: {grown[0]} bytes more on the GPU, {grown[1]} beside it")
        sys.stdout.write(f"{part} of {PART}: {compared} requests compared, {grown} bytes more\n")
        sys.stdout.flush()
    counts = {
        name: float(sum(getattr(lane, name) for lane in running))
        for name in ("steps", "tokens", "requests")
    }
    counts |= {"requests compared": compared}
    return {**counts, "GPU bytes grown": grown[0], "process bytes grown": grown[1]}, found


def shared(options: argparse.Namespace, seed: int) -> tuple[dict[str, float], list[str]]:
    """What one process runs of the steps."""
    model = load(options.checkpoint, device=options.device, max_positions=POSITIONS)
    start = time.perf_counter()
    counts, found = endure(
        model,
        -(-options.steps // options.workers),
        lanes=options.lanes,
        share=options.share,
        graphs=options.device != "cpu",
        seconds=options.seconds,
        seed=seed,
        stay=options.stay,
    )
    return counts | {"s": time.perf_counter() - start}, [f"{seed}: {one}" for one in found]


def together(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """The counts of all processes; of what each has for itself the largest."""
    own = ("GPU bytes grown", "process bytes grown", "s")
    return {
        name: (max if name in own else sum)([counts[name] for counts in parts]) for name in parts[0]
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--output", required=True, help="the JSON file to be written")
    parser.add_argument("--steps", type=int, default=1_000_000, help="of all processes")
    parser.add_argument("--seconds", type=float, default=math.inf, help="at most, about")
    parser.add_argument("--share", type=float, default=0.01, help="of the requests, compared")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--lanes", type=int, default=2, help="decoders of each that take turns")
    parser.add_argument("--stay", type=int, default=LONGEST_STAY, help="steps, at most")
    parser.add_argument("--checkpoint", default="flint-tiny")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", help="of a tree that is no git checkout")
    options = parser.parse_args(argv)
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, mp_context=spawned) as pool:
        running = [pool.submit(shared, options, seed) for seed in range(options.workers)]
        done = [future.result() for future in running]
    counts = together([part[0] for part in done])
    found = [problem for part in done for problem in part[1]]
    sys.stdout.writelines(f"{problem}\n" for problem in found)
    sys.stdout.write(f"{counts['steps']:.0f} steps in {counts['s']:.1f} s\n")
    measured = {**counts, "failures": float(len(found)), "processes": float(options.workers)}
    rows = [
        results.row("endurance", options.checkpoint, metric, [float(value)])
        for metric, value in measured.items()
    ]
    results.write(options.output, rows, results.describe(options.device, options.commit))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
