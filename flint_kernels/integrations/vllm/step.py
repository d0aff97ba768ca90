"""From vLLM's step to a plan of this library's model, and from its cache to views of K and V."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flint_kernels.integrations.vllm.attention import FlintMetadata
from flint_kernels.model import Batch, DecodeBatch, LayerCache, PrefillBatch


class Caches(NamedTuple):
    """What the layers read of a cache: each layer's K and V, and the scratch of the ops."""

    layers: list[LayerCache]
    workspace: Tensor


def layer_cache(kv_cache: Tensor, head_dim: int) -> LayerCache:
    """vLLM's [pages, Hkv, page_size, 2 * D], of any layout, as views [pages, page_size, Hkv, D]."""
    return LayerCache(*kv_cache.transpose(1, 2).split(head_dim, dim=-1))


def batch_of(metadata: FlintMetadata, positions: Tensor, no_slots: Tensor) -> Batch:
    """The plan of a step for the layers of one group; its rows are those of `rows_of`.

    Args:
        metadata: the group's.
        positions: [T or more], the step's.
        no_slots: [0] int32.
    """
    rows = rows_of(metadata)
    slots, table = metadata.slots[:rows], metadata.block_table
    if metadata.max_query_len == 1:
        # vLLM gives each layer the table and slots of its group, so both kinds are the same here.
        return DecodeBatch(positions[:rows], slots, slots, table, table, metadata.seq_lens)
    starts = metadata.query_start_loc
    return PrefillBatch(
        positions=positions[:rows],
        slots=slots,
        window_slots=slots,
        block_table=table,
        window_block_table=table,
        seq_lens=metadata.seq_lens,
        context_lens=metadata.seq_lens - (starts[1:] - starts[:-1]),
        cu_seqlens=starts,
        last_rows=no_slots,  # vLLM chooses the rows that get logits
        no_slots=no_slots,
        max_query_len=metadata.max_query_len,
    )


def rows_of(metadata: FlintMetadata) -> int:
    """Rows that belong to requests; vLLM may pad a step with more."""
    return metadata.requests if metadata.max_query_len == 1 else metadata.rows


def profiling(rows: int, device: torch.device) -> FlintMetadata:
    """vLLM's run before there is a cache, to see how much memory is left for one: a prefill of one
    request that caches nothing."""

    def numbers(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return FlintMetadata(
        slots=torch.full((rows,), -1, dtype=torch.int64, device=device),
        block_table=numbers(0)[:, None],
        seq_lens=numbers(rows),
        query_start_loc=numbers(0, rows),
        rows=rows,
        requests=1,
        max_query_len=max(rows, 2),  # a prefill, even of one row
    )
