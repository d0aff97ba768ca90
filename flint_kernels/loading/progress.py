"""A progress bar on stderr, for whoever looks at one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(title: str, n_bytes: int, show: bool | None) -> Iterator[Callable[[int], object]]:
    """Gives a function that is told the bytes done, of `n_bytes` in all.

    `show` None: where stderr is a terminal.
    """
    if show is None:
        show = sys.stderr.isatty()
    if not show:
        yield lambda n_bytes: None
        return
    from tqdm import tqdm

    with tqdm(total=n_bytes, desc=title, unit="B", unit_scale=True, unit_divisor=1024) as bar:
        yield bar.update
