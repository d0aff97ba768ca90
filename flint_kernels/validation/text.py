"""Texts to validate on, cut into sequences of tokens."""

from __future__ import annotations

import os
import platform
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def held_out_documents() -> tuple[list[str], str]:
    """The default text and what to call it: Python source that flint-tiny was not trained on.

    It is the held-out part (by the hash of a file's path) of the standard library of the running
    Python. Another Python's library has the same parts, so far as it has the same files.

    Raises FileNotFoundError where the library's source is not installed.
    """
    from flint_kernels.flint_tiny.corpus import part_of, read_standard_library

    documents = read_standard_library(Path(sysconfig.get_path("stdlib")))
    held_out = [text for name, text in documents.items() if part_of(name) == "held_out"]
    return held_out, f"held-out standard library of CPython {platform.python_version()}"


def read_documents(path: str | os.PathLike[str]) -> tuple[list[str], str]:
    """A UTF-8 text file as one document, and its name."""
    path = Path(path)
    try:
        return [path.read_text(encoding="utf-8")], path.name
    except UnicodeDecodeError as error:
        raise ValueError(
            f"text: got {path}, which is not UTF-8 ({error.reason} at byte {error.start}); want a "
            "UTF-8 text file"
        ) from error


def sequences(
    tokenizer: Tokenizer,
    documents: Iterable[str],
    *,
    context: int,
    tokens: int,
    end_of_text: int | None = None,
) -> Tensor:
    """Windows of the documents, [n, context + 1] int64, n * context at least `tokens`.

    The text is cut into windows that overlap by one token, so that every token is predicted once
    at most, from what precedes it in its window. Of these n are taken at even distances, so that a
    short run sees all of the text; all, where there are fewer. A short tail is left out.

    Args:
        end_of_text: put before each document and after the last; None: nothing is.

    Raises:
        ValueError: `context` or `tokens` is below 1, or the text is too short for one window.
    """
    for name, value in (("context", context), ("tokens", tokens)):
        if value < 1:
            raise ValueError(f"{name}: got {value}, want 1 or more")
    separator = [] if end_of_text is None else [end_of_text]
    ids: list[int] = []
    for document in documents:
        ids += separator + tokenizer.encode(document, add_special_tokens=False).ids
    ids += separator
    if len(ids) <= context:
        raise ValueError(
            f"text: got {len(ids)} tokens, want more than {context} (context); pass a longer text "
            "or a smaller context"
        )
    windows = torch.tensor(ids, dtype=torch.int64).unfold(0, context + 1, context)
    wanted = min(-(-tokens // context), len(windows))
    return windows[torch.arange(wanted) * len(windows) // wanted]
