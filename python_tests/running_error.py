"""Arithmetic in float64 that carries along how far a computation in FP32 and BF16 may be from it.

An `Approx` is the value that exact arithmetic gives, and a bound on the error of any body that
computes in FP32, in whatever order it sums, and rounds where docs/numerics.md says. The bounds are
the textbook ones (Higham, Accuracy and Stability of Numerical Algorithms, ch. 3 and 4): an
operation is off by a unit roundoff of its result, a sum of n terms by n unit roundoffs of the sum
of their magnitudes, in any order. Nothing here is fitted to a body.

Not every value has a right answer. Where an error is infinite the value is not compared: a sum
whose terms reach beyond FP32 may overflow in one order and not in another, and infinity times what
may be 0 may be NaN. Where the exact value is NaN or infinite with a finite error, it has to be met.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

Tensor = torch.Tensor
INF = math.inf

U32 = 2.0**-24
U16 = 2.0**-8
FP32_MAX = (2 - 2.0**-23) * 2.0**127
BF16_MAX = (2 - 2.0**-7) * 2.0**127
TINY = 2.0**-126
"""The smallest normal number of FP32 and BF16: what is below it may be flushed by a GPU."""
STEP = 2.0**-149
"""Between neighbouring subnormal numbers of FP32."""
FUNCTION = 8 * U32
"""Of exp, rsqrt or a division, some ulps whatever the device, and what stands around it."""


def f64(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float64)


@dataclass(frozen=True)
class Approx:
    value: Tensor
    error: Tensor

    @staticmethod
    def exact(tensor: Tensor) -> Approx:
        value = f64(tensor)
        return Approx(value, torch.zeros_like(value))

    def __getitem__(self, index: object) -> Approx:
        return Approx(self.value[index], self.error[index])

    def reshape(self, *shape: int) -> Approx:
        return Approx(self.value.reshape(*shape), self.error.reshape(*shape))

    def halves(self) -> tuple[Approx, Approx]:
        first, second = zip(self.value.chunk(2, -1), self.error.chunk(2, -1), strict=True)
        return Approx(*first), Approx(*second)

    def __add__(self, other: Approx) -> Approx:
        value = self.value + other.value
        return _settled(value, self.error + other.error + U32 * value.abs(), (self, other))

    def __neg__(self) -> Approx:
        return Approx(-self.value, self.error)

    def __mul__(self, other: Approx) -> Approx:
        a, b = self.value, other.value
        value = a * b
        error = a.abs() * other.error + b.abs() * self.error + self.error * other.error
        # Infinity times a value that may be 0, or may be flushed to it.
        risky = _may_be_zero(self) & b.isinf() | _may_be_zero(other) & a.isinf()
        error = torch.where(risky, INF, error + U32 * value.abs() + STEP)
        return _settled(value, error, (self, other))


def _may_be_zero(a: Approx) -> Tensor:
    zero = (a.value == 0) & (a.error == 0)
    return ~zero & (a.value.abs() <= a.error + TINY)


def _settled(
    value: Tensor, error: Tensor, of: tuple[Approx, ...], largest: float = FP32_MAX
) -> Approx:
    """Overflow, and the error of what is not finite: 0 where it is certain, else infinite."""
    known = torch.ones_like(value, dtype=torch.bool)
    for part in of:
        known = known & part.error.expand_as(value).isfinite()
    magnitude = value.abs()
    over = value.isfinite() & (magnitude - error > largest * (1 + U16))
    near = value.isfinite() & ~over & (magnitude + error >= largest)
    value = torch.where(over, value.sign() * INF, value)
    error = torch.where(value.isfinite(), error.nan_to_num(nan=INF, posinf=INF), _indefinite(error))
    return Approx(value, torch.where(near | ~known, INF, error))


def _indefinite(error: Tensor) -> Tensor:
    """0, but infinite where the error is infinite for a reason of its own."""
    return torch.where(error == INF, INF, 0.0)


def rounded(a: Approx, dtype: torch.dtype) -> Approx:
    """To BF16; FP32 is what it has been computed in."""
    if dtype == torch.float32:
        return a
    error = a.error + U16 * (a.value.abs() + a.error) + 2.0**-134
    error = torch.where(a.value.isfinite(), error, a.error)
    return _settled(a.value, error, (a,), BF16_MAX)


def dot(x: Approx, weight: Tensor, unit: float = STEP) -> Approx:
    """x [..., K] with the exact weight [N, K] -> [..., N]. `unit`: what a term may underflow by."""
    weight, k = f64(weight), weight.shape[-1]
    value = x.value @ weight.T
    sizes = x.value.abs() + x.error
    terms = _finite(sizes) @ _finite(weight.abs()).T
    error = x.error @ weight.abs().T + (k + 4) * U32 * terms + k * unit
    # Of each sign by itself: the smaller sum would be lost beside the larger one.
    up, down = _finite(x.value.clamp_min(0)), _finite((-x.value).clamp_min(0))
    w_up, w_down = _finite(weight.clamp_min(0)).T, _finite((-weight).clamp_min(0)).T
    opposing = torch.minimum(up @ w_up + down @ w_down, up @ w_down + down @ w_up)
    return _sum(value, error, (terms, opposing), _certain(x, weight))


def _finite(magnitudes: Tensor) -> Tensor:
    return magnitudes.nan_to_num(nan=0.0, posinf=0.0)


def _certain(x: Approx, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Of each sum x . w: whether a term is NaN for certain, and whether one is not certain at all.

    What is infinite or NaN makes its term so whatever the errors of the others are, except where
    infinity meets what may be 0.
    """
    flat = x.value.shape[:-1].numel(), weight.shape[-1]
    rows, errors = x.value.reshape(flat), x.error.reshape(flat)
    nan_rows = (rows.isnan() & errors.isfinite()).any(-1)
    nan_weights = weight.isnan().any(-1)
    nan = nan_rows[:, None] | nan_weights[None, :]
    zero_risk = _may_be_zero(Approx(rows, errors))
    risk = (zero_risk.double() @ weight.isinf().double().T) > 0
    small = (weight != 0) & (weight.abs() <= TINY)
    risk |= (rows.isinf().double() @ small.double().T) > 0
    risk |= (~errors.isfinite()).any(-1)[:, None]
    shape = (*x.value.shape[:-1], weight.shape[0])
    return nan.reshape(shape), risk.reshape(shape)


def _sum(
    value: Tensor, error: Tensor, sizes: tuple[Tensor, Tensor], certain: tuple[Tensor, Tensor]
) -> Approx:
    """A sum whose finite terms, and those of the rarer sign, have these magnitudes: overflow on
    the way is certain or unknown."""
    (terms, opposing), (nan, risk) = sizes, certain
    certain_overflow = (value.abs() - error > FP32_MAX * (1 + U16)) & (opposing < FP32_MAX)
    # An infinite term decides, unless the finite ones may overflow to the other side.
    # Tensor cores add without normalising in between: an H200's were infinite at 0.79 of it.
    unknown = (terms >= FP32_MAX / 2) & ~(value.isfinite() & certain_overflow)
    settled = _settled(value, error.nan_to_num(nan=INF), ())
    error = torch.where(settled.value.isfinite(), settled.error, 0.0)
    error = torch.where(unknown | risk, INF, error)
    return Approx(torch.where(nan, math.nan, settled.value), torch.where(nan, 0.0, error))


def norm(x: Approx, weight: Tensor, eps: float) -> Approx:
    """`x * rsqrt(mean(x^2) + eps) * weight` over the last dimension."""
    d = max(x.value.shape[-1], 1)
    mean = x.value.square().sum(-1, keepdim=True) / d
    root = (mean + eps).sqrt()
    # The root mean square moves by no more than that of the errors: a norm is 1-Lipschitz.
    moved = (x.error.square().sum(-1, keepdim=True) / d).sqrt()
    moved = moved + root * ((d + 4) / 2 * U32 + STEP / (mean + eps))
    low = (root - moved).clamp_min(0)
    scaled = x.value / root
    error = x.error / low + scaled.abs() * moved / low + FUNCTION * scaled.abs() + STEP
    over = mean > FP32_MAX  # the squares' sum is infinite and its inverse root 0 in any order
    near = ~over & (mean * d * (1 + d * U32) >= FP32_MAX)
    near |= over & (x.error > 0).any(-1, keepdim=True)
    scaled = torch.where(over & x.value.isfinite(), 0.0 * x.value, scaled)
    error = torch.where(over & x.value.isfinite(), 0.0, error)
    bad_row = (~x.value.isfinite()).any(-1, keepdim=True) & (x.error > 0).any(-1, keepdim=True)
    error = torch.where(near | bad_row, INF, error)
    part = _settled(scaled, error, (x,))
    whole = x.error.isfinite().all(-1, keepdim=True).expand_as(part.error)
    return Approx(part.value, torch.where(whole, part.error, INF)) * Approx.exact(weight)


def silu(gate: Approx) -> Approx:
    """`g / (1 + exp(-g))`, by a division or by a product with the sigmoid."""
    value = gate.value / (1 + torch.exp(-gate.value))
    error = 1.1 * gate.error + FUNCTION * value.abs() + STEP  # the slope is 1.1 at most
    # exp(-g) is beyond FP32: g over infinity is 0, and the exact value is next to it.
    error = torch.where(gate.value < -86, error + value.abs(), error)
    # At -inf it is NaN, and of what may be -inf nothing is known.
    error = torch.where((gate.value == -INF) & (gate.error > 0), INF, error)
    return _settled(value, error, (gate,))


def softmax_average(
    logits: Approx, values: Tensor, sinks: Tensor | None, dtype: torch.dtype
) -> Approx:
    """[H, L] logits and values [H, L, D] -> [H, D]: P rounded, the row sum not, one sink a head."""
    keys = logits.value.shape[-1]
    maximum = logits.value.amax(-1, keepdim=True)
    worst = logits.error.amax(-1, keepdim=True)
    apart = (logits.value - maximum).abs()
    p = torch.exp(logits.value - maximum)
    relative = torch.expm1(2 * worst + 3 * U32 * apart + FUNCTION)
    p_error = (p * relative + TINY).nan_to_num(nan=INF)
    p_error = torch.where(p.isnan() & logits.error.isfinite().all(-1, keepdim=True), 0.0, p_error)
    rounded_p = rounded(Approx(p, p_error), dtype)
    weighted = [
        dot(Approx(rounded_p.value[h : h + 1], rounded_p.error[h : h + 1]), values[h].T)
        for h in range(values.shape[0])
    ]
    top = Approx(*(torch.cat([getattr(w, part) for w in weighted]) for part in ("value", "error")))
    total = p.sum(-1, keepdim=True)
    total_error = p_error.sum(-1, keepdim=True) + keys * U32 * total
    if sinks is not None:
        sink = torch.exp(f64(sinks)[:, None] - maximum)
        total_error = total_error + sink * torch.expm1(
            worst + FUNCTION * (1 + apart.amax(-1, True))
        )
        total = total + sink
    bottom = _settled(total, total_error.nan_to_num(nan=INF), ())
    low = (total - total_error).clamp_min(0)
    value = top.value / bottom.value
    error = (top.error + value.abs() * total_error) / low + FUNCTION * value.abs() + STEP
    # An infinite denominator makes 0 of what is finite.
    far = (bottom.value == INF) & (bottom.error == 0) & top.value.isfinite()
    error = torch.where(far & top.error.isfinite(), 0.0, error)
    certain_nan = value.isnan() & (top.error == 0) & (bottom.error == 0)
    error = torch.where(certain_nan, 0.0, error.nan_to_num(nan=INF))
    error = torch.where(value.isinf(), INF, error)
    return rounded(_settled(value, error, (top,)), dtype)


def failure(got: Tensor, want: Approx) -> str:
    """What is wrong with `got`, or nothing."""
    if got.shape != want.value.shape:
        return f"got shape {list(got.shape)}, want {list(want.value.shape)}"
    mine = f64(got.cpu())
    finite = want.value.isfinite()
    # Beyond the error's own rounding in float64.
    near = (mine - want.value).abs() <= want.error * (1 + 2.0**-40) + 2.0**-52 * want.value.abs()
    same = (mine == want.value) | (mine.isnan() & want.value.isnan())
    wrong = ~torch.where(finite, near, same) & want.error.isfinite()
    if not bool(wrong.any()):
        return ""
    index = wrong.nonzero()[0].tolist()
    at = tuple(index)
    return (
        f"{int(wrong.sum())} of {wrong.numel()} values, the first at {index}: got {mine[at]:.9g}, "
        f"want {want.value[at]:.9g} within {want.error[at]:.3g}"
    )
