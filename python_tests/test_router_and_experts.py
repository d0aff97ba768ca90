"""Router and experts: rows T1-T3, Q2, Q4-Q6, and a second, float64 arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from op_samples import BF16, experts, gated_experts, int32, quantized, randn, routing, shards
from spec_float64 import (
    U16,
    U32,
    assert_close,
    assert_rounds,
    exact,
    f64,
    gated_slack,
    nvfp4_values,
    routed_experts,
    router,
    silu,
    to_bf16,
)

from flint_kernels import ops

pytestmark = pytest.mark.usefixtures("_each_cpu_body")

NAN, INF = math.nan, math.inf


# ------------------------------------------------------------------ T1-T3: the router


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_T1_nan_and_infinities(dtype: torch.dtype) -> None:
    finite = randn(256, dtype=dtype)
    mixed = randn(256, seed=1, dtype=dtype)
    mixed[7], mixed[3], mixed[200] = INF, -INF, INF
    logits = torch.stack(
        [
            finite,
            torch.full((256,), NAN, dtype=dtype),
            mixed,
            torch.full((256,), -INF, dtype=dtype),
            torch.full((256,), INF, dtype=dtype),
            finite.clone().index_fill_(0, torch.tensor([9, 90]), NAN),
            finite.clone().index_fill_(0, torch.tensor([9, 90]), -NAN),
        ]
    )
    weights, ids = ops.router_topk(logits, 6)
    alone = ops.router_topk(finite[None], 6)
    assert torch.equal(weights[0], alone[0][0])
    assert torch.equal(ids[0], alone[1][0])
    for row in ids.tolist():
        assert len(set(row)) == 6
        assert all(0 <= expert < 256 for expert in row)
    assert ids[2, :2].tolist() == [7, 200]
    assert bool(weights[[0, 2, 3, 4]].isfinite().all())
    assert weights[3].tolist() == [0.0] * 6  # 0 / 1e-20
    # NaN ranks above +inf and ties with itself; its row's weights are NaN, as documented.
    assert ids[1].tolist() == [0, 1, 2, 3, 4, 5]
    assert ids[5, :2].tolist() == ids[6, :2].tolist() == [9, 90]
    assert bool(weights[[1, 5, 6]].isnan().all())


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_T2_ties_and_saturated_scores(dtype: torch.dtype) -> None:
    for value in (0.0, -3.0, 30.0):
        weights, ids = ops.router_topk(torch.full((2, 256), value, dtype=dtype), 6)
        assert ids.tolist() == [[0, 1, 2, 3, 4, 5]] * 2
        # Renormalised, then rounded, and not renormalised again: 0.16699, not 1/6.
        sixth = torch.tensor(1 / 6).to(dtype).float()
        tolerance = 0.0 if dtype == BF16 else 2e-7
        assert torch.allclose(weights, sixth.expand(2, 6), rtol=tolerance, atol=0)
    # Ranking is by logit: 17 ... 24 all have the fp32 score 1.0.
    logits = torch.full((1, 256), -1.0, dtype=dtype)
    logits[0, 10:18] = torch.arange(17.0, 25.0).to(dtype)
    assert bool((1 / (1 + torch.exp(-logits[0, 10:18].float())) == 1.0).all())
    _, ids = ops.router_topk(logits, 6)
    assert ids.tolist() == [[17, 16, 15, 14, 13, 12]]
    # -0 ties with +0.
    signed = torch.tensor([[-1.0, -0.0, 0.0, -0.0]], dtype=dtype)
    assert ops.router_topk(signed, 3)[1].tolist() == [[1, 2, 3]]


@pytest.mark.parametrize("tokens", [1, 64])
def test_T3_logits_that_differ_below_bf16(tokens: int) -> None:
    """Sums of small integers and halves, exact in any order; rounded they tie: index decides."""
    hidden, count = 64, 16
    x = torch.ones(tokens, hidden, dtype=BF16)
    x[:, ::2] = -1.0
    row = x[0].float()
    weight = torch.zeros(count, hidden, dtype=BF16)
    weight[11], weight[5] = (row * 4.0).to(BF16), (row * 4.0).to(BF16)
    weight[11, 0] -= 0.5  # 256.5 against 256: one BF16 value
    weight[3] = (row * 4.0625).to(BF16)  # 260: another
    sums = x.float() @ weight.float().T
    assert sums[0, 11] == 256.5
    assert sums[0, 5] == 256.0
    _, ids = ops.router_topk(ops.bf16_linear(x, weight), 3)
    assert ids.tolist() == [[3, 5, 11]] * tokens
    # The same in the fused step: the norm of a row of +-1 is that row.
    normed, _, _, ids = ops.fused_add_rms_norm_router_topk(
        x, torch.zeros_like(x), torch.ones(hidden, dtype=BF16), weight, 3
    )
    assert torch.equal(normed, x)
    assert ids.tolist() == [[3, 5, 11]] * tokens
    # Without rounding 256.5 wins.
    assert ops.router_topk(sums, 3)[1].tolist() == [[3, 11, 5]] * tokens


@pytest.mark.parametrize("renormalize", [True, False])
def test_router_against_float64(renormalize: bool) -> None:
    logits = randn(9, 256, dtype=torch.float32, scale=3.0)
    for values in (logits, logits.to(BF16)):
        want, order = router(f64(values), 6, exact)
        got, ids = ops.router_topk(values, 6, renormalize)
        if not renormalize:
            want = 1 / (1 + torch.exp(-f64(values).gather(1, order)))
        assert torch.equal(ids.long(), order)
        assert ids.dtype == torch.int32
        if values.dtype == BF16:
            # exp to an ulp, and eight more fp32 operations.
            assert torch.equal(got.to(BF16).float(), got)
            assert_rounds(got.to(BF16), want, 12 * U32 * want)
        else:
            assert_close(got, want, 1e-6)


# ------------------------------------------------------------------ the experts

COUNT, TOP_K, HIDDEN, INNER = 8, 3, 64, 32


def nvfp4_weights() -> tuple[torch.Tensor, ...]:
    return *gated_experts(COUNT, INNER, HIDDEN), *experts(COUNT, HIDDEN, INNER, seed=50)


def bf16_weights() -> tuple[torch.Tensor, ...]:
    return (
        randn(COUNT, 2 * INNER, HIDDEN, seed=7, scale=0.2),
        randn(COUNT, HIDDEN, INNER, seed=8, scale=0.2),
    )


def expanded(weights: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """w13 and w2 in float64, global scales in."""
    if len(weights) == 2:
        return f64(weights[0]), f64(weights[1])
    w13, w13_scale, w13_scale_2, w2, w2_scale, w2_scale_2 = weights
    gate_up = f64(w13_scale_2).repeat_interleave(w13.shape[1] // 2, dim=1)
    return (
        nvfp4_values(w13, w13_scale) * gate_up[..., None],
        nvfp4_values(w2, w2_scale) * f64(w2_scale_2)[:, None, None],
    )


Op = Callable[..., torch.Tensor]
BOTH = pytest.mark.parametrize(
    "op,weights",
    [(ops.nvfp4_routed_experts, nvfp4_weights()), (ops.bf16_routed_experts, bf16_weights())],
    ids=["nvfp4", "bf16"],
)


@BOTH
def test_experts_against_float64(op: Op, weights: tuple[torch.Tensor, ...]) -> None:
    w13, w2 = expanded(weights)
    x = randn(6, HIDDEN, dtype=torch.float32)
    topk_weights, topk_ids = routing(6, TOP_K, COUNT)
    args = f64(topk_weights), topk_ids, w13, w2
    truth = routed_experts(f64(x), *args, exact)
    shared = randn(6, HIDDEN, seed=5, dtype=torch.float32)
    assert_close(op(x, topk_weights, topk_ids, *weights), truth, 2e-6)
    assert_close(op(x, topk_weights, topk_ids, *weights, shared), truth + f64(shared), 2e-6)

    x = x.to(BF16)
    want = routed_experts(f64(x), *args, to_bf16)
    got = op(x, topk_weights, topk_ids, *weights)
    # An act (one of INNER) or a y_e (one of TOP_K) whose rounding flips moves the sum by an ulp of
    # its own share; `size` is the sum of all shares without their signs.
    size = torch.zeros_like(want)
    for token in range(6):
        for weight, expert in zip(f64(topk_weights)[token], topk_ids[token], strict=True):
            gate, up = (w13[expert] @ f64(x[token])).chunk(2)
            size[token] += weight * (w2[expert].abs() @ (silu(gate) * up).abs())
    assert_rounds(got, want, 2 * U16 / INNER * size + U16 / TOP_K * want.abs())
    # And nearer to exact arithmetic than twice what plain PyTorch in BF16 gets.
    truth = routed_experts(f64(x), *args, exact)
    plain = torch.stack([plain_bf16(x[t], topk_weights[t], topk_ids[t], w13, w2) for t in range(6)])
    assert (f64(got) - truth).norm() <= 2 * (f64(plain) - truth).norm()
    # The shared output joins after the rounding of the routed sum: one more, exactly rounded add.
    both = op(x, topk_weights, topk_ids, *weights, shared.to(BF16))
    assert torch.equal(both, (got.float() + shared.to(BF16).float()).to(BF16))


def plain_bf16(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    """A token through its experts as a PyTorch user would write it, all in BF16."""
    out = torch.zeros_like(x)
    for weight, expert in zip(weights.to(BF16), ids.tolist(), strict=True):
        gate, up = (w13[expert].to(BF16) @ x).chunk(2)
        out += weight * (w2[expert].to(BF16) @ (torch.nn.functional.silu(gate) * up))
    return out


def test_Q2_one_expert_ten_times_the_others() -> None:
    """Equal codes, global scales 1 and 10, gate and up apart: each scaled by its own."""
    weights = list(nvfp4_weights())
    weights = [w[:1].view(torch.uint8).expand(3, *w.shape[1:]).contiguous().view(w.dtype)
               if w.dim() == 3 else w[:3].clone() for w in weights]  # fmt: skip
    x = randn(1, HIDDEN, dtype=torch.float32)
    w13_scales = torch.tensor([[1e-3, 1e-3], [1e-2, 1e-3], [1e-3, 1e-2]])
    w2_scales = torch.tensor([1e-3, 1e-3, 1e-2])
    weights[2], weights[5] = w13_scales, w2_scales
    codes = nvfp4_values(weights[0][0], weights[1][0]), nvfp4_values(weights[3][0], weights[4][0])
    gate, up = (codes[0] @ f64(x[0])).chunk(2)
    for expert in range(3):
        got = ops.nvfp4_routed_experts(x, torch.ones(1, 1), int32(expert).view(1, 1), *weights)
        g_scale, u_scale = f64(w13_scales[expert])
        act = silu(gate * g_scale) * up * u_scale
        assert_close(got, (codes[1] @ act * f64(w2_scales[expert]))[None], 2e-6)


@BOTH
def test_Q4_rows_of_nan_stay_where_they_are(op: Op, weights: tuple[torch.Tensor, ...]) -> None:
    x = randn(8, HIDDEN)
    x[5:] = NAN
    topk_weights, topk_ids = routing(8, TOP_K, COUNT)
    topk_weights[6:] = NAN
    together = op(x, topk_weights, topk_ids, *weights)
    assert torch.equal(together[:5], op(x[:5], topk_weights[:5], topk_ids[:5], *weights))
    assert together[5:].isnan().all()


@BOTH
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_Q5_ids(op: Op, weights: tuple[torch.Tensor, ...], dtype: torch.dtype) -> None:
    x = randn(4, HIDDEN, dtype=dtype)
    topk_weights, topk_ids = routing(4, TOP_K, COUNT)
    assert torch.unique(topk_ids).numel() < COUNT  # experts without a token are there too
    full = op(x, topk_weights, topk_ids, *weights)
    assert full.isfinite().all()
    for wrong in (COUNT, 256, -2, 2**31 - 1):
        bad = topk_ids.clone()
        bad[2, 1] = wrong
        message = rf"routed_experts.*'topk_ids'.*{wrong}.*\[0, {COUNT}\)"
        with pytest.raises(ValueError, match=message):
            op(x, topk_weights, bad, *weights)

    # -1 skips: as if the entry were not there, whatever its weight.
    skipped = topk_ids.clone()
    skipped[:, 1] = -1
    poisoned = topk_weights.clone()
    poisoned[:, 1] = NAN
    without = op(x, topk_weights[:, ::2], topk_ids[:, ::2].contiguous(), *weights)
    assert torch.equal(op(x, poisoned, skipped, *weights), without)
    assert not op(x, poisoned, torch.full_like(topk_ids, -1), *weights).any()
    shared = randn(4, HIDDEN, seed=9, dtype=dtype)
    assert torch.equal(op(x, poisoned, torch.full_like(topk_ids, -1), *weights, shared), shared)
    assert not op(x, topk_weights[:, :0], topk_ids[:, :0], *weights).any()

    # An expert named twice counts twice.
    twice = op(x, torch.full((4, 2), 0.5), int32(3, 3).expand(4, 2).contiguous(), *weights)
    once = op(x, torch.ones(4, 1), int32(3).expand(4, 1).contiguous(), *weights)
    assert torch.equal(twice, once)  # halves are exact in every rounding

    # All tokens to one expert.
    to_one = torch.full_like(topk_ids, 5)
    together = op(x, topk_weights, to_one, *weights)
    assert together.isfinite().all()
    if dtype == BF16:
        for row in range(4):
            part = slice(row, row + 1)
            alone = op(x[part], topk_weights[part], to_one[part], *weights)
            assert torch.equal(together[part], alone)


def test_Q6_top_6_of_10923_tokens() -> None:
    """65,538 entries: one more than 16-bit indices hold."""
    tokens = 10_923
    logits = randn(tokens, 256, scale=2.0)
    weights, ids = ops.router_topk(logits, 6)
    values = logits.float().gather(1, ids.long())
    assert torch.equal(values, logits.float().topk(6, dim=1).values)
    for row in (0, 5_461, 10_922):
        alone = ops.router_topk(logits[row : row + 1], 6)
        assert torch.equal(weights[row], alone[0][0])
        assert torch.equal(ids[row], alone[1][0])
    x = randn(tokens, 16, seed=1)
    small = randn(256, 4, 16, seed=2, scale=0.3), randn(256, 16, 2, seed=3, scale=0.3)
    out = ops.bf16_routed_experts(x, weights, ids, *small)
    for row in (0, 10_922):
        part = slice(row, row + 1)
        assert torch.equal(
            out[part], ops.bf16_routed_experts(x[part], weights[part], ids[part], *small)
        )
    assert bool(out.any(dim=1).all())


# ------------------------------------------------------------------ the fused decode steps


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_norm_and_router_step_is_its_composition(dtype: torch.dtype) -> None:
    x, residual = randn(5, 64, dtype=dtype), randn(5, 64, seed=1, dtype=dtype)
    weight, gate = randn(64, seed=2), randn(16, 64, seed=3)
    got = ops.fused_add_rms_norm_router_topk(x, residual, weight, gate, 6, 1e-5)
    normed, carried = ops.fused_add_rms_norm(x, residual, weight, 1e-5)
    routed = ops.router_topk(ops.bf16_linear(normed, gate), 6)
    for one, two in zip(got, (normed, carried, *routed), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("kind", ["nvfp4", "bf16"])
def test_gate_up_and_down_steps_are_their_composition(kind: str, dtype: torch.dtype) -> None:
    x = randn(5, HIDDEN, dtype=dtype)
    topk_weights, topk_ids = routing(5, TOP_K, COUNT)
    topk_ids[1, 2] = topk_ids[4, 0] = -1
    if kind == "nvfp4":
        weights = nvfp4_weights()
        w13, w2 = weights[:3], weights[3:]
        shared_w13, shared_w2 = shards(16, 16, k=HIDDEN, seed=30), quantized(HIDDEN, 16, seed=31)
        shared = ops.nvfp4_linear(ops.nvfp4_linear_silu_and_mul(x, *shared_w13), *shared_w2)
        gate_up, down, routed = ops.nvfp4_moe_gate_up, ops.nvfp4_moe_down, ops.nvfp4_routed_experts
    else:
        weights = bf16_weights()
        w13, w2 = weights[:1], weights[1:]
        shared_w13 = (randn(32, HIDDEN, seed=30, scale=0.2),)
        shared_w2 = (randn(HIDDEN, 16, seed=31, scale=0.2),)
        shared = ops.bf16_linear(ops.bf16_linear_silu_and_mul(x, *shared_w13), *shared_w2)
        gate_up, down, routed = ops.bf16_moe_gate_up, ops.bf16_moe_down, ops.bf16_routed_experts
    routed_act, shared_act = gate_up(x, topk_ids, *w13, *shared_w13)
    assert not routed_act[1, 2].any()
    assert not routed_act[4, 0].any()
    got = down(routed_act, shared_act, topk_weights, topk_ids, *w2, *shared_w2)
    want = routed(x, topk_weights, topk_ids, *weights, shared)
    assert torch.equal(got, want)

    if dtype == BF16:  # the acts: gate and up in fp32, one rounding
        full_w13, _ = expanded(weights)
        for token, expert in ((0, 0), (3, 1)):
            matrix = full_w13[int(topk_ids[token, expert])]
            gate, up = (matrix @ f64(x[token])).chunk(2)
            slack = gated_slack(f64(x[token]), matrix)
            assert_rounds(routed_act[token, expert], silu(gate) * up, slack)


def test_the_weighted_sum_is_exact_where_fp32_is() -> None:
    """Integer y_e: `round(sum(weight * y))` in the order of selection, then the shared add."""
    generator = torch.Generator().manual_seed(1)
    acts = torch.randint(-4, 5, (6, TOP_K, 8), generator=generator).to(BF16)
    w2 = torch.randint(-4, 5, (COUNT, 24, 8), generator=generator).to(BF16)
    shared_act = torch.randint(-4, 5, (6, 4), generator=generator).to(BF16)
    shared_w2 = torch.randint(-4, 5, (24, 4), generator=generator).to(BF16)
    topk_weights, topk_ids = routing(6, TOP_K, COUNT, seed=3)
    y = torch.einsum("tki,tkhi->tkh", acts.double(), w2[topk_ids.long()].double()).float()
    total = torch.zeros(6, 24)
    for j in range(TOP_K):
        total = total + topk_weights[:, j : j + 1] * y[:, j]
    shared = (shared_act.double() @ shared_w2.double().T).float()
    want = (total.to(BF16).float() + shared).to(BF16)
    got = ops.bf16_moe_down(acts, shared_act, topk_weights, topk_ids, w2, shared_w2)
    assert torch.equal(got, want)
