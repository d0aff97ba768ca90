"""The ops of a decode layer at any size: their arguments, and what their results are held to.

Everything is made on `DEVICE`. LOW_LATENCY_DEVICE=cpu runs the same tests against the CPU's bodies
at small sizes, which finds a mistake of a test without a GPU.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import cache

import torch
from support import Bound, as_tuple, bits, relative_error

from flint_kernels import ops
from flint_kernels.backends.cpu import reference_body
from flint_kernels.model import cos_sin_table
from flint_kernels.ops import REGISTRY

Tensor = torch.Tensor
BF16 = torch.bfloat16
E4M3 = torch.float8_e4m3fn

DEVICE = os.environ.get("LOW_LATENCY_DEVICE", "cuda")
ON_GPU = DEVICE == "cuda"

PAGE, BLOCKS, POSITIONS = 16, 40, 1024
FAST_ROWS, MOST_ROWS = 8, 17  # what the fast kernels are made for; what the samples have


@dataclass(frozen=True)
class Sizes:
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    experts: int
    width: int  # of a routed expert
    top_k: int
    shared: int
    dense: int
    vocabulary: int

    @property
    def kv_rows(self) -> int:
        return self.kv_heads * self.dim

    @property
    def qkv_rows(self) -> int:
        return self.heads * self.dim + 2 * self.kv_rows


TINY = Sizes(128, 8, 1, 128, 16, 64, 6, 128, 384, 2048)  # flint-tiny's
FLINT = Sizes(2048, 32, 4, 128, 256, 512, 6, 1024, 6144, 4097) if ON_GPU else TINY
MODELS = {"flint": FLINT, "flint-tiny": TINY}
SIZES = {
    **MODELS,
    "narrow": Sizes(64, 2, 1, 32, 5, 16, 5, 32, 96, 33),
    "odd": Sizes(192, 3, 1, 64, 7, 48, 3, 80, 112, 51),
    "wide": Sizes(1088, 5, 1, 64, 9, 96, 1, 64, 192, 1001),
    "many": Sizes(256, 3, 1, 128, 12, 64, 8, 64, 320, 1000),  # 64 entries of 8 rows
    "more": Sizes(320, 4, 2, 128, 40, 48, 9, 80, 80, 8),  # and 72
}

CHECKPOINTS = ("nvfp4", "bf16")
# The steps of a layer, and the head. Norm and router are of BF16 in both checkpoints.
PLAIN_STEPS = ("norm", "router")
STEPS = ("qkv", "o", "gate_up", "down", "dense_gate_up", "dense_down", "head")
CALLS = [(step, "bf16") for step in PLAIN_STEPS] + [(s, c) for s in STEPS for c in CHECKPOINTS]

OPS = {
    "norm": "fused_add_rms_norm",
    "router": "fused_add_rms_norm_router_topk",
    "qkv": "qkv_norm_rope_kv_write",
    "o": "linear",
    "gate_up": "moe_gate_up",
    "down": "moe_down",
    "dense_gate_up": "linear_silu_and_mul",
    "dense_down": "linear",
    "head": "lm_head",
}
# Arguments that have a row for each token, and those that FP32 turns into the oracle's.
OF_ROWS = (
    "x", "residual", "positions", "slot_mapping", "topk_ids", "topk_weights", "routed_act",
    "shared_act",
)  # fmt: skip
ACTIVATIONS = ("x", "residual", "routed_act", "shared_act", "k_cache", "v_cache")


def op_name(step: str, checkpoint: str) -> str:
    return OPS[step] if step in PLAIN_STEPS else f"{checkpoint}_{OPS[step]}"


# ---------------------------------------------------------------------------------- tensors


def rng(seed: int) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


def randn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    values = torch.randn(*shape, generator=rng(seed), device=DEVICE, dtype=BF16)
    return values if scale == 1.0 else values * scale


def random_bytes(*shape: int, low: int = 0, high: int = 256, seed: int = 0) -> Tensor:
    generator = rng(seed)
    return torch.randint(low, high, shape, generator=generator, device=DEVICE, dtype=torch.uint8)


def nvfp4(*shape: int, scales: tuple[int, ...] = (), seed: int = 0) -> dict[str, Tensor]:
    """Random codes and block scales of [..., N, K], and global scales of shape `scales`.

    Code and block scale are 3 in the root mean square, so a global scale of 1 / (3 * sqrt(K)) keeps
    the size of what comes in; those of neighbouring shards and experts differ up to fourfold.
    """
    *lead, columns = shape
    weight = random_bytes(*lead, columns // 2, seed=seed)
    scale = random_bytes(*lead, columns // 16, low=0x28, high=0x41, seed=seed + 1)
    factors = 1 + torch.arange(math.prod(scales), device=DEVICE) % 4
    scale_2 = factors.reshape(scales) / (3 * math.sqrt(columns))
    return {"": weight, "_scale": scale.view(E4M3), "_scale_2": scale_2.float()}


def weights(
    name: str, checkpoint: str, *shape: int, scales: tuple[int, ...] = (), seed: int = 0
) -> Bound:
    """The arguments that a weight of [..., N, K] is in either checkpoint."""
    if checkpoint == "nvfp4":
        return {name + part: t for part, t in nvfp4(*shape, scales=scales, seed=seed).items()}
    return {name: randn(*shape, seed=seed, scale=shape[-1] ** -0.5)}


def twin(tensor: Tensor) -> Tensor:
    """A copy with the same strides."""
    room = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=DEVICE)
    return room.copy_(tensor)


def routing(rows: int, sizes: Sizes, seed: int = 0) -> Bound:
    chosen, ids = ops.router_topk(randn(rows, sizes.experts, seed=seed), sizes.top_k)
    return {"topk_weights": chosen, "topk_ids": ids}


def near_one(size: int, seed: int) -> Tensor:
    return 1 + randn(size, seed=seed, scale=0.1)


# ---------------------------------------------------------------------------------- calls


@cache
def whole(step: str, checkpoint: str, size: str) -> Bound:
    """Arguments with `MOST_ROWS` rows; shared by all tests, so nothing may write into them."""
    s, rows = SIZES[size], MOST_ROWS
    x = {"x": randn(rows, s.hidden, seed=1)}
    residual = {"residual": randn(rows, s.hidden, seed=2), "weight": near_one(s.hidden, 3)}
    if step == "norm":
        return {**x, **residual}
    if step == "router":
        router = randn(s.experts, s.hidden, seed=4, scale=s.hidden**-0.5)
        return {**x, **residual, "router_weight": router, "top_k": s.top_k}
    if step == "qkv":
        return {
            **x,
            **weights("weight", checkpoint, s.qkv_rows, s.hidden, scales=(3,), seed=5),
            "q_weight": near_one(s.dim, 6),
            "k_weight": near_one(s.dim, 7),
            "cos_sin": cos_sin_table(POSITIONS, s.dim, theta=10000.0).to(DEVICE),
            "positions": torch.randint(
                POSITIONS, (rows,), generator=rng(8), device=DEVICE, dtype=torch.int32
            ),
            "slot_mapping": torch.randperm(BLOCKS * PAGE, generator=rng(9), device=DEVICE)[:rows],
            "k_cache": randn(BLOCKS, PAGE, s.kv_heads, s.dim, seed=10),
            "v_cache": randn(BLOCKS, PAGE, s.kv_heads, s.dim, seed=11),
        }
    if step == "gate_up":
        return {
            **x,
            "topk_ids": routing(rows, s)["topk_ids"],
            **weights(
                "w13", checkpoint, s.experts, 2 * s.width, s.hidden, scales=(s.experts, 2), seed=12
            ),
            **weights("shared_w13", checkpoint, 2 * s.shared, s.hidden, scales=(2,), seed=14),
        }
    if step == "down":
        return {
            "routed_act": randn(rows, s.top_k, s.width, seed=16),
            "shared_act": randn(rows, s.shared, seed=17),
            **routing(rows, s),
            **weights("w2", checkpoint, s.experts, s.hidden, s.width, scales=(s.experts,), seed=18),
            **weights("shared_w2", checkpoint, s.hidden, s.shared, seed=20),
        }
    columns = {"o": s.heads * s.dim, "dense_down": s.dense}.get(step, s.hidden)
    out, scales = {
        "o": (s.hidden, ()),
        "dense_down": (s.hidden, (1,)),
        "dense_gate_up": (2 * s.dense, (2,)),
        "head": (s.vocabulary, ()),
    }[step]
    return {
        "x": randn(rows, columns, seed=22),
        **weights("weight", checkpoint, out, columns, scales=scales, seed=23),
    }


def of_rows(arguments: Bound, rows: slice | list[int]) -> Bound:
    """The call of some of the rows alone."""
    return {k: v[rows] if k in OF_ROWS else v for k, v in arguments.items()}


def sample(step: str, checkpoint: str, size: str, rows: int) -> Bound:
    return of_rows(whole(step, checkpoint, size), slice(rows))


def with_own_cache(arguments: Bound) -> Bound:
    return {k: twin(v) if k in ("k_cache", "v_cache") else v for k, v in arguments.items()}


def cached_rows(arguments: Bound) -> tuple[Tensor, ...]:
    """What stands in the caches under the slots of the call, none of which is -1."""
    slots = arguments["slot_mapping"].long()
    return tuple(arguments[name][slots // PAGE, slots % PAGE] for name in ("k_cache", "v_cache"))


def run(name: str, arguments: Bound, *, out: bool = False, **more: object) -> tuple[Tensor, ...]:
    """The op's outputs, and for one that writes a cache the rows it has written there.

    out: by the out-variant, into buffers full of NaN.
    """
    mine = with_own_cache(arguments)
    declared = REGISTRY[name]
    if out:
        specs = declared.infer(**declared.bind((), mine))
        specs = specs if isinstance(specs, tuple) else (specs,)
        outputs = tuple(filled_with_ones(spec.shape, spec.dtype) for spec in specs)
        buffers = dict(zip(declared.outputs, outputs, strict=True))
        declared.packet.out(**mine, **buffers, **more)
    else:
        outputs = as_tuple(declared.packet.default(**mine, **more))
    return (*outputs, *cached_rows(mine)) if "k_cache" in mine else outputs


def filled_with_ones(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Every bit is set: a NaN, or -1."""
    room = torch.empty(shape, dtype=dtype, device=DEVICE)
    room.view(torch.uint8).fill_(0xFF)
    return room


def reference(name: str, arguments: Bound, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The plain PyTorch body, with activations in BF16, or in FP32 as the oracle."""
    mine = with_own_cache(arguments)
    mine = {k: v.to(dtype) if k in ACTIVATIONS else v for k, v in mine.items()}
    outputs = as_tuple(reference_body(name)(**REGISTRY[name].bind((), mine)))
    return (*outputs, *cached_rows(mine)) if "k_cache" in mine else outputs


# ---------------------------------------------------------------------------------- judgements


def assert_same(got: tuple[Tensor, ...], want: tuple[Tensor, ...], what: object = "") -> None:
    assert len(got) == len(want)
    for index, (one, two) in enumerate(zip(got, want, strict=True)):
        assert one.shape == two.shape, (index, what)
        assert one.dtype == two.dtype, (index, what)
        assert torch.equal(bits(one), bits(two)), (index, what)


def assert_no_worse(got: Tensor, plain: Tensor, exact: Tensor, what: object = "") -> None:
    """The error of `got` is at most 1.1 times that of plain PyTorch.

    A sum that falls on the other side of a rounding on the way moves one of n values by 2^-8 of
    itself, 2^-8 / sqrt(n) of them all: what luck may add to the error of few values. FP32 logits
    are not rounded at all; a tensor core truncates their sums, and so gets 1e-5.
    """
    assert got.shape == plain.shape
    assert got.dtype == plain.dtype
    if not bool(exact.any()):
        assert not bool(got.any()), what
        return
    luck = 1e-5 if got.dtype == torch.float32 else 2**-8 / math.sqrt(max(got.numel(), 1))
    mine, theirs = relative_error(got, exact), relative_error(plain, exact)
    assert mine <= 1.1 * theirs + luck, (what, mine, theirs)  # NaN fails


def to_bf16(values: Tensor) -> Tensor:
    return values.to(BF16).double()


def assert_routed(arguments: Bound, outputs: tuple[Tensor, ...]) -> None:
    """Ids and weights follow from the op's own normed rows.

    An fp32 sum in any order is within `slack` of the exact logit, and rounding is monotonic: no
    chosen logit may be below one that ranks after it by more than that. The weights are those of
    the chosen logits, one of which may have been rounded to the other side: then a score s moves by
    2^-8 * |logit| * s * (1 - s), and the weight is rounded once more.
    """
    normed, _, chosen, ids = outputs
    router, top_k = arguments["router_weight"].double(), arguments["top_k"]
    logits = normed.double() @ router.T
    terms = normed.double().abs() @ router.abs().T
    slack = (router.shape[1] + 2) * 2**-24 * terms
    low, high = to_bf16(logits - slack), to_bf16(logits + slack)
    ids = ids.long()
    assert ids.shape == (normed.shape[0], top_k)
    assert bool(((ids >= 0) & (ids < router.shape[0])).all())
    for row in ids.tolist():
        assert len(set(row)) == top_k
    best = high.gather(1, ids)
    following = low.gather(1, ids)[:, 1:]
    assert bool((best[:, :-1] >= following).all())
    unchosen = low.scatter(1, ids, -torch.inf).amax(1, keepdim=True)
    assert bool((best[:, -1:] >= unchosen).all())
    scores = torch.sigmoid(to_bf16(logits.gather(1, ids)))
    want = scores / (scores.sum(1, keepdim=True) + 1e-20)
    torch.testing.assert_close(chosen.double(), want, rtol=2**-6, atol=0)
