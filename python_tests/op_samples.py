"""Legal arguments for every op of the namespace, made the same way each time.

A sample is `(args, kwargs)` as the op takes them. `SAMPLES` has at least one maker for every
declared op (a test compares it with the registry), and each maker yields an ordinary call, one
with strided inputs, and one with odd sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from flint_kernels import ops
from flint_kernels.formats import nvfp4

BF16 = torch.bfloat16
Call = tuple[tuple[Any, ...], dict[str, Any]]
SAMPLES: dict[str, Callable[[], Iterator[Call]]] = {}


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(
    *shape: int, seed: int = 0, dtype: torch.dtype = BF16, scale: float = 1.0
) -> torch.Tensor:
    return (torch.randn(*shape, generator=rng(seed)) * scale).to(dtype)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as a slice of a wider buffer that starts one element in."""
    wide = torch.empty(*tensor.shape[:-1], tensor.shape[-1] + 3, dtype=tensor.dtype)
    view = wide[..., 1 : tensor.shape[-1] + 1]
    view.copy_(tensor)
    return view


def quantized(*shape: int, seed: int = 0, scale: float = 0.1) -> tuple[torch.Tensor, ...]:
    """weight, weight_scale, weight_scale_2 [] of a random [..., N, K]."""
    return nvfp4.quantize(torch.randn(*shape, generator=rng(seed)) * scale)


def shards(*sizes: int, k: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """A fused projection whose shards have global scales of their own, each twice the last."""
    parts = [quantized(size, k, seed=seed + i, scale=0.05 * 2**i) for i, size in enumerate(sizes)]
    scales = torch.cat([part[1].view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)
    return torch.cat([part[0] for part in parts]), scales, torch.stack([part[2] for part in parts])


def experts(count: int, n: int, k: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """weight [E, N, K / 2], weight_scale [E, N, K / 16], weight_scale_2 [E]; scales differ."""
    parts = [quantized(n, k, seed=seed + i, scale=0.05 * (1 + i % 3)) for i in range(count)]
    scales = torch.stack([part[1].view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)
    return (
        torch.stack([part[0] for part in parts]),
        scales,
        torch.stack([part[2] for part in parts]),
    )


def gated_experts(count: int, i: int, k: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """w13, w13_scale, w13_scale_2 [E, 2] with different scales for gate and up."""
    gate, up = experts(count, i, k, seed), experts(count, i, k, seed + 100)
    scales = [part[1].view(torch.uint8) for part in (gate, up)]
    return (
        torch.cat([gate[0], up[0]], dim=1),
        torch.cat(scales, dim=1).view(torch.float8_e4m3fn),
        torch.stack([gate[2], up[2] * 3], dim=1),
    )


def caches(layout: str, blocks: int, page: int, heads: int, dim: int) -> tuple[torch.Tensor, ...]:
    """K and V caches of random values, [blocks, page, heads, dim] in one of four memory layouts."""
    if layout == "nhd":
        pair = [randn(blocks, page, heads, dim, seed=s) for s in (1, 2)]
    elif layout == "hnd":
        pair = [randn(blocks, heads, page, dim, seed=s).permute(0, 2, 1, 3) for s in (1, 2)]
    elif layout == "interleaved":
        pair = list(randn(blocks, 2, page, heads, dim, seed=1).unbind(1))
    elif layout == "halves":
        both = randn(blocks, heads, page, 2 * dim, seed=1).permute(0, 2, 1, 3)
        pair = list(both.split(dim, dim=-1))
    else:
        raise ValueError(layout)
    return tuple(pair)


LAYOUTS = ("nhd", "hnd", "interleaved", "halves")


def table(positions: int, dim: int) -> torch.Tensor:
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, dim, 2) / dim)
    angles = torch.arange(positions)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def routing(rows: int, top_k: int, count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return ops.router_topk(randn(rows, count, seed=seed), top_k)


def samples(name: str) -> Callable[[Callable[[], Iterator[Call]]], Callable[[], Iterator[Call]]]:
    def add(maker: Callable[[], Iterator[Call]]) -> Callable[[], Iterator[Call]]:
        SAMPLES[name] = maker
        return maker

    return add


@samples("rms_norm")
def _() -> Iterator[Call]:
    yield (randn(3, 64), randn(64, seed=1)), {}
    yield (strided(randn(3, 64)), strided(randn(64, seed=1)), 1e-5), {}
    yield (randn(2, 3, 33), randn(33, seed=1)), {"enable_pdl": True}
    yield (randn(5, 4).T, randn(5, seed=1)), {}
    yield (randn(0, 16), randn(16, seed=1)), {}


@samples("fused_add_rms_norm")
def _() -> Iterator[Call]:
    yield (randn(3, 64), randn(3, 64, seed=2), randn(64, seed=1)), {}
    yield (strided(randn(3, 64)), randn(64, 3, seed=2).T, strided(randn(64, seed=1))), {}
    yield (randn(2, 1, 33), randn(2, 1, 33, seed=2), randn(33, seed=1), 1e-5), {}


@samples("silu_and_mul")
def _() -> Iterator[Call]:
    yield (randn(3, 64),), {}
    yield (strided(randn(3, 66)),), {}
    yield (randn(2, 2, 6).transpose(0, 1),), {"enable_pdl": True}


@samples("qk_norm_rope_kv_write")
def _() -> Iterator[Call]:
    weights = randn(32, seed=3), randn(32, seed=4)
    for layout in LAYOUTS:
        positions, slots = torch.tensor([0, 7, 9]), torch.tensor([5, -1, 17])
        qkv = strided(randn(3, 8 * 32))
        rope = None if layout == "halves" else table(16, 32)
        yield (qkv, *weights, rope, positions, slots, *caches(layout, 3, 16, 2, 32)), {}
    args = (randn(5, 8 * 32), *weights, table(16, 32), int32(1, 2, 3, -1, 99), int32(1, 2, 3))
    yield (*args, *caches("nhd", 1, 16, 2, 32), 1e-5), {}


@samples("kv_cache_write")
def _() -> Iterator[Call]:
    k, v = randn(3, 2, 32, seed=5), strided(randn(3, 2, 32, seed=6))
    for layout in LAYOUTS:
        yield (k, v, torch.tensor([5, -1, 17]), *caches(layout, 3, 16, 2, 32)), {}
    yield (k, v, int32(3), *caches("nhd", 3, 16, 2, 32)), {}
    yield (k, v, torch.tensor([5, -1, 17]), *caches("nhd", 3, 16, 2, 32), int32(7)), {}


@samples("nvfp4_linear")
def _() -> Iterator[Call]:
    yield (randn(3, 64), *quantized(48, 64)), {}
    yield (strided(randn(3, 64)), *shards(16, 8, 8, k=64), [16, 8, 8]), {}
    yield (randn(2, 1, 48), *quantized(7, 48)), {"enable_pdl": True}


@samples("bf16_linear")
def _() -> Iterator[Call]:
    yield (randn(3, 64), randn(48, 64, seed=1)), {}
    yield (randn(65, 3).T, strided(randn(5, 65, seed=1))), {}
    yield (randn(0, 8), randn(4, 8, seed=1)), {}


@samples("nvfp4_linear_silu_and_mul")
def _() -> Iterator[Call]:
    yield (randn(3, 64), *quantized(48, 64)), {}
    yield (strided(randn(3, 64)), *shards(9, 9, k=64)), {}


@samples("bf16_linear_silu_and_mul")
def _() -> Iterator[Call]:
    yield (randn(3, 64), randn(48, 64, seed=1)), {}
    yield (strided(randn(2, 2, 33)), strided(randn(10, 33, seed=1))), {}


@samples("nvfp4_lm_head")
def _() -> Iterator[Call]:
    yield (randn(3, 64), *quantized(48, 64)), {}
    yield (strided(randn(1, 64)), *quantized(51, 64)), {}


@samples("bf16_lm_head")
def _() -> Iterator[Call]:
    yield (randn(3, 64), randn(48, 64, seed=1)), {}
    yield (strided(randn(2, 33)), strided(randn(51, 33, seed=1))), {}


@samples("router_topk")
def _() -> Iterator[Call]:
    yield (randn(3, 16), 6), {}
    yield (strided(randn(2, 7)), 7), {"renormalize": False}
    yield (randn(16, 5).T, 1), {}


@samples("nvfp4_routed_experts")
def _() -> Iterator[Call]:
    weights = (*gated_experts(4, 32, 64), *experts(4, 64, 32, seed=50))
    yield (randn(3, 64), *routing(3, 2, 4), *weights), {}
    yield (strided(randn(3, 64)), *routing(3, 2, 4), *weights, randn(3, 64, seed=9)), {}
    topk_weights, topk_ids = routing(2, 3, 4)
    topk_ids[0, 1] = -1
    yield (randn(2, 64), topk_weights, topk_ids, *weights), {"workspace": ops.make_workspace("cpu")}


@samples("bf16_routed_experts")
def _() -> Iterator[Call]:
    weights = randn(4, 64, 40, seed=7, scale=0.1), randn(4, 40, 32, seed=8, scale=0.1)
    yield (randn(3, 40), *routing(3, 2, 4), *weights), {}
    yield (strided(randn(3, 40)), *routing(3, 2, 4), *weights, strided(randn(3, 40, seed=9))), {}


def decode_tables() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(6, dtype=torch.int32).reshape(3, 2), int32(17, 0, 32)


@samples("attention_decode")
def _() -> Iterator[Call]:
    for layout in LAYOUTS:
        call = (randn(3, 4, 32), *caches(layout, 6, 16, 2, 32), *decode_tables())
        yield call, {"sinks": randn(4, seed=3, dtype=torch.float32), "window": 9}
    yield (strided(randn(3, 3, 20)), *caches("nhd", 6, 16, 1, 20), *decode_tables()), {"scale": 0.3}


@samples("attention_prefill")
def _() -> Iterator[Call]:
    q, k, v = randn(7, 4, 32), randn(7, 2, 32, seed=1), strided(randn(7, 2, 32, seed=2))
    sinks = randn(4, seed=3, dtype=torch.float32)
    yield (q, k, v, int32(0, 2, 2, 7)), {"sinks": sinks, "max_query_len": 5}
    tables, lengths = decode_tables()
    past = (*caches("hnd", 6, 16, 2, 32), tables, lengths)
    yield (strided(q), k, v, int32(0, 2, 2, 7), *past, sinks), {"window": 5}


def _qkv_rest() -> tuple[Any, ...]:
    cache = caches("hnd", 3, 16, 2, 32)
    weights = randn(32, seed=3), randn(32, seed=4)
    return (*weights, table(16, 32), int32(3, 4), torch.tensor([5, 40]), *cache)


@samples("nvfp4_qkv_norm_rope_kv_write")
def _() -> Iterator[Call]:
    yield (randn(2, 64), *shards(128, 64, 64, k=64), *_qkv_rest()), {}
    workspace = {"workspace": ops.make_workspace("cpu")}
    yield (strided(randn(2, 64)), *quantized(256, 64), *_qkv_rest(), 1e-5), workspace


@samples("bf16_qkv_norm_rope_kv_write")
def _() -> Iterator[Call]:
    yield (randn(2, 64), randn(256, 64, seed=1), *_qkv_rest()), {}
    yield (strided(randn(2, 33)), strided(randn(256, 33, seed=1)), *_qkv_rest()), {}


@samples("fused_add_rms_norm_router_topk")
def _() -> Iterator[Call]:
    weights = randn(64, seed=2), randn(16, 64, seed=3)
    yield (randn(3, 64), randn(3, 64, seed=1), *weights, 6), {}
    yield (
        (strided(randn(1, 64)), randn(1, 64, seed=1), *weights, 1, 1e-5),
        {"workspace": ops.make_workspace("cpu")},
    )


@samples("nvfp4_moe_gate_up")
def _() -> Iterator[Call]:
    weights = (*gated_experts(4, 32, 64), *shards(16, 16, k=64, seed=30))
    yield (randn(3, 64), routing(3, 2, 4)[1], *weights), {}
    yield (strided(randn(1, 64)), int32(-1, 2, 2).reshape(1, 3), *weights), {}


@samples("bf16_moe_gate_up")
def _() -> Iterator[Call]:
    weights = randn(4, 64, 40, seed=7, scale=0.1), randn(18, 40, seed=8, scale=0.1)
    yield (randn(3, 40), routing(3, 2, 4)[1], *weights), {}
    yield (strided(randn(1, 40)), int32(-1, 2, 2).reshape(1, 3), *weights), {}


@samples("nvfp4_moe_down")
def _() -> Iterator[Call]:
    weights = (*experts(4, 64, 32), *quantized(64, 16, seed=30))
    yield (randn(3, 2, 32), randn(3, 16, seed=1), *routing(3, 2, 4), *weights), {}
    yield (strided(randn(3, 2, 32)), strided(randn(3, 16)), *routing(3, 2, 4), *weights), {}


@samples("bf16_moe_down")
def _() -> Iterator[Call]:
    weights = randn(4, 40, 33, seed=7), randn(40, 9, seed=8)
    yield (randn(3, 2, 33), randn(3, 9, seed=1), *routing(3, 2, 4), *weights), {}
    yield (strided(randn(3, 2, 33)), strided(randn(3, 9)), *routing(3, 2, 4), *weights), {}


@samples("sample")
def _() -> Iterator[Call]:
    logits = randn(3, 50, dtype=torch.float32)
    rest = int32(20, 0, 1), torch.tensor([0.95, 1.0, 0.5])
    seeds = torch.tensor([1, 2, -3]), torch.tensor([0, 5, 2**40])
    yield (logits, torch.tensor([1.0, 0.0, 2.0]), *rest, *seeds), {}
    yield (strided(logits), torch.tensor([1.0, 0.7, 2.0]), *rest, *seeds), {}

    few = int32(20, 0, 1), torch.tensor([0.95, 1.0, 0.5])
    yield (logits, torch.tensor([1.0, 0.0, 2.0]), *few, *seeds), {"max_top_k": 20}


@samples("decode_advance")
def _() -> Iterator[Call]:
    def step(*lengths: int) -> tuple[torch.Tensor, ...]:
        seq_lens = int32(*lengths)
        ids, slots, window_slots = torch.tensor([1, 2, 3]), int32(5, -1, 40), int32(15, 9, -1)
        history = torch.full((3, 4), -1)
        long = seq_lens.to(torch.int64)
        return ids, (seq_lens - 1).clamp(min=0), slots, window_slots, seq_lens, long, history

    table = int32(3, 1, 2, 0, 2, 1).view(3, 2)
    yield (torch.tensor([7, -1, 9]), table, table.flip(0), 16, *step(16, 0, 3)), {}
    yield (torch.tensor([0, 8, 9]), table, table, 8, *step(7, 8, 15)), {}


@samples("nvfp4_quantize")
def _() -> Iterator[Call]:
    yield (randn(5, 64),), {}
    yield (strided(randn(2, 5, 48)), torch.tensor(0.01)), {}


@samples("nvfp4_dequantize")
def _() -> Iterator[Call]:
    yield quantized(5, 64), {}
    yield quantized(2, 5, 48)[:2], {"dtype": BF16}


def gguf_blocks(*shape: int) -> torch.Tensor:
    weight, scale, _ = quantized(*shape)
    return nvfp4.modelopt_to_gguf(weight, scale)


@samples("gguf_to_modelopt")
def _() -> Iterator[Call]:
    yield (gguf_blocks(3, 64),), {}
    yield (strided(gguf_blocks(2, 3, 128)),), {}


@samples("modelopt_to_gguf")
def _() -> Iterator[Call]:
    yield quantized(3, 64)[:2], {}
    yield quantized(2, 3, 128)[:2], {}
