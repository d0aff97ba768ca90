"""In BF16 a row's bits do not depend on the rows beside it, for every op that has rows.

Each op is one call on 33 rows; any part of the rows alone, on one thread or two, as a strided
view, or beside rows of NaN must give the same bits (cases/README's row Q4 for every op).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from op_samples import (
    BF16,
    caches,
    experts,
    gated_experts,
    int32,
    quantized,
    randn,
    routing,
    shards,
    strided,
    table,
)
from test_namespace import bits

from flint_kernels import ops

pytestmark = pytest.mark.usefixtures("_each_cpu_body")

ROWS = 33
PARTS = [slice(i, i + 1) for i in (0, 7, 13, 32)] + [
    slice(0, 2), slice(1, 4), slice(3, 7), slice(2, 10), slice(16, 32), slice(0, 32), slice(ROWS),
]  # fmt: skip

Rows = dict[str, torch.Tensor]
Run = Callable[[Rows], Any]
CASES: dict[str, tuple[Rows, Run]] = {}


def case(name: str, run: Run, **rows: torch.Tensor) -> None:
    """`run` takes the row-wise arguments, each with a first dimension of ROWS."""
    assert all(value.shape[0] == ROWS for value in rows.values())
    CASES[name] = rows, run


def norms() -> None:
    for width in (1, 7, 33, 64, 129, 2048):
        x, residual, weight = randn(ROWS, width), randn(ROWS, width, seed=1), randn(width, seed=2)
        case(f"rms_norm {width}", lambda r, w=weight: ops.rms_norm(r["x"], w), x=x)
        case(
            f"fused_add_rms_norm {width}",
            lambda r, w=weight: ops.fused_add_rms_norm(r["x"], r["residual"], w),
            x=x,
            residual=residual,
        )
    for width in (1, 7, 17, 128, 1025):
        x = randn(ROWS, 2 * width, scale=3.0)
        case(f"silu_and_mul {width}", lambda r: ops.silu_and_mul(r["x"]), x=x)


def linears() -> None:
    # Odd sizes: a BLAS changes its order of summation with alignment, and with the shape.
    for n, k in ((1, 33), (7, 65), (34, 16), (64, 127), (130, 201), (6, 1025)):
        x, weight = randn(ROWS, k), randn(n, k, seed=1)
        case(f"bf16_linear {n}x{k}", lambda r, w=weight: ops.bf16_linear(r["x"], w), x=x)
        case(f"bf16_lm_head {n}x{k}", lambda r, w=weight: ops.bf16_lm_head(r["x"], w), x=x)
    weight = randn(34, 65, seed=1)
    run = lambda r: ops.bf16_linear_silu_and_mul(r["x"], weight)  # noqa: E731
    case("bf16_linear_silu_and_mul", run, x=randn(ROWS, 65))
    for n, k in ((1, 16), (7, 48), (34, 144)):
        x, packed = randn(ROWS, k), quantized(n, k)
        case(f"nvfp4_linear {n}x{k}", lambda r, w=packed: ops.nvfp4_linear(r["x"], *w), x=x)
        case(f"nvfp4_lm_head {n}x{k}", lambda r, w=packed: ops.nvfp4_lm_head(r["x"], *w), x=x)
    fused = shards(9, 9, k=48)
    run = lambda r: ops.nvfp4_linear_silu_and_mul(r["x"], *fused)  # noqa: E731
    case("nvfp4_linear_silu_and_mul", run, x=randn(ROWS, 48))


def moe() -> None:
    for count in (7, 256):
        logits = randn(ROWS, count, scale=2.0)
        case(f"router_topk {count}", lambda r: ops.router_topk(r["logits"], 6), logits=logits)
    topk_weights, topk_ids = routing(ROWS, 3, 16)
    routed = {"topk_weights": topk_weights, "topk_ids": topk_ids}
    # Expert matrices of an odd number of elements: the alignment of each must not depend on
    # which other experts the batch selects.
    for inner, hidden in ((3, 33), (17, 65), (5, 7), (32, 64)):
        w13 = randn(16, 2 * inner, hidden, seed=7, scale=0.3)
        w2 = randn(16, hidden, inner, seed=8, scale=0.3)
        case(
            f"bf16_routed_experts {inner}x{hidden}",
            lambda r, a=w13, b=w2: ops.bf16_routed_experts(
                r["x"], r["topk_weights"], r["topk_ids"], a, b, r["shared"]
            ),
            x=randn(ROWS, hidden),
            shared=randn(ROWS, hidden, seed=9),
            **routed,
        )
    w13, w2 = gated_experts(16, 24, 48), experts(16, 48, 16)
    w2 = experts(16, 48, 16)
    case(
        "nvfp4_routed_experts",
        lambda r: ops.nvfp4_routed_experts(
            r["x"], r["topk_weights"], r["topk_ids"], *gated_experts(16, 16, 48), *w2
        ),
        x=randn(ROWS, 48),
        **routed,
    )
    shared_w13, shared_w2 = shards(16, 16, k=48), quantized(48, 16)
    case(
        "nvfp4_moe_gate_up",
        lambda r: ops.nvfp4_moe_gate_up(r["x"], r["topk_ids"], *w13, *shared_w13),
        x=randn(ROWS, 48),
        topk_ids=topk_ids,
    )
    case(
        "nvfp4_moe_down",
        lambda r: ops.nvfp4_moe_down(
            r["acts"], r["shared"], r["topk_weights"], r["topk_ids"], *w2, *shared_w2
        ),
        acts=randn(ROWS, 3, 16),
        shared=randn(ROWS, 16, seed=1),
        **routed,
    )
    plain13, plain2 = randn(16, 10, 33, seed=7), randn(16, 33, 5, seed=8)
    plain_shared13, plain_shared2 = randn(14, 33, seed=9), randn(33, 7, seed=10)
    case(
        "bf16_moe_gate_up",
        lambda r: ops.bf16_moe_gate_up(r["x"], r["topk_ids"], plain13, plain_shared13),
        x=randn(ROWS, 33),
        topk_ids=topk_ids,
    )
    case(
        "bf16_moe_down",
        lambda r: ops.bf16_moe_down(
            r["acts"], r["shared"], r["topk_weights"], r["topk_ids"], plain2, plain_shared2
        ),
        acts=randn(ROWS, 3, 5),
        shared=randn(ROWS, 7, seed=1),
        **routed,
    )
    weight, gate = randn(33, seed=2), randn(16, 33, seed=3)
    case(
        "fused_add_rms_norm_router_topk",
        lambda r: ops.fused_add_rms_norm_router_topk(r["x"], r["residual"], weight, gate, 6),
        x=randn(ROWS, 33),
        residual=randn(ROWS, 33, seed=1),
    )


def attention() -> None:
    slots = torch.randperm(48, generator=torch.Generator().manual_seed(1))[:ROWS]
    placed = {"positions": torch.arange(ROWS), "slots": slots}
    for dim in (20, 32, 33):
        norms = randn(dim, seed=3), randn(dim, seed=4)
        rope = table(64, dim) if dim % 2 == 0 else None

        def write(r: Rows, d: int = dim, n: Any = norms, t: Any = rope) -> tuple[Any, ...]:
            cache = torch.zeros(3, 16, 2, d, dtype=BF16), torch.zeros(3, 16, 2, d, dtype=BF16)
            out = ops.qk_norm_rope_kv_write(r["qkv"], *n, t, r["positions"], r["slots"], *cache)
            return *out, *(part.flatten(0, 1)[r["slots"]] for part in cache)

        case(f"qk_norm_rope_kv_write {dim}", write, qkv=randn(ROWS, 7 * dim), **placed)
    projections = quantized(7 * 32, 48), (randn(7 * 32, 49, seed=5),)
    norms = randn(32, seed=3), randn(32, seed=4)
    for name, k, weight in (("nvfp4", 48, projections[0]), ("bf16", 49, projections[1])):
        op = getattr(ops, f"{name}_qkv_norm_rope_kv_write")

        def project(r: Rows, op: Any = op, weight: Any = weight) -> tuple[Any, ...]:
            cache = torch.zeros(3, 16, 2, 32, dtype=BF16), torch.zeros(3, 16, 2, 32, dtype=BF16)
            rest = table(64, 32), r["positions"], r["slots"], *cache
            q = op(r["x"], *weight, *norms, *rest)
            return q, *(part.flatten(0, 1)[r["slots"]] for part in cache)

        case(f"{name}_qkv_norm_rope_kv_write", project, x=randn(ROWS, k), **placed)
    generator = torch.Generator().manual_seed(2)
    requests = {
        "block_table": torch.randint(0, 9, (ROWS, 5), generator=generator).to(torch.int32),
        "seq_lens": torch.randint(1, 81, (ROWS,), generator=generator).to(torch.int32),
    }
    for heads, kv_heads, dim in ((3, 1, 20), (4, 2, 33), (2, 2, 7), (8, 1, 128)):
        cache, sinks = caches("hnd", 9, 16, kv_heads, dim), randn(heads, dtype=torch.float32)
        for window in (0, 17):
            case(
                f"attention_decode {heads}/{kv_heads}x{dim} window {window}",
                lambda r, c=cache, s=sinks, w=window: ops.attention_decode(
                    r["q"], *c, r["block_table"], r["seq_lens"], s, w
                ),
                q=randn(ROWS, heads, dim),
                **requests,
            )


def sampling() -> None:
    case(
        "sample",
        lambda r: ops.sample(**r),
        logits=randn(ROWS, 501, dtype=torch.float32),
        temperature=torch.linspace(0, 2, ROWS),
        top_k=(torch.arange(ROWS) * 3 % 25).to(torch.int32),
        top_p=torch.linspace(0.3, 1, ROWS),
        seed=torch.arange(ROWS) * 7919,
        offset=torch.arange(ROWS),
    )


for family in (norms, linears, moe, attention, sampling):
    family()


def as_tuple(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def assert_same_rows(run: Run, rows: Rows, whole: tuple[torch.Tensor, ...], part: slice) -> None:
    alone = as_tuple(run({name: value[part] for name, value in rows.items()}))
    for one, all_of_them in zip(alone, whole, strict=True):
        assert torch.equal(bits(one), bits(all_of_them[part])), part


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def test_every_op_with_rows_is_here() -> None:
    without_rows = {"gguf_to_modelopt", "modelopt_to_gguf", "nvfp4_quantize", "nvfp4_dequantize"}
    # A copy; the chunks below; integers, which its judge takes row by row.
    elsewhere = {"kv_cache_write", "attention_prefill", "decode_advance"}
    covered = {name.split()[0] for name in CASES}
    assert covered == set(ops.REGISTRY) - without_rows - elsewhere


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("name", CASES)
def test_a_row_alone_equals_the_row_in_a_batch(name: str) -> None:
    rows, run = CASES[name]
    whole = as_tuple(run(rows))
    for part in PARTS:
        assert_same_rows(run, rows, whole, part)


@pytest.mark.parametrize("name", CASES)
def test_strided_rows_have_the_same_bits(name: str) -> None:
    """Slices of wider rows, and (where there is one) the transposed layout."""
    rows, run = CASES[name]
    whole = as_tuple(run(rows))
    floating = {key: value for key, value in rows.items() if value.dim() > 1}
    for layout in (strided, lambda t: t.transpose(0, -1).contiguous().transpose(0, -1)):
        seen = {**rows, **{key: layout(value) for key, value in floating.items()}}
        for one, two in zip(as_tuple(run(seen)), whole, strict=True):
            assert torch.equal(bits(one), bits(two))


@pytest.mark.parametrize("name", [name for name in CASES if name != "sample"])
def test_Q4_beside_rows_of_nan(name: str) -> None:
    rows, run = CASES[name]
    whole = as_tuple(run(rows))
    poisoned = {key: value.clone() for key, value in rows.items()}
    for key, value in poisoned.items():
        if value.is_floating_point():
            value[1::3] = math.nan
        assert key  # integers (ids, positions, lengths) stay legal
    good = torch.arange(ROWS) % 3 != 1
    for one, two in zip(as_tuple(run(poisoned)), whole, strict=True):
        assert torch.equal(bits(one[good]), bits(two[good]))


# ------------------------------------------------------------------ attention, in any form


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("heads,kv_heads,dim", [(3, 1, 20), (4, 2, 33), (2, 2, 7), (8, 1, 128)])
@pytest.mark.parametrize("window", [0, 17])
def test_decode_prefill_and_chunks_agree(heads: int, kv_heads: int, dim: int, window: int) -> None:
    """One query's bits, whichever op computes it, in whatever chunk, batch and table."""
    tokens = 50
    q = randn(tokens, heads, dim)
    k, v = randn(tokens, kv_heads, dim, seed=1), randn(tokens, kv_heads, dim, seed=2)
    sinks = randn(heads, seed=3, dtype=torch.float32)
    cache = (
        torch.zeros(5, 16, kv_heads, dim, dtype=BF16),
        torch.zeros(5, 16, kv_heads, dim, dtype=BF16),
    )
    ops.kv_cache_write(k, v, torch.arange(tokens), *cache)
    whole = ops.attention_prefill(q, k, v, int32(0, tokens), sinks=sinks, window=window)
    for width in (4, 9):
        pages = torch.full((tokens, width), -1, dtype=torch.int32)
        pages[:, :4] = torch.arange(4)
        lengths = torch.arange(1, tokens + 1, dtype=torch.int32)
        decoded = ops.attention_decode(q, *cache, pages, lengths, sinks, window)
        assert torch.equal(decoded, whole)
    for size in (1, 7, 33):
        for start in range(0, tokens, size):
            rows = slice(start, min(start + size, tokens))
            count = rows.stop - start
            past = *cache, pages[:1], int32(start)
            chunk = ops.attention_prefill(
                q[rows], k[rows], v[rows], int32(0, count), *past, sinks, window
            )
            assert torch.equal(chunk, whole[rows]), (size, start)
    # Two requests beside each other, the second the first one's twin.
    twice = [torch.cat([t, t]) for t in (q, k, v)]
    both = ops.attention_prefill(*twice, int32(0, tokens, 2 * tokens), sinks=sinks, window=window)
    assert torch.equal(both, torch.cat([whole, whole]))
