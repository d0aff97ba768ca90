"""Threads, models, streams and memory on a GPU: what runs beside something else gives the same.

Two decoders on two streams: test_graph_decoder_gpu.py.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import tiny
import torch
from support import GPU, bits
from test_concurrency import CHECKPOINTS, PARAMS, PROMPTS, continued, together

from flint_kernels import memory
from flint_kernels.generation import GraphDecoder, generate
from flint_kernels.loading import load, synthetic
from flint_kernels.loading.loader import allocate
from flint_kernels.model import Flint, FlintConfig

pytestmark = pytest.mark.gpu


def test_threads_load_and_decode_as_one_does_alone() -> None:
    """Four threads, two checkpoints, a model each; captures and replays among each other."""
    jobs = [(checkpoint, text) for checkpoint in CHECKPOINTS for text in PROMPTS[:2]]
    alone = [continued(load(c, device=GPU), c, text) for c, text in jobs]
    got = together(*(lambda j=job: continued(load(j[0], device=GPU), *j) for job in jobs))
    assert got == alone


def test_threads_share_a_model_with_caches_of_their_own() -> None:
    model = load("flint-tiny", device=GPU)
    alone = [continued(model, "flint-tiny", text) for text in PROMPTS]
    got = together(*(lambda t=text: continued(model, "flint-tiny", t) for text in PROMPTS * 2))
    assert got == alone * 2


def test_two_models_step_by_step_beside_each_other() -> None:
    models = [synthetic(tiny.CONFIG, kind, seed=7, device=GPU) for kind in ("nvfp4", "bf16")]
    prompts = [[tiny.random_tokens(9, seed).tolist()] for seed in (1, 2)]
    alone = [generate(*pair, PARAMS) for pair in zip(models, prompts, strict=True)]
    assert together(*(lambda m=m, p=p: generate(m, p, PARAMS)
                      for m, p in zip(models, prompts, strict=True))) == alone  # fmt: skip


def test_replays_between_eager_calls() -> None:
    """A step is replayed, then made eagerly in another cache, then replayed: the same logits."""
    model = synthetic(tiny.CONFIG, "nvfp4", seed=7, device=GPU)
    decoders = [GraphDecoder(model, model.make_cache(), graphs=graphs) for graphs in (True, False)]
    requests = [decoder.cache.add() for decoder in decoders]
    ids = tiny.random_tokens(40, seed=3).to(GPU)
    for index in range(len(ids)):
        replayed, eager = (
            decoder(ids[index : index + 1], [request]).logits.clone()
            for decoder, request in zip(decoders, requests, strict=True)
        )
        assert torch.equal(bits(replayed), bits(eager)), index


# ------------------------------------------------------------------ memory that is not there


@pytest.fixture
def _little_memory() -> Iterator[None]:
    """The process may have 256 MiB more of the GPU than it has."""
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    allowed = torch.cuda.memory_reserved() + (256 << 20)
    torch.cuda.set_per_process_memory_fraction(allowed / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def two_layers() -> FlintConfig:
    """The model's own widths: some 2 GiB in BF16."""
    shape = FlintConfig.flint_40b().to_dict()
    shape |= {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    return FlintConfig.from_dict({**shape, "no_rope_layer_indices": [], "mlp_only_layers": [0]})


@pytest.mark.usefixtures("_little_memory")
def test_a_model_that_does_not_fit_leaves_the_gpu_as_it_was() -> None:
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        with pytest.raises(MemoryError, match=r"model: 2\.\d GiB are needed on cuda"):
            allocate(two_layers(), "bf16", GPU, 64)
        gc.collect()
        assert torch.cuda.memory_allocated() == before
    assert continued(load("flint-tiny", device=GPU), "flint-tiny", PROMPTS[0])


def test_what_torch_keeps_counts_as_free() -> None:
    held = torch.empty(1 << 28, dtype=torch.uint8, device=GPU)
    used = memory.free_bytes(held.device)
    del held
    free = memory.free_bytes(torch.device("cuda", torch.cuda.current_device()))
    assert used is not None
    assert free is not None
    assert free - used >= 1 << 28


def test_running_out_in_a_capture_leaves_a_decoder_that_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The model's step fails inside the capture, once; the next step captures and replays."""
    model = synthetic(tiny.CONFIG, "nvfp4", seed=7, device=GPU)
    decoder = GraphDecoder(model, model.make_cache())
    request = decoder.cache.add()
    ids = torch.zeros(1, dtype=torch.int64, device=GPU)
    plain, calls = Flint.logits, 0

    def fails(self: Flint, *arguments: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:  # the first is the warming up outside the capture
            return torch.empty(1 << 46, dtype=torch.uint8, device=GPU)
        return plain(self, *arguments)

    monkeypatch.setattr(Flint, "logits", fails)
    with pytest.raises(torch.OutOfMemoryError):
        decoder(ids, [request])
    torch.cuda.synchronize()
    assert decoder.cache.length(request) == 0
    first = decoder(ids, [request]).logits.clone()
    eager = GraphDecoder(model, model.make_cache(), graphs=False)
    assert torch.equal(bits(first), bits(eager(ids, [eager.cache.add()]).logits))
