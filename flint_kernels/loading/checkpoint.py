"""What a checkpoint of any format is to the loader once its headers have been checked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from flint_kernels.loading.transfer import Transfer


class Checkpoint(Protocol):
    """Open files whose tensors fit a config, name by name; nothing is allocated for them yet."""

    source: Path
    weight_format: str
    """"nvfp4" or "bf16"."""
    n_bytes: int
    """Of all tensors, as the files have them."""

    def read(self, transfer: Transfer) -> Iterator[int]:
        """Writes tensor after tensor in the order of the file; yields the bytes of each.

        Raises ValueError for values that no weight can have, naming file and tensor.
        """

    def close(self) -> None:
        """Lets go of the files."""
