"""The library's GPU kernels of rows and the NVFP4 repack, against the plain PyTorch bodies.

A norm's sum is taken in another order than PyTorch's on the CPU, so a value may differ by one unit
in the last place of BF16, in few places; what has no sum is equal to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from flint_kernels import ops
from flint_kernels.backends import cuda
from flint_kernels.backends.cpu import reference_body
from flint_kernels.formats import nvfp4
from flint_kernels.model.rope import cos_sin_table
from flint_kernels.ops import VALUE_CHECKS_VARIABLE
from flint_kernels.reference.kv_write import rotate

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
HIDDEN, HEADS, KV_HEADS, DIM = 2048, 32, 4, 128
GPU = torch.device("cuda")

_native: Any = torch.ops.flint_native


@pytest.fixture(autouse=True)
def _fast_kernels() -> Iterator[None]:
    """The library's kernels are what runs here, and their errors belong to their own test."""
    assert cuda.why_not(GPU) is None, cuda.why_not(GPU)
    torch.manual_seed(0)
    yield
    torch.cuda.synchronize()


def randn(*shape: int, dtype: torch.dtype = BF16, device: torch.device | str = GPU) -> torch.Tensor:
    return torch.randn(*shape, device=device).to(dtype)


def misaligned(x: torch.Tensor) -> torch.Tensor:
    """A copy of x that starts one element into its buffer."""
    copy = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape)
    return copy.copy_(x)


def ordered(x: torch.Tensor) -> torch.Tensor:
    """BF16 as integers in the order of its values: neighbours are 1 apart, -0 is 0."""
    bits = x.cpu().contiguous().view(torch.int16).to(torch.int32)
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


def assert_within_an_ulp(got: torch.Tensor, want: torch.Tensor) -> None:
    """At most 1 ulp anywhere, and that in at most 1 of 100 values; NaN in the same places."""
    got, want = got.cpu(), want.cpu()
    assert got.shape == want.shape and got.dtype == want.dtype
    nan = torch.isnan(want)
    assert torch.equal(torch.isnan(got), nan)
    if want.dtype == torch.float32:
        torch.testing.assert_close(got[~nan], want[~nan], rtol=2e-6, atol=1e-30)
        return
    apart = (ordered(got) - ordered(want)).abs()[~nan]
    assert not bool((apart > 1).any())
    assert int(apart.count_nonzero()) <= 1 + got.numel() // 100


def same_bits(got: torch.Tensor, want: torch.Tensor) -> bool:
    return torch.equal(got.cpu().view(torch.uint8), want.cpu().view(torch.uint8))


def on_cpu(name: str, *args: Any, **kwargs: Any) -> Any:
    """The plain PyTorch body of an op, on CPU copies."""
    declared = ops.REGISTRY[name].bind(
        [a.cpu() if isinstance(a, torch.Tensor) else a for a in args], kwargs
    )
    return reference_body(name)(**declared)


# ------------------------------------------------------------------------------ norms


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("width", [HIDDEN, 1, 7, 8, 100, 1000, 2056, 4096, 8192, 16384, 16385])
@pytest.mark.parametrize("rows", [1, 3, 1500])
def test_norms_equal_the_reference(rows: int, width: int, dtype: torch.dtype) -> None:
    if rows * width > 2**22:
        rows = 20
    x, residual = randn(rows, width, dtype=dtype), randn(rows, width, dtype=dtype)
    weight = randn(width)
    assert_within_an_ulp(ops.rms_norm(x, weight), on_cpu("rms_norm", x, weight))
    normed, total = ops.fused_add_rms_norm(x, residual, weight, 1e-5)
    want_normed, want_total = on_cpu("fused_add_rms_norm", x, residual, weight, 1e-5)
    assert_within_an_ulp(normed, want_normed)
    assert same_bits(total, want_total)


@pytest.mark.parametrize("rows", [1, 5, 3000])
def test_N1_strided_rows_equal_contiguous_ones(rows: int) -> None:
    wide, weight = randn(rows, HIDDEN + 64), randn(HIDDEN)
    inner = wide[:, 32 : 32 + HIDDEN]
    assert same_bits(ops.rms_norm(inner, weight), ops.rms_norm(inner.contiguous(), weight))
    turned = randn(HIDDEN, rows).t()
    assert same_bits(ops.rms_norm(turned, weight), ops.rms_norm(turned.contiguous(), weight))
    got = ops.fused_add_rms_norm(inner, turned, weight)
    want = ops.fused_add_rms_norm(inner.contiguous(), turned.contiguous(), weight)
    assert all(map(same_bits, got, want))
    deep = randn(3, 2, rows, HIDDEN).transpose(0, 2)
    assert same_bits(ops.rms_norm(deep, weight), ops.rms_norm(deep.contiguous(), weight))
    spread = randn(1, HIDDEN).expand(rows, HIDDEN)
    assert same_bits(ops.silu_and_mul(spread), ops.silu_and_mul(spread.contiguous()))
    assert same_bits(ops.silu_and_mul(turned), ops.silu_and_mul(turned.contiguous()))


@pytest.mark.parametrize("rows", [1, 5, 3000])
def test_N2_misaligned_rows_give_the_aligned_result(rows: int) -> None:
    x, residual, weight = randn(rows, HIDDEN), randn(rows, HIDDEN), randn(HIDDEN)
    want = ops.fused_add_rms_norm(x, residual, weight)
    for args in (
        (misaligned(x), residual, weight),
        (x, misaligned(residual), weight),
        (x, residual, misaligned(weight)),
        (misaligned(x), misaligned(residual), misaligned(weight)),
    ):
        assert all(map(same_bits, ops.fused_add_rms_norm(*args), want))
    assert same_bits(ops.rms_norm(misaligned(x), weight), ops.rms_norm(x, weight))
    assert same_bits(ops.silu_and_mul(misaligned(x)), ops.silu_and_mul(x))


def test_N3_no_rows_and_then_some() -> None:
    weight = randn(HIDDEN)
    assert ops.rms_norm(randn(0, HIDDEN), weight).shape == (0, HIDDEN)
    assert ops.silu_and_mul(randn(0, HIDDEN)).shape == (0, HIDDEN // 2)
    x = randn(2, HIDDEN)
    assert_within_an_ulp(ops.rms_norm(x, weight), on_cpu("rms_norm", x, weight))


def test_N4_a_chain_of_72_adds_eager_and_compiled() -> None:
    weight, steps = randn(HIDDEN), randn(72, 2, HIDDEN)

    def chain(steps: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed = residual
        for step in steps.unbind(0):
            normed, residual = ops.fused_add_rms_norm(step, residual, weight)
        return normed, residual

    start = randn(2, HIDDEN)
    normed, residual = chain(steps, start)
    compiled = torch.compile(chain, fullgraph=True, backend="aot_eager")(steps, start)
    assert same_bits(compiled[0], normed) and same_bits(compiled[1], residual)
    want = start.cpu()
    for step in steps.cpu().unbind(0):
        unrounded = step.float() + want.float()
        want = unrounded.to(BF16)
    assert same_bits(residual, want)
    scale = torch.rsqrt(unrounded.square().mean(-1, keepdim=True) + 1e-6)
    assert_within_an_ulp(normed, (unrounded * scale * weight.cpu().float()).to(BF16))


def test_N5_large_values_do_not_overflow() -> None:
    x, weight = torch.full((2, HIDDEN), 300.0, dtype=BF16, device=GPU), randn(HIDDEN)
    assert torch.equal(ops.rms_norm(x, weight), weight.expand(2, -1))


@pytest.mark.parametrize("width", [6144, 1, 7, 64, 100, 1000])
@pytest.mark.parametrize("rows", [1, 3, 1500])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_silu_and_mul_equals_the_reference(rows: int, width: int, dtype: torch.dtype) -> None:
    x = randn(rows if width < 6144 else min(rows, 600), 2 * width, dtype=dtype) * 4
    assert_within_an_ulp(ops.silu_and_mul(x), on_cpu("silu_and_mul", x))


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_N6_gates_at_the_limits(dtype: torch.dtype) -> None:
    gates = [-torch.inf, -100.0, -88.5, -87.5, -0.0, 0.0, 88.5, torch.inf, torch.nan]
    gate = torch.tensor(gates * 8, dtype=dtype, device=GPU)  # a multiple of 8: both kernels
    for part in (gate, gate[: len(gates)]):
        act = ops.silu_and_mul(torch.cat([part, torch.ones_like(part)]))
        assert_within_an_ulp(act, on_cpu("silu_and_mul", torch.cat([part, torch.ones_like(part)])))
        assert torch.isnan(act[0]) and act[1] == 0
        assert float(act[3]) == pytest.approx(-8.7e-37, rel=0.01)


def test_N7_more_than_2_31_elements() -> None:
    rows = 2**20 + 3
    x = torch.empty(rows, HIDDEN, dtype=BF16, device=GPU)
    x[:-3] = 1
    x[-3:] = randn(3, HIDDEN)
    weight = randn(HIDDEN)
    assert same_bits(ops.rms_norm(x, weight)[-3:], ops.rms_norm(x[-3:], weight))
    assert same_bits(ops.silu_and_mul(x)[-3:], ops.silu_and_mul(x[-3:]))
    whole = (x.numel() - 3) // 1019 * 1019
    flat = x.view(-1)[-whole:].view(-1, 1019)  # no alignment, odd width, 2.1 million rows
    tail = flat[-3:]
    narrow = randn(1019)
    assert same_bits(ops.rms_norm(flat, narrow)[-3:], ops.rms_norm(tail, narrow))
    thin = x.view(-1)[: 2**24].view(-1, 16)  # more rows than the second dimension of a grid
    assert same_bits(ops.silu_and_mul(thin)[-3:], ops.silu_and_mul(thin[-3:]))


def test_a_rows_bits_depend_on_the_row_alone() -> None:
    x, residual, weight = randn(3000, HIDDEN), randn(3000, HIDDEN), randn(HIDDEN)
    normed, total = ops.fused_add_rms_norm(x, residual, weight)
    for rows in (1, 2, 7, 1024, 1025):
        got = ops.fused_add_rms_norm(x[:rows], residual[:rows], weight)
        assert same_bits(got[0], normed[:rows]) and same_bits(got[1], total[:rows])
    act = ops.silu_and_mul(x)
    assert all(same_bits(ops.silu_and_mul(x[:rows]), act[:rows]) for rows in (1, 2, 513))


def test_every_way_to_spread_a_row_gives_the_same_bits() -> None:
    x, residual, weight = randn(300, HIDDEN), randn(300, HIDDEN), randn(HIDDEN)
    want = ops.fused_add_rms_norm(x, residual, weight)
    for plan in range(1, 3):
        got = torch.empty_like(x), torch.empty_like(x)
        _native.rms_norm_cuda_out(x, residual, weight, 1e-6, *got, False, plan)
        assert all(map(same_bits, got, want)), plan


def test_an_output_may_be_its_input() -> None:
    for rows in (3, 2000):
        x, residual, weight = randn(rows, HIDDEN), randn(rows, HIDDEN), randn(HIDDEN)
        want = ops.fused_add_rms_norm(x, residual, weight)
        for got in ((x.clone(), residual.clone()), (misaligned(x), misaligned(residual))):
            _native.rms_norm_cuda_out(*got, weight, 1e-6, *got, False)
            assert all(map(same_bits, got, want))


# ------------------------------------------------------------------------------ q/k norm, RoPE, KV


def caches(layout: str, blocks: int = 64, page: int = 16, **kwargs: Any) -> list[torch.Tensor]:
    """Zeroed K and V caches [blocks, page, kv_heads, DIM] in one of the layouts in use."""
    form: dict[str, Any] = {"dtype": BF16, "device": GPU, **kwargs}
    if layout == "NHD":
        return [torch.zeros(blocks, page, KV_HEADS, DIM, **form) for _ in range(2)]
    if layout == "HND":
        both = [torch.zeros(blocks, KV_HEADS, page, DIM, **form) for _ in range(2)]
        return [cache.permute(0, 2, 1, 3) for cache in both]
    if layout == "interleaved":
        return list(torch.zeros(blocks, 2, page, KV_HEADS, DIM, **form).unbind(1))
    if layout == "halves":
        both = torch.zeros(blocks, KV_HEADS, page, 2 * DIM, **form).permute(0, 2, 1, 3)
        return list(both.split(DIM, dim=-1))
    assert layout == "misaligned"
    return [misaligned(torch.zeros(blocks, page, KV_HEADS, DIM, **form)) for _ in range(2)]


LAYOUTS = ["NHD", "HND", "interleaved", "halves", "misaligned"]


def rope_inputs(rows: int, table_rows: int = 4096, dtype: torch.dtype = BF16) -> dict[str, Any]:
    return {
        "qkv": randn(rows, (HEADS + 2 * KV_HEADS) * DIM, dtype=dtype),
        "q_weight": randn(DIM),
        "k_weight": randn(DIM),
        "cos_sin": cos_sin_table(table_rows, DIM, 1e6).to(GPU),
        "positions": torch.randint(table_rows, (rows,), device=GPU, dtype=torch.int32),
        "slot_mapping": torch.randperm(1024, device=GPU)[:rows].to(torch.int32),
    }


def call(inputs: dict[str, Any], k_cache: torch.Tensor, v_cache: torch.Tensor) -> Any:
    return ops.qk_norm_rope_kv_write(**inputs, k_cache=k_cache, v_cache=v_cache)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [1, 9, 700])
def test_R5_every_cache_layout(rows: int, layout: str) -> None:
    inputs = rope_inputs(rows)
    k_cache, v_cache = caches(layout)
    q, k = call(inputs, k_cache, v_cache)

    # The norm first: within 1 ulp. Then the rotation of those very values: to the bit.
    flat = {**inputs, "cos_sin": None}
    normed = call(flat, *caches("NHD"))
    want_normed = on_cpu("qk_norm_rope_kv_write", *flat.values(), *_cpu_caches(), 1e-6)
    table = inputs["cos_sin"].cpu()[inputs["positions"].cpu()]
    for got, plain, want in zip((q, k), normed, want_normed, strict=True):
        assert_within_an_ulp(plain, want)
        assert same_bits(got, rotate(plain.cpu(), table, BF16))

    # The cache holds k as returned and v as given, and zeros elsewhere.
    want_k, want_v = (torch.zeros(1024, KV_HEADS, DIM, dtype=BF16) for _ in range(2))
    slots = inputs["slot_mapping"].cpu().long()
    want_k[slots] = k.cpu()
    want_v[slots] = inputs["qkv"].cpu()[:, (HEADS + KV_HEADS) * DIM :].view(rows, KV_HEADS, DIM)
    assert same_bits(k_cache.reshape(want_k.shape), want_k)
    assert same_bits(v_cache.reshape(want_v.shape), want_v)

    # Alone, k and v go to the same places.
    again = caches(layout)
    v = inputs["qkv"].view(rows, -1, DIM)[:, HEADS + KV_HEADS :]
    ops.kv_cache_write(k, v, inputs["slot_mapping"], *again)
    assert torch.equal(again[0], k_cache) and torch.equal(again[1], v_cache)


def _cpu_caches() -> list[torch.Tensor]:
    return caches("NHD", device=torch.device("cpu"))


@pytest.mark.parametrize("rows", [2, 600])
def test_N1_N2_qkv_of_any_stride_and_alignment(rows: int) -> None:
    inputs = rope_inputs(rows)
    want = call(inputs, *caches("NHD"))
    qkv = inputs["qkv"]
    wide = torch.cat([qkv, qkv], dim=1)[:, : qkv.shape[1]]
    odd = torch.cat([qkv[:, :1], qkv], dim=1)[:, 1:]
    turned = qkv.t().contiguous().t()
    for view in (wide, odd, turned, misaligned(qkv)):
        assert all(map(same_bits, call({**inputs, "qkv": view}, *caches("NHD")), want))
    for name in ("q_weight", "k_weight", "cos_sin"):
        moved = {**inputs, name: misaligned(inputs[name])}
        assert all(map(same_bits, call(moved, *caches("NHD")), want))
    wide_indices = {name: inputs[name].long() for name in ("positions", "slot_mapping")}
    assert all(map(same_bits, call({**inputs, **wide_indices}, *caches("NHD")), want))


@pytest.mark.parametrize("shape", [(3, 1, 64), (7, 2, 128), (5, 1, 6), (2, 3, 130), (2, 1, 5)])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_other_head_counts_and_widths(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    heads, kv_heads, dim = shape
    table = torch.randn(32, dim) if dim % 2 == 0 else None
    args = (
        randn(9, (heads + 2 * kv_heads) * dim, dtype=dtype, device="cpu"),
        randn(dim, dtype=dtype, device="cpu"),
        randn(dim, dtype=dtype, device="cpu"),
        table,
        torch.arange(9),
        torch.tensor([5, -1, 0, 63, 62, 1, 40]),
    )
    cpu = [torch.zeros(4, 16, kv_heads, dim, dtype=dtype) for _ in range(2)]
    gpu = [cache.to(GPU) for cache in cpu]
    moved = [None if a is None else a.to(GPU) for a in args]
    got = ops.qk_norm_rope_kv_write(*moved, *gpu)
    want = on_cpu("qk_norm_rope_kv_write", *args, *cpu, 1e-6)
    # A norm that is an ulp off shows in both turned elements: an ulp of the head's largest.
    for g, w in zip((*got, *gpu), (*want, *cpu), strict=True):
        bound = (2.0**-7 if dtype == BF16 else 2e-6) * w.float().abs().amax(-1, keepdim=True)
        assert bool(((g.cpu().float() - w.float()).abs() <= bound).all())
        assert float((g.cpu() != w).float().mean()) < (0.01 if dtype == BF16 else 1)
    assert same_bits(gpu[1], cpu[1])


def test_R1_positions_outside_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = rope_inputs(6, table_rows=1024)
    positions = [-1, 1023, 1024, 2**31 - 1, 0, 7]
    inputs["positions"] = torch.tensor(positions, dtype=torch.int32, device=GPU)
    k_cache, v_cache = caches("NHD")
    q, k = call(inputs, k_cache, v_cache)
    alone = {
        name: value[[1, 4, 5]] if name in ("qkv", "positions", "slot_mapping") else value
        for name, value in inputs.items()
    }
    want_cache = caches("NHD")
    want = call(alone, *want_cache)
    assert same_bits(q[[1, 4, 5]], want[0]) and same_bits(k[[1, 4, 5]], want[1])
    assert bool(q[[0, 2, 3]].isnan().all() and k[[0, 2, 3]].isnan().all())
    assert torch.equal(k_cache, want_cache[0]) and torch.equal(v_cache, want_cache[1])
    monkeypatch.setenv(VALUE_CHECKS_VARIABLE, "1")
    with pytest.raises(ValueError, match="positions"):
        call(inputs, k_cache, v_cache)


def test_slots_outside_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = rope_inputs(5)
    slots = [1024, 3, -2, 2**62, -1]
    inputs["slot_mapping"] = torch.tensor(slots, dtype=torch.int64, device=GPU)
    k_cache, v_cache = caches("HND")
    q, k = call(inputs, k_cache, v_cache)
    assert q.isnan().flatten(1).all(1).tolist() == [True, False, True, True, False]
    assert k.isnan().flatten(1).all(1).tolist() == [True, False, True, True, False]
    written = k_cache.reshape(1024, -1).any(1).nonzero().flatten().tolist()
    assert written == [3]
    v = inputs["qkv"].view(5, -1, DIM)[:, HEADS + KV_HEADS :]
    again = caches("HND")
    ops.kv_cache_write(k, v, inputs["slot_mapping"], *again)
    assert torch.equal(again[0], k_cache) and torch.equal(again[1], v_cache)
    monkeypatch.setenv(VALUE_CHECKS_VARIABLE, "1")
    with pytest.raises(ValueError, match="slot_mapping"):
        call(inputs, k_cache, v_cache)


def test_R3_a_row_without_a_slot_is_not_cached() -> None:
    inputs = rope_inputs(3)
    inputs["slot_mapping"] = torch.tensor([5, -1, -1], device=GPU)
    k_cache, v_cache = caches("NHD")
    q, k = call(inputs, k_cache, v_cache)
    assert not bool(q.isnan().any())
    for cache in (k_cache, v_cache):
        assert cache.reshape(1024, -1).any(1).nonzero().flatten().tolist() == [5]
    assert same_bits(k_cache.reshape(1024, KV_HEADS, DIM)[5], k[0])


@pytest.mark.parametrize("rows, slots", [(512, 509), (8, 5)])
def test_R4_padding_rows_with_garbage_positions(rows: int, slots: int) -> None:
    inputs = rope_inputs(rows)
    inputs["slot_mapping"] = torch.randperm(1024, device=GPU)[:slots]
    inputs["positions"][slots:] = torch.tensor([-5, 2**31 - 1, 4096], device=GPU)
    k_cache, v_cache = caches("NHD")
    q, k = call(inputs, k_cache, v_cache)
    assert int(k_cache.reshape(1024, -1).any(1).sum()) == slots
    assert int(v_cache.reshape(1024, -1).any(1).sum()) == slots
    assert not bool(q[slots:].any()) and not bool(k[slots:].any())
    assert not bool(q[:slots].isnan().any())


def test_Q6_65536_tokens_through_norm_and_rope() -> None:
    rows = 65536
    inputs = rope_inputs(rows)
    inputs["slot_mapping"] = torch.randperm(rows, device=GPU)
    cache = caches("NHD", blocks=rows // 16)
    q, k = call(inputs, *cache)
    last = {
        name: value[-3:] if name in ("qkv", "positions", "slot_mapping") else value
        for name, value in inputs.items()
    }
    want = call(last, *caches("NHD", blocks=rows // 16))
    assert same_bits(q[-3:], want[0]) and same_bits(k[-3:], want[1])
    assert same_bits(cache[0].view(rows, KV_HEADS, DIM)[inputs["slot_mapping"]], k)
    x, weight = randn(rows, HIDDEN), randn(HIDDEN)
    assert same_bits(ops.rms_norm(x, weight)[-3:], ops.rms_norm(x[-3:], weight))


def test_N7_caches_and_rows_beyond_2_31_elements() -> None:
    blocks = 2**31 // (16 * KV_HEADS * DIM) + 2
    cache = [torch.empty(blocks, 16, KV_HEADS, DIM, dtype=BF16, device=GPU) for _ in range(2)]
    cache[0][-2:], cache[1][-2:] = 0, 0
    rows = 2**31 // ((HEADS + 2 * KV_HEADS) * DIM) + 3
    inputs = rope_inputs(3)
    qkv = torch.empty(rows, (HEADS + 2 * KV_HEADS) * DIM, dtype=BF16, device=GPU)
    qkv[-3:] = inputs["qkv"]
    far = torch.full((rows,), -1, dtype=torch.int64, device=GPU)
    far[-3:] = blocks * 16 - torch.tensor([1, 2, 20], device=GPU)
    positions = torch.zeros(rows, dtype=torch.int64, device=GPU)
    positions[-3:] = inputs["positions"].long()
    large = {**inputs, "qkv": qkv, "positions": positions, "slot_mapping": far}
    q, k = call(large, *cache)
    small = caches("NHD", blocks=2)
    slots = 32 - torch.tensor([1, 2, 20], device=GPU)
    want = call({**inputs, "slot_mapping": slots}, *small)
    assert same_bits(q[-3:], want[0]) and same_bits(k[-3:], want[1])
    assert torch.equal(cache[0][-2:], small[0]) and torch.equal(cache[1][-2:], small[1])


def test_no_rows_and_then_some() -> None:
    k_cache, v_cache = caches("NHD")
    q, k = call(rope_inputs(0), k_cache, v_cache)
    assert q.shape == (0, HEADS, DIM) and k.shape == (0, KV_HEADS, DIM)
    ops.kv_cache_write(k, k, torch.empty(0, dtype=torch.int32, device=GPU), k_cache, v_cache)
    assert not bool(k_cache.any())
    assert call(rope_inputs(1), k_cache, v_cache)[0].shape == (1, HEADS, DIM)


# ------------------------------------------------------------------------------ NVFP4 repack


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 7, 32), (4096, 80)])
def test_repack_equals_the_reference_to_the_bit(shape: tuple[int, ...]) -> None:
    blocks = torch.randint(256, (*shape, 36), dtype=torch.uint8)
    blocks[..., :4].clamp_(max=0xFE)
    blocks = blocks.flatten(-2)
    want = nvfp4.gguf_to_modelopt(blocks)
    gpu = blocks.to(GPU)
    spread = torch.stack([gpu, gpu], dim=-1)[..., 0]
    for view in (gpu, misaligned(gpu), spread):
        got = ops.gguf_to_modelopt(view)
        assert all(map(same_bits, got, want))
    assert same_bits(ops.modelopt_to_gguf(*got), nvfp4.modelopt_to_gguf(*want))
    weight = misaligned(got[0])
    assert same_bits(ops.modelopt_to_gguf(weight, got[1]), nvfp4.modelopt_to_gguf(*want))


def test_Q1_every_scale_byte_is_taken_or_refused_as_the_reference_does() -> None:
    def outcome(call: Callable[..., Any], *args: torch.Tensor) -> Any:
        try:
            result = call(*args)
        except ValueError as error:
            return str(error)
        parts = result if isinstance(result, tuple) else (result,)
        return [part.cpu().view(torch.uint8).tolist() for part in parts]

    for byte in range(256):
        blocks = torch.full((3, 5 * 36), 0x21, dtype=torch.uint8)
        blocks[1, 2 * 36 + 3] = byte
        want = outcome(ops.gguf_to_modelopt, blocks)
        assert outcome(ops.gguf_to_modelopt, blocks.to(GPU)) == want, byte
        weight, scale = nvfp4.gguf_to_modelopt(torch.full((3, 5 * 36), 0x21, dtype=torch.uint8))
        scale.view(torch.uint8)[2, 7] = byte
        want = outcome(ops.modelopt_to_gguf, weight, scale)
        assert outcome(ops.modelopt_to_gguf, weight.to(GPU), scale.to(GPU)) == want, byte


def test_the_first_of_many_bad_scales_is_named() -> None:
    blocks = torch.full((4096, 36), 0x21, dtype=torch.uint8)
    blocks[1234:, 1] = 0xFF
    with pytest.raises(ValueError, match=r"row \[1234\], super-block 0, block 1"):
        ops.gguf_to_modelopt(blocks.to(GPU))


# ------------------------------------------------------------------------------ graphs and devices


def captured(body: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = body()
    return graph, result


@pytest.mark.parametrize("enable_pdl", [False, True])
@pytest.mark.parametrize("rows", [1, 40, 2000])
def test_graphs_replay_with_changed_inputs(rows: int, enable_pdl: bool) -> None:
    x, residual, weight = randn(rows, HIDDEN), randn(rows, HIDDEN), randn(HIDDEN)
    inputs = rope_inputs(min(rows, 1000))
    cache = caches("HND")
    blocks = torch.full((rows, 36), 0x21, dtype=torch.uint8, device=GPU)

    def body() -> list[torch.Tensor]:
        normed, total = ops.fused_add_rms_norm(x, residual, weight, enable_pdl=enable_pdl)
        act = ops.silu_and_mul(ops.rms_norm(normed, weight, enable_pdl=enable_pdl))
        q, k = ops.qk_norm_rope_kv_write(
            **inputs, k_cache=cache[0], v_cache=cache[1], enable_pdl=enable_pdl
        )
        ops.kv_cache_write(k, k, inputs["slot_mapping"], *cache, enable_pdl=enable_pdl)
        repacked = ops.modelopt_to_gguf(*ops.gguf_to_modelopt(blocks))
        return [normed, total, act, q, k, repacked]

    graph, outputs = captured(body)
    for _ in range(3):
        for tensor in (x, residual, weight, inputs["qkv"]):
            tensor.copy_(randn(*tensor.shape))
        inputs["positions"].random_(4096)
        slots = inputs["slot_mapping"]
        slots.copy_(torch.randperm(1024, device=GPU)[: slots.numel()])
        blocks.random_(0x7F)
        for part in (*outputs, *cache):
            part.zero_()
        graph.replay()
        after = [part.clone() for part in (*outputs, *cache)]
        for part in cache:
            part.zero_()
        assert all(map(same_bits, after, [*body(), *cache]))


def test_a_capture_checks_no_scale() -> None:
    blocks = torch.full((2, 36), 0xFF, dtype=torch.uint8, device=GPU)
    graph, (_, scale) = captured(lambda: ops.gguf_to_modelopt(blocks))
    graph.replay()
    assert not bool(scale.view(torch.uint8).any())


@pytest.mark.parametrize("rows", [1, 7, 2000])
def test_C6_a_pdl_chain_behind_a_slow_producer_is_stable(rows: int) -> None:
    """Each kernel reads what the one before wrote, in place: a missing wait shows."""
    weight = randn(HIDDEN)
    start = randn(rows, 2 * HIDDEN)
    inputs = rope_inputs(min(rows, 500))
    wide, x = torch.empty_like(start), torch.empty(rows, HIDDEN, dtype=BF16, device=GPU)
    residual = torch.zeros_like(x)
    qkv = inputs["qkv"].clone()
    q = torch.empty(qkv.shape[0], HEADS, DIM, dtype=BF16, device=GPU)
    k = torch.empty(qkv.shape[0], KV_HEADS, DIM, dtype=BF16, device=GPU)
    cache = caches("NHD")
    turn = [inputs[n] for n in ("q_weight", "k_weight", "cos_sin", "positions", "slot_mapping")]

    def chain(pdl: bool) -> None:
        torch.cuda._sleep(20_000)
        wide.copy_(start)
        residual.zero_()
        qkv.copy_(inputs["qkv"])
        for _ in range(8):
            _native.silu_and_mul_cuda_out(wide, x, pdl)
            _native.rms_norm_cuda_out(x, residual, weight, 1e-6, x, residual, pdl)
            _native.rms_norm_cuda_out(x, None, weight, 1e-6, wide.view(-1)[: x.numel()], None, pdl)
            _native.qk_norm_rope_kv_write_cuda_out(qkv, *turn, *cache, 1e-6, q, k, pdl)
            _native.silu_and_mul_cuda_out(
                q.view(-1, 2 * HIDDEN), qkv.view(-1)[: q.numel() // 2], pdl
            )

    def state() -> list[torch.Tensor]:
        return [part.clone() for part in (wide, x, residual, qkv, q, k, *cache)]

    chain(False)
    want = state()
    graph, _ = captured(lambda: chain(True))
    wrong = torch.zeros((), dtype=torch.int64, device=GPU)
    for _ in range(1000 if rows < 100 else 200):
        graph.replay()
        for got, right in zip((wide, x, residual, qkv, q, k, *cache), want, strict=True):
            wrong += (got.view(torch.int16) != right.view(torch.int16)).sum()
    assert int(wrong) == 0


def test_C7_the_tensors_device_and_not_the_current_one() -> None:
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    x, weight = randn(4, HIDDEN, device=device), randn(HIDDEN, device=device)
    with torch.cuda.device(0):
        got = ops.rms_norm(x, weight)
        assert torch.cuda.current_device() == 0
    assert got.device == device
    assert_within_an_ulp(got, on_cpu("rms_norm", x, weight))


def test_the_current_stream_is_taken() -> None:
    x, weight = torch.zeros(4, HIDDEN, dtype=BF16, device=GPU), randn(HIDDEN)
    values = randn(4, HIDDEN)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)  # on another stream the kernel would be done before the copy
        x.copy_(values)
        got = ops.rms_norm(x, weight)
    side.synchronize()
    assert_within_an_ulp(got, on_cpu("rms_norm", values, weight))


def test_raw_ops_refuse_what_is_elsewhere_or_does_not_fit() -> None:
    x, weight = randn(4, HIDDEN), randn(HIDDEN)
    with pytest.raises(RuntimeError, match="weight: want a tensor on cuda"):
        _native.rms_norm_cuda_out(x, None, weight.cpu(), 1e-6, torch.empty_like(x), None, False)
    with pytest.raises(RuntimeError, match="normed: got 6144 elements, want 8192"):
        _native.rms_norm_cuda_out(x, None, weight, 1e-6, torch.empty_like(x[:3]), None, False)
    with pytest.raises(RuntimeError, match="x: want a contiguous last dimension"):
        _native.silu_and_mul_cuda_out(x.t(), torch.empty(2048, 2, dtype=BF16, device=GPU), False)
    with pytest.raises(RuntimeError, match="act: got scalar type"):
        _native.silu_and_mul_cuda_out(x, torch.empty(4, 1024, device=GPU), False)
