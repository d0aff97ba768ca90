"""`flint-kernels validate`: a checkpoint against the FP32 forward of its weights."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from flint_kernels.results import Row
    from flint_kernels.validation.compare import Progress

DEFAULT_CHECKPOINT = "flint-tiny"


def add_parser(subparsers: Any) -> None:
    """Defines the arguments of `validate`."""
    parser = subparsers.add_parser(
        "validate",
        help="compare a checkpoint with its FP32 forward",
        description="Perplexity, KL divergence and top-1 agreement of a checkpoint, as the ops "
        "compute it, against the FP32 forward of the same weights: prefill and decode.",
    )
    parser.add_argument(
        "checkpoints",
        nargs="*",
        default=[DEFAULT_CHECKPOINT],
        metavar="CHECKPOINT",
        help="a .gguf or .safetensors file, a folder with one, or a packaged model's name "
        f"(default: {DEFAULT_CHECKPOINT})",
    )
    parser.add_argument(
        "--text", type=Path, help="a UTF-8 file; default: held-out standard library source"
    )
    parser.add_argument(
        "--tokens", type=int, default=50_000, metavar="N", help="to predict (default: %(default)s)"
    )
    parser.add_argument(
        "--context", type=int, default=512, metavar="N", help="of a sequence (default: %(default)s)"
    )
    parser.add_argument(
        "--batch", type=int, default=8, metavar="N", help="sequences at once (default: %(default)s)"
    )
    parser.add_argument(
        "--path", choices=("prefill", "decode"), action="append", help="default: both"
    )
    parser.add_argument("--device", help="default: an accelerator that the ops have bodies for")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write result rows (JSON); its folder is made"
    )
    parser.add_argument(
        "--json", action="store_true", help="the result rows, one JSON object, in place of tables"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Validates each checkpoint in turn. Returns 0."""
    from flint_kernels import results
    from flint_kernels.cli.device import choose_device
    from flint_kernels.validation.text import held_out_documents, read_documents

    if arguments.output is not None:
        check_output(arguments.output)
    device = choose_device(arguments.device)
    meta = results.describe(device)
    if arguments.text is None:
        documents, title = held_out_documents()
    else:
        documents, title = read_documents(arguments.text)
    meta["text"] = title
    rows: list[Row] = []
    for checkpoint in arguments.checkpoints:
        rows += _validate(checkpoint, documents, title, device, arguments)
    if arguments.output is not None:
        results.write(arguments.output, rows, meta)
    if arguments.json:
        sys.stdout.write(json.dumps({"meta": meta, "rows": rows}) + "\n")
    return 0


def _validate(
    checkpoint: str,
    documents: list[str],
    title: str,
    device: torch.device,
    arguments: argparse.Namespace,
) -> list[Row]:
    from flint_kernels.loading import load, load_tokenizer
    from flint_kernels.loading.source import find, read_config
    from flint_kernels.validation import result_rows, sequences, summarize, table, validate

    config = read_config(find(checkpoint))
    tokens = sequences(
        load_tokenizer(checkpoint),
        documents,
        context=arguments.context,
        tokens=arguments.tokens,
        end_of_text=next(iter(config.eos_token_ids), None),
    )
    # No longer RoPE table than this run needs: at the model's full length it takes 128 MiB.
    positions = min(arguments.context, config.max_position_embeddings)
    model = load(checkpoint, device=device, config=config, max_positions=positions)
    paths = arguments.path or ["prefill", "decode"]
    with _progress(len(tokens) * len(paths)) as progress:
        found = validate(model, tokens, paths=paths, batch=arguments.batch, progress=progress)
    summaries = {path: summarize(comparison) for path, comparison in found.items()}
    if not arguments.json:
        count = len(tokens) * arguments.context
        intervals = "95% intervals" if len(tokens) > 1 else "one sequence gives no intervals"
        sys.stdout.write(
            f"{checkpoint} ({model.weight_format}) on {device}: {count} tokens in sequences of "
            f"{arguments.context}, {title}; {intervals}\n{table(summaries)}"
        )
        sys.stdout.flush()
    return result_rows(model_name(checkpoint), model.weight_format, summaries)


def check_output(path: Path) -> None:
    """Makes the folder, and raises OSError where `path` cannot be written: before the long work."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        existed = path.exists()
        path.open("a").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise OSError(
            f"--output: got {path}, which cannot be written ({error.strerror}); want a file in a "
            "folder that can be written or made."
        ) from error


def model_name(checkpoint: str) -> str:
    """What result rows call a checkpoint: both packaged ones are the model "flint-tiny"."""
    from flint_kernels.loading.source import PACKAGED

    if checkpoint in PACKAGED:
        return DEFAULT_CHECKPOINT
    path = Path(checkpoint)
    return path.stem if path.suffix else path.resolve().name


@contextmanager
def _progress(total: int) -> Iterator[Progress | None]:
    """A bar on stderr where that is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    with tqdm(total=total, desc="sequences", leave=False) as bar:
        yield bar.update
