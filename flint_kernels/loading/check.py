"""Holds what a file has against what the model needs, before any memory is taken for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from flint_kernels.loading.names import Target

SHOWN_PROBLEMS = 10


@dataclass(frozen=True)
class Found:
    """A tensor as the header of a file describes it."""

    name: str
    type: str
    shape: tuple[int, ...]
    """In torch's order."""
    n_bytes: int
    file: Path


@dataclass(frozen=True)
class Expected:
    """A tensor as the model needs it."""

    types: tuple[str, ...]
    """In the words of the file's format."""
    shapes: tuple[tuple[int, ...], ...]
    """Those that are taken (a global scale may be [] or [1])."""
    target: Target
    role: str = "weight"
    """"weight", "weight_scale" or "weight_scale_2"."""


@dataclass(frozen=True)
class Entry:
    """A tensor of a file and where it goes."""

    found: Found
    expected: Expected


def match(
    expected: Mapping[str, Expected],
    found: Iterable[Found],
    source: Path,
    hints: Mapping[str, str],
) -> list[Entry]:
    """Pairs each tensor of a checkpoint with its target, in the order of `found`.

    Args:
        expected: name -> what the model needs; exactly these names must be there.
        found: what the files have, in the order in which they are to be read.
        source: the file or folder that errors name.
        hints: suffix of a name -> what to say of unexpected tensors that end in it.

    Raises:
        ValueError: tensors missing, unexpected, twice, or of a wrong type or shape; the message
            counts all of them and names the first ten.
    """
    entries: list[Entry] = []
    problems: list[str] = []
    files: dict[str, Path] = {}
    for tensor in found:
        if tensor.name in files:
            problems.append(
                f"{tensor.file.name}: tensor {tensor.name!r}: got it twice (also in "
                f"{files[tensor.name].name}), want each tensor once"
            )
            continue
        files[tensor.name] = tensor.file
        want = expected.get(tensor.name)
        if want is None:
            problems.append(_unexpected(tensor, hints))
        elif problem := _mismatch(tensor, want):
            problems.append(problem)
        else:
            entries.append(Entry(tensor, want))
    problems.extend(
        f"tensor {name!r}: missing, want type {_either(want.types)}, shape {_shapes(want)}"
        for name, want in expected.items()
        if name not in files
    )
    if problems:
        raise ValueError(_summary(problems, source))
    return entries


def _unexpected(tensor: Found, hints: Mapping[str, str]) -> str:
    hint = next((hint for suffix, hint in hints.items() if tensor.name.endswith(suffix)), "")
    return (
        f"{tensor.file.name}: tensor {tensor.name!r}: got {tensor.type} {list(tensor.shape)}, "
        f"want no tensor of that name in this config" + (f": {hint}" if hint else "")
    )


def _mismatch(tensor: Found, want: Expected) -> str | None:
    faults = []
    if tensor.type not in want.types:
        faults.append(f"got type {tensor.type}, want {_either(want.types)}")
    if tensor.shape not in want.shapes:
        faults.append(f"got shape {list(tensor.shape)}, want {_shapes(want)}")
    if not faults:
        return None
    return f"{tensor.file.name}: tensor {tensor.name!r}: {'; '.join(faults)}"


def _either(words: tuple[str, ...]) -> str:
    return " or ".join(words)


def _shapes(want: Expected) -> str:
    return " or ".join(str(list(shape)) for shape in want.shapes)


def _summary(problems: list[str], source: Path) -> str:
    count = "1 tensor does" if len(problems) == 1 else f"{len(problems)} tensors do"
    shown = problems[:SHOWN_PROBLEMS]
    more = [f"... and {len(problems) - len(shown)} more"] if len(problems) > len(shown) else []
    head = f"{source}: {count} not fit the config; is config.json that of this checkpoint?"
    return "\n  ".join((head, *shown, *more))
