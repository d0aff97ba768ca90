"""How a request's tokens are drawn, and when it ends."""

from __future__ import annotations

import math
import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from flint_kernels.arguments import integer, token_ids
from flint_kernels.model import calls


@dataclass(frozen=True)
class SamplingParams:
    """Settings of one request; the defaults are the model's own.

    Attributes:
        temperature: divides the logits; 0 is greedy. It and top_p are rounded to fp32.
        top_p: keeps the most likely tokens that together have this probability; 1: all.
        top_k: keeps this many tokens; 0: all.
        seed: of this request's draws, 0 to 2**63 - 1; the same seed, prompt and model give the
            same text whatever else is in the batch. None: a fresh one for every request.
        max_new_tokens: after which the request ends.
        stop_token_ids: a token that ends the request and is not part of its result.
        greedy: take the most likely token, whatever the other settings say.

    Raises:
        TypeError, ValueError: a value of a wrong type or out of range, naming it.
    """

    temperature: float = 1.0
    top_p: float = 0.95
    top_k: int = 20
    seed: int | None = None
    max_new_tokens: int = 256
    stop_token_ids: Sequence[int] = ()
    greedy: bool = False

    def __post_init__(self) -> None:
        want = "0 (greedy), or a number above 0 and finite in fp32"
        value = _fp32("temperature", self.temperature, want)
        _check("temperature", self.temperature, self.temperature == 0 or 0 < value < math.inf, want)
        want = "a number above 0 in fp32, at most 1 (1: all)"
        value = _fp32("top_p", self.top_p, want)
        _check("top_p", self.top_p, value > 0 and self.top_p <= 1, want)
        self._check_integer("top_k", 0, 1 << 31, "0 (all) to 2**31 - 1")
        if self.seed is not None:
            self._check_integer("seed", 0, 1 << 63, "0 to 2**63 - 1, or None for a fresh one")
        self._check_integer("max_new_tokens", 1, 1 << 63, "1 or more")
        object.__setattr__(
            self, "stop_token_ids", tuple(token_ids("stop_token_ids", self.stop_token_ids))
        )
        if not isinstance(self.greedy, bool):
            raise TypeError(f"greedy: got {self.greedy!r}; want True or False.")

    def _check_integer(self, name: str, low: int, end: int, want: str) -> None:
        value = integer(name, getattr(self, name), want)
        _check(name, value, low <= value < end, want)
        object.__setattr__(self, name, value)

    def resolved_seed(self) -> int:
        """The seed, or a fresh one."""
        return secrets.randbits(63) if self.seed is None else self.seed


# A row that keeps more candidates is drawn from its whole sorted vocabulary.
_FEW = 32


def promised_top_k(params: Sequence[SamplingParams]) -> int:
    """What `flint::sample` may be promised of these rows, as max_top_k: one of two numbers, so that
    a graph serves many settings."""
    drawn = [p.top_k for p in params if not (p.greedy or p.temperature == 0)]
    return _FEW if all(1 <= top_k <= _FEW for top_k in drawn) else 0


def check_token(token: int) -> None:
    """ValueError for -1, an accelerator's answer to a row of logits without a choice."""
    if token < 0:
        raise ValueError(
            "logits: got a row of NaN or -inf alone; want a candidate in each. Damaged weights? "
            "FLINT_KERNELS_CHECK_VALUES=1 finds the op."
        )


class Sampler:
    """The settings of a batch's rows as tensors on the device, made once a batch."""

    def __init__(
        self, params: Sequence[SamplingParams], seeds: Sequence[int], device: torch.device
    ) -> None:
        def column(values: list[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

        temperatures = [0.0 if p.greedy else p.temperature for p in params]
        self.temperature = column(temperatures, torch.float32)
        self.top_k = column([p.top_k for p in params], torch.int32)
        self.top_p = column([p.top_p for p in params], torch.float32)
        self.seed = torch.tensor(seeds, dtype=torch.int64).to(device, non_blocking=True)
        self.max_top_k = promised_top_k(params)

    def __call__(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Draws one token a row.

        logits [B, V] fp32; positions [B] int64, where each new token will stand: the draw depends
        on the row's seed and position alone. Returns [B] int64.
        """
        settings = self.temperature, self.top_k, self.top_p, self.seed
        return calls.sample(logits, *settings, positions, max_top_k=self.max_top_k)


def _fp32(name: str, value: object, want: str) -> float:
    """The value as `flint::sample` gets it: far too large a number is infinite."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: got {value!r}; want {want}.")
    try:
        rounded: float = struct.unpack("f", struct.pack("f", float(value)))[0]
    except OverflowError:
        return math.inf
    return rounded


def _check(name: str, got: object, fits: bool, want: str) -> None:
    if not fits:
        raise ValueError(f"{name}: got {got}; want {want}.")
