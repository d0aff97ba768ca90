"""`flint-kernels generate`: streams a continuation of a prompt."""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from flint_kernels.generation import Completion, Generation

DEFAULT_CHECKPOINT = "flint-tiny"
DEFAULT_PROMPT = "class Cache:\n    def __init__(self"


def add_parser(subparsers: Any) -> None:
    """Defines the arguments of `generate`."""
    parser = subparsers.add_parser(
        "generate",
        help="continue a prompt",
        description="Continues a prompt: the text goes to stdout as it comes, times to stderr.",
    )
    parser.add_argument(
        "checkpoint",
        nargs="?",
        default=DEFAULT_CHECKPOINT,
        help="a .gguf or .safetensors file, a folder with one, or a packaged model's name "
        "(default: %(default)s)",
    )
    parser.add_argument("--prompt", default=DEFAULT_PROMPT, help="the text to continue")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N")
    parser.add_argument("--temperature", type=float, default=1.0, help="default: %(default)s")
    parser.add_argument("--top-p", type=float, default=0.95, help="default: %(default)s")
    parser.add_argument("--top-k", type=int, default=20, help="default: %(default)s; 0: all")
    parser.add_argument("--seed", type=int, help="of the draws; default: a fresh one")
    parser.add_argument("--greedy", action="store_true", help="always the most likely token")
    parser.add_argument("--device", help="default: an accelerator that the ops have bodies for")
    parser.add_argument("--chunk", type=int, default=512, help="prompt tokens a step")
    parser.add_argument(
        "--no-graphs",
        action="store_true",
        help="decode eagerly on a GPU too, and not by CUDA graphs; the tokens are the same",
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object at the end in place of the stream"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Loads, generates, reports. Returns 0."""
    start = time.perf_counter()
    from flint_kernels.cli.device import choose_device
    from flint_kernels.generation import Generation, SamplingParams
    from flint_kernels.loading import load, load_tokenizer
    from flint_kernels.loading.source import find, read_config

    imported = time.perf_counter()
    check_prompt(arguments.prompt)
    device = choose_device(arguments.device)
    config = read_config(find(arguments.checkpoint))
    params = SamplingParams(
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        seed=arguments.seed,
        max_new_tokens=arguments.max_new_tokens,
        stop_token_ids=config.eos_token_ids,
        greedy=arguments.greedy,
    )
    tokenizer = load_tokenizer(arguments.checkpoint)
    prompt = tokenizer.encode(arguments.prompt, add_special_tokens=False).ids
    # No longer RoPE table than this run needs: at the model's full length it takes 128 MiB.
    positions = min(len(prompt) + params.max_new_tokens, config.max_position_embeddings)
    model = load(arguments.checkpoint, device=device, config=config, max_positions=positions)
    loaded = time.perf_counter()

    generation = Generation(
        model, [prompt], params, chunk=arguments.chunk, graphs=not arguments.no_graphs
    )
    if arguments.json:
        completion, first, end = _generate(generation, tokenizer, lambda _: None)
    else:
        _write(tokenizer.decode(prompt))
        completion, first, end = _generate(generation, tokenizer, _write)
    count = len(completion.tokens)
    report = {
        "checkpoint": arguments.checkpoint,
        "device": str(device),
        "prompt": arguments.prompt,
        "prompt_tokens": len(prompt),
        "text": tokenizer.decode(completion.tokens),
        "tokens": completion.tokens,
        "finish_reason": completion.finish_reason,
        "seed": completion.seed,
        "import_seconds": imported - start,
        "load_seconds": loaded - imported,
        "first_token_seconds": first - loaded,
        "tokens_per_second": (count - 1) / (end - first) if count > 1 and end > first else None,
    }
    if arguments.json:
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        sys.stdout.write("\n")
        sys.stdout.flush()
        sys.stderr.write(_summary(report, count))
    return 0


def check_prompt(prompt: str) -> None:
    """Raises ValueError for bytes of the command line that were no UTF-8: no text, no tokens."""
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"--prompt: got bytes that are no UTF-8, from character {error.start} on; want text, "
            "as UTF-8."
        ) from error


def _generate(
    generation: Generation, tokenizer: Tokenizer, write: Callable[[str], None]
) -> tuple[Completion, float, float]:
    """The one completion, and when its first and its last token came."""
    from flint_kernels.generation import TextStream

    text = TextStream(tokenizer)
    times: list[float] = []
    for _, token in generation:
        times.append(time.perf_counter())
        write(text.push(token))
    write(text.finish())
    times = times or [time.perf_counter()]  # a stop token at once: nothing came
    return generation.completions()[0], times[0], times[-1]


def _write(text: str) -> None:
    if not text:
        return
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that cannot show it is no reason
        sys.stdout.reconfigure(errors="replace")
    sys.stdout.write(text)
    sys.stdout.flush()


def _summary(report: dict[str, Any], count: int) -> str:
    speed = report["tokens_per_second"]
    rate = "" if speed is None else f", {speed:.1f} tokens/s"
    return (
        f"\n{report['checkpoint']} on {report['device']}: loaded in "
        f"{report['load_seconds']:.2f} s, first token after {report['first_token_seconds']:.2f} s, "
        f"{count} tokens{rate} (seed {report['seed']}, ended by {report['finish_reason']})\n"
    )
