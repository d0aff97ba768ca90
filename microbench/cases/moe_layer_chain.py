"""All Mixture-of-Experts layers of a decode step behind each other: seven launches a layer.

Every launch takes what the ones before it have written, as in the model; every layer has weights
and a cache of its own, and layers share the buffers between their launches. The weights of the 49
layers are 22 GB in NVFP4 and 77 GB in BF16.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flint_kernels import ops
from flint_kernels.model import cos_sin_table
from flint_kernels.ops import REGISTRY
from microbench.cases import Group, Outputs, Subject, bench, decode, generator, near_one, randn
from microbench.cases.decode import CHECKPOINTS, EPS, PAGE, launch_bytes
from microbench.cases.kv_write import THETA

ROWS = (1, 8)

Arguments = dict[str, Any]


def layer_weights(checkpoint: str, device: torch.device, seed: int) -> dict[str, dict[str, Tensor]]:
    """Those of a layer, as its ops take them."""
    m = decode.MODEL

    def made(index: int, name: str, *shape: int, scales: tuple[int, ...] = ()) -> dict[str, Tensor]:
        return decode.weights(name, checkpoint, device, seed + index, *shape, scales=scales)

    router = decode.weights("router_weight", "bf16", device, seed, m.experts, m.hidden)
    return {
        "input_norm": {"weight": near_one(device, seed + 1, m.hidden)},
        "qkv": {
            **made(2, "weight", m.qkv_rows, m.hidden, scales=(3,)),
            "q_weight": near_one(device, seed + 3, m.dim),
            "k_weight": near_one(device, seed + 4, m.dim),
        },
        "o": made(5, "weight", m.hidden, m.heads * m.dim),
        "router": {"weight": near_one(device, seed + 6, m.hidden), **router},
        "gate_up": {
            **made(7, "w13", m.experts, 2 * m.width, m.hidden, scales=(m.experts, 2)),
            **made(8, "shared_w13", 2 * m.shared, m.hidden, scales=(2,)),
        },
        "down": {
            **made(9, "w2", m.experts, m.hidden, m.width, scales=(m.experts,)),
            **made(10, "shared_w2", m.hidden, m.shared),
        },
    }


class Layers:
    """The weights of all layers, for any number of rows."""

    def __init__(self, checkpoint: str, device: torch.device) -> None:
        self.checkpoint, self.device = checkpoint, device
        count = decode.MODEL.layers
        self.layers = [layer_weights(checkpoint, device, 100 * index) for index in range(count)]


class Chain:
    """The launches of all layers for `rows` requests, each beyond its window's first tokens."""

    def __init__(self, layers: Layers, rows: int, *, attends: bool) -> None:
        m, device = decode.MODEL, layers.device
        self.plan: list[tuple[str, Arguments, dict[str, Tensor]]] = []
        self._rows, self._device = rows, device
        workspace = {"workspace": ops.make_workspace(device)}
        context = m.window + 5 * PAGE + 7
        pages = -(-context // PAGE)
        table = torch.randperm(rows * pages, generator=generator(device, 0), device=device)
        table = table.int().view(rows, pages)
        lengths = torch.full((rows,), context, dtype=torch.int32, device=device)
        step = {
            "cos_sin": cos_sin_table(m.positions, m.dim, theta=THETA).to(device),
            "positions": lengths - 1,
            "slot_mapping": table[:, -1] * PAGE + (context - 1) % PAGE,
        }
        seen = {"block_table": table, "seq_lens": lengths, "window": m.window}
        sinks = randn(device, 1, m.heads).float()

        x, residual = (randn(device, 2 + i, rows, m.hidden) for i in range(2))
        normed, sum_1, sum_2, mixed, routed_normed, self.out = (
            self._empty(m.hidden) for _ in range(6)
        )
        self.residual = sum_2
        q, attended = (self._empty(m.heads, m.dim) for _ in range(2))
        routed, shared = self._empty(m.top_k, m.width), self._empty(m.shared)
        chosen = torch.empty(rows, m.top_k, device=device)
        self.ids = chosen.int()
        eps = {"eps": EPS}
        for index, layer in enumerate(layers.layers):
            cache = self._caches(rows * pages, 4 * index)
            self._add(
                "fused_add_rms_norm",
                {"x": x, "residual": residual, **layer["input_norm"], **eps},
                {"normed_out": normed, "residual_out": sum_1},
            )
            self._add(
                f"{layers.checkpoint}_qkv_norm_rope_kv_write",
                {"x": normed, **layer["qkv"], **step, **cache, **eps, **workspace},
                {"q_out": q},
            )
            if attends:
                self._add(
                    "attention_decode",
                    {"q": q, **cache, **seen, "sinks": sinks, **workspace},
                    {"out": attended},
                )
            mixed_heads = attended if attends else q
            self._add(
                f"{layers.checkpoint}_linear",
                {"x": mixed_heads.view(rows, -1), **layer["o"]},
                {"out": mixed},
            )
            self._add(
                "fused_add_rms_norm_router_topk",
                {
                    "x": mixed, "residual": sum_1, **layer["router"], "top_k": m.top_k, **eps,
                    **workspace,
                },
                {
                    "normed_out": routed_normed, "residual_out": sum_2, "topk_weights_out": chosen,
                    "topk_ids_out": self.ids,
                },
            )  # fmt: skip
            self._add(
                f"{layers.checkpoint}_moe_gate_up",
                {"x": routed_normed, "topk_ids": self.ids, **layer["gate_up"], **workspace},
                {"routed_act_out": routed, "shared_act_out": shared},
            )
            self._add(
                f"{layers.checkpoint}_moe_down",
                {
                    "routed_act": routed, "shared_act": shared, "topk_weights": chosen,
                    "topk_ids": self.ids, **layer["down"], **workspace,
                },
                {"out": self.out},
            )  # fmt: skip
            x, residual = self.out, sum_2

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(self._rows, *shape, dtype=torch.bfloat16, device=self._device)

    def _caches(self, blocks: int, seed: int) -> Arguments:
        m = decode.MODEL
        shape = blocks, m.kv_heads, PAGE, m.dim
        memory = (randn(self._device, seed + i, *shape) for i in range(2))
        return dict(zip(decode.CACHES, (c.permute(0, 2, 1, 3) for c in memory), strict=True))

    def _add(self, op: str, arguments: Arguments, outputs: dict[str, Tensor]) -> None:
        self.plan.append((op, arguments, outputs))

    def launch(self, *, enable_pdl: bool) -> Outputs:
        for op, arguments, outputs in self.plan:
            REGISTRY[op].packet.out(**arguments, **outputs, enable_pdl=enable_pdl)
        return self.out, self.residual

    def bytes(self) -> int:
        """What all launches move. It runs them: which experts are read, the data decides."""
        m, total = decode.MODEL, 0
        for op, arguments, outputs in self.plan:
            REGISTRY[op].packet.out(**arguments, **outputs)
            if op == "attention_decode":  # of the caches, the window of each request
                total += self._rows * m.window * 2 * m.kv_rows * 2
                small = {k: v for k, v in arguments.items() if k not in decode.CACHES}
                total += launch_bytes(small, outputs)
            else:
                total += launch_bytes(arguments, outputs)
        return total


def launch(chain: Chain, *, enable_pdl: bool) -> Outputs:
    return chain.launch(enable_pdl=enable_pdl)


def groups(name: str, device: torch.device, *, attends: bool) -> Iterator[Group]:
    for checkpoint in CHECKPOINTS:
        layers = Layers(checkpoint, device)
        for rows in ROWS:
            chain = Chain(layers, rows, attends=attends)
            case = f"M={rows} layers={len(layers.layers)}"
            subjects = [
                Subject("flint pdl", partial(launch, enable_pdl=True), case),
                Subject("flint", partial(launch, enable_pdl=False), f"{case} plain"),
            ]
            # One set: a chain is far larger than the L2, so none of its launches finds it warm.
            yield Group(
                name,
                chain.bytes(),
                lambda _, chain=chain: chain,  # type: ignore[misc]
                subjects,
                checkpoint=checkpoint,
            )


@bench("moe_layer_chain", file="decode_kernels")
def _(device: torch.device) -> Iterator[Group]:
    return groups("moe_layer_chain", device, attends=True)


@bench("moe_layer_chain_without_attention", file="decode_kernels", on_request=True)
def _(device: torch.device) -> Iterator[Group]:
    return groups("moe_layer_chain_without_attention", device, attends=False)
