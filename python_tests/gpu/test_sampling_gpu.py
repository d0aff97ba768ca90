"""Sampling on a GPU: the tokens of the CPU from the same logits, its distribution, and a step's
inputs as the CPU makes them."""

from __future__ import annotations

import math
from typing import Any

import op_samples
import pytest
import torch
from op_samples import randn
from support import GPU, bits, captured, on_gpu
from test_sampling import chance_of_as_bad_a_fit

from flint_kernels import ops
from flint_kernels.backends import gpu_general
from flint_kernels.ops import REGISTRY
from flint_kernels.reference import sampling as reference

pytestmark = pytest.mark.gpu

VOCABULARY = 150_144


def settings_of(rows: int, first: int, top_k: int = 20) -> tuple[torch.Tensor, ...]:
    return (
        torch.full((rows,), 1.0),
        torch.full((rows,), top_k, dtype=torch.int32),
        torch.full((rows,), 0.95),
        torch.arange(rows) * (2**41 + 7) - 3,
        torch.arange(first, first + rows),
    )


@pytest.mark.parametrize("vocabulary", [1, 33, 1024, 1025, 5000, VOCABULARY])
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_tokens_are_those_of_the_cpu(rows: int, vocabulary: int) -> None:
    logits = randn(rows, vocabulary, seed=rows, dtype=torch.float32) * 3
    logits[0, ::7] = logits[0, 0]  # ties
    on_device = logits.to(GPU)
    for first in range(0, 40, rows):
        settings = settings_of(rows, first)
        want = ops.sample(logits, *settings)
        moved = [tensor.to(GPU) for tensor in settings]
        for pdl in (False, True):
            got = ops.sample(on_device, *moved, max_top_k=20, enable_pdl=pdl)
            assert torch.equal(got.cpu(), want)
        assert torch.equal(gpu_general.sample(on_device, *moved).cpu(), want)


def test_settings_of_all_kinds_and_what_is_no_number() -> None:
    rows = 400
    logits = randn(rows, 3000, seed=5, dtype=torch.float32) * 3
    logits = logits.to(torch.bfloat16).float()  # ties
    generator = torch.Generator().manual_seed(1)
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0])
    pick = torch.randint(50, logits.shape, generator=generator)
    logits = torch.where(pick < 5, special[pick.clamp_max(4)], logits)
    logits[:, 0] = 0.5

    def choices(*values: float) -> torch.Tensor:
        return torch.tensor(values)[torch.randint(len(values), (rows,), generator=generator)]

    settings = (
        choices(0.0, 1e-30, 0.7, 1.0, 3.0),
        choices(1, 2, 20, 32).to(torch.int32),
        choices(1e-9, 0.3, 0.95, 1.0),
        torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator),
        torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator),
    )
    want = ops.sample(logits, *settings, max_top_k=32)
    got = ops.sample(logits.to(GPU), *[t.to(GPU) for t in settings], max_top_k=32)
    assert torch.equal(got.cpu(), want)
    # What the promise forbids, and a row without a candidate, has no token.
    moved = [t.to(GPU) for t in settings]
    moved[0][:] = 1.0
    moved[1][0], moved[1][1] = 0, 33
    broken = logits.to(GPU)
    broken[2] = math.nan
    assert ops.sample(broken, *moved, max_top_k=32)[:3].tolist() == [-1, -1, -1]


def test_chi_square_of_a_million_draws() -> None:
    count, part, vocabulary = 1_000_000, 50_000, 300
    logits = randn(vocabulary, seed=11, dtype=torch.float32) * 2
    top = logits.double().sort(descending=True, stable=True)
    chances = torch.softmax(top.values[:20], dim=0)
    kept = int(((chances.cumsum(0) - chances) < 0.95).sum())
    probabilities = torch.zeros(vocabulary, dtype=torch.float64)
    probabilities[top.indices[:kept]] = chances[:kept] / chances[:kept].sum()
    for seed in (0, 1, -(2**40)):
        counts = torch.zeros(vocabulary, dtype=torch.float64)
        for first in range(0, count, part):
            settings = [tensor.to(GPU) for tensor in settings_of(part, first)]
            settings[3].fill_(seed)
            rows = logits.to(GPU).expand(part, -1)
            tokens = ops.sample(rows, *settings, max_top_k=20)
            counts += torch.bincount(tokens.cpu(), minlength=vocabulary)
        assert chance_of_as_bad_a_fit(counts, probabilities) > 1e-3


def test_a_captured_draw_follows_logits_and_offsets() -> None:
    logits = randn(2, VOCABULARY, seed=3, dtype=torch.float32).to(GPU)
    settings = [tensor.to(GPU) for tensor in settings_of(2, 0)]
    graph, tokens = captured(lambda: ops.sample(logits, *settings, max_top_k=32, enable_pdl=True))
    for seed in range(5):
        logits.copy_(randn(2, VOCABULARY, seed=seed, dtype=torch.float32))
        settings[4].add_(1)
        graph.replay()
        want = ops.sample(logits.cpu(), *[tensor.cpu() for tensor in settings])
        assert torch.equal(tokens.cpu(), want)


@pytest.mark.parametrize("pdl", [False, True])
def test_decode_advance_is_the_cpu_s(pdl: bool) -> None:
    for args, kwargs in op_samples.SAMPLES["decode_advance"]():
        here: dict[str, Any] = REGISTRY["decode_advance"].bind(args, kwargs)
        here = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in here.items()}
        there = on_gpu(here)
        ops.decode_advance(**here)
        ops.decode_advance(**{**there, "enable_pdl": pdl})
        for name, value in here.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(bits(there[name].cpu()), bits(value)), name


@pytest.mark.parametrize("pdl", [False, True])
def test_decode_advance_of_positions_that_no_row_can_have(pdl: bool) -> None:
    """Such a row is as a full one, and nothing outside of its tensors is touched."""
    worst = [-(1 << 31), -(1 << 31) + 1, -7, -1, 0, 1 << 30, (1 << 31) - 2, (1 << 31) - 1]
    positions, seq_lens = torch.cartesian_prod(*2 * [torch.tensor(worst, dtype=torch.int32)]).T
    rows, width = len(positions), 3
    table = torch.full((rows, width), 7, dtype=torch.int32)
    slots = torch.arange(rows, dtype=torch.int32) - 1
    ids, history = torch.arange(rows), torch.zeros(rows + 2, 5, dtype=torch.int64)
    here = [ids + 1, table, table + 1, ids, positions, slots, slots + 1, seq_lens, ids, history]
    here = [tensor.clone(memory_format=torch.contiguous_format) for tensor in here]
    there = [tensor.to(GPU) for tensor in here]
    reference.decode_advance(*here[:3], 16, *here[3:-1], here[-1][1:-1])
    ops.decode_advance(*there[:3], 16, *there[3:-1], there[-1][1:-1], enable_pdl=pdl)
    for got, want in zip(there, here, strict=True):
        assert torch.equal(got.cpu(), want)
