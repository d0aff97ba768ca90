"""Sampling from fp32 logits with an explicit seed, and what follows it in a decode step."""

from __future__ import annotations

import torch

from flint_kernels.ops._check import FLOAT, INT32, Checker
from flint_kernels.ops._declare import Spec, op


def _values(
    name: str,
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    max_top_k: int = 0,
    **_: object,
) -> None:
    check = Checker(name, "logits", logits)
    if logits.shape[0] == 0:
        return
    if not bool(((temperature >= 0) & torch.isfinite(temperature)).all()):
        check.fail("temperature", temperature.tolist(), "finite values of 0 or more", "0: greedy.")
    if bool((top_k < 0).any()):
        check.fail("top_k", top_k.tolist(), "0 or more", "0 keeps all tokens.")
    few = (temperature == 0) | ((top_k >= 1) & (top_k <= max_top_k))
    if max_top_k and not bool(few.all()):
        check.fail(
            "top_k",
            top_k.tolist(),
            f"1 to {max_top_k} (max_top_k) in each row that is not greedy",
            "Leave max_top_k out where a row may keep more, or all.",
        )
    if not bool(((top_p > 0) & (top_p <= 1)).all()):
        check.fail("top_p", top_p.tolist(), "values in (0, 1]", "1: all.")
    if not bool((logits > -torch.inf).any(dim=1).all()):
        check.fail(
            "logits",
            "a row without a single candidate (all -inf or NaN)",
            "at least one logit above -inf in each row",
            "Look for the NaN upstream; FLINT_KERNELS_CHECK_VALUES=1 helps to find it.",
        )


@op(
    "sample(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor seed, "
    "Tensor offset, *, bool enable_pdl=False, int max_top_k=0) -> Tensor",
    outputs=("tokens_out",),
    values=_values,
)
def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seed: torch.Tensor,
    offset: torch.Tensor,
    *,
    enable_pdl: bool = False,
    max_top_k: int = 0,
) -> Spec:
    """Draws one token a row: temperature, then top-k, then top-p, then one uniform number.

    Candidates are ordered by falling logit, ties by rising token id. top-k keeps the first k;
    top-p keeps a candidate while the probability before it (among those kept) is below top_p; the
    token is where the cumulative probability first exceeds u. The uniform number u is
    `((x0 >> 5) * 2**26 + (x1 >> 6)) / 2**53` of Philox4x32-10 with key = seed (low word, high word)
    and counter = (offset low, offset high, 0, 0), so the draw depends on nothing but this row.
    Probabilities are fp64. A temperature of 0 takes the first candidate (greedy).

    Args:
        logits: [M, vocabulary] float32; NaN counts as -inf, +inf as the largest finite value.
        temperature: [M] float32, 0 or more.
        top_k: [M] int32; 0 or more than the vocabulary: all.
        top_p: [M] float32 in (0, 1].
        seed: [M] int64; offset: [M] int64, advanced by the caller (the position of the token, say).
        enable_pdl: launch with programmatic dependent launch (GPU only).
        max_top_k: a promise that no row keeps more: every top_k is from 1 to it, but of greedy
            rows. Up to 32, a GPU then draws from each row's best candidates, without sorting the
            vocabulary. It changes no token. 0: nothing is promised.

    Returns: [M] int64 token ids.

    Values: parameters out of range or a row without candidates are an error on the CPU and with
    FLINT_KERNELS_CHECK_VALUES; on a GPU without it such a row gives -1.
    """
    check = Checker("sample", "logits", logits)
    check.tensor("logits", logits, FLOAT, [None, None], "The LM head gives fp32 logits.")
    rows = [logits.shape[0]]
    if logits.shape[1] == 0:
        check.fail(
            "logits", "an empty vocabulary", "at least one token", "Is it the head's output?"
        )
    check.tensor("temperature", temperature, FLOAT, rows)
    check.tensor("top_k", top_k, INT32, rows)
    check.tensor("top_p", top_p, FLOAT, rows)
    check.tensor("seed", seed, (torch.int64,), rows)
    check.tensor("offset", offset, (torch.int64,), rows)
    if max_top_k < 0:
        check.fail("max_top_k", max_top_k, "0 or more", "0 promises nothing.")
    return Spec((logits.shape[0],), torch.int64)


def _advance_values(
    name: str,
    tokens: torch.Tensor,
    block_table: torch.Tensor,
    page_size: int,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    **_: object,
) -> None:
    check = Checker(name, "tokens", tokens)
    live = seq_lens > 0
    if bool((live & (positions != seq_lens - 1)).any()):
        check.fail(
            "positions",
            positions.tolist(),
            f"{(seq_lens - 1).tolist()} in the rows that have a length",
            "The newest token of a row stands at its length - 1.",
        )
    room = block_table.shape[1] * page_size
    if bool((live & (seq_lens > room)).any()):
        check.fail(
            "seq_lens",
            seq_lens.tolist(),
            f"at most {room}, the tokens that a row of block_table has pages for",
            "Give the tables more pages.",
        )


@op(
    "decode_advance(Tensor tokens, Tensor block_table, Tensor window_block_table, int page_size, "
    "Tensor(a!) input_ids, Tensor(b!) positions, Tensor(c!) slots, Tensor(d!) window_slots, "
    "Tensor(e!) seq_lens, Tensor(f!) offsets, Tensor(g!) history, *, bool enable_pdl=False) -> ()",
    values=_advance_values,
)
def decode_advance(
    tokens: torch.Tensor,
    block_table: torch.Tensor,
    window_block_table: torch.Tensor,
    page_size: int,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    window_slots: torch.Tensor,
    seq_lens: torch.Tensor,
    offsets: torch.Tensor,
    history: torch.Tensor,
    *,
    enable_pdl: bool = False,
) -> tuple[()]:
    """Turns a decode step's inputs into those of the next one, on the device.

    A row whose length is 0 is padding, and nothing of it changes. Of every other one, with p its
    new position, `positions + 1`: `history[p mod N] = tokens`; `input_ids` are the tokens (0 for
    -1, which is no token); `positions = p`, `seq_lens = p + 1`, `offsets = p + 1`, where the token
    after this one will stand; and each of the two slots is where its table puts p, or stays as it
    is where it is negative: a model need not have both kinds of layer.

    Args:
        tokens: [M] int64, as `sample` draws them.
        block_table, window_block_table: [M, W] int32 page numbers.
        page_size: tokens a page.
        input_ids: [M] int64. Written, as all that follow.
        positions, slots, window_slots, seq_lens: [M] int32.
        offsets: [M] int64.
        history: [M, N] int64, the last N tokens of each row.
        enable_pdl: launch with programmatic dependent launch (GPU only). Kernels of the next step
            may read positions, slots and lengths ahead of their wait: so that step has to begin
            with an ordinary launch.

    A row that is full gets slot -1, where nothing is written: it has no next step.

    Values: positions that are not the lengths - 1, or a length beyond the table, are an error on
    the CPU and with FLINT_KERNELS_CHECK_VALUES; on a GPU without it such a row is as a full one,
    and its new position is its length.
    """
    check = Checker("decode_advance", "tokens", tokens)
    long = (torch.int64,)
    check.tensor("tokens", tokens, long, [None])
    rows = tokens.shape[0]
    check.tensor("block_table", block_table, INT32, [rows, None])
    check.tensor("window_block_table", window_block_table, INT32, list(block_table.shape))
    if not 1 <= page_size < 1 << 31:
        check.fail("page_size", page_size, "1 or more", "It is that of the cache.")
    check.tensor("input_ids", input_ids, long, [rows])
    for argument, tensor in (
        ("positions", positions),
        ("slots", slots),
        ("window_slots", window_slots),
        ("seq_lens", seq_lens),
    ):
        check.tensor(argument, tensor, INT32, [rows])
    check.tensor("offsets", offsets, long, [rows])
    check.tensor("history", history, long, [rows, None])
    if history.shape[1] == 0:
        check.fail("history", f"shape {list(history.shape)}", "room for a token", "Give it more.")
    return ()
