"""What one step needs to know of its requests: tensors on the device, named tuples for torch.

Named tuples are pytrees already, so that torch.compile, torch.export and graph capture take them
as they are. `PagedKVCache.plan` makes them. B requests, T rows (new tokens) of all requests one
after the other, W pages in a table's row.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class DecodeBatch(NamedTuple):
    """One new token a request: T = B."""

    positions: Tensor  # [B] int32
    slots: Tensor  # [B] int32, where full layers cache the row
    window_slots: Tensor  # [B] int32, where window layers do
    block_table: Tensor  # [B, W] int32, full layers
    window_block_table: Tensor  # [B, W] int32, the ring of pages written out
    seq_lens: Tensor  # [B] int32, the new token among them


class PrefillBatch(NamedTuple):
    """Any number of new tokens a request: first chunks, later chunks and decode rows mixed."""

    positions: Tensor  # [T] int32
    slots: Tensor  # [T] int32, where full layers cache the row
    window_slots: Tensor  # [T] int32, -1 where no later query will see the row
    block_table: Tensor  # [B, W] int32, full layers
    window_block_table: Tensor  # [B, W] int32, the ring of pages written out
    seq_lens: Tensor  # [B] int32, the new tokens among them
    context_lens: Tensor  # [B] int32, tokens before the new ones
    cu_seqlens: Tensor  # [B + 1] int32, offsets of the requests' rows
    last_rows: Tensor  # [requests whose logits are wanted] int32, their last rows
    no_slots: Tensor  # [0] int32
    max_query_len: int  # a bound on a request's new tokens, a power of two


Batch = DecodeBatch | PrefillBatch
