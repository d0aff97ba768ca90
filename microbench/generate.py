"""Transformers' generate() beside the library's own loop: greedy decoding of one request.

    python -m microbench.generate --output docs/results/h200/generate.json

Both have their cache and graphs beforehand: the library a GraphDecoder, generate() its static
cache from a call before. Repetitions of the two alternate. A rate is that of all tokens but the
first, out of the times of a call for one token and of a call for all; both have to give the same
tokens. Needs Transformers.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from flint_kernels import results
from flint_kernels.generation import GraphDecoder, SamplingParams, generate
from flint_kernels.loading import load, synthetic
from flint_kernels.model import Flint, FlintConfig

PROMPT, TOKENS = 200, 256
TINY = {"nvfp4": "flint-tiny", "bf16": "flint-tiny-bf16"}
SIZES = ("flint-tiny", "full")
POSITIONS = 4096

Run = Callable[[int], list[int]]
"""Generates that many tokens."""


def load_model(size: str, checkpoint: str, device: str) -> Flint:
    if size == "full":
        config = FlintConfig.flint_40b()
        return synthetic(config, checkpoint, device=device, max_positions=POSITIONS)
    return load(TINY[checkpoint], device=device, max_positions=POSITIONS)


def by_the_library(model: Flint, prompt: list[int]) -> Run:
    cache = model.make_cache(1, tokens=PROMPT + TOKENS)
    decoder = GraphDecoder(model, cache, graphs=model.device.type == "cuda")

    def run(count: int) -> list[int]:
        params = SamplingParams(greedy=True, max_new_tokens=count)
        [completion] = generate(model, [prompt], params, decoder=decoder)
        return completion.tokens

    return run


def by_transformers(model: Flint, prompt: list[int], stop: int) -> Run:
    """`stop`: a token that does not come, so that it is looked for and nothing ends early."""
    from flint_kernels.integrations.transformers import FlintConfig as Config
    from flint_kernels.integrations.transformers import FlintForCausalLM

    config = Config(**{**model.config.to_dict(), "max_position_embeddings": POSITIONS})
    wrapped: Any = FlintForCausalLM(config, model)
    ids = torch.tensor([prompt], device=model.device)
    given = {
        "attention_mask": torch.ones_like(ids),
        "do_sample": False,
        "cache_implementation": "static",
        "eos_token_id": stop,
        "pad_token_id": 0,
    }
    wrapped.generate(ids, **given, max_new_tokens=TOKENS)  # keeps a cache of this size

    def run(count: int) -> list[int]:
        tokens: list[int] = wrapped.generate(ids, **given, max_new_tokens=count)[0].tolist()
        return tokens[len(prompt) :]

    return run


def seconds(run: Run, count: int, device: torch.device) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    run(count)
    wait()
    return time.perf_counter() - start


def rows_of(model: Flint, size: str, checkpoint: str, repetitions: int) -> list[results.Row]:
    """First token and rate of either.

    Raises RuntimeError where the two do not give the same tokens.
    """
    prompt = [(7 + 31 * index) % model.config.vocab_size for index in range(PROMPT)]
    library = by_the_library(model, prompt)
    want = library(TOKENS)
    stop = next(token for token in range(model.config.vocab_size) if token not in want)
    runs = {"library": library, "transformers": by_transformers(model, prompt, stop)}
    for name, run in runs.items():
        if run(TOKENS) != want:
            raise RuntimeError(f"{size} {checkpoint}: {name} gave other tokens than the library")
    first: dict[str, list[float]] = {name: [] for name in runs}
    rate: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repetitions):
        for name, run in runs.items():
            first[name].append(seconds(run, 1, model.device))
            rest = seconds(run, TOKENS, model.device) - first[name][-1]
            rate[name].append((TOKENS - 1) / rest)
    rows = []
    for metric, measured in (("first_token_s", first), ("tok/s", rate)):
        for name in runs:
            row = results.row(
                "generate", f"{size} {name}", metric, measured[name], checkpoint=checkpoint
            )
            if name != "library":
                row |= {"peer": "library", "peer_median": rows[-1]["median"]}
            rows.append(row)
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--output", required=True, help="the JSON file to be written")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=SIZES, action="append", help="default: both")
    parser.add_argument("--checkpoint", choices=TINY, action="append", help="default: both")
    parser.add_argument("--repetitions", type=int, default=7, metavar="N")
    parser.add_argument("--commit", help="of a tree that is no git checkout")
    options = parser.parse_args(argv)
    rows: list[results.Row] = []
    for size in options.size or SIZES:
        for checkpoint in options.checkpoint or TINY:
            model = load_model(size, checkpoint, options.device)
            rows += rows_of(model, size, checkpoint, options.repetitions)
            del model
            # Whatever was measured stays, should a larger model not fit.
            results.write(options.output, rows, results.describe(options.device, options.commit))


if __name__ == "__main__":
    main()
