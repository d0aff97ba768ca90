"""Row C7 of the fault table: tensors on a GPU that is not the current one, and on two at once.

Needs two NVIDIA GPUs: `make gpu-test-two`.
"""

from __future__ import annotations

import pytest
import torch
from support import bits
from test_concurrency import PARAMS, PROMPTS
from test_contract_gpu import assert_misplaced_is_named, calls, outcome
from test_namespace import NAMES

from flint_kernels.generation import generate
from flint_kernels.loading import load, load_tokenizer

pytestmark = pytest.mark.two_gpus


@pytest.mark.parametrize("name", NAMES)
def test_C7_tensors_on_the_second_gpu_while_the_first_is_current(name: str) -> None:
    with torch.cuda.device(0):
        there = [outcome(name, call) for call in calls(name, "cuda:1")]
        assert torch.cuda.current_device() == 0
        here = [outcome(name, call) for call in calls(name, "cuda:0")]
    for ours, theirs in zip(there, here, strict=True):
        for one, two in zip(ours, theirs, strict=True):
            assert one.device.index == 1
            assert torch.equal(bits(one).cpu(), bits(two).cpu())


@pytest.mark.parametrize("name", NAMES)
def test_C7_tensors_on_two_gpus_are_refused(name: str) -> None:
    assert_misplaced_is_named(name, "cuda:0", "cuda:1")


def test_C7_a_model_decodes_on_the_second_gpu_while_the_first_is_current() -> None:
    """Prefill, captured graphs and their replays."""
    prompts = [load_tokenizer("flint-tiny").encode(text).ids for text in PROMPTS]
    with torch.cuda.device(0):
        models = [load("flint-tiny", device=f"cuda:{index}") for index in range(2)]
        here, there = (generate(model, prompts, PARAMS) for model in models)
        assert torch.cuda.current_device() == 0
    assert here == there
