"""generate() on a GPU: the library's tokens, and Transformers' own loop's. Needs Transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import GPU
from test_transformers_loop import OPTIONS, Noted
from transformers_support import NAMES, TEXTS, batch, folder, ids_of

from flint_kernels.generation import SamplingParams, generate
from flint_kernels.integrations.transformers import FlintForCausalLM, loop

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest) -> FlintForCausalLM:
    return FlintForCausalLM.from_pretrained(folder(request.param), device_map=GPU)


@pytest.mark.parametrize("cache", [None, "static"])
def test_greedy_tokens_are_the_librarys(model: FlintForCausalLM, cache: str | None) -> None:
    """Beyond the window and across pages; the static cache is used twice."""
    params = SamplingParams(greedy=True, max_new_tokens=100)
    for text in (*TEXTS, *TEXTS[:1]):
        inputs = batch(text).to(GPU)
        [want] = generate(model.model, [ids_of(text)], params)
        options = {"do_sample": False, "max_new_tokens": 100, "cache_implementation": cache}
        got = model.generate(**inputs, **options, eos_token_id=None)
        assert got[0, inputs["input_ids"].shape[1] :].tolist() == want.tokens


def outcome(model: FlintForCausalLM, rows: int, options: dict) -> tuple[Any, ...]:
    torch.manual_seed(5)
    streamer = Noted() if rows == 1 else None
    given = {"do_sample": False, "max_new_tokens": 40, **options}
    got = model.generate(**batch(*TEXTS[:rows]).to(GPU), **given, streamer=streamer)
    tokens = got if isinstance(got, torch.Tensor) else got.sequences
    state = torch.cuda.get_rng_state()
    return tokens.tolist(), state.tolist(), [] if streamer is None else streamer.pieces


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", OPTIONS)
def test_equals_transformers_own_loop(model: FlintForCausalLM, name: str, rows: int) -> None:
    ours = outcome(model, rows, OPTIONS[name])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "takes", lambda *_: False)
        assert outcome(model, rows, OPTIONS[name]) == ours
