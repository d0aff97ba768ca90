"""Which columns of a padded batch are tokens: a batch as rows that have lengths of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Row:
    """Of a row's new columns, those that are tokens: [start, stop), the others padding."""

    start: int
    stop: int

    @property
    def count(self) -> int:
        return self.stop - self.start


def real_columns(
    shape: Sequence[int],
    mask: Tensor | None,
    lengths: Sequence[int],
    columns: int,
    ended: Sequence[bool],
) -> list[Row]:
    """The tokens of each row among new columns.

    Args:
        shape: [B, S] of the new input_ids.
        mask: [B, columns + S], 1 for tokens and 0 for padding, of the cached columns too; None: no
            padding at all.
        lengths: tokens of each row that are cached.
        columns: cached columns, padding among them.
        ended: whether a row's last cached column is padding after tokens.

    A row may be padded on the left, before its first token, and on the right, after its last. What
    is on the device is read back, one small tensor a call.

    Raises:
        ValueError: the mask has another shape, padding between tokens, or other tokens than the
            cached ones.
    """
    batch, new = shape
    if mask is None:
        for row, length in enumerate(lengths):
            if length != columns:
                raise _error(
                    "nothing, which is no padding",
                    f"a mask of [{batch}, {columns + new}]: row {row} of the cache has "
                    f"{columns - length} columns of padding",
                    "Pass the mask that the cached tokens came with, grown by the new columns",
                )
        return [Row(0, new)] * batch
    if list(mask.shape) != [batch, columns + new]:
        raise _error(
            f"shape {list(mask.shape)}",
            f"[{batch}, {columns + new}]: a column for each of {columns} cached and {new} new ones",
            "Masks of four dimensions, and packed sequences, have no place in this model",
        )
    real = mask != 0
    seen = real[:, :columns].sum(1, keepdim=True)
    answers: list[list[int]] = torch.cat([seen, real[:, columns:].long()], 1).tolist()
    return [
        _row(index, *state) for index, state in enumerate(zip(answers, lengths, ended, strict=True))
    ]


def check_positions(
    position_ids: Tensor | None, rows: Sequence[Row], lengths: Sequence[int]
) -> None:
    """Raises ValueError for positions other than the numbers of the rows' tokens.

    position_ids: [B, S] or [1, S]; lengths: cached tokens of each row, before these.
    """
    if position_ids is None:
        return
    given = position_ids.reshape(-1, position_ids.shape[-1]).tolist()
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        got = given[index if len(given) > 1 else 0][row.start : row.stop]
        if got != list(range(length, length + row.count)):
            raise ValueError(
                f"position_ids: got {got[:4]} ... for row {index}; want its tokens numbered from "
                f"{length} on. Leave the argument out."
            )


def check_prompt_end(mask: Tensor | None) -> None:
    """Raises ValueError where a row of a prompt's mask [B, S] ends in padding.

    The tokens to come are drawn from the logits of the last column.
    """
    ended = [] if mask is None else (mask[:, -1] == 0).nonzero().flatten().tolist()
    if ended:
        raise _error(
            f"padding at the end of row {ended[0]}",
            "padding before the first token, where new tokens do not follow it",
            "Set tokenizer.padding_side = 'left'",
        )


def _row(index: int, answer: list[int], length: int, ended: bool) -> Row:
    seen, new = answer[0], answer[1:]
    if seen != length:
        raise _error(
            f"{seen} tokens in the cached columns of row {index}",
            f"{length}, those that are cached",
            "Pass the mask that they came with",
        )
    count = sum(new)
    start = new.index(1) if count else 0
    broken = sum(new[start : start + count]) != count
    if broken or (count and (ended or (length and start))):
        raise _error(
            f"padding between tokens in row {index}",
            "padding before the first token or after the last",
            "Leave the columns out, or start the row anew",
        )
    return Row(start, start + count)


def _error(got: str, want: str, remedy: str) -> ValueError:
    return ValueError(f"attention_mask: got {got}; want {want}. {remedy}.")
