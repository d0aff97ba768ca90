"""One step of a batch: tokens of any number a row through the `Flint`, and their logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flint_kernels.integrations.transformers.cache import FlintCache
from flint_kernels.integrations.transformers.rows import Row
from flint_kernels.model import Flint


def step(
    model: Flint, input_ids: Tensor, rows: Sequence[Row], cache: FlintCache, keep: int | Tensor
) -> Tensor:
    """Writes the rows' tokens into the cache; logits [B, columns kept, V] fp32, zeros at padding.

    As in the library's own loop: the decode composition where every row has one token that goes on
    from others, the composition of prefill otherwise.

    Args:
        input_ids: [B, S].
        rows: the tokens in it, as `cache.place` gave them.
        keep: the last n columns, 0: all; or a tensor of column numbers.
    """
    kept = _kept_columns(input_ids.shape[1], keep)
    input_ids = input_ids.to(model.device)
    alone = input_ids.shape[1] == 1 and all(row.count for row in rows)
    if alone and len(kept) == 1 and all(cache.lengths):
        return _decode(model, input_ids[:, 0], cache).clone()[:, None]  # what is returned stays
    return _prefill(model, input_ids, rows, kept, cache)


def decode_step(model: Flint, ids: Tensor, cache: FlintCache) -> Tensor:
    """One more column of the cache, a token of every row [B], none of which is the row's first:
    its logits [B, V], on a GPU good until the next step."""
    cache.extend()
    return _decode(model, ids, cache)


def _decode(model: Flint, ids: Tensor, cache: FlintCache) -> Tensor:
    """[B, V] of one token a row, in inference mode, which spares each op a turn through autograd;
    those of a graph are written anew by its next step."""
    room, requests = cache.room, cache.requests
    if room.decoder is not None and len(requests) <= room.decoder.largest:
        return room.decoder(ids, requests).logits
    with torch.inference_mode():
        logits: Tensor = model(ids, room.paged.plan_decode(requests), room.paged)
    return logits


def _prefill(
    model: Flint, input_ids: Tensor, rows: Sequence[Row], kept: Tensor, cache: FlintCache
) -> Tensor:
    """[B, columns kept, V]: the rows' tokens one after the other, without the padding."""
    paged, device = cache.room.paged, model.device
    taking = [index for index, row in enumerate(rows) if row.count]
    # Which row of the hidden states each kept column is; -1: none, it is padding.
    places = torch.full((len(rows), len(kept)), -1)
    first = 0
    for index in taking:
        row = rows[index]
        inside = (kept >= row.start) & (kept < row.stop)
        places[index, inside] = first + kept[inside] - row.start
        first += row.count
    real = places >= 0
    if taking:
        ids = torch.cat([input_ids[i, rows[i].start : rows[i].stop] for i in taking])
        requests = [cache.requests[index] for index in taking]
        batch = paged.plan(requests, [rows[index].count for index in taking])
        with torch.inference_mode():
            hidden = model.prefill(ids, batch, paged)
        logits = model.logits(hidden[places[real].to(device, non_blocking=True)])
        if bool(real.all()):
            return logits.view(*places.shape, -1)
    padded = torch.zeros(*places.shape, model.config.vocab_size, dtype=torch.float32, device=device)
    if taking:
        padded[real.to(device)] = logits
    return padded


def _kept_columns(columns: int, keep: int | Tensor) -> Tensor:
    """[columns kept] int64 on the CPU, each in [0, columns)."""
    if isinstance(keep, Tensor):
        return torch.arange(columns)[keep.cpu()]
    return torch.arange(columns)[-keep if keep else 0 :]
