"""Projections of many tokens with NVFP4 weights, and routed experts with either kind.

Peers are torch's products with the weights' values in BF16, which they are given beforehand: four
times the bytes, and nothing to decode.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flint_kernels import ops
from flint_kernels.backends import native_many
from microbench.cases import Group, Outputs, Subject, bench, decode, generator, randn
from microbench.cases.decode import Pool, expanded
from microbench.cases.low_latency_peers import gated

FILE = "prefill_kernels"
ROWS = (64, 256, 1024, 8192)


# ---------------------------------------------------------------------------------- projections


@dataclass(frozen=True)
class Projection:
    x: Tensor
    weight: dict[str, Tensor]
    dense: Tensor


@bench("linear", file=FILE)
def _(device: torch.device) -> Iterator[Group]:
    m = decode.MODEL
    for features, columns in (
        (m.qkv_rows, m.hidden),
        (m.hidden, m.heads * m.dim),
        (2 * m.dense, m.hidden),
        (m.hidden, m.dense),
    ):
        yield from linear_groups(features, columns, device)


def linear_groups(features: int, columns: int, device: torch.device) -> Iterator[Group]:
    def weights(index: int) -> dict[str, Tensor]:
        return decode.weights("weight", "nvfp4", device, index, features, columns)

    pool = Pool(weights, device)
    dense = Pool(lambda index: {"weight": expanded("weight", weights(index))}, device)
    for rows in ROWS:

        def make(index: int, rows: int = rows) -> Projection:
            x = randn(device, index, rows, columns)
            return Projection(x, pool[index], dense[index]["weight"])

        size = sum(t.nbytes for t in pool[0].values()) + 2 * rows * (features + columns)
        yield Group(
            "linear",
            size,
            make,
            [
                Subject("flint", linear, f"M={rows} N={features} K={columns}"),
                Subject("torch.mm", lambda buffers: (torch.mm(buffers.x, buffers.dense.T),)),
            ],
            flop=2 * rows * features * columns,
            checkpoint="nvfp4",
        )


def linear(buffers: Projection) -> Outputs:
    return (ops.nvfp4_linear(buffers.x, *buffers.weight.values()),)


# ---------------------------------------------------------------------------------- experts


@dataclass(frozen=True)
class Experts:
    """Entries whose experts rise, so that the order of experts is the one that they are in."""

    checkpoint: str
    ids: Tensor  # [M, top_k]
    weight: dict[str, Tensor]
    dense: Tensor  # [E, N, K]
    ends: Tensor  # of each expert's entries
    inputs: Tensor  # [M * top_k, K], for the peer
    between: dict[str, Tensor]  # what the steps of the kernels leave to each other


def shape() -> tuple[int, int, int]:
    return decode.MODEL.experts, decode.MODEL.hidden, decode.MODEL.width


def random_ids(rows: int, index: int, device: torch.device) -> Tensor:
    """As a router chooses that has no preference: no expert twice for a token."""
    scores = torch.rand(
        rows, decode.MODEL.experts, generator=generator(device, index), device=device
    )
    return scores.topk(decode.MODEL.top_k, dim=1).indices.int()


def rising_ids(rows: int, index: int, device: torch.device) -> Tensor:
    ids = random_ids(rows, index, device)
    return ids.flatten().sort().values.view_as(ids)


def between(ids: Tensor) -> dict[str, Tensor]:
    experts, hidden, width = shape()
    if not ids.is_cuda:
        return {}
    words = torch.ops.flint_native.routed_experts_many_words(*ids.shape, experts)
    return {
        "order": torch.empty(words, dtype=torch.int32, device=ids.device),
        "rows": torch.empty(ids.numel(), hidden, dtype=torch.bfloat16, device=ids.device),
        "act": torch.empty(ids.numel(), width, dtype=torch.bfloat16, device=ids.device),
    }


def experts_groups(
    name: str, weight: str, features: int, columns: int, checkpoint: str, device: torch.device
) -> Iterator[Group]:
    experts = decode.MODEL.experts
    scales = (experts, 2) if weight == "w13" else (experts,)

    def weights(index: int) -> dict[str, Tensor]:
        size = experts, features, columns
        return decode.weights(weight, checkpoint, device, index, *size, scales=scales)

    pool = Pool(weights, device)
    dense = pool
    if checkpoint == "nvfp4":
        dense = Pool(lambda index: {weight: expanded(weight, weights(index))}, device)
    step, peer = (gate_up, peer_gate_up) if weight == "w13" else (down, peer_down)
    for rows in ROWS:

        def make(index: int, rows: int = rows) -> Experts:
            ids = rising_ids(rows, index, device)
            counts = torch.bincount(ids.flatten(), minlength=experts)
            inputs = randn(device, index, ids.numel(), columns)
            ends = counts.cumsum(0).int()
            buffers = Experts(
                checkpoint, ids, pool[index], dense[index][weight], ends, inputs, between(ids)
            )
            if ids.is_cuda:
                prepare(buffers, weight)
            return buffers

        entries = rows * decode.MODEL.top_k
        used = rising_ids(rows, 0, device).unique().numel()
        of_experts = sum(t.nbytes for t in pool[0].values()) * used // experts
        outputs = features // 2 if weight == "w13" else features
        yield Group(
            name,
            of_experts + 2 * entries * (columns + outputs),
            make,
            [Subject("flint", step, f"M={rows}"), Subject("torch grouped_mm", peer)],
            flop=2 * entries * features * columns,
            checkpoint=checkpoint,
        )


def run(
    buffers: Experts | Around, steps: int, ids: Tensor, checkpoint: str, **given: Tensor
) -> None:
    """Steps of the kernels over what the buffers have between them."""
    bf16 = checkpoint == "bf16"
    tensors = {**buffers.between, **given}
    native_many.experts(steps, ids, shape(), bf16=bf16, enable_pdl=False, **tensors)


def prepare(buffers: Experts, weight: str) -> None:
    """The steps before the one that is timed. A token for each entry: it has no other."""
    ids, inputs = buffers.ids, buffers.inputs
    if weight == "w2":
        before = native_many.ORDER | native_many.GATHER_ACTS
        run(buffers, before, ids, buffers.checkpoint, entry_act=inputs)
    else:
        before = native_many.ORDER | native_many.GATHER_TOKENS
        run(buffers, before, ids.view(-1, 1), buffers.checkpoint, x=inputs)


def named(buffers: Experts, *names: str) -> dict[str, Tensor]:
    return dict(zip(names, buffers.weight.values(), strict=False))


def gate_up(buffers: Experts) -> Outputs:
    """By entries, each a token of its own."""
    if not buffers.ids.is_cuda:
        return peer_gate_up(buffers)
    steps = native_many.GATE_UP | native_many.ACT_BY_ENTRY
    weight = named(buffers, "w13", "scale", "scale_2")
    run(buffers, steps, buffers.ids.view(-1, 1), buffers.checkpoint, x=buffers.inputs, **weight)
    return (buffers.between["act"],)


def down(buffers: Experts) -> Outputs:
    if not buffers.ids.is_cuda:
        return peer_down(buffers)
    weight = named(buffers, "w2", "w2_scale", "w2_scale_2")
    act = buffers.inputs
    run(buffers, native_many.DOWN, buffers.ids, buffers.checkpoint, entry_act=act, **weight)
    return (buffers.between["rows"],)


def grouped(buffers: Experts) -> Tensor:
    multiply = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    out: Tensor = multiply(buffers.inputs, buffers.dense.transpose(1, 2), offs=buffers.ends)
    return out


def peer_gate_up(buffers: Experts) -> Outputs:
    return (gated(grouped(buffers)),)


def peer_down(buffers: Experts) -> Outputs:
    return (grouped(buffers),)


@bench("experts_gate_up", file=FILE)
def _(device: torch.device) -> Iterator[Group]:
    _, hidden, width = shape()
    for checkpoint in decode.CHECKPOINTS:
        yield from experts_groups("experts_gate_up", "w13", 2 * width, hidden, checkpoint, device)


@bench("experts_down", file=FILE)
def _(device: torch.device) -> Iterator[Group]:
    _, hidden, width = shape()
    for checkpoint in decode.CHECKPOINTS:
        yield from experts_groups("experts_down", "w2", hidden, width, checkpoint, device)


# ---------------------------------------------------------------------------------- around them


@dataclass(frozen=True)
class Around:
    logits: Tensor  # [M, E]
    x: Tensor
    shared: Tensor
    outputs: Tensor  # [M * top_k, H], of the experts
    between: dict[str, Tensor]


def around(buffers: Around) -> Outputs:
    """Choice, order, x in that order, and the combination of what the experts make of it."""
    if not buffers.x.is_cuda:
        return peer_around(buffers)
    weights, ids = ops.router_topk(buffers.logits, decode.MODEL.top_k)
    run(buffers, native_many.ORDER | native_many.GATHER_TOKENS, ids, "nvfp4", x=buffers.x)
    out = torch.empty_like(buffers.x)
    given = {"topk_weights": weights, "shared": buffers.shared, "out": out, "rows": buffers.outputs}
    run(buffers, native_many.COMBINE, ids, "nvfp4", **given)
    return (out,)


def peer_around(buffers: Around) -> Outputs:
    """In ops of torch; the experts' rows are kept, as nothing else would need them."""
    logits, ids = torch.topk(buffers.logits, decode.MODEL.top_k)
    scores = torch.sigmoid(logits.float())
    weights = (scores / scores.sum(1, keepdim=True)).bfloat16().float()
    order = ids.flatten().argsort(stable=True)
    rows = buffers.x[order // ids.shape[1]]
    parts = buffers.outputs.view(*ids.shape, -1) * weights[..., None]
    return parts.sum(1).bfloat16() + buffers.shared, rows


@bench("experts_around", file=FILE)
def _(device: torch.device) -> Iterator[Group]:
    experts, hidden, _ = shape()
    top_k = decode.MODEL.top_k
    for rows in ROWS:

        def make(index: int, rows: int = rows) -> Around:
            ids = random_ids(rows, index, device)
            return Around(
                randn(device, 4 * index, rows, experts),
                randn(device, 4 * index + 1, rows, hidden),
                randn(device, 4 * index + 2, rows, hidden),
                randn(device, 4 * index + 3, rows * top_k, hidden),
                between(ids),
            )

        row = 2 * hidden
        yield Group(
            "experts_around",
            rows * (2 * experts + row * (2 * top_k + 3)),
            make,
            [Subject("flint", around, f"M={rows}"), Subject("torch", peer_around)],
            checkpoint="nvfp4",
            compared=1,
        )
