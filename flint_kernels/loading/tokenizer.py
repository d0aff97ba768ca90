"""The tokenizer.json beside a checkpoint: read within bounds, and with errors that are ValueErrors.

The package `tokenizers` runs what such a file describes (regular expressions, replacements), raises
bare Exceptions, and where its Rust panics something that is no Exception at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from flint_kernels.json_files import parse_json, read_bounded
from flint_kernels.loading.source import Source, folder_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_BYTES = 1 << 28
"""Far above any tokenizer: one of 250,000 entries has some 30 MiB."""
MAX_GROWTH = 256
"""How many times as long as it was a normalizer or a decoder may make a text."""
_MAX_DEPTH = 128


def load_tokenizer(source: Source) -> Tokenizer:
    """The tokenizer.json beside the weights of `source` (anything that `load` takes).

    It neither pads nor truncates, whatever the file says. Its `encode` and `decode` raise
    ValueError for a text or ids that it has no answer for; everything else is the package's own.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is no tokenizer, or one that may make a text MAX_GROWTH times as long.
    """
    path = folder_of(source) / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: got no such file, want the tokenizer.json of the model; fetch it from the "
            "BF16 checkpoint"
        )
    try:
        return parse(read_bounded(path, MAX_BYTES))
    except ValueError as error:
        raise ValueError(
            f"{path}: got a file that is no tokenizer ({error}); fetch it again"
        ) from error


def parse(content: bytes) -> Tokenizer:
    """A tokenizer from the bytes of a tokenizer.json; ValueError where they are none."""
    from tokenizers import Tokenizer

    _check(parse_json(content))
    with _errors_are_values("it cannot be read"):
        tokenizer = Tokenizer.from_buffer(content)
        # A prompt is what the user wrote. Padding to a length of the file's would take any memory.
        tokenizer.no_padding()
        tokenizer.no_truncation()
    return cast("Tokenizer", _Checked(tokenizer))


def _check(parts: Any) -> None:
    """Refuses what the package takes, and what then ends the process or takes any memory."""
    if not isinstance(parts, dict) or not isinstance(parts.get("model"), dict):
        raise ValueError("it has no 'model'")
    for name in ("normalizer", "decoder"):
        if _growth(parts.get(name)) > MAX_GROWTH:
            raise ValueError(f"its {name} may make a text more than {MAX_GROWTH} times as long")
    _check_merges(parts["model"])


def _check_merges(model: dict[str, Any]) -> None:
    """The package cuts the prefix off the second half of each merge without looking; what is left
    is no text where it was not there, and a message with it ends the process."""
    prefix, merges = model.get("continuing_subword_prefix"), model.get("merges")
    if not isinstance(prefix, str) or not isinstance(merges, list):
        return
    for merge in merges:
        halves = merge.split(" ") if isinstance(merge, str) else merge
        second = halves[1] if isinstance(halves, list) and len(halves) == 2 else None
        if not isinstance(second, str) or not second.startswith(prefix):
            raise ValueError(f"its merge {merge!r} has a second half without the prefix {prefix!r}")


class _Checked:
    """A `tokenizers.Tokenizer` whose errors name it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, *arguments: Any, **options: Any) -> Any:
        with _errors_are_values("tokenizer: got a text that it cannot encode"):
            return self._tokenizer.encode(text, *arguments, **options)

    def decode(self, ids: Sequence[int], *arguments: Any, **options: Any) -> Any:
        with _errors_are_values("tokenizer: got ids that it cannot decode"):
            return self._tokenizer.decode(ids, *arguments, **options)


@contextmanager
def _errors_are_values(what: str) -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError, TypeError):
        raise
    except BaseException as error:  # a panic of the package's Rust is no Exception
        raise ValueError(f"{what}: {error}") from error


def _growth(part: Any, depth: int = 0) -> int:
    """By what factor replacements may lengthen a text, at most; they come one after the other."""
    if not isinstance(part, dict) or depth > _MAX_DEPTH:  # so deep the package reads nothing
        return 1
    factor = 1
    for name in ("normalizers", "decoders"):
        inner = part.get(name)
        for one in inner if isinstance(inner, list) else ():
            factor *= _growth(one, depth + 1)
    if part.get("type") == "Replace":  # a pattern may match before every character
        factor *= 1 + len(str(part.get("content", "")).encode("utf-8", "replace"))
    return factor
