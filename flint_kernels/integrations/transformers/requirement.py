"""Which Transformers there has to be."""

from __future__ import annotations

import importlib.metadata

# The first with a config of its own for Flint, and with `cache` in place of `past_key_values`.
MINIMUM = (5, 24)
_REMEDY = "pip install 'flint-kernels[transformers]'"


def check() -> None:
    """Raises ImportError, with the remedy, where Transformers is missing or older than MINIMUM."""
    wanted = ".".join(map(str, MINIMUM))
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError(
            f"transformers: got none; want {wanted} or newer. {_REMEDY} installs it."
        ) from error
    major, minor = version.split(".")[:2]
    if (int(major), int(minor)) < MINIMUM:
        raise ImportError(f"transformers: got {version}; want {wanted} or newer. {_REMEDY}")
