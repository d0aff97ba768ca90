"""The model's arithmetic a second time: float64, straight from the written rounding points.

Nothing here is shared with the package. `rnd` is what happens at each rounding point: `exact`
(nothing: what the FP32 mode must agree with) or `to_bf16`. Tensors are float64 throughout.

Rounding is monotonic, so a BF16 result whose fp32 value is off by at most `slack` lies between
`to_bf16(exact - slack)` and `to_bf16(exact + slack)`: `assert_rounds` asks just that, which is
bit-equality wherever no rounding boundary is that near, and never more than one BF16 ulp for a
slack below an ulp.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Tensor = torch.Tensor
Round = Callable[[Tensor], Tensor]

U32 = 2.0**-24  # half an ulp of 1 in fp32
U16 = 2.0**-8  # a whole ulp of 1 in BF16: what a flipped rounding moves a value by, relatively


def exact(value: Tensor) -> Tensor:
    return value


def to_bf16(value: Tensor) -> Tensor:
    return value.to(torch.bfloat16).to(torch.float64)


def f64(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float64)


def assert_close(got: Tensor, want: Tensor, tolerance: float) -> None:
    """fp32 against float64: the largest error, relative to the largest value of its row."""
    assert got.dtype == torch.float32
    assert got.shape == want.shape
    size = want.abs().amax(dim=-1, keepdim=True) + 1e-30
    assert float(((f64(got) - want).abs() / size).max()) <= tolerance


def assert_rounds(got: Tensor, want: Tensor, slack: Tensor | float) -> None:
    """`got`, in BF16, is the rounding of something within `slack` of `want` (see above)."""
    assert got.dtype == torch.bfloat16
    assert got.shape == want.shape
    low, high = to_bf16(want - slack), to_bf16(want + slack)
    wrong = ~((low <= f64(got)) & (f64(got) <= high))
    assert not bool(wrong.any()), (got[wrong][:5], want[wrong][:5])


# ------------------------------------------------------------------ norms, activation


def rms_norm(x: Tensor, weight: Tensor, eps: float, rnd: Round) -> Tensor:
    return rnd(x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight)


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, rnd: Round
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm(total, weight, eps, rnd), rnd(total)


def silu(gate: Tensor) -> Tensor:
    return gate / (1 + torch.exp(-gate))


def silu_and_mul(x: Tensor, rnd: Round) -> Tensor:
    half = x.shape[-1] // 2
    return rnd(silu(x[..., :half]) * x[..., half:])


# ------------------------------------------------------------------ NVFP4, linear


def e2m1(code: int) -> float:
    magnitude = [0, 0.5, 1, 1.5, 2, 3, 4, 6][code % 8]
    return -magnitude if code >= 8 else magnitude


def e4m3(byte: int) -> float:
    """float8_e4m3fn by its bits: sign, 4 bits of exponent (bias 7), 3 of mantissa."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def nvfp4_values(weight: Tensor, weight_scale: Tensor) -> Tensor:
    """`e2m1 * e4m3` of ModelOpt tensors [..., K / 2], [..., K / 16] -> [..., K]."""
    codes = torch.tensor([e2m1(code) for code in range(16)], dtype=torch.float64)
    bytes_ = torch.tensor([e4m3(byte) for byte in range(256)], dtype=torch.float64)
    low, high = codes[(weight % 16).long()], codes[(weight // 16).long()]
    values = torch.stack([low, high], dim=-1).flatten(-2)
    scales = bytes_[weight_scale.view(torch.uint8).long()]
    return values * scales.repeat_interleave(16, dim=-1)


def linear(x: Tensor, weight: Tensor, rnd: Round) -> Tensor:
    return rnd(torch.einsum("...k,nk->...n", x, weight))


def linear_slack(x: Tensor, weight: Tensor) -> Tensor:
    """How far an fp32 sum in any order may be off, plus the product with a global scale."""
    terms = torch.einsum("...k,nk->...n", x.abs(), weight.abs())
    return (x.shape[-1] + 2) * U32 * terms


def gated_slack(x: Tensor, gate_up: Tensor) -> Tensor:
    """The same for `silu(x . gate) * (x . up)` with gate and up kept in fp32."""
    gate, up = linear(x, gate_up, exact).chunk(2, dim=-1)
    gate_slack, up_slack = linear_slack(x, gate_up).chunk(2, dim=-1)
    # The slope of silu is 1.1 at most; exp to an ulp, and five more operations.
    own = 8 * U32 * (silu(gate) * up).abs()
    return 1.1 * gate_slack * up.abs() + silu(gate).abs() * up_slack + own


# ------------------------------------------------------------------ q/k norm, RoPE


def rope(n: Tensor, cos: Tensor, sin: Tensor, rnd: Round) -> Tensor:
    """n [M, H, D]; cos, sin [M, D / 2]: dimension i pairs with i + D / 2."""
    half = n.shape[-1] // 2
    n1, n2 = n[..., :half], n[..., half:]
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat([rnd(n1 * cos - n2 * sin), rnd(n2 * cos + n1 * sin)], dim=-1)


# ------------------------------------------------------------------ router, experts


def router(logits: Tensor, top_k: int, rnd: Round) -> tuple[Tensor, Tensor]:
    weights, ids = [], []
    for row in logits.tolist():
        chosen = sorted(range(len(row)), key=lambda e, row=row: (-row[e], e))[:top_k]
        scores = 1 / (1 + torch.exp(-torch.tensor([row[e] for e in chosen], dtype=torch.float64)))
        weights.append(rnd(scores / (scores.sum() + 1e-20)))
        ids.append(chosen)
    return torch.stack(weights), torch.tensor(ids)


def expert_act(x: Tensor, w13: Tensor, rnd: Round) -> Tensor:
    """One token [H] through one expert's gate and up [2 * I, H]; not rounded in between."""
    gate, up = (w13 @ x).chunk(2)
    return rnd(silu(gate) * up)


def routed_experts(
    x: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w2: Tensor, rnd: Round
) -> Tensor:
    """Expert weights [E, ...] with their global scales already in; -1 skips."""
    out = torch.zeros(x.shape[0], w2.shape[1], dtype=torch.float64)
    for token in range(x.shape[0]):
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            if expert >= 0:
                act = expert_act(x[token], w13[expert], rnd)
                out[token] += weight * rnd(w2[expert] @ act)
    return rnd(out)


# ------------------------------------------------------------------ attention


def attention_row(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, rnd: Round, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """One query [Hq, D] over exactly its keys [L, Hkv, D] -> out [Hq, D] and a slack for it.

    The slack allows an fp32 error in the logits, and one flipped rounding of a p.
    """
    heads, dim = q.shape
    scale = dim**-0.5 if scale is None else scale
    out, slack = torch.zeros_like(q), torch.zeros_like(q)
    for head in range(heads if k.shape[0] else 0):
        shared = head // (heads // k.shape[1])
        logits = (k[:, shared] @ q[head]) * scale
        error = (dim + 2) * U32 * float((k[:, shared].abs() @ q[head].abs()).max()) * scale
        p = torch.exp(logits - logits.max())
        denominator = p.sum()
        if sinks is not None:
            denominator = denominator + torch.exp(sinks[head] - logits.max())
        terms = p[:, None] * v[:, shared].abs() / denominator
        out[head] = (rnd(p) @ v[:, shared]) / denominator
        slack[head] = U16 * terms.amax(0) + (2 * error + len(p) * U32) * terms.sum(0)
    return rnd(out), slack


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, window: int, rnd: Round
) -> tuple[Tensor, Tensor]:
    """Queries and keys of one request [T, H, D], position by position."""
    rows = []
    for position in range(q.shape[0]):
        first = max(0, position - window + 1) if window else 0
        keys = slice(first, position + 1)
        rows.append(attention_row(q[position], k[keys], v[keys], sinks, rnd))
    return torch.stack([row for row, _ in rows]), torch.stack([slack for _, slack in rows])
