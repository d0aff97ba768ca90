"""Sampling from fp32 logits with an explicit seed."""

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
    **_: object,
) -> None:
    check = Checker(name, "logits", logits)
    if logits.shape[0] == 0:
        return
    if not bool(((temperature >= 0) & torch.isfinite(temperature)).all()):
        check.fail("temperature", temperature.tolist(), "finite values of 0 or more", "0: greedy.")
    if bool((top_k < 0).any()):
        check.fail("top_k", top_k.tolist(), "0 or more", "0 keeps all tokens.")
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
    "Tensor offset, *, bool enable_pdl=False) -> Tensor",
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
    return Spec((logits.shape[0],), torch.int64)
