"""Turn one CPython's standard library into the corpus of flint-tiny.

    python -m flint_kernels.flint_tiny.corpus --output build/flint_tiny [--stdlib DIRECTORY]

reads the `.py` files that ship with CPython, trains the tokenizer on the training part and writes
into `--output`:

    tokenizer.json, tokenizer_config.json
    train.npy, validation.npy, held_out.npy   uint16 tokens; <|endoftext|> before every document
    corpus.json                               CPython version, file and token counts, sha256

The same CPython gives the same bytes. A file belongs to a part by the hash of its path:
2% validation (the curve that training watches and chooses by), 3% held out (only reported).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import re
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from flint_kernels.flint_tiny.tokenizer import (
    END_OF_TEXT_ID,
    VOCABULARY_SIZE,
    save_tokenizer,
    train_tokenizer,
)

log = logging.getLogger(__name__)

PARTS = ("train", "validation", "held_out")

# Not source that anyone wrote by hand: character tables, the built-in help's text, and the record
# of how this very interpreter was built (its paths are the builder's, it does not ship).
EXCLUDED = re.compile(
    r"^(site-packages|encodings|pydoc_data|config-[^/]*|__pycache__)/|^_sysconfig(data|_vars)"
)


def read_standard_library(root: Path) -> dict[str, str]:
    """Map the path of each source file below `root` to its text, in sorted order of the paths.

    Files that are not UTF-8 (CPython ships a few to test its parser) are left out. Raises
    FileNotFoundError when `root` holds no standard library.
    """
    if not (root / "sysconfig" / "__init__.py").exists() and not (root / "sysconfig.py").exists():
        raise FileNotFoundError(
            f"stdlib: {root} holds no CPython standard library; pass the directory that "
            "sysconfig.get_path('stdlib') names"
        )
    documents = {}
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        name = path.relative_to(root).as_posix()
        if EXCLUDED.search(name):
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            documents[name] = text.replace("\r\n", "\n")
    return documents


def part_of(name: str) -> str:
    """The part that the file `name` belongs to, by the hash of its path."""
    bucket = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % 100
    if bucket < 2:
        return "validation"
    return "held_out" if bucket < 5 else "train"


def digest(documents: dict[str, str]) -> str:
    """sha256 over paths and texts, in order."""
    state = hashlib.sha256()
    for name, text in documents.items():
        state.update(name.encode() + b"\0" + text.encode() + b"\0")
    return state.hexdigest()


def pack(tokenizer: Tokenizer, texts: Iterable[str]) -> np.ndarray:
    """Encode `texts` into one uint16 array, <|endoftext|> before each text and after the last."""
    pieces: list[np.ndarray] = []
    separator = np.array([END_OF_TEXT_ID], dtype=np.uint16)
    for text in texts:
        ids = np.array(tokenizer.encode(text).ids, dtype=np.uint16)
        pieces += [separator, ids]
    return np.concatenate([*pieces, separator])


def python_version(root: Path) -> str:
    """The version of the CPython whose library `root` is, as its patchlevel.h or path says it."""
    header = root.parent.parent / "include" / root.name / "patchlevel.h"
    if header.exists():
        found = re.search(r'#define PY_VERSION\s+"([^"]+)"', header.read_text(encoding="utf-8"))
        if found:
            return found.group(1)
    return root.name.removeprefix("python")


def build(root: Path, output: Path, vocabulary_size: int = VOCABULARY_SIZE) -> dict[str, object]:
    """Read the library at `root`, write everything into `output`, return what corpus.json says."""
    documents = read_standard_library(root)
    parts = {
        part: [text for name, text in documents.items() if part_of(name) == part] for part in PARTS
    }
    tokenizer = train_tokenizer(iter(parts["train"]), vocabulary_size)
    output.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, output)
    record: dict[str, object] = {
        "source": f"standard library of CPython {python_version(root)}",
        "sha256": digest(documents),
        "tokenizer_sha256": hashlib.sha256((output / "tokenizer.json").read_bytes()).hexdigest(),
        "files": {part: len(texts) for part, texts in parts.items()},
        "bytes": {part: sum(len(text.encode()) for text in parts[part]) for part in PARTS},
    }
    tokens = {}
    for part, texts in parts.items():
        packed = pack(tokenizer, texts)
        np.save(output / f"{part}.npy", packed)
        tokens[part] = len(packed)
    record["tokens"] = tokens
    text = json.dumps(record, indent=2)
    (output / "corpus.json").write_text(text + "\n", encoding="utf-8")
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_path("stdlib")))
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    log.info(json.dumps(build(arguments.stdlib, arguments.output), indent=2))


if __name__ == "__main__":
    main()
