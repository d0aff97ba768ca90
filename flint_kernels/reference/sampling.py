"""Seeded sampling and what follows it; `flint_kernels/ops/sampling.py` says how it is done."""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF


def philox_4x32_10(
    key: tuple[int, int], counter: tuple[int, int, int, int]
) -> tuple[int, int, int, int]:
    """Philox4x32-10 (Salmon et al., SC11) of 32-bit words, the lowest first."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        low, high = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            (high >> 32) ^ c1 ^ k0,
            high & _MASK,
            (low >> 32) ^ c3 ^ k1,
            low & _MASK,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, offset: int) -> float:
    """53 random bits in [0, 1), the same on every machine."""
    key = seed & _MASK, (seed >> 32) & _MASK
    x0, x1, _, _ = philox_4x32_10(key, (offset & _MASK, (offset >> 32) & _MASK, 0, 0))
    return ((x0 >> 5) * 2.0**26 + (x1 >> 6)) / 2.0**53


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seed: torch.Tensor,
    offset: torch.Tensor,
    **_: object,
) -> torch.Tensor:
    rows = zip(
        logits.unbind(0),
        temperature.tolist(),
        top_k.tolist(),
        top_p.tolist(),
        seed.tolist(),
        offset.tolist(),
        strict=True,
    )
    tokens = [_sample_row(*row) for row in rows]
    return torch.tensor(tokens, dtype=torch.int64, device=logits.device)


def _sample_row(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, seed: int, offset: int
) -> int:
    largest = torch.finfo(torch.float32).max
    logits = torch.nan_to_num(logits, nan=-torch.inf, posinf=largest, neginf=-torch.inf)
    if temperature == 0:
        return int(torch.nonzero(logits == logits.amax())[0, 0])
    values, ids = _candidates(logits, top_k)
    scaled = values.to(torch.float64) / temperature
    probabilities = torch.exp(scaled - scaled[0])
    probabilities = probabilities / probabilities.sum()
    cumulative = probabilities.cumsum(0)
    # The sum before a candidate, not `cumulative - probabilities`, which rounds once more.
    kept = 1 + int((cumulative[:-1] < top_p).sum())
    target = uniform(seed, offset) * float(cumulative[kept - 1])
    chosen = int((cumulative[:kept] <= target).sum())
    return int(ids[min(chosen, kept - 1)])


def _candidates(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The top_k logits above -inf, falling, ties by rising token id."""
    count = logits.shape[0]
    if 0 < top_k < count:
        # topk settles ties as it likes: take all that reach its last value, then sort stably.
        last = torch.topk(logits, top_k).values[-1]
        ids = torch.nonzero((logits >= last) & (logits > -torch.inf)).squeeze(1)
        ranked, order = torch.sort(logits[ids], descending=True, stable=True)
        return ranked[:top_k], ids[order[:top_k]]
    ids = torch.nonzero(logits > -torch.inf).squeeze(1)
    ranked, order = torch.sort(logits[ids], descending=True, stable=True)
    return ranked, ids[order]


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
    **_: object,
) -> None:
    """Whatever the data decides is decided by torch.where, so that a CUDA graph can hold it."""
    live = seq_lens > 0
    width = block_table.shape[1]
    sound = (positions == seq_lens - 1) & (seq_lens.to(torch.int64) <= width * page_size)
    # By the length, which is above 0, and not by a position, which may be anything; the length
    # after it has to be a number too.
    new = seq_lens.clamp(0, (1 << 31) - 2)
    for table, slot in ((block_table, slots), (window_block_table, window_slots)):
        page = torch.div(new, page_size, rounding_mode="floor")
        if width == 0:
            at = torch.full_like(slot, -1)
        else:
            index = page.clamp(0, width - 1).to(torch.int64)[:, None]
            at = table.gather(1, index)[:, 0] * page_size + new % page_size
        at = torch.where(sound & (page < width), at, -1)
        slot.copy_(torch.where(live & (slot >= 0), at, slot))
    column = (new % history.shape[1]).to(torch.int64)[:, None]
    old = history.gather(1, column)[:, 0]
    history.scatter_(1, column, torch.where(live, tokens, old)[:, None])
    input_ids.copy_(torch.where(live, tokens.clamp(min=0), input_ids))
    positions.copy_(torch.where(live, new, positions))
    seq_lens.copy_(torch.where(live, new + 1, seq_lens))
    offsets.copy_(torch.where(live, new.to(torch.int64) + 1, offsets))
