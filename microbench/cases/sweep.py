"""Each op of a layer over 1 to 16,384 tokens: what another token costs, and where kernels change.

Weights are cold, launches of their own. `unevenness` reads the rows: where time falls although
there are more tokens, and where twice the tokens take more than twice the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flint_kernels import ops, results
from flint_kernels.model import cos_sin_table
from microbench.cases import Group, Outputs, Subject, bench, decode, near_one, randn
from microbench.cases.decode import Pool
from microbench.cases.kv_write import THETA, cache
from microbench.cases.prefill import random_ids

ROWS = (*(1 << power for power in range(15)),)
FALLS, DOUBLES, SMALL = 0.95, 2.0, 512


@dataclass(frozen=True)
class Op:
    """name: of the op, and sizes where it has several. make: what it takes, of launch `index`."""

    name: str
    checkpoint: str
    weights: Pool
    make: Callable[[int, int], Sequence[Any]]  # rows, index
    call: Callable[..., Any]
    flop: int  # of a token
    read: int  # bytes of a token, written ones too


def linear(name: str, features: int, columns: int, device: torch.device, shards: int = 1) -> Op:
    def weights(index: int) -> dict[str, Tensor]:
        size = features, columns
        return decode.weights("w", "nvfp4", device, index, *size, scales=(shards,))

    gated = "silu" in name
    return Op(
        f"{name} N={features} K={columns}",
        "nvfp4",
        Pool(weights, device),
        lambda rows, index: (randn(device, index, rows, columns),),
        getattr(ops, name),
        2 * features * columns,
        2 * (columns + features // (2 if gated else 1)),
    )


def experts(checkpoint: str, device: torch.device) -> Op:
    m = decode.MODEL

    def weights(index: int) -> dict[str, Tensor]:
        def made(name: str, *size: int, scales: tuple[int, ...]) -> dict[str, Tensor]:
            return decode.weights(name, checkpoint, device, index, *size, scales=scales)

        return {
            **made("w13", m.experts, 2 * m.width, m.hidden, scales=(m.experts, 2)),
            **made("w2", m.experts, m.hidden, m.width, scales=(m.experts,)),
        }

    def make(rows: int, index: int) -> Sequence[Any]:
        x, shared = (randn(device, 2 * index + i, rows, m.hidden) for i in range(2))
        chosen = torch.full((rows, m.top_k), 1 / m.top_k, device=device)
        return x, chosen, random_ids(rows, index, device), shared

    routed = getattr(ops, f"{checkpoint}_routed_experts")

    def call(x: Tensor, chosen: Tensor, ids: Tensor, shared: Tensor, *weights: Tensor) -> Any:
        return routed(x, chosen, ids, *weights, shared)

    return Op(
        f"{checkpoint}_routed_experts",
        checkpoint,
        Pool(weights, device),
        make,
        call,
        m.top_k * 6 * m.hidden * m.width,
        6 * m.hidden,
    )


def row_ops(device: torch.device) -> Iterator[Op]:
    m = decode.MODEL
    nothing = Pool(lambda _: {"none": torch.empty(1, device=device)}, device)
    weight = near_one(device, 1, m.hidden)
    yield Op(
        "fused_add_rms_norm",
        "",
        nothing,
        lambda rows, index: [randn(device, 2 * index + i, rows, m.hidden) for i in range(2)],
        lambda x, residual, _: ops.fused_add_rms_norm(x, residual, weight, decode.EPS),
        0,
        8 * m.hidden,
    )
    yield Op(
        "router_topk",
        "",
        nothing,
        lambda rows, index: (randn(device, index, rows, m.experts),),
        lambda logits, _: ops.router_topk(logits, m.top_k),
        0,
        2 * m.experts + 8 * m.top_k,
    )
    yield Op(
        "silu_and_mul",
        "",
        nothing,
        lambda rows, index: (randn(device, index, rows, 2 * m.dense),),
        lambda x, _: ops.silu_and_mul(x),
        0,
        6 * m.dense,
    )
    q_weight, k_weight = (near_one(device, 2 + i, m.dim) for i in range(2))
    cos_sin = cos_sin_table(m.positions, m.dim, theta=THETA).to(device)

    def tokens(rows: int, index: int) -> Sequence[Any]:
        place = torch.arange(rows, dtype=torch.int32, device=device)
        caches = [cache(-(-rows // 16), device, m.kv_heads, m.dim) for _ in range(2)]
        return randn(device, index, rows, m.qkv_rows), place % m.positions, place, *caches

    def turn(qkv: Tensor, at: Tensor, slots: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Any:
        given = qkv, q_weight, k_weight, cos_sin, at, slots, k, v
        return ops.qk_norm_rope_kv_write(*given, decode.EPS)

    size = 4 * m.qkv_rows
    yield Op("qk_norm_rope_kv_write", "", nothing, tokens, turn, 0, size)


@bench("sweep", file="sweep")
def _(device: torch.device) -> Iterator[Group]:
    m = decode.MODEL
    yield from groups(linear("nvfp4_linear", m.qkv_rows, m.hidden, device))
    yield from groups(linear("nvfp4_linear", m.hidden, m.heads * m.dim, device))
    yield from groups(linear("nvfp4_linear", m.hidden, m.dense, device))
    yield from groups(linear("nvfp4_linear_silu_and_mul", 2 * m.dense, m.hidden, device, 2))
    for checkpoint in decode.CHECKPOINTS:
        yield from groups(experts(checkpoint, device))
    for op in row_ops(device):
        yield from groups(op)


def groups(op: Op) -> Iterator[Group]:
    def call(buffers: tuple[Sequence[Any], dict[str, Tensor]]) -> Outputs:
        inputs, weights = buffers
        outputs = op.call(*inputs, *weights.values())
        return outputs if isinstance(outputs, tuple) else (outputs,)

    of_weights = sum(t.nbytes for t in op.weights[0].values())
    for rows in ROWS:
        # Experts that nobody chose are not read.
        used = min(rows * decode.MODEL.top_k / decode.MODEL.experts, 1.0)
        read = of_weights * used if "experts" in op.name else of_weights

        def make(index: int, rows: int = rows) -> Any:
            return op.make(rows, index), op.weights[index]

        yield Group(
            "sweep",
            int(read) + rows * op.read,
            make,
            [Subject("flint", call, f"{op.name} M={rows}")],
            flop=rows * op.flop,
            checkpoint=op.checkpoint,
        )


def unevenness(rows: Sequence[results.Row]) -> list[str]:
    """A line for each step from one M to the next that time falls at, by more than 5%, or that more
    than doubles it below 512 tokens."""
    series: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row["bench"] == "sweep":
            name, tokens = row["case"].rsplit(" M=", 1)
            series.setdefault(name, []).append((int(tokens), row["median"]))
    found = []
    for name, points in series.items():
        for (few, before), (many, after) in pairwise(sorted(points)):
            if after < FALLS * before or (many <= SMALL and after > DOUBLES * before):
                found.append(f"{name}: M={few} {before:.1f} us, M={many} {after:.1f} us")
    return found
