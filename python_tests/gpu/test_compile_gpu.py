"""torch.compile(mode="reduce-overhead") on a GPU: decode steps as CUDA graphs of torch's own."""

from __future__ import annotations

import pytest
import tiny
import torch
from support import GPU
from torch._dynamo.utils import counters

from flint_kernels.loading import synthetic

pytestmark = pytest.mark.gpu

REQUESTS, STEPS = 4, 12


@pytest.mark.parametrize("weight_format", ["nvfp4", "bf16"])
def test_reduce_overhead_replays_decode_steps(weight_format: str) -> None:
    """Eager's tokens and cache to the bit; one compilation; no graph left out."""
    model = synthetic(tiny.CONFIG, weight_format, seed=7, device=GPU)
    torch.compiler.reset()
    counters.clear()
    caches = [model.make_cache(REQUESTS, tokens=REQUESTS * 64) for _ in range(2)]
    for layer in caches[1].layers:
        for tensor in layer:
            torch._dynamo.mark_static_address(tensor)
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    logits = []
    for cache, step in zip(caches, (model, compiled), strict=True):
        requests = [cache.add() for _ in range(REQUESTS)]
        buffers = cache.make_decode_buffers(REQUESTS)
        ids = tiny.random_tokens(REQUESTS).to(GPU)
        own = []
        for _ in range(STEPS):
            with torch.inference_mode():
                out = step(ids, cache.plan_decode(requests, buffers), cache).clone()
            own.append(out)
            ids = out.argmax(-1)
        logits.append(torch.stack(own))
    assert torch.equal(*logits)
    for one, two in zip(caches[0].layers, caches[1].layers, strict=True):
        assert torch.equal(one.k, two.k) and torch.equal(one.v, two.v) and one.k.any()
    assert counters["stats"]["unique_graphs"] == 1
    assert counters["inductor"]["cudagraph_skips"] == 0
    # The ids are such an input; they are counted where a graph is recorded.
    assert counters["inductor"]["cudagraph_recorded_non_static_inputs"] > 0
