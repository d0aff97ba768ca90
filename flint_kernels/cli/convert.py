"""`flint-kernels convert`: a checkpoint in another file format, or in another weight format."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flint_kernels.model import Flint

FORMATS = {"gguf": "nvfp4", "modelopt": "nvfp4", "bf16": "bf16"}
"""What can be written, and the weight format that it holds."""

BESIDE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
)
"""Files beside the weights that are copied, those that are there."""


def add_parser(subparsers: Any) -> None:
    """Defines the arguments of `convert`."""
    parser = subparsers.add_parser(
        "convert",
        help="write a checkpoint in another format",
        description="Writes a checkpoint in another format. Between GGUF and ModelOpt nothing is "
        "lost. From BF16 to NVFP4 and back the weights change, which has to be asked for. The "
        "model is in host memory meanwhile, in both weight formats where they differ.",
    )
    parser.add_argument(
        "checkpoint",
        help="a .gguf or .safetensors file, a folder with one, or a packaged model's name",
    )
    parser.add_argument("output", type=Path, help="a folder, new or empty; it is made")
    parser.add_argument(
        "--to",
        choices=FORMATS,
        required=True,
        help="gguf: NVFP4, one file; modelopt: NVFP4 safetensors; bf16: safetensors",
    )
    parser.add_argument(
        "--round", action="store_true", help="convert between BF16 and NVFP4, changing the weights"
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object at the end in place of text"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Loads, converts, writes. Returns 0."""
    from flint_kernels.loading import load
    from flint_kernels.loading.source import find, folder_of, read_config

    folder: Path = arguments.output
    check_folder(folder)
    files = find(arguments.checkpoint)
    config = read_config(files)
    # No longer RoPE table than a conversion needs, which is none.
    model = load(arguments.checkpoint, config=config, max_positions=1)
    source = model.weight_format
    if source != FORMATS[arguments.to]:
        check_rounding(source, arguments.to, arguments.round)
        model = _converted(model)
    save, path = _saver(arguments.to, folder)
    try:
        save(model)
    except ImportError as error:  # the gguf package, which reading does not need
        raise ValueError(str(error)) from error
    beside = folder_of(arguments.checkpoint)
    for name in BESIDE:
        if (beside / name).is_file():
            shutil.copyfile(beside / name, folder / name)
    write_config(beside / "config.json", folder / "config.json")
    report = {
        "checkpoint": arguments.checkpoint,
        "source_weights": source,
        "weights": model.weight_format,
        "format": arguments.to,
        "path": str(path),
        "files": sorted(file.name for file in folder.iterdir()),
        "bytes": sum(file.stat().st_size for file in folder.iterdir()),
    }
    sys.stdout.write((json.dumps(report) if arguments.json else _text(report)) + "\n")
    return 0


def check_folder(folder: Path) -> None:
    """Raises ValueError where there is something already, which new files would be mixed with."""
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"output: got {folder}, which is not empty; want a new folder.")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output: got {folder}, which is a file; want a new folder.")


def check_rounding(source: str, to: str, asked: bool) -> None:
    """Raises ValueError where the weights would change and nobody has asked for it."""
    if not asked:
        loss = (
            "each weight is rounded to the nearest of 15 values of its block, and nothing makes up "
            "for it"
            if source == "bf16"
            else "each weight is rounded to BF16, and takes 3.6 times the room"
        )
        raise ValueError(
            f"--to {to}: got a checkpoint of {source} weights; {loss}. Want --round, if that is "
            "meant."
        )


def write_config(source: Path, target: Path) -> None:
    """The source's config.json, with all that other libraries read in it; but for how its weights
    were packed, which is no longer so."""
    fields = json.loads(source.read_text(encoding="utf-8"))
    fields.pop("quantization_config", None)
    target.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def _converted(model: Flint) -> Flint:
    from flint_kernels.loading.convert import to_bf16, to_nvfp4

    return to_nvfp4(model) if model.weight_format == "bf16" else to_bf16(model)


def _saver(to: str, folder: Path) -> tuple[Callable[[Flint], None], Path]:
    from flint_kernels.loading import export

    if to == "gguf":
        path = folder / "model.gguf"
        return lambda model: export.save_gguf(model, path), path
    save = export.save_bf16 if to == "bf16" else export.save_modelopt
    return lambda model: save(model, folder), folder


def _text(report: dict[str, Any]) -> str:
    return (
        f"{report['path']}: {report['weights']} weights as {report['format']}, "
        f"{report['bytes'] / 1e6:.1f} MB in {len(report['files'])} files"
    )
