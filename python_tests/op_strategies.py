"""Random legal calls of every op: sizes, strides, and values with NaN, infinities and subnormals.

Hypothesis draws sizes, layouts, kinds of values and a seed; the values themselves come of the seed,
so that an example is small and shrinks well. A test compares `CALLS` with the registry.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

from flint_kernels.formats import nvfp4
from flint_kernels.ops import REGISTRY, make_workspace

Tensor = torch.Tensor
Bound = dict[str, Any]
BF16, FP32 = torch.bfloat16, torch.float32

SPECIAL = (
    0.0, -0.0, math.inf, -math.inf, math.nan, 2.0**-133, -(2.0**-127), 2.0**-126, 3.3e38, -3.3e38,
    1e30, -1e-30, 2.0**127, 1.0, -1.0,
)  # fmt: skip
# How values are made: factor of a normal distribution, and the share of `SPECIAL` ones.
KINDS = {
    "plain": (1.0, 0.0),
    "small": (1e-3, 0.0),
    "some special": (1.0, 0.03),
    "special": (1.0, 0.4),
    "huge": (1e37, 0.0),
    "large": (1e18, 0.0),
    "subnormal": (2.0**-130, 0.0),
    "zeros": (0.0, 0.0),
}
GLOBAL_SCALES = (1.0, 1e-3, 0.3, 0.0, -2.0, 1e30, 1e-38, 2.0**-140, math.inf, math.nan)


class Draw:
    """What builders draw with; tensors are on the CPU."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any], dtype: torch.dtype) -> None:
        self.draw = draw
        self.dtype = dtype
        self.rng = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
        self.kind = draw(st.sampled_from(sorted(KINDS)))
        self.ordinary_weights = draw(st.booleans())

    def size(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def one_of(self, *choices: Any) -> Any:
        return self.draw(st.sampled_from(choices))

    def maybe(self, make: Callable[[], Any]) -> Any:
        return make() if self.draw(st.booleans()) else None

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Below `high`; int64."""
        return torch.randint(low, max(high, low + 1), shape, generator=self.rng)

    def filled(self, kind: str, dtype: torch.dtype, *shape: int) -> Tensor:
        factor, share = KINDS[kind]
        values = torch.randn(*shape, generator=self.rng, dtype=torch.float64) * factor
        special = torch.tensor(SPECIAL, dtype=torch.float64)[self.integers(0, len(SPECIAL), *shape)]
        chosen = torch.rand(*shape, generator=self.rng) < share
        return torch.where(chosen, special, values).to(dtype)

    def rows(self, *shape: int) -> Tensor:
        """Activations; sometimes with one row of another kind, which must not leak."""
        values = self.filled(self.kind, self.dtype, *shape)
        if len(shape) > 1 and shape[0] > 1 and self.draw(st.booleans()):
            values[self.size(0, shape[0] - 1)] = self.one_of(math.nan, math.inf, 0.0, 3.3e38)
        return self.laid_out(values)

    def weight(self, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
        kind = "plain" if self.ordinary_weights else self.one_of("some special", "large", "small")
        return self.laid_out(self.filled(kind, dtype, *shape))

    def fp32(self, *shape: int) -> Tensor:
        return self.laid_out(self.filled(self.one_of("plain", "some special"), FP32, *shape))

    def laid_out(self, tensor: Tensor) -> Tensor:
        """The same values in one of many memory layouts."""
        if tensor.dim() == 0:
            return tensor
        kind = self.one_of("dense", "slice", "offset", "transposed", "every second", "expanded")
        raw = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
        room = _room(kind, raw)
        if kind == "expanded" and tensor.shape[0] > 1:
            return tensor[:1].expand(tensor.shape)  # other values: every row is the first
        return room.copy_(raw).view(tensor.dtype)

    def caches(self, blocks: int, page: int, heads: int, dim: int) -> Bound:
        """K and V [blocks, page, heads, dim] in one of the layouts of engines; dim is dense."""
        shape = (blocks, page, heads, dim)
        layout = self.one_of("nhd", "hnd", "interleaved", "halves", "wide")
        if layout == "interleaved":
            pair = torch.empty(blocks, 2, page, heads, dim, dtype=self.dtype).unbind(1)
        elif layout == "halves":
            both = torch.empty(blocks, heads, page, 2 * dim, dtype=self.dtype).permute(0, 2, 1, 3)
            pair = both.split(dim, dim=-1)
        elif layout == "hnd":
            pair = tuple(torch.empty(blocks, heads, page, dim, dtype=self.dtype).permute(0, 2, 1, 3)
                         for _ in range(2))  # fmt: skip
        elif layout == "wide":
            pair = tuple(torch.empty(blocks, page, heads + 1, dim + 3, dtype=self.dtype)
                         [:, :, 1:, 1 : dim + 1] for _ in range(2))  # fmt: skip
        else:
            pair = tuple(torch.empty(shape, dtype=self.dtype) for _ in range(2))
        k, v = (part.copy_(self.filled(self.kind, self.dtype, *shape)) for part in pair)
        return {"k_cache": k, "v_cache": v}

    def nvfp4(self, prefix: str, *shape: int, scales: tuple[tuple[int, ...], ...]) -> Bound:
        """The three tensors of a weight [..., N, K]; `scales`: shapes that its global may have."""
        *lead, k = shape
        codes = self.integers(0, 256, *lead, k // 2).to(torch.uint8)
        if self.ordinary_weights:
            bytes_ = self.integers(0x28, 0x48, *lead, k // 16)
        else:
            bytes_ = self.integers(0, 256, *lead, k // 16)
        # Of no columns at all the sums are 0, and what 0 * NaN is is nobody's business.
        kinds = 3 if self.ordinary_weights or k == 0 else len(GLOBAL_SCALES)
        scale_2 = torch.tensor(GLOBAL_SCALES)[self.integers(0, kinds, *self.one_of(*scales))]
        scale = self.laid_out(bytes_.to(torch.uint8).view(torch.float8_e4m3fn))
        return {
            prefix: self.laid_out(codes),
            f"{prefix}_scale": scale,
            f"{prefix}_scale_2": self.laid_out(scale_2),
        }


def _room(kind: str, tensor: Tensor) -> Tensor:
    """Uninitialised memory for `tensor` in the layout of that kind."""
    *lead, last = tensor.shape
    new = tensor.new_empty
    if kind == "slice":
        return new(*lead, last + 3)[..., 1 : last + 1]
    if kind == "offset":
        return new(tensor.numel() + 1)[1:].view(tensor.shape)
    if kind == "transposed" and tensor.dim() > 1:
        return new(*lead[:-1], last, lead[-1]).transpose(-1, -2)
    if kind == "every second":
        return new(2 * tensor.shape[0], *tensor.shape[1:])[::2]
    return new(tensor.shape)


Builder = Callable[[Draw], Bound]
CALLS: dict[str, Builder] = {}


def calls(name: str) -> Callable[[Builder], Builder]:
    def add(builder: Builder) -> Builder:
        CALLS[name] = builder
        return builder

    return add


@st.composite
def legal_calls(draw: Any, name: str, dtype: torch.dtype) -> Bound:
    """Every argument of a legal call by name, defaults too; activations in `dtype`."""
    return REGISTRY[name].bind((), CALLS[name](Draw(draw, dtype)))


def lead(d: Draw) -> tuple[int, ...]:
    """Leading dimensions of an activation that takes any."""
    return tuple(d.size(0, 4) if i == 0 else d.size(1, 3) for i in range(d.size(0, 2)))


def options(d: Draw, *names: str) -> Bound:
    made = {
        "eps": lambda: d.one_of(1e-6, 1e-5, 1.0, 1e-30),
        "enable_pdl": lambda: d.one_of(False, True),
        "workspace": lambda: d.maybe(lambda: make_workspace("cpu")),
        "window": lambda: d.one_of(0, 1, 2, 5, 17, 513),
        "scale": lambda: d.one_of(None, 0.3, 2.0),
    }
    return {name: made[name]() for name in names}


@calls("rms_norm")
def _(d: Draw) -> Bound:
    width = d.size(1, 70)
    rest = {"weight": d.weight(width), **options(d, "eps", "enable_pdl")}
    return {"x": d.rows(*lead(d), width), **rest}


@calls("fused_add_rms_norm")
def _(d: Draw) -> Bound:
    width, shape = d.size(1, 70), lead(d)
    rows = {"x": d.rows(*shape, width), "residual": d.rows(*shape, width)}
    return {**rows, "weight": d.weight(width), **options(d, "eps", "enable_pdl")}


@calls("silu_and_mul")
def _(d: Draw) -> Bound:
    return {"x": d.rows(*lead(d), 2 * d.size(0, 40)), **options(d, "enable_pdl")}


def projection(
    d: Draw, kind: str, prefix: str, *shape: int, scales: tuple[tuple[int, ...], ...] = ((), (1,))
) -> Bound:
    """A weight [..., N, K] of either kind."""
    if kind == "nvfp4":
        return d.nvfp4(prefix, *shape, scales=scales)
    return {prefix: d.weight(*shape)}


def columns(d: Draw, kind: str) -> int:
    return 16 * d.size(0, 5) if kind == "nvfp4" else d.size(0, 70)


def both(name: str) -> Callable[[Callable[[Draw, str], Bound]], None]:
    """One builder for the op with NVFP4 weights and the one with BF16 weights."""

    def add(builder: Callable[[Draw, str], Bound]) -> None:
        for kind in ("nvfp4", "bf16"):
            CALLS[f"{kind}_{name}"] = lambda d, kind=kind: builder(d, kind)

    return add


@both("linear")
def _(d: Draw, kind: str) -> Bound:
    k = columns(d, kind)
    x = {"x": d.rows(*lead(d), k), **options(d, "enable_pdl")}
    if kind == "nvfp4" and d.one_of(False, True):
        sizes = [d.size(0, 9) for _ in range(d.size(1, 4))]
        scales = ((), (1,), (len(sizes),))
        return {**x, **d.nvfp4("weight", sum(sizes), k, scales=scales), "shard_sizes": sizes}
    return {**x, **projection(d, kind, "weight", d.size(0, 33), k)}


@both("linear_silu_and_mul")
def _(d: Draw, kind: str) -> Bound:
    k = columns(d, kind)
    weight = projection(d, kind, "weight", 2 * d.size(0, 17), k, scales=((), (1,), (2,)))
    return {"x": d.rows(*lead(d), k), **weight, **options(d, "enable_pdl")}


@both("lm_head")
def _(d: Draw, kind: str) -> Bound:
    k = columns(d, kind)
    return {"x": d.rows(*lead(d), k), **projection(d, kind, "weight", d.size(0, 40), k)}


@calls("router_topk")
def _(d: Draw) -> Bound:
    experts = d.size(1, 40)
    logits = d.rows(d.size(0, 5), experts)
    if d.one_of(False, True):  # ties
        logits = (logits.float().round() + 0.0).to(logits.dtype)
    return {
        "logits": logits,
        "top_k": d.size(1, min(experts, 8)),
        "renormalize": d.one_of(True, False),
    }


def routing(d: Draw, rows: int, experts: int) -> Bound:
    shape = rows, d.size(0, 4)
    skipped = torch.rand(shape, generator=d.rng) < d.one_of(0.0, 0.3, 1.0)
    ids = torch.where(skipped, -1, d.integers(0, experts, *shape)).to(torch.int32)
    return {"topk_ids": d.laid_out(ids)}


def routed_weights(d: Draw, ids: Tensor) -> Bound:
    weights = d.filled(d.one_of("plain", "some special"), FP32, *ids.shape)
    return {"topk_weights": d.laid_out(weights)}


def width(d: Draw, kind: str) -> int:
    return 16 * d.size(0, 3) if kind == "nvfp4" else d.size(0, 40)


@both("routed_experts")
def _(d: Draw, kind: str) -> Bound:
    rows, experts, hidden, inner = d.size(0, 4), d.size(1, 5), width(d, kind), width(d, kind)
    chosen = routing(d, rows, experts)
    return {
        "x": d.rows(rows, hidden),
        **routed_weights(d, chosen["topk_ids"]),
        **chosen,
        **projection(d, kind, "w13", experts, 2 * inner, hidden, scales=((experts, 2),)),
        **projection(d, kind, "w2", experts, hidden, inner, scales=((experts,),)),
        "shared_output": d.maybe(lambda: d.rows(rows, hidden)),
        **options(d, "workspace", "enable_pdl"),
    }


@both("moe_gate_up")
def _(d: Draw, kind: str) -> Bound:
    rows, experts, hidden = d.size(0, 4), d.size(1, 5), width(d, kind)
    inner, shared = d.size(0, 20), d.size(0, 20)
    return {
        "x": d.rows(rows, hidden),
        **routing(d, rows, experts),
        **projection(d, kind, "w13", experts, 2 * inner, hidden, scales=((experts, 2),)),
        **projection(d, kind, "shared_w13", 2 * shared, hidden, scales=((), (1,), (2,))),
        **options(d, "workspace", "enable_pdl"),
    }


@both("moe_down")
def _(d: Draw, kind: str) -> Bound:
    rows, experts, hidden = d.size(0, 4), d.size(1, 5), d.size(1, 40)
    inner, shared = width(d, kind), width(d, kind)
    chosen = routing(d, rows, experts)
    return {
        "routed_act": d.rows(rows, chosen["topk_ids"].shape[1], inner),
        "shared_act": d.rows(rows, shared),
        **routed_weights(d, chosen["topk_ids"]),
        **chosen,
        **projection(d, kind, "w2", experts, hidden, inner, scales=((experts,),)),
        **projection(d, kind, "shared_w2", hidden, shared),
        **options(d, "workspace", "enable_pdl"),
    }


@calls("fused_add_rms_norm_router_topk")
def _(d: Draw) -> Bound:
    rows, hidden, experts = d.size(0, 4), d.size(1, 70), d.size(1, 20)
    return {
        "x": d.rows(rows, hidden),
        "residual": d.rows(rows, hidden),
        "weight": d.weight(hidden),
        "router_weight": d.weight(experts, hidden),
        "top_k": d.size(1, experts),
        **options(d, "eps", "workspace", "enable_pdl"),
    }


def pages(d: Draw) -> tuple[int, int]:
    """Blocks and page size of a cache."""
    return d.size(1, 5), d.one_of(1, 3, 16)


def rope_and_slots(d: Draw, rows: int, kv_heads: int, dim: int) -> Bound:
    """All of the fused cache write but the projections."""
    blocks, page = pages(d)
    table = None
    if dim % 2 == 0 and d.one_of(True, False):
        angles = torch.rand(d.size(1, 20), dim // 2, generator=d.rng) * 6.3
        table = d.laid_out(torch.cat([angles.cos(), angles.sin()], dim=-1))
    named = min(d.size(0, rows), blocks * page)
    slots = torch.randperm(blocks * page, generator=d.rng)[:named]
    slots[torch.rand(named, generator=d.rng) < 0.2] = -1
    positions = d.integers(0, 1 if table is None else table.shape[0], rows)
    # Rows without a slot are padding, and may hold any position.
    padding = torch.ones(rows, dtype=torch.bool)
    padding[:named] = slots < 0
    wild = torch.tensor([-1, 2**31 - 1, 10**6])[d.integers(0, 3, rows)]
    positions = torch.where(padding & (d.integers(0, 2, rows) > 0), wild, positions)
    integer = d.one_of(torch.int32, torch.int64)
    return {
        "q_weight": d.weight(dim),
        "k_weight": d.weight(dim),
        "cos_sin": table,
        "positions": d.laid_out(positions.to(integer)) if table is None else positions.to(integer),
        "slot_mapping": slots.to(d.one_of(torch.int32, torch.int64)),
        **d.caches(blocks, page, kv_heads, dim),
        **options(d, "eps", "enable_pdl"),
    }


def heads(d: Draw) -> tuple[int, int, int]:
    """Query heads a KV head, KV heads, head_dim."""
    return d.size(1, 4), d.size(1, 3), d.one_of(1, 2, 6, 16, 20, 32)


@calls("qk_norm_rope_kv_write")
def _(d: Draw) -> Bound:
    (group, kv_heads, dim), rows = heads(d), d.size(0, 4)
    qkv = d.rows(rows, (group + 2) * kv_heads * dim)
    return {"qkv": qkv, **rope_and_slots(d, rows, kv_heads, dim)}


@both("qkv_norm_rope_kv_write")
def _(d: Draw, kind: str) -> Bound:
    (group, kv_heads, dim), rows, k = heads(d), d.size(0, 4), columns(d, kind)
    n = (group + 2) * kv_heads * dim
    return {
        "x": d.rows(rows, k),
        **projection(d, kind, "weight", n, k, scales=((), (1,), (3,))),
        **rope_and_slots(d, rows, kv_heads, dim),
        **options(d, "workspace"),
    }


@calls("kv_cache_write")
def _(d: Draw) -> Bound:
    (_, kv_heads, dim), rows = heads(d), d.size(0, 4)
    rest = rope_and_slots(d, rows, kv_heads, dim)
    k, v = d.rows(rows, kv_heads, dim), d.rows(rows, kv_heads, dim)
    kept = {key: rest[key] for key in ("slot_mapping", "k_cache", "v_cache", "enable_pdl")}
    return {"k": k, "v": v, **kept, "after": d.maybe(lambda: torch.zeros(2))}


def sinks(d: Draw, count: int) -> Tensor | None:
    values = torch.tensor([0.5, -3.0, 20.0, -200.0, 1e30, -math.inf])
    return d.maybe(lambda: values[d.integers(0, len(values), count)])


def paged_past(d: Draw, requests: int, kv_heads: int, dim: int, seen: int | None) -> Bound:
    """Caches, a table whose unread entries are garbage, and lengths; the last `seen` are read."""
    blocks, page = pages(d)
    table_width = d.size(1, 4)
    lengths = d.integers(0, table_width * page + 1, requests)
    table = d.integers(0, blocks, requests, table_width)
    for row, length in enumerate(lengths.tolist()):
        first = 0 if seen is None else max(0, length - seen) // page
        last = 0 if seen == 0 else -(-length // page)
        unread = torch.ones(table_width, dtype=torch.bool)
        unread[first:last] = False
        table[row, unread] = d.one_of(-1, 2**31 - 1, 0)
    return {
        **d.caches(blocks, page, kv_heads, dim),
        "block_table": table.to(torch.int32),
        "lengths": lengths.to(torch.int32),
    }


@calls("attention_decode")
def _(d: Draw) -> Bound:
    (group, kv_heads, dim), requests = heads(d), d.size(0, 4)
    chosen = options(d, "window", "scale", "workspace", "enable_pdl")
    past = paged_past(d, requests, kv_heads, dim, chosen["window"] or None)
    past["seq_lens"] = past.pop("lengths")
    q = d.rows(requests, group * kv_heads, dim)
    return {"q": q, **past, "sinks": sinks(d, group * kv_heads), **chosen}


@calls("attention_prefill")
def _(d: Draw) -> Bound:
    (group, kv_heads, dim), requests = heads(d), d.size(0, 3)
    counts = [d.size(0, 5) for _ in range(requests)]
    rows = sum(counts)
    offsets = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    chosen = options(d, "window", "scale", "workspace", "enable_pdl")
    past: Bound = {}
    if d.one_of(True, False):
        seen = chosen["window"] - 1 if chosen["window"] else None
        past = paged_past(d, requests, kv_heads, dim, seen)
        past["context_lens"] = past.pop("lengths")
    return {
        "q": d.rows(rows, group * kv_heads, dim),
        "k": d.rows(rows, kv_heads, dim),
        "v": d.rows(rows, kv_heads, dim),
        "cu_seqlens": offsets,
        **past,
        "sinks": sinks(d, group * kv_heads),
        "max_query_len": d.maybe(lambda: max(counts, default=0) + d.size(0, 3)),
        **chosen,
    }


@calls("sample")
def _(d: Draw) -> Bound:
    rows, vocabulary = d.size(0, 4), d.size(1, 40)
    logits = d.filled(d.kind, FP32, rows, vocabulary)
    if d.one_of(True, False):
        logits = logits.round()
    logits[:, d.size(0, vocabulary - 1)] = 1.5  # a candidate in every row
    pick = lambda *values: torch.tensor(values)[d.integers(0, len(values), rows)]  # noqa: E731
    top_k = pick(0, 1, 3, 50, 2**31 - 1).to(torch.int32)
    return {
        "logits": d.laid_out(logits) if rows > 1 else logits,
        "temperature": pick(0.0, 0.7, 1.0, 2.0, 1e-30, 1e30),
        "top_k": top_k,
        "top_p": pick(1.0, 0.95, 0.5, 1e-30),
        "seed": d.integers(-(2**62), 2**62, rows),
        "offset": d.integers(0, 2**40, rows),
        "max_top_k": d.one_of(0, 0, 2**31 - 1) if bool((top_k > 0).all()) else 0,
        **options(d, "enable_pdl"),
    }


@calls("decode_advance")
def _(d: Draw) -> Bound:
    rows, width, page = d.size(0, 4), d.size(1, 4), d.one_of(1, 7, 16)
    lengths = d.integers(0, width * page, rows)
    slots, window_slots = (d.integers(-1, 99, rows).to(torch.int32) for _ in range(2))
    table, window_table = (d.integers(0, 9, rows, width).to(torch.int32) for _ in range(2))
    return {
        "tokens": d.integers(-1, 99, rows),
        "block_table": table,
        "window_block_table": window_table,
        "page_size": page,
        "input_ids": d.integers(0, 99, rows),
        "positions": (lengths - 1).clamp(min=0).to(torch.int32),
        "slots": slots,
        "window_slots": window_slots,
        "seq_lens": lengths.to(torch.int32),
        "offsets": lengths,
        "history": d.integers(0, 99, rows, d.size(1, 5)),
        **options(d, "enable_pdl"),
    }


@calls("nvfp4_quantize")
def _(d: Draw) -> Bound:
    kind = d.one_of("plain", "small", "huge", "large", "zeros", "subnormal")
    x = d.filled(kind, d.dtype, *lead(d), d.size(0, 4), 16 * d.size(0, 4))
    return {"x": d.laid_out(x), "global_scale": d.one_of(None, torch.tensor(0.01))}


@calls("nvfp4_dequantize")
def _(d: Draw) -> Bound:
    shape = *lead(d), d.size(0, 4), 16 * d.size(0, 4)
    weight = d.nvfp4("weight", *shape, scales=((), (1,)))
    if d.one_of(True, False):
        weight["weight_scale_2"] = None
    return {**weight, "dtype": d.one_of(BF16, FP32)}


def superblocks(d: Draw) -> Tensor:
    blocks = d.integers(0, 256, *lead(d), d.size(0, 3), 36).to(torch.uint8)
    blocks[..., :4].clamp_(max=0xFE)  # 0xFF alone is an error
    return blocks.flatten(-2)


@calls("gguf_to_modelopt")
def _(d: Draw) -> Bound:
    return {"blocks": d.laid_out(superblocks(d))}


@calls("modelopt_to_gguf")
def _(d: Draw) -> Bound:
    weight, scale = nvfp4.gguf_to_modelopt(superblocks(d))
    if scale.numel() and d.one_of(True, False):  # -0 is a scale of 0
        scale.view(torch.uint8)[..., 0] = 0x80
    return {"weight": d.laid_out(weight), "weight_scale": d.laid_out(scale)}


# ------------------------------------------------------------------ illegal calls

DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, BF16, FP32,
    torch.float64, torch.complex64, torch.float8_e4m3fn,
)  # fmt: skip
NUMBERS = (
    0, -1, 1, 3, 2**31, 2**63 - 1, -(2**63), 0.0, -1.0, 1e-300, 1e300, math.inf, math.nan, True,
)  # fmt: skip
OBJECTS = (None, "text", (), [1, 2], [-1, 2**62], object(), 1 << 70)
WILD = (-(2**31), -7, -2, -1, 0, 1, 40, 10**6, 2**31 - 1)


@st.composite
def broken_calls(draw: Any, name: str, dtype: torch.dtype) -> Bound:
    """A legal call of which one or two arguments were replaced; some are legal after all."""
    arguments = dict(draw(legal_calls(name, dtype)))
    chosen = st.lists(st.sampled_from(sorted(arguments)), min_size=1, max_size=2, unique=True)
    for argument in draw(chosen):
        arguments[argument] = draw(_replacements(arguments[argument]))
    return arguments


@st.composite
def _replacements(draw: Any, value: Any) -> Any:
    """Another value, of any kind; for a tensor mostly another tensor."""
    if not isinstance(value, torch.Tensor) or draw(st.integers(0, 9)) == 0:
        return draw(st.sampled_from(NUMBERS + OBJECTS))
    return draw(st.sampled_from(CHANGES))(draw, value)


def _other_dtype(draw: Any, value: Tensor) -> Tensor:
    return torch.zeros(value.shape, dtype=draw(st.sampled_from(DTYPES)))


def _other_shape(draw: Any, value: Tensor) -> Tensor:
    anything = st.lists(st.integers(0, 9), max_size=5)
    nearby = st.tuples(*(st.integers(max(0, size - 1), size + 1) for size in value.shape))
    return torch.zeros(tuple(draw(st.one_of(anything, nearby))), dtype=value.dtype)


def _other_values(draw: Any, value: Tensor) -> Tensor:
    if value.is_floating_point() or value.dtype == torch.uint8:
        return value
    picks = draw(st.lists(st.sampled_from(WILD), min_size=1, max_size=4))
    flat = [picks[i % len(picks)] for i in range(value.numel())]
    return torch.tensor(flat, dtype=value.dtype).reshape(value.shape)


def _other_device(draw: Any, value: Tensor) -> Tensor:
    return value.to("meta")


def _overlapping(draw: Any, value: Tensor) -> Tensor:
    return value[:1].expand(value.shape) if value.dim() and value.shape[0] else value


def _transposed(draw: Any, value: Tensor) -> Tensor:
    return value.transpose(-1, -2).contiguous().transpose(-1, -2) if value.dim() > 1 else value


CHANGES = (
    _other_values, _other_values, _other_dtype, _other_shape, _other_device, _overlapping,
    _transposed,
)  # fmt: skip
