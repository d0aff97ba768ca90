"""RMSNorm, the fused add, SiLU·mul: rows N1-N6, and a second, float64 arithmetic."""

from __future__ import annotations

import math

import pytest
import torch
from op_samples import BF16, randn
from spec_float64 import (
    U32,
    assert_close,
    assert_rounds,
    exact,
    f64,
    fused_add_rms_norm,
    rms_norm,
    silu_and_mul,
    to_bf16,
)
from test_namespace import bits

from flint_kernels import ops

pytestmark = pytest.mark.usefixtures("_each_cpu_body")

EPS = 1e-6


def views(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same values [M, D] in memory layouts that callers really pass."""
    qkv = randn(x.shape[0], 3 * x.shape[1] + 1, seed=8).to(x.dtype)
    part = qkv[:, x.shape[1] : 2 * x.shape[1]]
    part.copy_(x)
    buffer = torch.empty(x.numel() + 1, dtype=x.dtype)
    shifted = buffer[1:].view(x.shape)
    shifted.copy_(x)
    assert shifted.data_ptr() % 4 == 2 or x.dtype == torch.float32
    every_other = torch.stack([x, x.neg()], dim=1).flatten(0, 1)[::2]
    return {
        "slice of a wider row": part,
        "transposed": x.T.contiguous().T,
        "every other row": every_other,
        "one element in": shifted,
    }


@pytest.mark.parametrize("layout", ["slice of a wider row", "transposed", "every other row"])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_N1_strided_views_equal_contiguous(layout: str, dtype: torch.dtype) -> None:
    x, residual = randn(7, 66, dtype=dtype), randn(7, 66, seed=1, dtype=dtype)
    weight = randn(66, seed=2)
    seen, beside = views(x)[layout], views(residual)[layout]
    assert seen.stride() != x.stride()
    assert torch.equal(ops.rms_norm(seen, weight), ops.rms_norm(x, weight))
    assert torch.equal(ops.silu_and_mul(seen), ops.silu_and_mul(x))
    want = ops.fused_add_rms_norm(x, residual, weight)
    for mixed in ((seen, beside), (seen, residual), (x, beside)):
        for got, expected in zip(ops.fused_add_rms_norm(*mixed, weight), want, strict=True):
            assert torch.equal(got, expected)


def test_N2_two_byte_alignment() -> None:
    x, residual, weight = randn(5, 64), randn(5, 64, seed=1), randn(64, seed=2)
    odd_x, odd_residual = views(x)["one element in"], views(residual)["one element in"]
    odd_weight = views(weight[None])["one element in"][0]
    assert torch.equal(ops.rms_norm(odd_x, odd_weight), ops.rms_norm(x, weight))
    assert torch.equal(ops.silu_and_mul(odd_x), ops.silu_and_mul(x))
    got = ops.fused_add_rms_norm(odd_x, odd_residual, odd_weight)
    want = ops.fused_add_rms_norm(x, residual, weight)
    assert all(torch.equal(one, two) for one, two in zip(got, want, strict=True))
    out = views(torch.zeros(5, 64, dtype=BF16))["one element in"]
    ops.rms_norm(x, weight, out=out)
    assert torch.equal(out, ops.rms_norm(x, weight))


def test_N3_no_rows_then_an_ordinary_call() -> None:
    empty, weight = torch.empty(0, 2048, dtype=BF16), randn(2048)
    assert ops.rms_norm(empty, weight).shape == (0, 2048)
    assert [t.shape for t in ops.fused_add_rms_norm(empty, empty, weight)] == [(0, 2048)] * 2
    assert ops.silu_and_mul(empty).shape == (0, 1024)
    ops.rms_norm(empty, weight, out=torch.empty(0, 2048, dtype=BF16))
    ones = torch.ones(1, 2048, dtype=BF16)
    assert torch.equal(ops.rms_norm(ones, weight), weight[None])


def chain(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    """72 fused adds; each norm is the next one's branch."""
    seen = []
    for _ in range(72):
        x, residual = ops.fused_add_rms_norm(x, residual, weight)
        seen += [x, residual]
    return seen


def test_N4_a_chain_of_72_fused_adds() -> None:
    x, residual = randn(3, 64, seed=1), randn(3, 64, seed=2, scale=9.0)
    weight = (1 + randn(64, seed=3, scale=0.1).float()).to(BF16)
    eager = chain(x, residual, weight)
    torch._dynamo.reset()
    compiled = torch.compile(chain, fullgraph=True, backend="aot_eager")(x, residual, weight)
    for one, two in zip(eager, compiled, strict=True):
        assert torch.equal(bits(one), bits(two))

    # The declared rounding, step by step: the residual to the bit (one fp32 addition, one
    # rounding); the norm from the sum before it was rounded.
    from_rounded_sum = total = 0
    for step in range(72):
        if step:
            x, residual = eager[2 * step - 2 : 2 * step]
        normed, carried = eager[2 * step : 2 * step + 2]
        assert torch.equal(carried, (x.float() + residual.float()).to(BF16))
        want, _ = fused_add_rms_norm(f64(x), f64(residual), f64(weight), EPS, exact)
        # Six roundings and an fp32 sum of 64 equal-signed squares, each half an ulp at most.
        assert_rounds(normed, want, (64 / 2 + 8) * U32 * want.abs())
        wrong = rms_norm(f64(carried), f64(weight), EPS, to_bf16)
        from_rounded_sum += int((f64(normed) != wrong).sum())
        total += normed.numel()
    # The test can tell the two apart: a norm of the rounded sum would differ in many places.
    assert from_rounded_sum > 0.02 * total


def test_N5_rows_of_300() -> None:
    weight = randn(2048, seed=1)
    x = torch.full((2, 2048), 300.0, dtype=BF16)
    assert torch.equal(ops.rms_norm(x, weight), weight.expand(2, -1))
    # The largest power of two whose 2048 squares fp32 can add up.
    assert torch.equal(ops.rms_norm(torch.full_like(x, 2.0**58), weight), weight.expand(2, -1))
    with pytest.raises(TypeError, match=r"rms_norm.*'x'.*float16.*want torch.bfloat16"):
        ops.rms_norm(x.half(), weight)


def test_N6_silu_at_its_edges() -> None:
    gates = torch.tensor([-torch.inf, -100.0, -87.5, 0.0, torch.nan, torch.inf])
    for dtype in (BF16, torch.float32):
        x = torch.cat([gates, torch.full((6,), 2.0)])[None].to(dtype)
        minus_inf, far, near, zero, nan, inf = ops.silu_and_mul(x)[0].tolist()
        assert math.isnan(minus_inf)  # -inf / inf, as torch's silu
        assert -1e-40 <= far <= 0
        assert near == pytest.approx(2 * -8.7254e-37, rel=2**-8)  # no flush to zero
        assert zero == 0
        assert math.isnan(nan)
        assert inf == torch.inf


def test_Q6_65536_tokens() -> None:
    x, weight = randn(65_536, 16), randn(16, seed=1)
    whole, parts = ops.rms_norm(x, weight), [ops.rms_norm(p, weight) for p in x.split(9_999)]
    assert torch.equal(whole, torch.cat(parts))
    want = rms_norm(f64(x), f64(weight), EPS, exact)
    assert_rounds(whole, want, 24 * U32 * want.abs())
    normed, carried = ops.fused_add_rms_norm(x, x.flip(0), weight)
    assert torch.equal(carried, (x.float() + x.flip(0).float()).to(BF16))
    want = rms_norm(f64(x) + f64(x.flip(0)), f64(weight), EPS, exact)
    assert_rounds(normed, want, 24 * U32 * want.abs())


@pytest.mark.parametrize("shape", [(3, 64), (2, 3, 33), (1, 2048), (4, 1)])
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_norms_against_float64(shape: tuple[int, ...], eps: float) -> None:
    x, residual = (randn(*shape, seed=s, dtype=torch.float32) for s in (1, 2))
    weight = randn(shape[-1], seed=3)
    want = fused_add_rms_norm(f64(x), f64(residual), f64(weight), eps, exact)
    for got, expected in zip(ops.fused_add_rms_norm(x, residual, weight, eps), want, strict=True):
        assert_close(got, expected, 1e-6)
    assert_close(ops.rms_norm(x, weight, eps), rms_norm(f64(x), f64(weight), eps, exact), 1e-6)

    # BF16: a sum of D equal-signed squares is off by D / 2 ulps of fp32 at the worst (halved by
    # the root), and five more operations by half an ulp each.
    x, residual = x.to(BF16), residual.to(BF16)
    slack = (shape[-1] / 2 + 6) * U32
    want = rms_norm(f64(x), f64(weight), eps, exact)
    assert_rounds(ops.rms_norm(x, weight, eps), want, slack * want.abs())
    normed, carried = ops.fused_add_rms_norm(x, residual, weight, eps)
    want = rms_norm(f64(x) + f64(residual), f64(weight), eps, exact)
    assert_rounds(normed, want, slack * want.abs())
    assert torch.equal(carried, (x.float() + residual.float()).to(BF16))


def test_silu_against_float64() -> None:
    x = randn(5, 2, 66, dtype=torch.float32, scale=4.0)
    assert_close(ops.silu_and_mul(x), silu_and_mul(f64(x), exact), 1e-6)
    x = x.to(BF16)
    want = silu_and_mul(f64(x), exact)
    # exp to an ulp, then addition, division and product.
    assert_rounds(ops.silu_and_mul(x), want, 6 * U32 * want.abs())


def test_the_out_variant_may_write_over_its_inputs() -> None:
    x, residual, weight = randn(3, 64), randn(3, 64, seed=1), randn(64, seed=2)
    normed, carried = ops.fused_add_rms_norm(x, residual, weight)
    ops.fused_add_rms_norm(x, residual, weight, out=(x, residual))
    assert torch.equal(x, normed)
    assert torch.equal(residual, carried)
