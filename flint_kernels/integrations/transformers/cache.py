"""`FlintCache`: the K and V of a batch as `generate()` hands them around, in pages."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import Cache

from flint_kernels.integrations.transformers.room import Room, Shelf
from flint_kernels.integrations.transformers.rows import Row, real_columns
from flint_kernels.model import Flint


class _Lease:
    """The room that a cache is in; outlives the cache, so that the room can be given back."""

    def __init__(self, room: Room | None) -> None:
        self.room = room


class FlintCache(Cache):
    """K and V of each row of a batch, in a `PagedKVCache` that the ops write and read in place.

    A row is a request of the paged cache and holds its own tokens alone: padding takes no place and
    no time. Nothing is copied from step to step. What `max_length` does not foresee makes the cache
    move, once for each doubling.

    It is returned by `generate(..., return_dict_in_generate=True)` and by the model's forward, as
    `cache`, and may be passed again, with the tokens that have been added.

    Args:
        model: whose K and V these are.
        max_length: tokens of the longest row, as far as known.
        shelf: takes the pages when the cache is gone, and gives them where it has them.
        rows: for how many rows; None: as many as the first batch has.

    Raises:
        ValueError: max_length is more than the model's positions.
    """

    def __init__(
        self,
        model: Flint,
        max_length: int = 0,
        *,
        shelf: Shelf | None = None,
        rows: int | None = None,
    ) -> None:
        super().__init__(layers=[])
        self.is_shared = False  # with who called generate(), and goes on with it
        if max_length > model.max_positions:
            raise too_long("max_length", max_length, model)
        self.model = model
        self._max_length = max_length
        self._requests: list[int] = []
        self._ended: list[bool] = []  # whether padding follows a row's tokens
        self._columns = 0  # padding among them
        room = shelf.take(rows, max_length) if shelf is not None and rows is not None else None
        self._lease = _Lease(room)
        if shelf is not None:
            weakref.finalize(self, _give_back, shelf, self._lease)

    # ------------------------------------------------------------------ what the model does with it

    @property
    def room(self) -> Room:
        """Where the rows are; RuntimeError before the first step."""
        if self._lease.room is None:
            raise RuntimeError("cache: got no rows yet; want those of a first step.")
        return self._lease.room

    @property
    def requests(self) -> list[int]:
        """The rows' requests in the paged cache, in order."""
        return list(self._requests)

    @property
    def lengths(self) -> list[int]:
        """Cached tokens of each row."""
        return [self.room.paged.length(request) for request in self._requests]

    def place(self, shape: Sequence[int], attention_mask: Tensor | None) -> list[Row]:
        """Makes room for new columns; the tokens among them, which the model then has to write.

        Args:
            shape: [B, S] of the new input_ids.
            attention_mask: [B, cached columns + S], or None: no padding; see `real_columns`.

        Raises:
            ValueError: another batch than before, a mask that does not fit, or rows that would be
                longer than the model's positions. In every case nothing has changed.
        """
        batch, columns = shape
        if self._requests and len(self._requests) != batch:
            raise ValueError(
                f"input_ids: got {batch} rows; want {len(self._requests)}, those of the cache. "
                "Start with another cache, or reorder this one (batch_select_indices)."
            )
        fresh = not self._requests
        lengths = [0] * batch if fresh else self.lengths
        ended = [False] * batch if fresh else self._ended
        rows = real_columns(shape, attention_mask, lengths, self._columns, ended)
        after = [length + row.count for length, row in zip(lengths, rows, strict=True)]
        if max(after) > self.model.max_positions:
            raise too_long("input_ids", max(after), self.model)
        self._make_room(batch, max(after))
        if fresh:
            self._requests = [self.room.paged.add() for _ in range(batch)]
        self._columns += columns
        self._ended = [
            before or (length > 0 and row.stop < columns)
            for before, length, row in zip(ended, after, rows, strict=True)
        ]
        return rows

    @property
    def holds_another_column(self) -> bool:
        """Whether `extend` would neither move the cache nor be an error."""
        return max(self.lengths) < self.room.length

    def extend(self) -> None:
        """Makes room for one more column, a token of every row, which the model then has to write.

        Raises:
            ValueError: a row would be longer than the model's positions; nothing has changed.
        """
        longest = max(self.lengths) + 1
        if longest > self.model.max_positions:
            raise too_long("input_ids", longest, self.model)
        self._make_room(len(self._requests), longest)
        self._columns += 1

    def _make_room(self, rows: int, length: int) -> None:
        """Moves to a larger room where this one is too small."""
        old = self._lease.room
        if old is not None and old.rows >= rows and old.length >= length:
            return
        length = max(length, self._max_length)
        if old is not None:
            rows = max(rows, old.rows)
            length = max(length, min(2 * old.length, self.model.max_positions))
        new = Room.make(self.model, rows, length)
        if old is not None:
            self._requests = [new.paged.copy(request, old.paged) for request in self._requests]
        self._lease.room = new

    # ------------------------------------------------------------------- what Transformers asks it

    def __repr__(self) -> str:
        return f"FlintCache(rows={len(self._requests)}, columns={self._columns})"

    def __len__(self) -> int:
        return self.model.config.num_hidden_layers

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of input_ids that are cached, padding among them; every layer's."""
        return self._columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """The model's positions: the cache grows up to there."""
        return self.model.max_positions

    @property
    def batch_size(self) -> int:
        """Rows; -1 before the first step."""
        return len(self._requests) or -1

    @property
    def is_initialized(self) -> bool:
        return self._lease.room is not None

    @property
    def is_compileable(self) -> bool:
        """False: generate() would compile the whole step, where the ops and graphs do their own."""
        return False

    @property
    def is_croppable(self) -> bool:
        """False: a window layer's pages hold later tokens now."""
        return False

    @property
    def is_sliding(self) -> list[bool]:
        config = self.model.config
        return [config.window(layer) > 0 for layer in range(config.num_hidden_layers)]

    @property
    def is_linear(self) -> list[bool]:
        return [False] * len(self)

    @property
    def is_dummy(self) -> list[bool]:
        return [False] * len(self)

    def reset(self) -> None:
        """Forgets all rows; their pages stay."""
        for request in sorted(self._requests, reverse=True):
            self.room.paged.release(request)
        self._requests, self._ended, self._columns = [], [], 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i goes on from what row beam_idx[i] was: [B] integers."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times, one after the other."""
        self._select([row for row in range(len(self._requests)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows `indices`, [n] integers, in that order; a row may be named again."""
        self._select(indices.tolist())

    def crop(self, tokens_to_remove: int) -> NoReturn:
        """Raises: see `is_croppable`."""
        raise NotImplementedError(
            f"crop: got {tokens_to_remove} tokens to remove; want none: the layers with a window "
            "have given up what came before theirs. Start with another cache."
        )

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises: the ops write K and V themselves."""
        raise NotImplementedError(
            "cache: got a call of update(), by a model that computes K and V itself; want "
            "FlintForCausalLM of flint_kernels, which this cache is for."
        )

    def _select(self, order: list[int]) -> None:
        """Who is named once keeps its pages, so that a mere exchange of rows copies nothing."""
        if not self._requests:
            return
        paged = self.room.paged
        for row in sorted(set(range(len(self._requests))) - set(order), reverse=True):
            paged.release(self._requests[row])
        named = list(dict.fromkeys(order))  # of the rows that stay, each once
        requests = dict(zip(named, (self._requests[row] for row in named), strict=True))
        lengths = [paged.length(request) for request in requests.values()]
        self._requests = list(requests.values())
        self._make_room(len(order), max(lengths))
        requests = dict(zip(named, self._requests, strict=True))
        first = set(named)
        chosen = []
        for row in order:
            if row in first:
                first.remove(row)
                chosen.append(requests[row])
            else:
                chosen.append(self.room.paged.copy(requests[row]))
        self._requests = chosen
        self._ended = [self._ended[row] for row in order]


def too_long(argument: str, got: int, model: Flint) -> ValueError:
    """For rows that the model has no positions for."""
    return ValueError(
        f"{argument}: got {got} tokens in a row; want at most {model.max_positions}. Shorten them, "
        "or load the model with a larger max_position_embeddings."
    )


def _give_back(shelf: Shelf, lease: _Lease) -> None:
    shelf.give(lease.room)


def check_batch(input_ids: Tensor) -> None:
    """Raises TypeError, ValueError for what are no ids [B, S]."""
    if not isinstance(input_ids, Tensor) or input_ids.dtype not in (torch.int32, torch.int64):
        got = input_ids.dtype if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise TypeError(f"input_ids: got {got}; want a tensor of int64 or int32 token ids.")
    if input_ids.dim() != 2 or input_ids.numel() == 0:
        raise ValueError(
            f"input_ids: got shape {list(input_ids.shape)}; want [rows, tokens], at least one of "
            "each. A single prompt is a row: ids[None]."
        )
