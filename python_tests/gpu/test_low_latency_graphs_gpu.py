"""The decode layer's ops in CUDA graphs: behind each other with PDL, beside each other, workspaces.

Every buffer of a chain lies in one arena, which is filled with ones (a NaN, an id of -1) before
each replay: a kernel that does not wait for the one before it reads those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from low_latency import (
    ACTIVATIONS,
    BF16,
    BLOCKS,
    CALLS,
    CHECKPOINTS,
    DEVICE,
    FAST_ROWS,
    MODELS,
    OF_ROWS,
    ON_GPU,
    PAGE,
    SIZES,
    Tensor,
    of_rows,
    op_name,
    randn,
    rng,
    run,
    twin,
    weights,
    whole,
)
from support import Bound, as_tuple, bits, captured

from flint_kernels import ops
from flint_kernels.model import cos_sin_table
from flint_kernels.ops import REGISTRY

pytestmark = pytest.mark.gpu

REPLAYS = 1000 if ON_GPU else 5
INPUTS = 8  # different ones that replays take in turn
SLOW_CYCLES = 20_000  # about 10 us
WINDOW, HISTORY = 513, 530  # keys of the longest request
ALIGNMENT = 256


@pytest.fixture(autouse=True)
def _errors_belong_to_their_test() -> Iterator[None]:
    yield
    if ON_GPU:
        torch.cuda.synchronize()


def replayed(step: Callable[[], Any]) -> Callable[[], Any]:
    """Replays of a graph of `step`; on the CPU `step` itself."""
    return captured(step)[0].replay if ON_GPU else step


class Arena:
    """Buffers in one piece of memory, to be filled and compared by one kernel."""

    def __init__(self, capacity: int) -> None:
        self.memory = torch.zeros(capacity, dtype=torch.uint8, device=DEVICE)
        self.used = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        start, self.used = self.used, self.used + -(-size // ALIGNMENT) * ALIGNMENT
        assert self.used <= self.memory.numel()
        return self.memory[start : start + size].view(dtype).view(shape)

    def fill_with_ones(self) -> None:
        self.memory.fill_(0xFF)


class Layers:
    """Layers of a decode step, each op into buffers of its own, with one workspace for all.

    The state that is compared: the arena (every output of every op) and the caches.
    """

    def __init__(
        self, checkpoint: str, size: str, rows: int, *, kinds: str, attention: bool, seed: int = 0
    ) -> None:
        self.checkpoint, self.sizes = checkpoint, SIZES[size]
        self.rows, self.attention = rows, attention
        s = self.sizes
        self.arena = Arena(
            256 * 2**10
            + len(kinds) * rows * 40 * (s.hidden + s.qkv_rows + s.top_k * s.width + s.dense)
            + rows * 4 * s.vocabulary
        )
        self.workspace = ops.make_workspace(DEVICE)
        self.bank = randn(INPUTS, 2, rows, s.hidden, seed=seed)
        self.turn = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        self.start = torch.zeros(1, 2, rows, s.hidden, dtype=BF16, device=DEVICE)
        self.caches = torch.zeros(
            len(kinds), 2, BLOCKS * rows, PAGE, s.kv_heads, s.dim, dtype=BF16, device=DEVICE
        )
        self.cos_sin = cos_sin_table(HISTORY, s.dim, theta=10000.0).to(DEVICE)
        self.seq_lens = HISTORY - 37 * torch.arange(rows, device=DEVICE, dtype=torch.int32)
        self.positions = self.seq_lens - 1
        pages = torch.randperm(BLOCKS * rows, generator=rng(seed), device=DEVICE)
        self.table = pages.view(rows, BLOCKS).int()
        row = torch.arange(rows, device=DEVICE)
        page = self.table[row, (self.positions // PAGE).long()].long()
        self.slots = page * PAGE + self.positions % PAGE
        self.sinks = randn(s.heads, seed=seed + 1).float()
        self.layers = [self._layer(kind, seed + 100 * i) for i, kind in enumerate(kinds)]
        self.last = randn(s.hidden, seed=seed + 3, scale=0.1) + 1
        self.head = weights("weight", checkpoint, s.vocabulary, s.hidden, seed=seed + 4)
        self.history = randn(*self.caches.shape, seed=seed + 5)
        self.plan: list[tuple[str, Bound]] = []
        self._write_plan()

    def _layer(self, kind: str, seed: int) -> dict[str, Any]:
        """The weights of a Mixture-of-Experts layer ("m") or of a dense one ("d")."""
        s, c = self.sizes, self.checkpoint

        def norm(index: int) -> Tensor:
            return 1 + randn(s.hidden, seed=seed + index, scale=0.1)

        layer: dict[str, Any] = {
            "kind": kind,
            "input_norm": norm(1),
            "post_norm": norm(2),
            "q_weight": 1 + randn(s.dim, seed=seed + 3, scale=0.1),
            "k_weight": 1 + randn(s.dim, seed=seed + 4, scale=0.1),
            "qkv": weights("weight", c, s.qkv_rows, s.hidden, scales=(3,), seed=seed + 5),
            "o": weights("weight", c, s.hidden, s.heads * s.dim, seed=seed + 7),
        }
        if kind == "d":
            layer["up"] = weights("weight", c, 2 * s.dense, s.hidden, scales=(2,), seed=seed + 9)
            layer["down"] = weights("weight", c, s.hidden, s.dense, seed=seed + 11)
            return layer
        e = s.experts
        layer["router"] = randn(e, s.hidden, seed=seed + 13, scale=s.hidden**-0.5)
        layer["up"] = {
            **weights("w13", c, e, 2 * s.width, s.hidden, scales=(e, 2), seed=seed + 15),
            **weights("shared_w13", c, 2 * s.shared, s.hidden, scales=(2,), seed=seed + 17),
        }
        layer["down"] = {
            **weights("w2", c, e, s.hidden, s.width, scales=(e,), seed=seed + 19),
            **weights("shared_w2", c, s.hidden, s.shared, seed=seed + 21),
        }
        return layer

    def _add(self, name: str, **arguments: Any) -> tuple[Tensor, ...]:
        """An op of the plan, and the buffers that it fills."""
        declared = REGISTRY[name]
        specs = declared.infer(**declared.bind((), arguments))
        specs = specs if isinstance(specs, tuple) else (specs,)
        outputs = tuple(self.arena.take(spec.shape, spec.dtype) for spec in specs)
        if "workspace" in declared.parameters:
            arguments["workspace"] = self.workspace
        self.plan.append((name, {**arguments, **dict(zip(declared.outputs, outputs, strict=True))}))
        return outputs

    def _write_plan(self) -> None:
        c, s = self.checkpoint, self.sizes
        x, residual = self.start[0]
        for layer, (k_cache, v_cache) in zip(self.layers, self.caches, strict=True):
            x, residual = self._add(
                "fused_add_rms_norm", x=x, residual=residual, weight=layer["input_norm"]
            )
            [q] = self._add(
                f"{c}_qkv_norm_rope_kv_write", x=x, **layer["qkv"], q_weight=layer["q_weight"],
                k_weight=layer["k_weight"], cos_sin=self.cos_sin, positions=self.positions,
                slot_mapping=self.slots, k_cache=k_cache, v_cache=v_cache,
            )  # fmt: skip
            if self.attention:
                [q] = self._add(
                    "attention_decode", q=q, k_cache=k_cache, v_cache=v_cache,
                    block_table=self.table, seq_lens=self.seq_lens, sinks=self.sinks,
                    window=WINDOW,
                )  # fmt: skip
            [x] = self._add(f"{c}_linear", x=q.view(self.rows, s.heads * s.dim), **layer["o"])
            if layer["kind"] == "d":
                x, residual = self._add(
                    "fused_add_rms_norm", x=x, residual=residual, weight=layer["post_norm"]
                )
                [act] = self._add(f"{c}_linear_silu_and_mul", x=x, **layer["up"])
                [x] = self._add(f"{c}_linear", x=act, **layer["down"])
                continue
            x, residual, chosen, ids = self._add(
                "fused_add_rms_norm_router_topk", x=x, residual=residual,
                weight=layer["post_norm"], router_weight=layer["router"], top_k=s.top_k,
            )  # fmt: skip
            routed, shared = self._add(f"{c}_moe_gate_up", x=x, topk_ids=ids, **layer["up"])
            [x] = self._add(
                f"{c}_moe_down", routed_act=routed, shared_act=shared, topk_weights=chosen,
                topk_ids=ids, **layer["down"],
            )  # fmt: skip
        x, _ = self._add("fused_add_rms_norm", x=x, residual=residual, weight=self.last)
        self._add(f"{c}_lm_head", x=x, **self.head)

    def launch(self, enable_pdl: bool) -> None:
        for name, arguments in self.plan:
            REGISTRY[name].packet.out(**arguments, enable_pdl=enable_pdl)

    def compose(self, enable_pdl: bool) -> Tensor:
        """The same by calls that make their outputs, as the model's are: in a graph these share
        memory, so that an op may write where the op before the last one has read. The logits."""
        made: dict[int, Tensor] = {}

        def current(value: Any) -> Any:
            fresh = made.get(value.data_ptr()) if isinstance(value, torch.Tensor) else None
            return value if fresh is None else fresh.view(value.shape)

        for name, arguments in self.plan:
            buffers = [arguments[output] for output in REGISTRY[name].outputs]
            given = {
                key: current(value)
                for key, value in arguments.items()
                if key not in REGISTRY[name].outputs
            }
            results = as_tuple(REGISTRY[name].packet.default(**given, enable_pdl=enable_pdl))
            made.update((b.data_ptr(), r) for b, r in zip(buffers, results, strict=True))
        return results[0]

    def next_input(self) -> None:
        """Takes the bank's next input, late."""
        if ON_GPU:
            torch.cuda._sleep(SLOW_CYCLES)
        self.turn.add_(1).remainder_(INPUTS)
        torch.index_select(self.bank, 0, self.turn, out=self.start)

    def step(self, enable_pdl: bool) -> None:
        self.next_input()
        self.launch(enable_pdl)

    def spoil(self) -> None:
        """Ones in every buffer, and in the caches under the slots that a step writes."""
        self.arena.fill_with_ones()
        lines = self.caches.view(torch.int16).view(*self.caches.shape[:2], -1, self.sizes.kv_rows)
        lines.index_fill_(2, self.slots, -1)

    def expected(self) -> list[tuple[Tensor, Tensor]]:
        """The state after each input of the bank, run eagerly and without PDL."""
        self.caches.copy_(self.history)
        states = []
        for _ in range(INPUTS):
            self.spoil()
            self.step(enable_pdl=False)
            states.append((self.arena.memory.clone(), self.new_lines()))
        logits = self.plan[-1][1]["logits_out"]
        assert bool(logits.isfinite().all())
        assert 0.01 < float(logits.std()) < 100
        return states

    def new_lines(self) -> Tensor:
        lines = self.caches.view(*self.caches.shape[:2], -1, self.sizes.kv_rows)
        return lines.index_select(2, self.slots).view(torch.int16)

    def difference(self, want: tuple[Tensor, Tensor]) -> Tensor:
        """How many bytes of the arena and elements of the caches are not as wanted."""
        return (self.arena.memory != want[0]).sum() + (self.new_lines() != want[1]).sum()


def check_replays(
    layers: Layers, replay: Callable[[], Any], want: list[tuple[Tensor, Tensor]]
) -> None:
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for index in range(REPLAYS):
        layers.spoil()
        replay()
        wrong += layers.difference(want[index % INPUTS]) != 0
    assert int(wrong) == 0, f"{int(wrong)} of {REPLAYS} replays differ"
    assert not bool(layers.workspace.any())


# Two layers each: the second one's norm takes what the first one's down has written.
CHAINS = [("mm", False), ("mm", True), ("dd", False), ("dm", True)]


@pytest.mark.parametrize("kinds, attention", CHAINS)
@pytest.mark.parametrize("rows", [1, 3, FAST_ROWS])
@pytest.mark.parametrize("size", MODELS)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_C6_a_pdl_chain_behind_a_slow_producer(
    checkpoint: str, size: str, rows: int, kinds: str, attention: bool
) -> None:
    """Bit-equal to the same ops without PDL, one after the other, for other inputs each replay."""
    layers = Layers(checkpoint, size, rows, kinds=kinds, attention=attention)
    want = layers.expected()
    assert not torch.equal(want[0][0], want[1][0])
    assert not torch.equal(want[0][1], want[1][1])
    replay = replayed(lambda: layers.step(enable_pdl=True))
    layers.turn.zero_()
    check_replays(layers, replay, want)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_a_launch_before_its_time_would_show(checkpoint: str) -> None:
    """Each launch put before the one it follows: what the tests of chains are there to find."""
    layers = Layers(checkpoint, "flint-tiny", 3, kinds="mdm", attention=True)
    want = layers.expected()
    in_order = list(layers.plan)
    for index in range(len(in_order) - 1):
        early = [*in_order[:index], in_order[index + 1], in_order[index], *in_order[index + 2 :]]
        for plan, differs in ((early, True), (in_order, False)):
            layers.plan = plan
            layers.turn.zero_()
            layers.spoil()
            layers.step(enable_pdl=False)
            assert bool(layers.difference(want[0])) == differs, in_order[index + 1][0]


@pytest.mark.parametrize("rows", [1, FAST_ROWS])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_C6_a_pdl_chain_whose_outputs_share_memory(checkpoint: str, rows: int) -> None:
    layers = Layers(checkpoint, "flint", rows, kinds="mdm", attention=True)
    layers.expected()
    want = []
    for _ in range(INPUTS):
        layers.next_input()
        want.append((layers.compose(enable_pdl=False).clone(), layers.new_lines()))
    logits = torch.empty_like(want[0][0])

    def step() -> None:
        layers.next_input()
        logits.copy_(layers.compose(enable_pdl=True))

    replay = replayed(step)
    layers.turn.zero_()
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for index in range(REPLAYS):
        replay()
        logits_wanted, lines = want[index % INPUTS]
        wrong += ((logits != logits_wanted).any() | (layers.new_lines() != lines).any()).long()
    assert int(wrong) == 0, f"{int(wrong)} of {REPLAYS} replays differ"
    assert not bool(layers.workspace.any())


@pytest.mark.parametrize("rows", [1, FAST_ROWS])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_two_graphs_at_once_with_workspaces_of_their_own(checkpoint: str, rows: int) -> None:
    """Each on a stream of its own, with different inputs and weights."""
    chains = [
        Layers(checkpoint, "flint", rows, kinds="m", attention=True, seed=1000 * (i + 1))
        for i in range(2)
    ]
    wants = [layers.expected() for layers in chains]
    replays = [replayed(lambda each=layers: each.step(enable_pdl=True)) for layers in chains]
    streams = [torch.cuda.Stream() if ON_GPU else None for _ in chains]
    wrong = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    for layers in chains:
        layers.turn.zero_()
    if ON_GPU:
        torch.cuda.synchronize()
    for index in range(REPLAYS):
        for which, layers in enumerate(chains):
            with torch.cuda.stream(streams[which]):
                layers.spoil()
                replays[which]()
                wrong[which] += layers.difference(wants[which][index % INPUTS]) != 0
    if ON_GPU:
        torch.cuda.synchronize()
    assert wrong.tolist() == [0, 0]
    for layers in chains:
        assert not bool(layers.workspace.any())


@pytest.mark.parametrize("enable_pdl", [False, True])
@pytest.mark.parametrize("rows", [1, FAST_ROWS])
@pytest.mark.parametrize("step, checkpoint", CALLS)
def test_the_same_bits_in_1000_replays(
    step: str, checkpoint: str, rows: int, enable_pdl: bool
) -> None:
    """Each op alone, three times in a graph, so that with PDL launches of it overlap."""
    name = op_name(step, checkpoint)
    arguments = of_rows(whole(step, checkpoint, "flint"), slice(rows))
    want = run(name, arguments)
    for cache in ("k_cache", "v_cache"):
        if cache in arguments:
            arguments[cache] = twin(arguments[cache])
    outputs = want[: len(REGISTRY[name].outputs)]
    arena = Arena(3 * sum(output.nbytes + ALIGNMENT for output in outputs))
    copies = [tuple(arena.take(o.shape, o.dtype) for o in outputs) for _ in range(3)]

    def launches() -> None:
        for buffers in copies:
            given = dict(zip(REGISTRY[name].outputs, buffers, strict=True))
            REGISTRY[name].packet.out(**arguments, **given, enable_pdl=enable_pdl)

    replay = replayed(launches)
    arena.memory.fill_(0xA5)
    replay()
    for buffers in copies:
        for one, two in zip(buffers, outputs, strict=True):
            assert torch.equal(bits(one), bits(two))
    first = arena.memory.clone()
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(REPLAYS):
        arena.memory.fill_(0xA5)
        replay()
        wrong += (arena.memory != first).any()
    assert int(wrong) == 0, f"{int(wrong)} of {REPLAYS} replays differ"


def test_a_workspace_is_zero_after_every_op() -> None:
    """Also one larger than asked for, and one that starts inside of a buffer."""
    size = ops.workspace_bytes(DEVICE)
    room = torch.zeros(size + 1024, dtype=torch.uint8, device=DEVICE)
    workspaces = [ops.make_workspace(DEVICE), room, room[512 : 512 + size]]
    served = 0
    for step, checkpoint in CALLS:
        name = op_name(step, checkpoint)
        if "workspace" not in REGISTRY[name].parameters:
            continue
        served += 1
        for model in MODELS:
            for rows in (*range(FAST_ROWS + 2), 17):
                arguments = of_rows(whole(step, checkpoint, model), slice(rows))
                want = run(name, arguments)
                for workspace in workspaces:
                    got = run(name, arguments, workspace=workspace)
                    assert not bool(room.any()), (name, rows)
                    assert not bool(workspace.any()), (name, rows)
                    for one, two in zip(got, want, strict=True):
                        assert torch.equal(bits(one), bits(two)), (name, rows)
    assert served == 7  # qkv, gate_up and down of both checkpoints, and the router


@pytest.mark.parametrize("step, checkpoint", CALLS)
def test_replays_follow_changed_inputs(step: str, checkpoint: str) -> None:
    """Ids, slots, positions and activations are read on the device, at every replay."""
    name = op_name(step, checkpoint)
    arguments = dict(of_rows(whole(step, checkpoint, "flint"), slice(FAST_ROWS)))
    changing = [key for key in arguments if key in OF_ROWS or key in ACTIVATIONS]
    for key in changing:
        arguments[key] = twin(arguments[key])
    held: list[tuple[Tensor, ...]] = []

    def call() -> None:
        result = REGISTRY[name].packet.default(**arguments)
        held[:] = [result if isinstance(result, tuple) else (result,)]

    replay = replayed(call)
    for turn in (9, 0, 4):
        part = of_rows(whole(step, checkpoint, "flint"), slice(turn, turn + FAST_ROWS))
        for key in changing:
            arguments[key].copy_(part[key])
        replay()
        got = [output.clone() for output in held[0]]
        want = run(name, part)
        for one, two in zip(got, want, strict=False):
            assert torch.equal(bits(one), bits(two))
