"""q/k norm, RoPE, KV write: rows R1-R5, C2, Q6, and a second, float64 arithmetic."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from op_samples import BF16, LAYOUTS, caches, int32, quantized, randn, shards, strided, table
from spec_float64 import U32, assert_close, assert_rounds, exact, f64, rms_norm, rope
from test_namespace import bits

from flint_kernels import ops

pytestmark = pytest.mark.usefixtures("_each_cpu_body")

HQ, HKV, D = 4, 2, 32
COLUMNS = (HQ + 2 * HKV) * D
WEIGHTS = randn(D, seed=3), randn(D, seed=4)
MAX32 = 2**31 - 1

Cache = tuple[torch.Tensor, torch.Tensor]


def empty_cache(blocks: int = 3, page: int = 16, dtype: torch.dtype = BF16) -> Cache:
    return tuple(torch.zeros(blocks, page, HKV, D, dtype=dtype) for _ in range(2))  # type: ignore[return-value]


def write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cache: Cache,
    rope_table: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return ops.qk_norm_rope_kv_write(qkv, *WEIGHTS, rope_table, positions, slots, *cache)


def write_low_latency(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cache: Cache,
    rope_table: torch.Tensor | None,
) -> torch.Tensor:
    """The fused step with an identity for its projection, which hands qkv on as it is."""
    identity = torch.eye(qkv.shape[1], dtype=qkv.dtype)
    return ops.bf16_qkv_norm_rope_kv_write(
        qkv, identity, *WEIGHTS, rope_table, positions, slots, *cache
    )


WRITERS = pytest.mark.parametrize("writer", [write, write_low_latency])


# ------------------------------------------------------------------ R1: positions


def test_R1_the_last_position_of_the_table_is_exact() -> None:
    cos_sin, cache = table(1024, D), empty_cache(dtype=torch.float32)
    qkv = randn(1, COLUMNS, dtype=torch.float32)
    q, k = write(qkv, int32(1023), int32(0), cache, cos_sin)
    heads = f64(qkv).view(1, -1, D)
    n = rms_norm(heads[:, :HQ], f64(WEIGHTS[0]), 1e-6, exact)
    cos, sin = (torch.as_tensor(part) for part in f64(cos_sin[1023:]).chunk(2, dim=1))
    assert_close(q, rope(n, cos, sin, exact), 1e-6)
    n = rms_norm(heads[:, HQ : HQ + HKV], f64(WEIGHTS[1]), 1e-6, exact)
    assert_close(k, rope(n, cos, sin, exact), 1e-6)


@WRITERS
@pytest.mark.parametrize("position", [-1, 1024, MAX32])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_R1_a_position_outside_the_table(
    writer: Callable[..., object], position: int, dtype: torch.dtype
) -> None:
    cache, positions = empty_cache(), torch.tensor([3, position], dtype=dtype)
    with pytest.raises(ValueError, match=rf"norm_rope_kv_write.*'positions'.*{position}.*1024"):
        writer(randn(2, COLUMNS), positions, int32(0, 1), cache, table(1024, D))
    assert not any(part.any() for part in cache)


def test_R1_without_a_table_positions_are_not_read() -> None:
    a, b = empty_cache(), empty_cache()
    qkv = randn(2, COLUMNS)
    one = write(qkv, int32(-1, MAX32), int32(0, 1), a, None)
    two = write(qkv, int32(0, 1), int32(0, 1), b, None)
    assert all(torch.equal(x, y) for x, y in zip((*one, *a), (*two, *b), strict=True))


# ------------------------------------------------------------------ R3, R4: slots


@WRITERS
@pytest.mark.parametrize("layout", LAYOUTS)
def test_R3_minus_one_writes_nothing(writer: Callable[..., object], layout: str) -> None:
    cache = caches(layout, 3, 16, HKV, D)
    before = [part.clone() for part in cache]
    qkv = randn(3, COLUMNS)
    writer(qkv, int32(1, 2, 3), torch.tensor([5, -1, -1]), cache, table(16, D))
    for part, old in zip(cache, before, strict=True):
        changed = (part != old).flatten(2).any(-1)
        assert changed.nonzero().tolist() == [[0, 5]]
    assert torch.equal(cache[1][0, 5], qkv[0].view(-1, D)[-HKV:])


def test_R3_every_slot_is_written_where_it_says() -> None:
    """Slot s is token s % page of block s // page, also for int32 slots of the last block."""
    slots = torch.tensor([47, 0, 16, 31])
    k, v = randn(4, HKV, D), randn(4, HKV, D, seed=1)
    for dtype in (torch.int32, torch.int64):
        cache = empty_cache()
        ops.kv_cache_write(k, v, slots.to(dtype), *cache)
        for part, rows in zip(cache, (k, v), strict=True):
            flat = part.view(48, HKV, D)
            assert torch.equal(flat[slots], rows)
            assert int(flat.flatten(1).any(1).sum()) == 4


@WRITERS
def test_R4_rows_beyond_the_last_slot_are_padding(writer: Callable[..., object]) -> None:
    qkv, cos_sin = randn(512, COLUMNS), table(600, D)
    positions = torch.arange(512, dtype=torch.int32)
    positions[509:] = int32(-7, MAX32, -(2**31))
    slots = torch.randperm(640, generator=torch.Generator().manual_seed(1))[:509]
    cache, alone = empty_cache(40), empty_cache(40)
    results = writer(qkv, positions, slots, cache, cos_sin)
    for part in cache:
        written = part.flatten(0, 1).flatten(1).any(1)
        assert int(written.sum()) == 509
        assert bool(written[slots].all())
    expected = writer(qkv[:509], positions[:509], slots, alone, cos_sin)
    assert all(torch.equal(a, b) for a, b in zip(cache, alone, strict=True))
    if isinstance(results, torch.Tensor):
        results, expected = (results,), (expected,)
    for got, want in zip(results, expected, strict=True):
        assert torch.equal(got[:509], want)
        assert not got[509:].any()  # documented: zeros


@WRITERS
@pytest.mark.parametrize("slot", [48, -2, MAX32, 2**40])
def test_R4_a_slot_outside_the_cache(writer: Callable[..., object], slot: int) -> None:
    cache = empty_cache()
    with pytest.raises(ValueError, match=rf"norm_rope_kv_write.*'slot_mapping'.*{slot}.*\[0, 48\)"):
        writer(randn(2, COLUMNS), int32(1, 2), torch.tensor([0, slot]), cache, table(16, D))
    with pytest.raises(ValueError, match=rf"kv_cache_write.*'slot_mapping'.*{slot}.*\[0, 48\)"):
        ops.kv_cache_write(randn(2, HKV, D), randn(2, HKV, D), torch.tensor([0, slot]), *cache)
    assert not any(part.any() for part in cache)


# ------------------------------------------------------------------ R5: layouts


@WRITERS
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fill", [0.0, float("nan")])
def test_R5_cache_layouts(writer: Callable[..., object], layout: str, fill: float) -> None:
    mine = caches(layout, 3, 16, HKV, D)
    theirs = empty_cache()
    for part in (*mine, *theirs):
        part.fill_(fill)
    qkv, slots = strided(randn(5, COLUMNS)), torch.tensor([40, 3, -1, 16, 15])
    positions = torch.arange(5)
    one = writer(qkv, positions, slots, mine, table(16, D))
    two = writer(qkv, positions, slots, theirs, table(16, D))
    as_tuple = lambda r: r if isinstance(r, tuple) else (r,)  # noqa: E731
    for a, b in zip((*as_tuple(one), *mine), (*as_tuple(two), *theirs), strict=True):
        assert torch.equal(bits(a), bits(b))


def test_R5_a_cache_whose_head_dim_is_not_contiguous_is_refused() -> None:
    cache = tuple(torch.zeros(3, 16, D, HKV, dtype=BF16).transpose(2, 3) for _ in range(2))
    with pytest.raises(ValueError, match=r"'k_cache'.*strides.*last stride of 1"):
        write(randn(1, COLUMNS), int32(1), int32(1), cache, None)


# ------------------------------------------------------------------ C2, Q6


@WRITERS
def test_C2_write_then_read_compiles(writer: Callable[..., object]) -> None:
    def step(qkv: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        result = writer(qkv, int32(5), int32(21), (k_cache, v_cache), table(16, D))
        q = result[0] if isinstance(result, tuple) else result
        # The read sees what the write put into the cache, or the compiler reordered them.
        return ops.attention_decode(q, k_cache, v_cache, int32(1).view(1, 1), int32(6))

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    eager_cache, compiled_cache = caches("hnd", 3, 16, HKV, D), caches("hnd", 3, 16, HKV, D)
    for seed in (1, 2):
        qkv = randn(1, COLUMNS, seed=seed)
        assert torch.equal(step(qkv, *eager_cache), compiled(qkv, *compiled_cache))
        for a, b in zip(eager_cache, compiled_cache, strict=True):
            assert torch.equal(a, b)
    assert not torch.equal(eager_cache[0], caches("hnd", 3, 16, HKV, D)[0])


def test_Q6_65536_tokens_through_norm_and_rope() -> None:
    tokens, dim = 65_536, 8
    qkv, weights = randn(tokens, 3 * dim), (randn(dim, seed=3), randn(dim, seed=4))
    positions = torch.arange(tokens, dtype=torch.int32) % 1000
    slots = torch.randperm(tokens, generator=torch.Generator().manual_seed(0))
    cache = (
        torch.zeros(tokens // 16, 16, 1, dim, dtype=BF16),
        torch.zeros(tokens // 16, 16, 1, dim, dtype=BF16),
    )
    rope_table = table(1000, dim)
    q, k = ops.qk_norm_rope_kv_write(qkv, *weights, rope_table, positions, slots, *cache)
    assert torch.equal(cache[0].view(tokens, 1, dim)[slots], k)
    assert torch.equal(cache[1].view(tokens, dim)[slots], qkv[:, 2 * dim :])
    scratch = torch.zeros(1, 16, 1, dim, dtype=BF16), torch.zeros(1, 16, 1, dim, dtype=BF16)
    for row in (0, 32_767, 32_768, 65_534, 65_535):
        part = slice(row, row + 1)
        alone = ops.qk_norm_rope_kv_write(
            qkv[part], *weights, rope_table, positions[part], int32(0), *scratch
        )
        assert torch.equal(alone[0], q[part])
        assert torch.equal(alone[1], k[part])


# ------------------------------------------------------------------ the arithmetic


@pytest.mark.parametrize("rotary", [True, False])
@pytest.mark.parametrize("heads,kv_heads,dim", [(4, 2, 32), (3, 1, 20), (8, 8, 128), (5, 1, 6)])
def test_against_float64(rotary: bool, heads: int, kv_heads: int, dim: int) -> None:
    rows, eps = 6, 1e-5
    weights = randn(dim, seed=3), randn(dim, seed=4)
    positions, slots = torch.tensor([0, 1, 7, 31, 500, 2]), torch.tensor([0, 4, 2, 31, -1, 9])
    cos_sin = table(512, dim) if rotary else None
    qkv = randn(rows, (heads + 2 * kv_heads) * dim, dtype=torch.float32, scale=3.0)

    def run(x: torch.Tensor, with_table: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        cache = tuple(torch.zeros(2, 16, kv_heads, dim, dtype=x.dtype) for _ in range(2))
        out = ops.qk_norm_rope_kv_write(x, *weights, with_table, positions, slots, *cache, eps)
        return (*out, *cache)

    def normed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        view = f64(x).view(rows, -1, dim)
        return (
            rms_norm(view[:, :heads], f64(weights[0]), eps, exact),
            rms_norm(view[:, heads : heads + kv_heads], f64(weights[1]), eps, exact),
        )

    def turned(n: torch.Tensor) -> torch.Tensor:
        if cos_sin is None:
            return n
        cos, sin = f64(cos_sin[positions]).chunk(2, dim=1)
        return rope(n, cos, sin, exact)

    used = slots >= 0
    for result, n in zip(run(qkv, cos_sin)[:2], normed(qkv), strict=True):
        assert_close(result, turned(n), 1e-6)

    qkv = qkv.to(BF16)
    plain = run(qkv, None)
    # The norm: a sum of D equal-signed squares (halved by the root) and a few more operations.
    for result, n in zip(plain[:2], normed(qkv), strict=True):
        assert_rounds(result, n, (dim / 2 + 6) * U32 * n.abs())
    # RoPE on the rounded norm: two fp32 products, one fp32 sum, one rounding: to the bit.
    q, k, k_cache, v_cache = run(qkv, cos_sin)
    for result, n in ((q, plain[0].float()), (k, plain[1].float())):
        want = n
        if cos_sin is not None:
            cos, sin = cos_sin[positions][:, None].chunk(2, dim=-1)
            n1, n2 = n[..., : dim // 2], n[..., dim // 2 :]
            want = torch.cat([n1 * cos - n2 * sin, n2 * cos + n1 * sin], dim=-1)
        assert torch.equal(result, want.to(BF16))
    # K is cached after norm and RoPE, V as it is.
    assert torch.equal(k_cache.flatten(0, 1)[slots[used]], k[used])
    v = qkv.view(rows, -1, dim)[:, heads + kv_heads :]
    assert torch.equal(v_cache.flatten(0, 1)[slots[used]], v[used])


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("scales", ["one", "three"])
def test_the_fused_step_is_its_composition(dtype: torch.dtype, scales: str) -> None:
    """Step 2 of a decode layer, to the bit; q, k and v scaled each by its own (row Q2)."""
    x = randn(5, 64, dtype=dtype)
    sizes = [HQ * D, HKV * D, HKV * D]
    weight = quantized(COLUMNS, 64) if scales == "one" else shards(*sizes, k=64)
    rest = table(16, D), torch.arange(5), torch.tensor([5, 40, -1, 7, 8])
    fused, composed = empty_cache(dtype=dtype), empty_cache(dtype=dtype)
    q = ops.nvfp4_qkv_norm_rope_kv_write(x, *weight, *WEIGHTS, *rest, *fused)
    qkv = ops.nvfp4_linear(x, *weight, sizes if scales == "three" else None)
    want, _ = ops.qk_norm_rope_kv_write(qkv, *WEIGHTS, *rest, *composed)
    assert torch.equal(q, want)
    assert all(torch.equal(a, b) for a, b in zip(fused, composed, strict=True))
    assert bool(fused[1].any())

    plain = randn(COLUMNS, 64, seed=9)
    q = ops.bf16_qkv_norm_rope_kv_write(x, plain, *WEIGHTS, *rest, *fused)
    qkv = ops.bf16_linear(x, plain)
    want, _ = ops.qk_norm_rope_kv_write(qkv, *WEIGHTS, *rest, *composed)
    assert torch.equal(q, want)
    assert all(torch.equal(a, b) for a, b in zip(fused, composed, strict=True))
