"""Linears and the LM head: rows Q1-Q4 at op level, and a second, float64 arithmetic."""

from __future__ import annotations

import math

import pytest
import torch
from op_samples import BF16, quantized, randn, shards, strided
from spec_float64 import (
    U32,
    assert_rounds,
    exact,
    f64,
    gated_slack,
    linear,
    linear_slack,
    nvfp4_values,
    silu_and_mul,
)

from flint_kernels import ops

pytestmark = pytest.mark.usefixtures("_each_cpu_body")

E4M3 = torch.float8_e4m3fn


def constant_weight(rows: int, columns: int, code: int, scale: int) -> tuple[torch.Tensor, ...]:
    """An NVFP4 weight of one code (E2M1) and one scale byte (E4M3)."""
    codes = torch.full((rows, columns // 2), code * 17, dtype=torch.uint8)
    scales = torch.full((rows, columns // 16), scale, dtype=torch.uint8).view(E4M3)
    return codes, scales


# ------------------------------------------------------------------ Q1: scale bytes

BYTES = [0x00, 0x01, 0x7E, 0x7F, 0x80, 0xB8, 0xFF]
MODELOPT = [0.0, 2.0**-9, 448.0, math.nan, 0.0, -1.0, math.nan]


def test_Q1_modelopt_scale_bytes() -> None:
    """Code 2 is 1.0: each weight is its scale. NaN stays NaN and in its own group of 16."""
    weight = torch.full((1, 8 * len(BYTES)), 0x22, dtype=torch.uint8)
    scale = torch.tensor([BYTES], dtype=torch.uint8).view(E4M3)
    want = torch.tensor(MODELOPT).repeat_interleave(16)
    for dtype in (torch.float32, BF16):
        got = ops.nvfp4_dequantize(weight, scale, dtype=dtype)[0].float()
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got[~want.isnan()], want[~want.isnan()])
    # The linear, group by group: x picks one group.
    x = torch.eye(len(BYTES)).repeat_interleave(16, dim=1).to(BF16)
    finite = [i for i, value in enumerate(MODELOPT) if not math.isnan(value)]
    picked = torch.cat([weight.view(-1, 8)[i] for i in finite])[None]
    scales = scale.view(torch.uint8)[:, finite].view(E4M3)
    columns = torch.arange(16 * len(finite))
    one = ops.nvfp4_linear(x[: len(finite), columns], picked, scales, torch.tensor(1.0))
    assert one[:, 0].tolist() == [16 * MODELOPT[i] for i in finite]
    assert ops.nvfp4_linear(x, weight, scale, torch.tensor(1.0)).isnan().all()


def test_Q1_gguf_scale_bytes() -> None:
    """7F reads as zero, the sign bit as nothing (B8 is 1.0), FF is refused."""
    block = torch.full((1, 36), 0x22, dtype=torch.uint8)
    block[0, :4] = torch.tensor([0x7E, 0x7F, 0x80, 0xB8], dtype=torch.uint8)
    weight, scale = ops.gguf_to_modelopt(block)
    assert scale.view(torch.uint8).tolist() == [[0x7E, 0x00, 0x00, 0x38]]
    values = ops.nvfp4_dequantize(weight, scale)[0].view(4, 16)
    assert values[:, 0].tolist() == [448.0, 0.0, 0.0, 1.0]
    block[0, 2] = 0xFF
    with pytest.raises(ValueError, match="argument 'blocks': got scale byte 0xff"):
        ops.gguf_to_modelopt(block)


# ------------------------------------------------------------------ Q2, Q3


def test_Q2_each_shard_has_its_own_global_scale() -> None:
    """q, k, v with 1e-3, 2e-3, 4e-3: the same codes, three results."""
    weight, scale = constant_weight(8, 32, code=2, scale=0x38)
    x = torch.ones(3, 32, dtype=torch.float32)
    three = torch.tensor([1e-3, 2e-3, 4e-3])
    got = ops.nvfp4_linear(x, weight, scale, three, [4, 1, 3])
    want = 32 * three.repeat_interleave(torch.tensor([4, 1, 3]))
    assert torch.allclose(got, want.expand(3, -1), rtol=1e-6, atol=0)
    # As each shard alone, to the bit, in BF16 too; a shard may be empty.
    x = randn(3, 32)
    fused = shards(4, 1, 3, k=32)
    parts = zip(*(t.split([4, 1, 3]) for t in fused[:2]), fused[2], strict=True)
    alone = torch.cat([ops.nvfp4_linear(x, *part) for part in parts], dim=1)
    assert torch.equal(ops.nvfp4_linear(x, *fused, [4, 1, 3]), alone)
    padded = torch.cat([fused[2], torch.tensor([math.nan])])
    assert torch.equal(ops.nvfp4_linear(x, *fused[:2], padded, [4, 1, 3, 0]), alone)


def test_Q2_gate_and_up_have_their_own_global_scales() -> None:
    weight, scale = constant_weight(4, 32, code=2, scale=0x38)
    x = torch.ones(1, 32)
    got = ops.nvfp4_linear_silu_and_mul(x, weight, scale, torch.tensor([1e-2, 3e-2]))
    gate, up = 0.32, 0.96
    want = gate / (1 + math.exp(-gate)) * up
    assert got.flatten().tolist() == pytest.approx([want, want], rel=1e-6)


def test_Q3_large_sums_do_not_overflow() -> None:
    weight, scale = constant_weight(3, 2048, code=7, scale=0x38)
    global_scale = torch.tensor(1e-3)
    x = torch.full((2, 2048), 6.0, dtype=BF16)
    assert ops.nvfp4_linear(x, weight, scale, global_scale).tolist() == [[73.5] * 3] * 2
    assert ops.nvfp4_lm_head(x, weight, scale, global_scale).flatten().tolist() == pytest.approx(
        [73.728] * 6, rel=2e-7
    )
    exact_mode = ops.nvfp4_linear(x.float(), weight, scale, global_scale)
    assert exact_mode.flatten().tolist() == pytest.approx([73.728] * 6, rel=2e-7)
    # The largest an NVFP4 weight can be, 6 * 448: 2048 of them times 2^14 is far beyond FP16.
    weight, scale = constant_weight(1, 2048, code=7, scale=0x7E)
    big = torch.full((1, 2048), 2.0**14, dtype=BF16)
    assert ops.nvfp4_linear(big, weight, scale, torch.tensor(2.0**-25)).item() == 2688.0


def test_Q4_rows_of_nan_stay_where_they_are() -> None:
    x = randn(8, 64)
    x[5:] = math.nan
    weight, fused = quantized(48, 64), shards(24, 24, k=64)
    plain = randn(48, 64, seed=1)
    for op, arguments in (
        (ops.nvfp4_linear, weight),
        (ops.nvfp4_lm_head, weight),
        (ops.nvfp4_linear_silu_and_mul, fused),
        (ops.bf16_linear, (plain,)),
        (ops.bf16_lm_head, (plain,)),
        (ops.bf16_linear_silu_and_mul, (plain,)),
    ):
        together, alone = op(x, *arguments), op(x[:5], *arguments)
        assert torch.equal(together[:5], alone)
        assert together[5:].isnan().all()


# ------------------------------------------------------------------ the arithmetic

SHAPES = [(3, 64, 48), (1, 16, 1), (5, 48, 7), (2, 2048, 3)]


@pytest.mark.parametrize("rows,k,n", SHAPES)
def test_nvfp4_linear_against_float64(rows: int, k: int, n: int) -> None:
    packed = quantized(n, k, seed=2)
    weight = nvfp4_values(*packed[:2]) * f64(packed[2])
    x = randn(rows, k, dtype=torch.float32)
    want = linear(f64(x), weight, exact)
    error = linear_slack(f64(x), weight)
    for got in (ops.nvfp4_linear(x, *packed), ops.nvfp4_lm_head(x, *packed)):
        assert got.dtype == torch.float32
        assert bool(((f64(got) - want).abs() <= error).all())
    x = x.to(BF16)
    want, slack = linear(f64(x), weight, exact), linear_slack(f64(x), weight)
    assert_rounds(ops.nvfp4_linear(x, *packed), want, slack)
    # The head is never rounded.
    assert bool(((f64(ops.nvfp4_lm_head(x, *packed)) - want).abs() <= slack).all())


@pytest.mark.parametrize("rows,k,n", [*SHAPES, (3, 33, 5), (2, 1, 2)])
def test_bf16_linear_against_float64(rows: int, k: int, n: int) -> None:
    weight = randn(n, k, seed=2)
    x = randn(rows, k, dtype=torch.float32)
    want, error = linear(f64(x), f64(weight), exact), linear_slack(f64(x), f64(weight))
    for got in (ops.bf16_linear(x, weight), ops.bf16_lm_head(x, weight)):
        assert bool(((f64(got) - want).abs() <= error).all())
    x = x.to(BF16)
    want, slack = linear(f64(x), f64(weight), exact), linear_slack(f64(x), f64(weight))
    assert_rounds(ops.bf16_linear(x, weight), want, slack)
    assert bool(((f64(ops.bf16_lm_head(x, weight)) - want).abs() <= slack).all())


def test_sums_that_are_exact_are_bit_exact() -> None:
    """Small integers: every order gives the same fp32 sum; one rounding remains."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-8, 9, (4, 96), generator=generator).to(BF16)
    weight = torch.randint(-8, 9, (11, 96), generator=generator).to(BF16)
    sums = x.double() @ weight.double().T
    assert torch.equal(ops.bf16_linear(x, weight), sums.float().to(BF16))
    assert torch.equal(ops.bf16_lm_head(x, weight), sums.float())
    codes = torch.randint(0, 256, (11, 48), generator=generator).to(torch.uint8)
    scales = torch.full((11, 6), 0x40, dtype=torch.uint8).view(E4M3)
    sums = x.double() @ nvfp4_values(codes, scales).T
    scale_2 = torch.tensor(0.3)
    want = sums.float() * scale_2  # one fp32 product, then one rounding
    assert torch.equal(ops.nvfp4_linear(x, codes, scales, scale_2), want.to(BF16))
    assert torch.equal(ops.nvfp4_lm_head(x, codes, scales, scale_2), want)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_the_silu_epilogue_is_its_composition(dtype: torch.dtype) -> None:
    """Gate and up are rounded in between: the two-op form, to the bit."""
    x, weight = strided(randn(5, 64, dtype=dtype)), randn(18, 64, seed=1)
    want = ops.silu_and_mul(ops.bf16_linear(x, weight))
    assert torch.equal(ops.bf16_linear_silu_and_mul(x, weight), want)
    for packed in (shards(9, 9, k=64), quantized(18, 64)):
        halves = [9, 9] if packed[2].numel() == 2 else None
        want = ops.silu_and_mul(ops.nvfp4_linear(x, *packed, halves))
        assert torch.equal(ops.nvfp4_linear_silu_and_mul(x, *packed), want)


def test_the_silu_epilogue_against_float64() -> None:
    x, weight = randn(5, 64, dtype=torch.float32), randn(18, 64, seed=1)
    packed = shards(9, 9, k=64)
    scales = f64(packed[2]).repeat_interleave(9)[:, None]
    for got, values in (
        (ops.bf16_linear_silu_and_mul(x, weight), f64(weight)),
        (ops.nvfp4_linear_silu_and_mul(x, *packed), nvfp4_values(*packed[:2]) * scales),
    ):
        want = silu_and_mul(linear(f64(x), values, exact), exact)
        assert bool(((f64(got) - want).abs() <= gated_slack(f64(x), values)).all())
    # BF16, from the rounded gate and up that the plain linear gives: exp, sum, quotient, product.
    gate_up = ops.bf16_linear(x.to(BF16), weight)
    want = silu_and_mul(f64(gate_up), exact)
    assert_rounds(ops.bf16_linear_silu_and_mul(x.to(BF16), weight), want, 6 * U32 * want.abs())


def test_transposed_weights_and_leading_dimensions() -> None:
    x, weight = randn(2, 3, 40), randn(9, 40, seed=1)
    want = ops.bf16_linear(x.view(6, 40), weight).view(2, 3, 9)
    assert torch.equal(ops.bf16_linear(x, weight.T.contiguous().T), want)
    assert torch.equal(ops.bf16_linear(x.transpose(0, 1), weight), want.transpose(0, 1))
    assert torch.equal(ops.bf16_linear(x[0, 0], weight), want[0, 0])
    wide, tall = randn(257, 200, seed=1), randn(2, 200)
    assert torch.equal(ops.bf16_linear(tall, wide.T.contiguous().T), ops.bf16_linear(tall, wide))
