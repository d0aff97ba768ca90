"""Distance of the full-size model's paths from the FP32 forward on the same GPU.

    python -m microbench.forward.validate --output docs/results/h200

Prompts are random tokens, weights synthetic. Each path is read layer by layer (the residual stream
after each, accumulated errors and all) and at its end (the distributions of the next token):

    prefill T=2000          eight prompts at once
    decode M=1, M=2, M=8    the prompts' last tokens, one at a time, on top of a prefill
    context=32768           a prompt in chunks of 8,192, and tokens decoded on top of it

The FP32 forward is that of the reference bodies in plain torch, by cuBLAS in full FP32.

Kernels are those that a user gets ("GPU"); beside each, as a yardstick, the general bodies in torch
and Triton, which round at the same points. A token that rounding sends to another expert is another
in all later layers, which hides everything else: so there is a third kind of rows, by the kernels,
but with the experts that the FP32 forward chose. Memory at 262,144 tokens is in rows of its own.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flint_kernels import results
from flint_kernels.backends import cuda
from flint_kernels.backends.cpu import reference_body
from flint_kernels.model import Flint, PagedKVCache, calls
from flint_kernels.model.batch import Batch, DecodeBatch
from flint_kernels.model.calls import Launch
from flint_kernels.ops import make_workspace
from flint_kernels.validation.compare import compare_hidden
from microbench.forward.case import parse
from microbench.forward.step import Step, replaced_ids
from microbench.forward.timing import free, full_size
from microbench.kernels import aligned

BENCH = "validate"
SAME_EXPERTS = "GPU, experts of FP32"
BODIES = ("GPU", SAME_EXPERTS, "general")


@dataclass(frozen=True)
class Sizes:
    prompts: int = 8
    tokens: int = 2000
    decoded: int = 8  # of the prompts' last tokens
    compared: int = 250  # last rows of a prompt or chunk
    batches: tuple[int, ...] = (1, 2, 8)
    context: int = 32768
    chunk: int = 8192
    longest: int = 262_144

    @property
    def in_last_chunk(self) -> int:
        """Rows of the context's last chunk that are compared."""
        return min(self.compared, (self.context - 1) % self.chunk + 1)


@dataclass
class Seen:
    """Of some rows: the residual stream after each layer, and the final hidden states, fp32."""

    streams: list[Tensor]
    hidden: Tensor


def read(model: Flint, ids: Tensor, batch: Batch, cache: PagedKVCache, rows: Tensor) -> Seen:
    """Runs a step as `Flint` does, and keeps `rows` of what each layer leaves."""
    launch = Launch(make_workspace(model.device), enable_pdl=isinstance(batch, DecodeBatch))
    x, residual = model._embed(ids).to(model.compute_dtype), None
    streams = []
    for layer in model.layers:
        if isinstance(batch, DecodeBatch):
            x, residual = layer.decode(x, residual, model.cos_sin, batch, cache, launch)
        else:
            x, residual = layer.prefill(x, residual, model.cos_sin, batch, cache)
        streams.append(x[rows].float() + residual[rows].float())
    return Seen(streams, model._final_norm(x, residual)[rows].float())


# Layer -> the experts of each token, [requests, tokens, k].
Chosen = dict[int, Tensor]


@contextmanager
def recorded(model: Flint, requests: int, into: Chosen) -> Iterator[None]:
    """Within it, keeps the experts that a prefill's router chooses, those of later steps behind."""

    def keep(layer: int, ids: Tensor) -> Tensor:
        new = ids.view(requests, -1, ids.shape[1])
        into[layer] = torch.cat([into[layer], new], dim=1) if layer in into else new
        return ids

    with replaced_ids(model, keep):
        yield


@contextmanager
def sent_to(model: Flint, chosen: Chosen | None, requests: slice, tokens: slice) -> Iterator[None]:
    """Within it, a step's tokens go to these experts; None: where the router sends them."""
    if chosen is None:
        yield
        return
    with replaced_ids(model, lambda layer, _: chosen[layer][requests, tokens].flatten(0, 1)):
        yield


def joined(parts: Sequence[Seen]) -> Seen:
    streams = [torch.cat(layer) for layer in zip(*(part.streams for part in parts), strict=True)]
    return Seen(streams, torch.cat([part.hidden for part in parts]))


def part_of(seen: Seen, rows: Tensor) -> Seen:
    return Seen([stream[rows] for stream in seen.streams], seen.hidden[rows])


def last_rows(count: int, length: int, kept: int, device: torch.device) -> Tensor:
    """The last `kept` rows of each of `count` prompts of that length, one after the other."""
    rows = torch.arange(count * length, device=device).view(count, length)
    return rows[:, length - kept :].flatten()


def prefilled(
    model: Flint, prompts: Tensor, kept: int, chosen: Chosen | None = None
) -> tuple[PagedKVCache, Seen]:
    """All prompts [B, T] in one step; the last `kept` rows of each."""
    count, length = prompts.shape
    cache = model.make_cache(count, count * (length + 64))
    batch = cache.plan([cache.add() for _ in range(count)], [length] * count)
    rows = last_rows(count, length, kept, model.device)
    with sent_to(model, chosen, slice(count), slice(length)):
        return cache, read(model, prompts.flatten(), batch, cache, rows)


def decoded(
    model: Flint, cache: PagedKVCache, tokens: Tensor, past: int, chosen: Chosen | None = None
) -> Seen:
    """`tokens` [B, N] one at a time on top of the `past` that the cache has; rows as [B, N]
    flattened."""
    count, steps = tokens.shape
    rows = torch.arange(count, device=model.device)
    parts = []
    for step in range(steps):
        batch = cache.plan_decode(list(range(count)))
        with sent_to(model, chosen, slice(count), slice(past + step, past + step + 1)):
            parts.append(read(model, tokens[:, step], batch, cache, rows))
    order = torch.arange(count * steps, device=model.device).view(steps, count).T.flatten()
    return part_of(joined(parts), order)


def chunked(
    model: Flint, tokens: Tensor, chunk: int, kept: int, chosen: Chosen | None = None
) -> tuple[PagedKVCache, Seen]:
    """One prompt in chunks; the last `kept` rows of the last."""
    cache = model.make_cache(1, len(tokens) + 64)
    request = cache.add()
    seen: Seen | None = None
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        rows = last_rows(1, len(part), min(kept, len(part)), model.device)
        with sent_to(model, chosen, slice(1), slice(start, start + len(part))):
            seen = read(model, part, cache.plan([request], [len(part)]), cache, rows)
    assert seen is not None
    return cache, seen


@contextmanager
def bodies(name: str) -> Iterator[None]:
    """Which bodies run on the GPU: those that a user gets, or the general ones."""
    held = cuda.why_not
    if name == "general":
        cuda.why_not = lambda device: "general bodies were asked for"
    try:
        yield
    finally:
        cuda.why_not = held


@contextmanager
def reference_in_torch() -> Iterator[None]:
    """Within it, products and attention of the model's layers are the reference's, in plain torch.

    The general bodies take FP32 too, but by kernels of small tiles, which would take minutes.
    """
    held = {name: getattr(calls, name) for name in _REFERENCE}
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")  # no TF32
        for name, op in held.items():
            setattr(calls, name, by_name(op, reference_body(name)))
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        for name, op in held.items():
            setattr(calls, name, op)


_REFERENCE = (
    "attention_prefill",
    *(f"{weights}_{op}" for weights in ("nvfp4", "bf16")
      for op in ("linear", "linear_silu_and_mul", "routed_experts")),
)  # fmt: skip


def by_name(op: Any, body: Callable[..., Any]) -> Callable[..., Any]:
    """A body, which takes an op's arguments by name, in the place of the op."""
    arguments = op._schema.arguments
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}

    def call(*given: Any, **named: Any) -> Any:
        names = (argument.name for argument in arguments)
        return body(**(defaults | dict(zip(names, given, strict=False)) | named))

    return call


def rows_of(
    model: Flint, case: str, name: str, got: Seen, want: Seen, targets: Tensor
) -> list[results.Row]:
    """KL, agreement and error of the end; the error after each layer stands in its row."""
    comparison = compare_hidden(model, want.hidden[None], got.hidden[None], targets[None])
    errors = [distance(*pair) for pair in zip(got.streams, want.streams, strict=True)]
    figures = {
        "kl_mean": comparison.kl.mean().item(),
        "kl_max": comparison.kl.max().item(),
        "top1": comparison.agree.mean().item(),
        "error": distance(got.hidden, want.hidden),
    }
    if not all(math.isfinite(value) for value in figures.values()):
        raise RuntimeError(f"{case} {name}: got {figures}, want finite numbers")
    more = {"bodies": name, "tokens": len(targets)}
    return [
        results.row(
            BENCH,
            f"full synthetic {case}",
            metric,
            [value],
            checkpoint=model.weight_format,
            **(more | {"layers": errors} if metric == "error" else more),
        )
        for metric, value in figures.items()
    ]


def distance(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def measure(model: Flint, sizes: Sizes) -> Iterator[results.Row]:
    """The rows of all paths but memory."""
    device, oracle = model.device, model.oracle()
    generator = torch.Generator(device).manual_seed(5)
    vocabulary, n = model.config.vocab_size, sizes.decoded
    prompts = torch.randint(
        vocabulary, (sizes.prompts, sizes.tokens), generator=generator, device=device
    )
    long = torch.randint(vocabulary, (sizes.context + n,), generator=generator, device=device)
    kept = last_rows(sizes.prompts, sizes.compared, n, device).view(sizes.prompts, n)
    rows = torch.arange(n, device=device)
    of_prompts: Chosen = {}
    of_long: Chosen = {}
    with reference_in_torch():
        with recorded(oracle, sizes.prompts, of_prompts):
            _, want = prefilled(oracle, prompts, sizes.compared)
        # In one piece: nothing is rounded that could lie otherwise, and weights are expanded once.
        last = sizes.in_last_chunk
        with recorded(oracle, 1, of_long):
            cache, want_chunk = chunked(oracle, long[: sizes.context], sizes.context, last)
            want_long = read(oracle, long[sizes.context :], cache.plan([0], [n]), cache, rows)
    del cache

    def targets(count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int64, device=device)  # KL needs none

    for label in BODIES:
        same = label == SAME_EXPERTS
        experts, experts_long = (of_prompts, of_long) if same else (None, None)
        with bodies(label):
            _, got = prefilled(model, prompts, sizes.compared, experts)
            case = f"prefill T={sizes.tokens}"
            yield from rows_of(model, case, label, got, want, targets(len(got.hidden)))
            for count in sizes.batches:
                past = sizes.tokens - n
                cache, _ = prefilled(model, prompts[:count, :past], 1, experts)
                got = decoded(model, cache, prompts[:count, past:], past, experts)
                wanted = part_of(want, kept[:count].flatten())
                case = f"decode M={count} T={sizes.tokens}"
                yield from rows_of(model, case, label, got, wanted, targets(count * n))
            cache, got = chunked(
                model, long[: sizes.context], sizes.chunk, sizes.compared, experts_long
            )
            case = f"prefill context={sizes.context}"
            yield from rows_of(model, case, label, got, want_chunk, targets(len(got.hidden)))
            got = decoded(model, cache, long[None, sizes.context :], sizes.context, experts_long)
            case = f"decode M=1 context={sizes.context}"
            yield from rows_of(model, case, label, got, want_long, targets(n))


def memory(model: Flint, sizes: Sizes) -> Iterator[results.Row]:
    """What a request of the greatest length takes beside the weights: its cache, and what a decode
    step and a chunk of prefill have in use at their peak."""
    weights = torch.cuda.memory_allocated()
    for text in (f"decode=1@{sizes.longest}", f"chunk={sizes.chunk}@{sizes.longest}"):
        step = Step(model, parse(text))
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step.forward()
        torch.cuda.synchronize()
        figures = {"bytes": torch.cuda.max_memory_allocated(), "cache_bytes": step.cache.bytes()}
        yield results.row(
            "memory",
            text,
            "bytes",
            [figures["bytes"]],
            checkpoint=model.weight_format,
            weights=weights,
            cache=figures["cache_bytes"],
            step=figures["bytes"] - held,
        )
        del step
        free()


def table(rows: Sequence[results.Row]) -> str:
    cells: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in rows:
        if row["bench"] == BENCH:
            line = cells.setdefault((row["case"], row["checkpoint"], row["bodies"]), {})
            line[row["metric"]] = f"{row['median']:.4g}"
    head = ("case", "checkpoint", "bodies", "kl_mean", "kl_max", "top1", "error")
    lines = [[*names, *(line[metric] for metric in head[3:])] for names, line in cells.items()]
    return aligned([head, *lines])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m microbench.forward.validate", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--checkpoint", choices=("nvfp4", "bf16"), action="append", metavar="NAME")
    parser.add_argument("--context", type=int, default=Sizes.context, metavar="TOKENS")
    parser.add_argument("--output", type=Path, metavar="FOLDER")
    parser.add_argument("--commit", help="of the tree, where it is run without its git history")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("no GPU: torch.cuda.is_available() is false; this size needs one")
    device = torch.device("cuda", torch.cuda.current_device())
    sizes = Sizes(context=options.context)
    rows: list[results.Row] = []
    start = time.monotonic()
    with torch.inference_mode():
        for checkpoint in options.checkpoint or ["nvfp4", "bf16"]:
            model = full_size(checkpoint, device)
            for found in (memory(model, sizes), measure(model, sizes)):
                for row in found:
                    rows.append(row)
                    if row["metric"] in ("error", "bytes"):
                        seconds = time.monotonic() - start
                        label = f"{row['case']} {checkpoint} {row['median']:.4g}"
                        print(f"{seconds:6.1f} s  {label}", file=sys.stderr, flush=True)
                    if options.output:  # what there is, whatever comes of the rest
                        meta = results.describe("cuda", options.commit)
                        results.write(options.output / "validate_full.json", rows, meta)
                free()
            del model
            free()
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
