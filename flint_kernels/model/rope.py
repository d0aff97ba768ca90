"""The table of cosines and sines that RoPE reads: fp32 throughout."""

from __future__ import annotations

import torch


def inverse_frequencies(head_dim: int, theta: float) -> torch.Tensor:
    """`theta ** (-2 i / head_dim)` for i < head_dim / 2: [head_dim / 2] fp32 on the CPU.

    On the CPU whatever device the table is for: an ulp of difference in a power here would be
    multiplied by the position, so that two devices would disagree on the angle far out.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    return 1.0 / theta**exponents


def cos_sin_table(
    positions: int | torch.Tensor,
    head_dim: int,
    theta: float,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """cos and sin of `position * inverse frequency`, for NeoX halves (i pairs with i + D/2).

    Args:
        positions: a number n of positions, 0 ... n - 1, or a tensor [n] of them.
        head_dim: D, even.
        theta: the base of the frequencies.
        device: where the table is made; None: the default device.

    Returns: [n, D] fp32: D/2 cosines, then D/2 sines.

    Raises:
        ValueError: head_dim is odd, or theta not above 0.
    """
    if head_dim <= 0 or head_dim % 2 != 0:
        raise ValueError(f"head_dim: got {head_dim}; want an even number above 0.")
    if not theta > 0:
        raise ValueError(f"theta: got {theta}; want a number above 0; the usual one is 10000.")
    if isinstance(positions, int):
        if torch.empty(0, device=device).is_meta:
            # arange on meta would import the whole compiler first: seconds.
            return torch.empty(positions, head_dim, dtype=torch.float32, device="meta")
        positions = torch.arange(positions, dtype=torch.float32, device=device)
    else:
        positions = positions.to(device=device, dtype=torch.float32)
    half = head_dim // 2
    table = positions.new_empty(positions.shape[0], head_dim)
    if table.is_meta:
        return table
    frequencies = inverse_frequencies(head_dim, theta).to(positions.device)
    angles = positions[:, None] * frequencies
    # Into the table's halves: the angles are the only other tensor of this size.
    torch.cos(angles, out=table[:, :half])
    torch.sin(angles, out=table[:, half:])
    return table
