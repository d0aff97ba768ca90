"""The general GPU bodies on the CPU: their Triton kernels in Triton's interpreter.

`test_triton_interpreter.py` runs this file in a process of its own, since Triton decides when it is
imported whether it interprets. The interpreter gets BF16 wrong, so tensors are FP32 here: as the
oracle's, which round nowhere, or (`emulated_bf16`) as stand-ins for BF16 ones, with rounding.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import op_samples
import pytest
import torch
from op_samples import BF16, int32, randn

from flint_kernels.backends import cpu, gpu_general
from flint_kernels.backends.triton import launch
from flint_kernels.backends.triton.launch import emulated_bf16
from flint_kernels.ops import REGISTRY

assert os.environ.get("TRITON_INTERPRET") == "1", "run test_triton_interpreter.py"

NAN = torch.nan
Bound = dict[str, Any]


def in_fp32(arguments: Bound) -> Bound:
    """Copies of the arguments, strides kept, BF16 as FP32."""
    return {name: twin(value) for name, value in arguments.items()}


def twin(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    dtype = torch.float32 if value.dtype == BF16 else value.dtype
    return torch.empty_strided(value.size(), value.stride(), dtype=dtype).copy_(value)


def run(name: str, *args: Any, **kwargs: Any) -> Any:
    """The general body, on FP32 copies of the arguments."""
    return gpu_general.general_body(name)(**in_fp32(REGISTRY[name].bind(args, kwargs)))


def as_tuple(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else () if result is None else (result,)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal, or for floats with another order of summation (some 2^-24 a term of the largest)."""
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    if not want.is_floating_point() or want.dtype.itemsize == 1:
        assert torch.equal(bits(got), bits(want))
        return
    largest = want.nan_to_num(0.0).abs().max() if want.numel() else 0.0
    torch.testing.assert_close(got, want, rtol=0, atol=3e-6 * float(largest), equal_nan=True)


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_every_sample_in_fp32(name: str) -> None:
    for args, kwargs in op_samples.SAMPLES[name]():
        bound = REGISTRY[name].bind(args, kwargs)
        mine, reference = in_fp32(bound), in_fp32(bound)
        got = as_tuple(gpu_general.general_body(name)(**mine))
        want = as_tuple(cpu.reference_body(name)(**reference))
        for one, two in zip(got, want, strict=True):
            assert_close(one, two)
        for argument, value in mine.items():  # what is written in place, and what must not be
            if isinstance(value, torch.Tensor):
                assert_close(value, reference[argument])


# Ops whose BF16 outputs come from a kernel alone, on the CPU too, and the share of values that must
# equal the reference's. Prefill rounds P with the maximum of the tiles so far, the reference with
# that of all keys: both are right, and they differ in some last bits.
ROUNDING = {
    "attention_decode": 0.99,
    "attention_prefill": 0.9,
    "bf16_routed_experts": 0.99,
    "nvfp4_linear": 0.99,
    "nvfp4_moe_down": 0.99,
    "nvfp4_routed_experts": 0.99,
}


@pytest.mark.parametrize("name", ROUNDING)
def test_rounding_points(name: str) -> None:
    """Nearly all values equal the BF16 reference's; a rounding left out would move many."""
    equal = total = 0
    for args, kwargs in op_samples.SAMPLES[name]():
        with emulated_bf16():
            got = run(name, *args, **kwargs)
        want = cpu.reference_body(name)(**REGISTRY[name].bind(args, kwargs)).to(torch.float32)
        assert torch.equal(got, got.to(BF16).to(torch.float32))
        # A sum that falls on the other side of a rounding moves one ulp, and may carry.
        torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-8 * float(want.abs().max()))
        equal += int((got == want).sum())
        total += want.numel()
    assert equal > ROUNDING[name] * total


def test_emulated_rounding_is_to_nearest_even() -> None:
    from flint_kernels.backends.triton.experts import combine

    bits = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x80000001 - (1 << 32)])
    values = bits.to(torch.int32).view(torch.float32)
    values = torch.cat([values, torch.tensor([torch.inf, -torch.inf, NAN])])
    ones = torch.ones(len(values), 1)
    with emulated_bf16():
        got = combine(values[:, None], ones, ones.to(torch.int32), 2, None)[:, 0]
    # -2^-149 added to 0 is not lost, and rounds to -0.
    assert torch.equal(got.nan_to_num(7.0), values.to(BF16).to(torch.float32).nan_to_num(7.0))


# ----------------------------------------------------------------------------------- attention


def paged(*lengths: int, heads: int = 2, dim: int = 16, page: int = 16) -> tuple[Any, ...]:
    """Caches with a page of NaN at 0, a table of exact width, and the lengths."""
    width = max(1, -(-max(lengths) // page))
    blocks = 1 + width * len(lengths)
    k = randn(blocks, page, heads, dim, seed=1)
    v = randn(blocks, page, heads, dim, seed=2)
    k[0] = v[0] = NAN
    table = 1 + torch.randperm(blocks - 1, generator=op_samples.rng(3)).to(torch.int32)
    return k, v, table.reshape(len(lengths), width), int32(*lengths)


def check_attention(name: str, *args: Any, **kwargs: Any) -> torch.Tensor:
    got = run(name, *args, **kwargs)
    want = cpu.reference_body(name)(**in_fp32(REGISTRY[name].bind(args, kwargs)))
    assert_close(got, want)
    return got


@pytest.mark.parametrize("window", [0, 33, 513])
def test_decode_lengths_and_splits(window: int) -> None:
    past = paged(1, 17, 257, 0, 600, heads=1)
    q, sinks = randn(5, 3, 16), randn(3, seed=9, dtype=torch.float32)
    check_attention("attention_decode", q, *past, sinks, window)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(34, 2, 20), (2, 2, 136), (5, 1, 16)])
def test_A9_decode_head_counts_and_sizes(heads: int, kv_heads: int, dim: int) -> None:
    sinks = randn(heads, seed=9, dtype=torch.float32)
    check_attention(
        "attention_decode", randn(1, heads, dim), *paged(40, heads=kv_heads, dim=dim), sinks
    )


def test_decode_depends_on_its_own_length_alone() -> None:
    """Neither batchmates nor the width of the table move a bit."""
    k, v, table, lengths = paged(600, 300, heads=1)
    q = randn(2, 2, 16)
    both = run("attention_decode", q, k, v, table, lengths)
    wide = torch.cat([table, torch.full((2, 40), -1, dtype=torch.int32)], dim=1)
    for row in range(2):
        alone = run("attention_decode", q[row : row + 1], k, v, wide[row : row + 1],
                    lengths[row : row + 1])  # fmt: skip
        assert torch.equal(alone[0], both[row])


def test_A1_window_counts_the_query_itself() -> None:
    for key, want in ((88, 1 / 513), (87, 0.0)):
        k = torch.zeros(38, 16, 1, 16)
        v = torch.zeros(38, 16, 1, 16)
        v[key // 16, key % 16] = 1.0
        table, length = torch.arange(38, dtype=torch.int32)[None], int32(601)
        out = run("attention_decode", torch.zeros(1, 8, 16), k, v, table, length, None, 513)
        torch.testing.assert_close(out, torch.full_like(out, want), rtol=1e-6, atol=0)
        chunk = torch.zeros(1, 1, 16)
        past = (k, v, table, int32(600))
        out = run("attention_prefill", torch.zeros(1, 8, 16), chunk, chunk, int32(0, 1), *past,
                  None, 513)  # fmt: skip
        torch.testing.assert_close(out, torch.full_like(out, want), rtol=1e-6, atol=0)


def test_A2_A3_extreme_logits_and_sinks() -> None:
    k = torch.full((1, 16, 1, 16), -1500.0)
    v = torch.arange(1.0, 17.0).reshape(1, 16, 1, 1).repeat(1, 1, 1, 16)
    q = torch.full((1, 1, 16), 10.0)
    call = (k, v, int32(0)[None], int32(4))
    out = run("attention_decode", q, *call, torch.tensor([-torch.inf]))
    torch.testing.assert_close(out, torch.full_like(out, 2.5), rtol=1e-6, atol=0)
    zeros = torch.zeros_like(q)
    out = run("attention_decode", zeros, *call, torch.tensor([100.0]))
    assert bool((out.abs() < 1e-30).all())
    empty = (k, v, int32(0)[None], int32(0))
    assert not run("attention_decode", q, *empty, torch.tensor([0.5])).any()
    assert not run("attention_decode", q, *empty).any()


def test_A5_nan_in_slots_that_no_query_sees() -> None:
    k, v, table, lengths = paged(40, 100)
    q = randn(2, 4, 16)
    for cache in (k, v):
        cache[table[0, 2], 8:] = NAN
        cache[table[1, 6], 4:] = NAN
        cache[table[1, :4]] = NAN  # before the window
    clean = [cache.nan_to_num(0.0) for cache in (k, v)]
    got = run("attention_decode", q, k, v, table, lengths, None, 30)
    assert torch.equal(got, run("attention_decode", q, *clean, table, lengths, None, 30))
    rows = randn(5, 4, 16), randn(5, 2, 16, seed=5), randn(5, 2, 16, seed=6), int32(0, 2, 5)
    got = run("attention_prefill", *rows, k, v, table, lengths, None, 30)
    assert torch.equal(got, run("attention_prefill", *rows, *clean, table, lengths, None, 30))
    assert bool(got.isfinite().all())


def test_A6_table_entries_past_the_length_are_not_read() -> None:
    k, v, table, _ = paged(64, 64, 64, 64)
    lengths = int32(1, 16, 17, 0)
    wild = table.clone()
    for row, length in enumerate(lengths.tolist()):
        used = -(-length // 16)
        wild[row, used:] = torch.tensor([-1, 2**31 - 1] * 2)[: 4 - used]
    q = randn(4, 2, 16)
    want = run("attention_decode", q, k, v, table, lengths)
    assert torch.equal(run("attention_decode", q, k, v, wild, lengths), want)


def test_broken_values_give_nan_and_leave_the_others_alone() -> None:
    k, v, table, lengths = paged(40, 40, 40, 40)
    q = randn(4, 4, 16)
    want = run("attention_decode", q, k, v, table, lengths)
    table, lengths = table.clone(), lengths.clone()
    lengths[0], lengths[1], table[2, 1] = -1, 49, 99
    got = run("attention_decode", q, k, v, table, lengths)
    assert bool(got[:3].isnan().all())
    assert torch.equal(got[3], want[3])
    rows = randn(4, 4, 16), randn(4, 2, 16, seed=5), randn(4, 2, 16, seed=6)
    got = run("attention_prefill", *rows, int32(0, 1, 2, 3, 4), k, v, table, lengths)
    assert bool(got[:3].isnan().all())
    assert bool(got[3].isfinite().all())
    got = run("attention_prefill", *rows, int32(0, 3, 1, 9))
    assert bool(got[3].isnan().all())
    assert bool(got[:3].isfinite().all())


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 1, 16), (6, 2, 20), (2, 2, 136)])
def test_prefill_chunks_over_a_past(window: int, heads: int, kv_heads: int, dim: int) -> None:
    past = paged(37, 0, 5, heads=kv_heads, dim=dim)
    q = randn(75, heads, dim)
    k, v = (randn(75, kv_heads, dim, seed=s) for s in (5, 6))
    sinks = randn(heads, seed=9, dtype=torch.float32)
    offsets = int32(0, 50, 51, 75)
    check_attention("attention_prefill", q, k, v, offsets, *past, sinks, window, None, 50)
    check_attention("attention_prefill", q, k, v, offsets, sinks=sinks, window=window)


# ------------------------------------------------------------------------------ products, experts


@pytest.mark.parametrize("rows", [1, 17, 33])
def test_shards_and_odd_sizes(rows: int) -> None:
    arguments = randn(rows, 176), *op_samples.shards(33, 8, 24, k=176), [33, 8, 24]
    want = cpu.reference_body("nvfp4_linear")(
        **in_fp32(REGISTRY["nvfp4_linear"].bind(arguments, {}))
    )
    assert_close(run("nvfp4_linear", *arguments), want)


def test_Q1_every_scale_byte() -> None:
    codes = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 8)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].view(torch.float8_e4m3fn)
    got = run("nvfp4_dequantize", codes, scales)
    want = cpu.reference_body("nvfp4_dequantize")(codes, scales, None, torch.float32)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_Q3_no_overflow_on_the_way() -> None:
    weight = torch.full((16, 1024), 0x77, dtype=torch.uint8)
    scale = torch.full((16, 128), 1.0).to(torch.float8_e4m3fn)
    with emulated_bf16():
        out = run("nvfp4_linear", torch.full((1, 2048), 6.0), weight, scale, torch.tensor(1e-3))
    assert bool((out == 73.5).all())


def test_Q4_rows_of_nan_leave_the_others_alone() -> None:
    weights = op_samples.quantized(48, 64)
    x = randn(8, 64)
    x[5:] = NAN
    got = run("nvfp4_linear", x, *weights)
    assert torch.equal(got[:5], run("nvfp4_linear", x[:5], *weights))


def grouped_cases() -> Iterator[tuple[str, torch.Tensor]]:
    generator = op_samples.rng(1)
    yield "few", torch.randint(0, 4, (3, 3), generator=generator)
    yield "many", torch.randint(0, 4, (50, 3), generator=generator)
    yield "one expert", torch.full((50, 3), 2)
    skipped = torch.randint(-2, 6, (50, 3), generator=generator)
    yield "ids out of range", skipped
    yield "all skipped", torch.full((30, 3), -1)


@pytest.mark.parametrize(("title", "ids"), list(grouped_cases()))
def test_Q5_grouping(title: str, ids: torch.Tensor) -> None:
    rows, ids = ids.shape[0], ids.to(torch.int32)
    weights = (*op_samples.gated_experts(4, 16, 32), *op_samples.experts(4, 32, 16, seed=50))
    topk_weights = randn(rows, 3, seed=4, dtype=torch.float32)
    outside = (ids < 0) | (ids >= 4)
    topk_weights[outside] = NAN  # nothing of a skipped entry counts
    x, shared = randn(rows, 32), randn(rows, 32, seed=8)
    got = run("nvfp4_routed_experts", x, topk_weights, ids, *weights, shared)
    known = torch.where(outside, -1, ids)
    bound = REGISTRY["nvfp4_routed_experts"].bind((x, topk_weights, known, *weights, shared), {})
    assert_close(got, cpu.reference_body("nvfp4_routed_experts")(**in_fp32(bound)))
    assert title


def test_one_choice_out_of_a_wider_tensor() -> None:
    """[M, 1] with strides of its own, of which a reshape to [M] is a view."""
    weights = (op_samples.randn(4, 32, 32) / 6, op_samples.randn(4, 32, 16) / 4)
    wide, x = int32(*range(-1, 11)).view(6, 2) % 5 - 1, randn(6, 32)
    for ids in (wide[:, :1], wide[:, 1:], wide.T[:1].T):
        args = (x, torch.rand(6, 2)[:, :1], ids, *weights)
        bound = REGISTRY["bf16_routed_experts"].bind(args, {})
        want = cpu.reference_body("bf16_routed_experts")(**in_fp32(bound))
        assert_close(run("bf16_routed_experts", *args), want)


def test_a_kernel_gets_no_strides_that_it_does_not_know() -> None:
    from flint_kernels.backends.triton.experts import Plan, expert_matmul

    ids = int32(0, 1, 2, 3)[::2]
    plan = Plan(16, 2, None, ids, None, None)
    with pytest.raises(ValueError, match=r"block_expert got strides \(2,\)"):
        expert_matmul(
            torch.ones(2, 16), plan, torch.zeros(2, 16), torch.ones(4, 16, 16), None, None,
            gated=False,
        )  # fmt: skip


def test_R3_R4_slots() -> None:
    """Slots outside the cache write nothing, and rows beyond the last slot are padding."""
    k, v = randn(6, 2, 16), randn(6, 2, 16, seed=1)
    k_cache, v_cache = (randn(2, 16, 2, 16, seed=s, dtype=torch.float32) for s in (2, 3))
    before = k_cache.clone()
    slots = torch.tensor([5, -1, 32, -7, 2**40])
    gpu_general.kv_cache_write(k.float(), v.float(), slots, k_cache, v_cache)
    assert torch.equal(k_cache[0, 5], k[0].float())
    assert torch.equal(v_cache[0, 5], v[0].float())
    before[0, 5] = k_cache[0, 5]
    assert torch.equal(k_cache, before)


def test_kinds_of_call_are_told_apart() -> None:
    """`launch` knows a call by what Triton compiles for; sizes that vary are not part of it."""

    class Kernel:
        do_not_specialize = ("rows",)

    def kind(**arguments: Any) -> tuple[Any, ...]:
        return launch._kind(Kernel, torch.device("cuda", 0), arguments, {"num_warps": 4})

    x = torch.zeros(64)
    base = kind(x=x, rows=1, stride=32, scale=0.5, BLOCK=16, sinks=None)
    assert base == kind(x=x.clone(), rows=16, stride=64, scale=0.1, BLOCK=16, sinks=None)
    for change in (
        {"x": x[1:]},
        {"x": x.to(BF16)},
        {"rows": 1 << 31},
        {"stride": 33},
        {"stride": 1},
        {"BLOCK": 32},
        {"sinks": x},
    ):
        arguments = {"x": x, "rows": 1, "stride": 32, "scale": 0.5, "BLOCK": 16, "sinks": None}
        assert base != kind(**{**arguments, **change})
