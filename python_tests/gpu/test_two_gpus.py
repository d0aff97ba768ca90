"""Row C7 of the fault table: tensors on a GPU that is not the current one, and on two at once.

Needs two NVIDIA GPUs: `make gpu-test-two`.
"""

from __future__ import annotations

import pytest
import torch
from support import bits
from test_contract_gpu import assert_misplaced_is_named, calls, outcome
from test_namespace import NAMES

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
