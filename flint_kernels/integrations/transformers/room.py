"""The paged cache behind a `FlintCache`, and what a model keeps of it for the next call."""

from __future__ import annotations

from dataclasses import dataclass

from flint_kernels.generation import GraphDecoder
from flint_kernels.model import Flint, PagedKVCache
from flint_kernels.ops import value_checks_enabled

PAGE_SIZE = 16


@dataclass(eq=False)
class Room:
    """Pages for `rows` requests of up to `length` tokens each, and the graphs that decode there."""

    paged: PagedKVCache
    decoder: GraphDecoder | None

    @staticmethod
    def make(model: Flint, rows: int, length: int) -> Room:
        """Of the model's device. On a GPU decode steps are replayed as CUDA graphs."""
        length = min(-(-length // PAGE_SIZE) * PAGE_SIZE, model.max_positions)
        paged = PagedKVCache(
            model.config,
            max_requests=rows,
            page_size=PAGE_SIZE,
            max_positions=length,
            dtype=model.compute_dtype,
            device=model.device,
        )
        decoder = None
        if model.device.type == "cuda":
            decoder = GraphDecoder(model, paged, graphs=not value_checks_enabled())
        return Room(paged, decoder)

    @property
    def rows(self) -> int:
        return self.paged.max_requests

    @property
    def length(self) -> int:
        return self.paged.max_positions

    def clear(self) -> None:
        """Ends all requests; the next ones are numbered from 0 on again."""
        for request in reversed(self.paged.requests):
            self.paged.release(request)


class Shelf:
    """Keeps the last room that was given back, pages, graphs and all."""

    def __init__(self) -> None:
        self._rooms: list[Room] = []

    def take(self, rows: int, length: int) -> Room | None:
        """The kept room, where it holds that much; one that is too small is dropped."""
        try:
            room = self._rooms.pop()  # at once, so that two threads cannot take the same
        except IndexError:
            return None
        return room if room.rows >= rows and room.length >= length else None

    def give(self, room: Room | None) -> None:
        if room is not None:
            room.clear()
            self._rooms[:] = [room]

    def clear(self) -> None:
        self._rooms.clear()
