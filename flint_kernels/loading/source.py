"""From what a user names (a packaged checkpoint, a file, a folder) to files on the disk."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from flint_kernels.loading.safetensors import INDEX_NAME, shard_files
from flint_kernels.model.config import FlintConfig

PACKAGED = {"flint-tiny": "nvfp4", "flint-tiny-bf16": "bf16"}
_PACKAGED_FOLDER = Path(__file__).parent.parent / "flint_tiny" / "checkpoint"

Source = str | os.PathLike[str]


@dataclass(frozen=True)
class Files:
    """The files of one checkpoint."""

    path: Path
    """What was named: the file or folder, for errors."""
    folder: Path
    """Where config.json and tokenizer.json are looked for."""
    weights: tuple[Path, ...]

    @property
    def is_gguf(self) -> bool:
        return self.weights[0].suffix == ".gguf"


def find(source: Source) -> Files:
    """The weight files of `source`: "flint-tiny", "flint-tiny-bf16", a file or a folder.

    A folder holds one .gguf file, or safetensors (one file, or shards with an index). A folder of
    that name in the working directory is reached as "./flint-tiny".

    Raises:
        FileNotFoundError: there is nothing there, or no weights in it.
        ValueError: it is not clear which files are meant, or the suffix is unknown.
    """
    path = packaged_folder(source) or Path(source)
    if path.is_dir():
        return Files(path, path, _weights(path))
    if not path.exists():
        names = ", ".join(repr(name) for name in PACKAGED)
        raise FileNotFoundError(
            f"source: got {os.fspath(source)!r}, where there is nothing; want a .gguf or "
            f".safetensors file, a folder with such files, or one of {names}"
        )
    if path.suffix not in (".gguf", ".safetensors"):
        raise ValueError(
            f"source: got the file {path}, want a .gguf or .safetensors file; name the weights or "
            "their folder"
        )
    return Files(path, path.parent, (path,))


def packaged_folder(source: Source) -> Path | None:
    """The folder of a checkpoint that comes with the package, None for any other source."""
    kind = PACKAGED.get(source) if isinstance(source, str) else None
    return None if kind is None else _PACKAGED_FOLDER / kind


def folder_of(source: Source) -> Path:
    """Where the config and the tokenizer of a source are."""
    path = packaged_folder(source) or Path(source)
    return path if path.is_dir() else path.parent


def read_config(files: Files) -> FlintConfig:
    """The config.json beside the weights; FileNotFoundError says how to do without."""
    path = files.folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: got no such file, want the config.json of the model (a GGUF file carries "
            "none); fetch it from the BF16 checkpoint, or pass config="
        )
    return FlintConfig.from_json_file(path)


def _weights(folder: Path) -> tuple[Path, ...]:
    gguf = sorted(folder.glob("*.gguf"))
    safetensors = sorted(folder.glob("*.safetensors"))
    has_index = (folder / INDEX_NAME).is_file()
    if gguf and (safetensors or has_index):
        raise ValueError(
            f"{folder}: got {gguf[0].name} beside safetensors, want one checkpoint a folder; name "
            "the .gguf file itself, or keep the two apart"
        )
    if len(gguf) > 1:
        raise ValueError(_ambiguous(folder, gguf, ".gguf file; name the one to load"))
    if gguf:
        return (gguf[0],)
    if has_index:
        return tuple(shard_files(folder))
    if len(safetensors) > 1:
        remedy = (
            f".safetensors file, or shards with a {INDEX_NAME}; name the file, or fetch the index"
        )
        raise ValueError(_ambiguous(folder, safetensors, remedy))
    if not safetensors:
        raise FileNotFoundError(
            f"{folder}: got no weights, want one .gguf file or .safetensors files; "
            "was the download broken off?"
        )
    return (safetensors[0],)


def _ambiguous(folder: Path, files: list[Path], want: str) -> str:
    names = ", ".join(file.name for file in files[:3]) + (", ..." if len(files) > 3 else "")
    return f"{folder}: got {len(files)} files ({names}), want one {want}"
