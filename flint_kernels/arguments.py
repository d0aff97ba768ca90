"""Checks of arguments that several modules share."""

from __future__ import annotations

import operator
from collections.abc import Iterable


def integer(name: str, value: object, want: str) -> int:
    """`value` as an int: ints, numpy's and tensors of one integer, but no float, bool or string.

    Raises TypeError, saying that `name` got `value` and wants an integer, `want`.
    """
    try:
        if not isinstance(value, bool):
            return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise TypeError(f"{name}: got {value!r}; want an integer, {want}.")


def token_ids(name: str, values: object) -> list[int]:
    """`values`, a list or tensor of token ids, as a list of ints.

    Raises TypeError, naming `name`, for what is no list, and for ids that are no integers.
    """
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"{name}: got {values!r}; want a list of token ids, which are integers.")
    return [integer(name, value, "a token id") for value in values]
