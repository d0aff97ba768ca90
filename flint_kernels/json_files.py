"""Reading a JSON file that came from somewhere: bounded, and each key once."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

MAX_BYTES = 1 << 25
"""Far above any config or index (that of 40,000 tensors has some 4 MiB)."""


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        FileNotFoundError, OSError: it is not there or cannot be read.
        ValueError, naming what is wrong but not the file: it is no regular file or has more than
            MAX_BYTES, is no JSON (nested too deep, or a number of thousands of digits, too), or has
            a key twice.
    """
    return parse_json(read_bounded(path, MAX_BYTES))


def parse_json(content: bytes) -> Any:
    """ValueError for what is no JSON, or has a key twice: two readers may take either value."""
    try:
        return json.loads(content.decode("utf-8"), object_pairs_hook=_unique)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def read_bounded(path: Path, most: int) -> bytes:
    """The bytes of a regular file of at most `most`; ValueError for another, before it is read."""
    # Not to wait for a writer, where the path is a pipe.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no regular file")
        if status.st_size > most:
            raise ValueError(f"it has {status.st_size} bytes, of which {most} would be read")
        return file.read(most)  # it may grow meanwhile


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"it has {twice!r} twice")
    return content
