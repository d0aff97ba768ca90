"""A decode step's plan in memory that stays: what a CUDA graph reads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flint_kernels.model.batch import DecodeBatch

# Every field of a plan starts on 16 bytes of the one buffer that is sent to the device.
ALIGN = 4

# What a row that is no request's holds: its position, slot, window slot and length. No op writes
# for such a row, or reads the cache.
_PADDING = (0, -1, -1, 0)


class DecodeBuffers:
    """A `DecodeBatch` of `rows` rows whose tensors are the same at every step.

    `PagedKVCache.make_decode_buffers` makes it, all rows padding, and `plan_decode` writes steps of
    up to `rows` requests into it, padding after them. The step is in `batch`.

    Args:
        owner: whose steps it takes.
        rows: of the batch.
        width: pages in a row of its tables.
        device: of its tensors.
    """

    def __init__(self, owner: object, rows: int, width: int, device: torch.device) -> None:
        self.owner = owner
        self.rows = rows
        field = -(-rows // ALIGN) * ALIGN
        self._rest = [0] * (field - rows)
        self._sent = torch.empty(len(_PADDING) * field, dtype=torch.int32, device=device)
        positions, slots, window_slots, seq_lens = (part[:rows] for part in self._sent.split(field))
        table, window_table = torch.zeros(2, rows, width, dtype=torch.int32, device=device)
        self.batch = DecodeBatch(positions, slots, window_slots, table, window_table, seq_lens)
        # Whose rows the tables hold, on the host and as an index, and as of which growth.
        self._requests: list[int] = []
        self._index = torch.empty(0, dtype=torch.int64, device=device)
        self._growth = -1
        self.send([], [], [], [])

    def send(self, *fields: Sequence[int]) -> None:
        """Writes positions, slots, window slots and lengths of the requests, in one transfer."""
        missing = self.rows - len(fields[0])
        values: list[int] = []
        for field, padding in zip(fields, _PADDING, strict=True):
            values += [*field, *[padding] * missing, *self._rest]
        cuda = self._sent.device.type == "cuda"
        host = torch.tensor(values, dtype=torch.int32, pin_memory=cuda)
        self._sent.copy_(host, non_blocking=True)

    def shows(self, requests: Sequence[int], growth: int) -> bool:
        """Whether `show` has nothing to do."""
        return growth == self._growth and list(requests) == self._requests

    def show(
        self,
        requests: Sequence[int],
        growth: int,
        block_table: Tensor,
        window_block_table: Tensor,
    ) -> None:
        """Copies the requests' rows of a cache's tables, where they have changed since the last
        step: `growth` is another number whenever a row of block_table has changed."""
        count = len(requests)
        if list(requests) != self._requests:
            device = self._sent.device
            self._index = torch.tensor(requests, dtype=torch.int64).to(device, non_blocking=True)
            own = self.batch.window_block_table[:count]
            torch.index_select(window_block_table, 0, self._index, out=own)
        elif growth == self._growth:
            return
        torch.index_select(block_table, 0, self._index, out=self.batch.block_table[:count])
        self._requests, self._growth = list(requests), growth
