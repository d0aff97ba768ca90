"""The kernels of a decode layer and the LM head, of 1 and of 8 rows, for both checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from flint_kernels import ops
from flint_kernels.model import cos_sin_table
from microbench.cases import Group, Outputs, Subject, bench, compiled, decode, near_one, randn
from microbench.cases import low_latency_peers as peers
from microbench.cases.decode import CHECKPOINTS, EPS, Buffers, Pool, choice, expanded, linked
from microbench.cases.kv_write import THETA, cache

ROWS = (1, 8)
# Of a gate's input, a part of this is the output of the one before it: values stay steady.
FED_TO_A_GATE = 8


@dataclass(frozen=True)
class Step:
    """What a benchmark is made of: an op, the buffers of launch number i, the peers."""

    op: str
    make: Callable[[int], Buffers]
    peers: Sequence[Subject]
    compared: int | None = None  # the outputs that peers have in common with the op


Steps = Callable[[str, int, torch.device], Step]


def register(name: str) -> Callable[[Steps], Steps]:
    """A benchmark of the step that the function makes of checkpoint, rows and device."""

    def add(step: Steps) -> Steps:
        @bench(name, file="decode_kernels")
        def _(device: torch.device) -> Iterator[Group]:
            for checkpoint in CHECKPOINTS:
                for rows in ROWS:
                    yield from groups(name, checkpoint, rows, step(checkpoint, rows, device))

        return step

    return add


def groups(name: str, checkpoint: str, rows: int, step: Step) -> Iterator[Group]:
    first = step.make(0)
    size = decode.launch_bytes(first.arguments, first.outputs)

    def kernel(buffers: Buffers, *, enable_pdl: bool) -> Outputs:
        return decode.launch(step.op, buffers, enable_pdl=enable_pdl)

    plain, pdl = partial(kernel, enable_pdl=False), partial(kernel, enable_pdl=True)
    group = Group(name, size, step.make, [], checkpoint=checkpoint, compared=step.compared)
    case = f"M={rows}"
    yield replace(group, subjects=[Subject("flint", plain, case), *step.peers])
    chains = [
        Subject("flint pdl", pdl, f"{case} pdl", decode.chained),
        Subject("flint chain", plain, f"{case} chain", decode.chained),
    ]
    warm = [replace(peer, arrange=decode.shared_activations) for peer in step.peers]
    yield replace(group, subjects=[*chains, *warm], chained=True)


def taking(call: Callable[..., Outputs], *names: str) -> Callable[[Buffers], Outputs]:
    """A peer that takes some of the arguments by position."""

    def peer(buffers: Buffers) -> Outputs:
        return call(*(buffers.arguments[name] for name in names))

    return peer


CUBLAS_ALONE = Subject("torch.mm, projection alone", peers.product, part=True)


# ---------------------------------------------------------------------------------- norm, router


def norm_buffers(rows: int, device: torch.device, index: int) -> Buffers:
    hidden = decode.MODEL.hidden
    x, residual, normed, total = (randn(device, 4 * index + i, rows, hidden) for i in range(4))
    arguments = {
        "x": x, "residual": residual, "weight": near_one(device, index, hidden), "eps": EPS,
    }  # fmt: skip
    links = {"x": normed, "residual": total}
    return Buffers(arguments, {"normed_out": normed, "residual_out": total}, links)


@register("ll_norm")
def _(checkpoint: str, rows: int, device: torch.device) -> Step:
    names = ("x", "residual", "weight")
    return Step(
        "fused_add_rms_norm",
        partial(norm_buffers, rows, device),
        [
            Subject("torch", taking(peers.add_norm, *names)),
            Subject("torch.compile", taking(compiled(peers.add_norm), *names)),
        ],
    )


@register("ll_router")
def _(checkpoint: str, rows: int, device: torch.device) -> Step:
    model = decode.MODEL
    workspace = ops.make_workspace(device)

    def router(index: int) -> dict[str, Tensor]:
        shape = model.experts, model.hidden
        return decode.weights("router_weight", "bf16", device, index, *shape)

    pool = Pool(router, device)

    def make(index: int) -> Buffers:
        buffers = norm_buffers(rows, device, index)
        chosen = torch.empty(rows, model.top_k, device=device)
        return replace(
            buffers,
            arguments={
                **buffers.arguments, **pool[index], "top_k": model.top_k, "workspace": workspace,
            },
            outputs={
                **buffers.outputs, "topk_weights_out": chosen, "topk_ids_out": chosen.int(),
            },
        )  # fmt: skip

    names = ("x", "residual", "weight", "router_weight", "top_k")
    return Step(
        "fused_add_rms_norm_router_topk",
        make,
        [
            Subject("torch", taking(peers.add_norm_route, *names)),
            Subject("torch.compile", taking(compiled(peers.add_norm_route), *names)),
        ],
        # The sum is rounded before torch norms it: of near ties another expert is chosen.
        compared=2,
    )


# ---------------------------------------------------------------------------------- projections


def dense_pools(
    name: str, checkpoint: str, device: torch.device, *shape: int, scales: tuple[int, ...] = ()
) -> tuple[Pool, Pool]:
    """The op's weights, and the peers' values of the same ones in BF16."""

    def make(index: int) -> dict[str, Tensor]:
        return decode.weights(name, checkpoint, device, index, *shape, scales=scales)

    return with_dense(name, checkpoint, device, make)


def with_dense(
    name: str, checkpoint: str, device: torch.device, make: Callable[[int], dict[str, Tensor]]
) -> tuple[Pool, Pool]:
    pool = Pool(make, device)
    if checkpoint == "bf16":
        return pool, pool
    return pool, Pool(lambda index: {name: expanded(name, make(index))}, device)


def projection(
    op: str,
    pools: tuple[Pool, Pool],
    device: torch.device,
    x_shape: tuple[int, ...],
    out_shape: tuple[int, ...],
    fed: int,
    subjects: Sequence[Subject],
    dtype: torch.dtype = torch.bfloat16,
) -> Step:
    """An op of x and a weight; `fed` elements of x are the output of the launch before it."""
    name = "logits_out" if op.endswith("lm_head") else "out"

    def make(index: int) -> Buffers:
        out, following = linked(device, 2 * index, out_shape, x_shape, fed, dtype)
        x = randn(device, 2 * index + 1, *x_shape)
        weight, dense = (pool[index] for pool in pools)
        return Buffers({"x": x, **weight}, {name: out}, {"x": following}, dense)

    return Step(op, make, subjects)


def linear(checkpoint: str, rows: int, device: torch.device, columns: int) -> Step:
    hidden = decode.MODEL.hidden
    return projection(
        f"{checkpoint}_linear",
        dense_pools("weight", checkpoint, device, hidden, columns),
        device,
        (rows, columns),
        (rows, hidden),
        rows * hidden,
        [Subject("torch.mm", peers.product)],
    )


@register("ll_o")
def _(checkpoint: str, rows: int, device: torch.device) -> Step:
    return linear(checkpoint, rows, device, decode.MODEL.heads * decode.MODEL.dim)


@register("ll_dense_down")
def _(checkpoint: str, rows: int, device: torch.device) -> Step:
    return linear(checkpoint, rows, device, decode.MODEL.dense)


@register("ll_dense_gate_up")
def _(checkpoint: str, rows: int, device: torch.device) -> Step:
    hidden, width = decode.MODEL.hidden, decode.MODEL.dense
    return projection(
        f"{checkpoint}_linear_silu_and_mul",
        dense_pools("weight", checkpoint, device, 2 * width, hidden, scales=(2,)),
        device,
        (rows, hidden),
        (rows, width),
        rows * hidden // FED_TO_A_GATE,
        [Subject("torch", peers.gated_product), CUBLAS_ALONE],
    )


@register("lm_head")
def _(checkpoint: str, rows: int, device: torch.device) -> Step:
    hidden, vocabulary = decode.MODEL.hidden, decode.MODEL.vocabulary

    def make(index: int) -> dict[str, Tensor]:
        weight = decode.weights("weight", checkpoint, device, index, vocabulary, hidden)
        copy_the_last_row(weight, hidden)
        return weight

    return projection(
        f"{checkpoint}_lm_head",
        with_dense("weight", checkpoint, device, make),
        device,
        (rows, hidden),
        (rows, vocabulary),
        rows * hidden,
        [Subject("torch.mm", peers.product)],
        torch.float32,
    )


def copy_the_last_row(weight: dict[str, Tensor], hidden: int) -> None:
    """Makes the last logits of a row its odd elements, again and again.

    A BF16 value in fp32 is 0 and the value, as BF16. So the last logits of the last row, read as
    BF16, are what a chain's next launch can take as its x: as large as before, and never NaN.
    """
    count = max(ROWS) * hidden // 2
    rows = torch.arange(-count, 0, device=weight["weight"].device)
    columns = (2 * rows + 1) % hidden
    weight["weight"][-count:] = 0
    if "weight_scale" not in weight:
        weight["weight"][rows, columns] = 1.0
        return
    # Code 2 is 1.0, here in the high nibble; the block scale undoes the global one, 2^-k.
    exponent = -round(torch.log2(weight["weight_scale_2"]).item())
    weight["weight"][rows, columns // 2] = 0x20
    weight["weight_scale"].view(torch.uint8)[rows, columns // 16] = (exponent + 7) << 3


@register("ll_qkv")
def _(checkpoint: str, rows: int, device: torch.device) -> Step:
    model = decode.MODEL
    pools = dense_pools("weight", checkpoint, device, model.qkv_rows, model.hidden, scales=(3,))
    cos_sin = cos_sin_table(model.positions, model.dim, theta=THETA).to(device)
    workspace = ops.make_workspace(device)
    row = torch.arange(rows, device=device)

    def make(index: int) -> Buffers:
        q_shape, x_shape = (rows, model.heads, model.dim), (rows, model.hidden)
        fed = min(rows * model.hidden, rows * model.heads * model.dim)
        q, following = linked(device, 4 * index, q_shape, x_shape, fed)
        weight, dense = (pool[index] for pool in pools)
        arguments = {
            "x": randn(device, 4 * index + 1, *x_shape),
            **weight,
            "q_weight": near_one(device, 4 * index + 2, model.dim),
            "k_weight": near_one(device, 4 * index + 3, model.dim),
            "cos_sin": cos_sin,
            "positions": ((index * rows + row) % model.positions).int(),
            "slot_mapping": (row * decode.PAGE + index % decode.PAGE).int(),
            "k_cache": cache(rows, device, model.kv_heads, model.dim),
            "v_cache": cache(rows, device, model.kv_heads, model.dim),
            "eps": EPS,
            "workspace": workspace,
        }
        return Buffers(arguments, {"q_out": q}, {"x": following}, dense)

    return Step(
        f"{checkpoint}_qkv_norm_rope_kv_write", make, [Subject("torch", peers.qkv), CUBLAS_ALONE]
    )


# ---------------------------------------------------------------------------------- experts


def ends(ids: Tensor) -> Tensor:
    """Where the entries of each expert end, once they stand in the experts' order."""
    counts = torch.bincount(ids.flatten(), minlength=decode.MODEL.experts)
    return counts.cumsum(0).int()


@register("ll_gate_up")
def _(checkpoint: str, rows: int, device: torch.device) -> Step:
    m = decode.MODEL
    experts = dense_pools(
        "w13", checkpoint, device, m.experts, 2 * m.width, m.hidden, scales=(m.experts, 2)
    )
    shared = dense_pools("shared_w13", checkpoint, device, 2 * m.shared, m.hidden, scales=(2,))
    workspace = ops.make_workspace(device)
    turns = max(1, m.experts // (rows * m.top_k))  # launches that one bank of experts serves

    def make(index: int) -> Buffers:
        shape = (rows, m.top_k, m.width)
        fed = rows * m.hidden // FED_TO_A_GATE
        routed, following = linked(device, 3 * index, shape, (rows, m.hidden), fed)
        ids = choice(rows, index, device)
        weights, dense = (
            {**e[index // turns], **s[index]} for e, s in zip(experts, shared, strict=True)
        )
        arguments = {
            "x": randn(device, 3 * index + 1, rows, m.hidden), "topk_ids": ids, **weights,
            "workspace": workspace,
        }  # fmt: skip
        act = randn(device, 3 * index + 2, rows, m.shared)
        return Buffers(
            arguments,
            {"routed_act_out": routed, "shared_act_out": act},
            {"x": following},
            {**dense, "ends": ends(ids)},
        )

    return Step(f"{checkpoint}_moe_gate_up", make, [Subject("torch.grouped_mm", peers.gate_up)])


@register("ll_down")
def _(checkpoint: str, rows: int, device: torch.device) -> Step:
    m = decode.MODEL
    experts = dense_pools(
        "w2", checkpoint, device, m.experts, m.hidden, m.width, scales=(m.experts,)
    )
    shared = dense_pools("shared_w2", checkpoint, device, m.hidden, m.shared)
    workspace = ops.make_workspace(device)
    turns = max(1, m.experts // (rows * m.top_k))

    def make(index: int) -> Buffers:
        shape = (rows, m.top_k, m.width)
        fed = min(rows * m.hidden, rows * m.top_k * m.width)
        out, following = linked(device, 4 * index, (rows, m.hidden), shape, fed)
        ids = choice(rows, index, device)
        scores = torch.sigmoid(randn(device, 4 * index + 1, rows, m.top_k).float())
        weights, dense = (
            {**e[index // turns], **s[index]} for e, s in zip(experts, shared, strict=True)
        )
        arguments = {
            "routed_act": randn(device, 4 * index + 2, *shape),
            "shared_act": randn(device, 4 * index + 3, rows, m.shared),
            "topk_weights": (scores / scores.sum(1, keepdim=True)).bfloat16().float(),
            "topk_ids": ids,
            **weights,
            "workspace": workspace,
        }
        dense = {**dense, "ends": ends(ids)}
        return Buffers(arguments, {"out": out}, {"routed_act": following}, dense)

    return Step(f"{checkpoint}_moe_down", make, [Subject("torch.grouped_mm", peers.down)])
