"""The ways in which rms_norm spreads rows over threads, for choosing between them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F

from microbench.cases import Group, Outputs, Subject, bench
from microbench.cases.norm import EPS, WIDTH, Buffers, make, rms_norm_bytes

# As `RmsNormPlan` of csrc/cuda/norm.h counts them.
PLANS = {"automatic": 0, "cta256": 1, "cta128": 2}
ROWS = (1, 8, 64, 256, 512, 1024, 2048, 8192)


def planned(buffers: Buffers, *, plan: int) -> Outputs:
    normed = torch.empty_like(buffers.x)
    native = torch.ops.flint_native
    native.rms_norm_cuda_out(buffers.x, None, buffers.weight, EPS, normed, None, False, plan)
    return (normed,)


def torch_rms_norm(buffers: Buffers) -> Outputs:
    return (F.rms_norm(buffers.x, (WIDTH,), buffers.weight, EPS),)


@bench("rms_norm_plans", on_request=True)
def _(device: torch.device) -> Iterator[Group]:
    for rows in ROWS:
        subjects = [
            Subject(name, partial(planned, plan=plan), f"M={rows} plan={name}")
            for name, plan in PLANS.items()
        ]
        peer = Subject("torch", torch_rms_norm)
        new = partial(make, rows, device)
        yield Group("rms_norm_plans", rms_norm_bytes(rows), new, [*subjects, peer])
