"""Which calls of the decode ops the library's GPU kernels take, and what becomes of the others.

How right the kernels are at any size is for test_low_latency_gpu.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from low_latency import (
    BF16,
    CALLS,
    CHECKPOINTS,
    DEVICE,
    E4M3,
    FAST_ROWS,
    MODELS,
    Bound,
    Tensor,
    assert_no_worse,
    assert_same,
    cached_rows,
    filled_with_ones,
    nvfp4,
    op_name,
    randn,
    reference,
    run,
    sample,
    with_own_cache,
)
from support import as_tuple, bits, captured

from flint_kernels.backends import cuda, gpu_general, native_decode
from flint_kernels.ops import REGISTRY

pytestmark = pytest.mark.gpu

STEPS = [(step, checkpoint) for step, checkpoint in CALLS if step != "norm"]
each_step = pytest.mark.parametrize("step, checkpoint", STEPS)


@pytest.fixture(autouse=True)
def _fast_kernels() -> Iterator[None]:
    """The library's kernels are what this is about, and their errors belong to their own test."""
    device = torch.device("cuda", torch.cuda.current_device())
    assert cuda.why_not(device) is None, cuda.why_not(device)
    assert native_decode._runs_on(torch.cuda.current_device())
    yield
    torch.cuda.synchronize()


def by(body: Callable[..., Any], name: str, arguments: Bound) -> tuple[Tensor, ...] | None:
    """What `run` gives, by one body alone; None where it hands the call back."""
    mine = with_own_cache(arguments)
    result = body(**REGISTRY[name].bind((), mine))
    if result is NotImplemented:
        return None
    outputs = as_tuple(result)
    return (*outputs, *cached_rows(mine)) if "k_cache" in mine else outputs


def kernel(name: str, arguments: Bound) -> tuple[Tensor, ...] | None:
    return by(getattr(native_decode, name), name, arguments)


def general(name: str, arguments: Bound) -> tuple[Tensor, ...]:
    results = by(gpu_general.general_body(name), name, arguments)
    assert results is not None
    return results


@pytest.mark.parametrize("size", MODELS)
@each_step
def test_the_kernels_take_every_step_of_the_models(step: str, checkpoint: str, size: str) -> None:
    """With every number of rows that they are made for, and it is they that the op runs."""
    name = op_name(step, checkpoint)
    for rows in range(1, FAST_ROWS + 1):
        arguments = sample(step, checkpoint, size, rows)
        got = kernel(name, arguments)
        assert got is not None, rows
        assert_same(run(name, arguments), got, rows)
        assert_same(run(name, arguments, out=True), got, rows)
    assert kernel(name, sample(step, checkpoint, size, FAST_ROWS + 1)) is None


@each_step
def test_no_further_from_fp32_than_the_general_body(step: str, checkpoint: str) -> None:
    name = op_name(step, checkpoint)
    for rows in (1, 5, FAST_ROWS):
        arguments = sample(step, checkpoint, "flint-tiny", rows)
        exact = reference(name, arguments, torch.float32)
        found = zip(run(name, arguments), general(name, arguments), exact, strict=True)
        # Another choice of experts is compared with its own logits elsewhere.
        for got, plain, want in list(found)[: 2 if step == "router" else None]:
            assert_no_worse(got, plain, want, rows)


# ------------------------------------------------------------------------- calls handed back


def weight_name(arguments: Bound) -> str:
    return next(n for n in ("router_weight", "w13", "w2", "weight") if n in arguments)


def apart(weight: Tensor) -> Tensor:
    """The same values, the rows 16 elements further apart."""
    wide = torch.zeros(*weight.shape[:-1], weight.shape[-1] + 16, dtype=weight.dtype, device=DEVICE)
    view = wide[..., : weight.shape[-1]]
    return view.copy_(weight)


def misaligned(weight: Tensor) -> Tensor:
    """A dense copy that starts one element into its buffer."""
    copy = torch.empty(weight.numel() + 1, dtype=weight.dtype, device=DEVICE)[1:]
    return copy.view(weight.shape).copy_(weight)


def odd_rows(x: Tensor) -> Tensor:
    """The same values, the rows an odd number of elements apart."""
    wide = torch.zeros(*x.shape[:-1], x.shape[-1] + 1, dtype=x.dtype, device=DEVICE)
    return wide[..., :-1].copy_(x)


def handed_back(step: str, checkpoint: str, reason: str) -> Bound:
    """A legal call that no kernel takes."""
    if reason == "rows":
        return sample(step, checkpoint, "flint-tiny", FAST_ROWS + 1)
    arguments = dict(sample(step, checkpoint, "flint-tiny", 3))
    if reason == "rows of x":
        arguments["x"] = odd_rows(arguments["x"])
        return arguments
    change = apart if reason == "weights apart" else misaligned
    name = weight_name(arguments)
    arguments[name] = change(arguments[name])
    return arguments


REASONS = ("rows", "rows of x", "weights apart", "weights misaligned")
# Activations of the step down are copied where they are not dense.
HANDED_BACK = [
    (*call, r) for call in STEPS for r in REASONS if (call[0], r) != ("down", "rows of x")
]


@pytest.mark.parametrize("step, checkpoint, reason", HANDED_BACK)
def test_what_no_kernel_takes_is_done_by_the_general_body(
    step: str, checkpoint: str, reason: str
) -> None:
    """The same bits as that body's own, in the op and in its out-variant."""
    name, arguments = op_name(step, checkpoint), handed_back(step, checkpoint, reason)
    assert kernel(name, arguments) is None
    want = general(name, arguments)
    assert_same(run(name, arguments), want)
    assert_same(run(name, arguments, out=True), want)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_a_head_of_another_size_is_not_the_kernel_s(checkpoint: str) -> None:
    name, arguments = op_name("qkv", checkpoint), sample("qkv", checkpoint, "narrow", 2)
    assert kernel(name, arguments) is None
    assert_same(run(name, arguments), general(name, arguments))


def test_more_shards_than_the_kernel_has_are_not_mixed_up() -> None:
    """Four shards are its, five are not; each row has its own shard's scale either way."""
    for sizes in ([24, 8, 16, 32], [24, 8, 16, 16, 16]):
        weight, scale, _ = nvfp4(sum(sizes), 128).values()
        scale_2 = 2.0 ** -torch.arange(len(sizes), device=DEVICE).float()
        arguments = {
            "x": randn(2, 128),
            "weight": weight,
            "weight_scale": scale,
            "weight_scale_2": scale_2,
            "shard_sizes": sizes,
        }
        assert (kernel("nvfp4_linear", arguments) is None) == (len(sizes) > 4)
        [got] = run("nvfp4_linear", arguments)
        first = 0
        for shard, size in enumerate(sizes):
            rows = slice(first, first + size)
            part = {
                "x": arguments["x"],
                "weight": weight[rows],
                "weight_scale": scale.view(torch.uint8)[rows].view(E4M3),
                "weight_scale_2": scale_2[shard],
            }
            [plain] = reference("nvfp4_linear", part, BF16)
            [exact] = reference("nvfp4_linear", part, torch.float32)
            assert_no_worse(got[:, rows], plain, exact, (sizes, shard))
            first += size


# ------------------------------------------------------------------------- graphs


@pytest.mark.parametrize("reason", ["none", "rows", "weights apart"])
@each_step
def test_both_kinds_of_call_can_be_captured(step: str, checkpoint: str, reason: str) -> None:
    """By the out-variant: a replay writes the same buffers again."""
    name = op_name(step, checkpoint)
    arguments = (
        sample(step, checkpoint, "flint-tiny", 3)
        if reason == "none"
        else handed_back(step, checkpoint, reason)
    )
    mine, op = with_own_cache(arguments), REGISTRY[name]
    specs = op.infer(**op.bind((), mine))
    specs = specs if isinstance(specs, tuple) else (specs,)
    outputs = tuple(filled_with_ones(spec.shape, spec.dtype) for spec in specs)
    buffers = dict(zip(op.outputs, outputs, strict=True))
    graph, _ = captured(lambda: op.packet.out(**mine, **buffers))
    want = [bits(output).clone() for output in outputs]
    for output in outputs:
        output.view(torch.uint8).fill_(0xFF)
    graph.replay()
    torch.cuda.synchronize()
    for output, bytes_ in zip(outputs, want, strict=True):
        assert torch.equal(bits(output), bytes_)


@pytest.mark.parametrize(
    "step, strided",
    [("qkv", ("positions", "slot_mapping")), ("down", ("topk_ids", "topk_weights"))],
)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_what_is_read_early_may_be_strided(
    step: str, strided: tuple[str, ...], checkpoint: str
) -> None:
    """The dense copies that a call makes stand between its kernel and the kernel in front. Each
    replay has other values than the last, which a launch ahead of the copies would still find."""
    name = op_name(step, checkpoint)
    for rows in (3, FAST_ROWS):
        arguments = with_own_cache(sample(step, checkpoint, "flint-tiny", rows))
        values = [{n: arguments[n].roll(turn, 0) for n in strided} for turn in (0, 1)]
        wants = [as_tuple(REGISTRY[name].packet.default(**{**arguments, **v})) for v in values]
        assert not torch.equal(wants[0][0], wants[1][0])
        wide = {n: torch.stack([arguments[n]] * 2, dim=-1) for n in strided}
        call = {**arguments, **{n: pair[..., 0] for n, pair in wide.items()}, "enable_pdl": True}
        graph, held = captured(lambda call=call: REGISTRY[name].packet.default(**call))
        for turn in range(20):
            for n, pair in wide.items():
                pair.copy_(values[turn % 2][n][..., None].expand_as(pair))
            graph.replay()
            torch.cuda.synchronize()
            assert_same(as_tuple(held), wants[turn % 2], (rows, turn))
