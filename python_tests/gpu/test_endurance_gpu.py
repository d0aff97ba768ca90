"""The endurance run in small, every request decoded again; `make gpu-endurance` is the long one."""

from __future__ import annotations

import pytest
import run_endurance
from run_endurance import PART, endure
from support import GPU

from flint_kernels.loading import load

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("checkpoint", ["flint-tiny", "flint-tiny-bf16"])
def test_two_lanes_of_graphs_equal_the_models_own_steps(checkpoint: str) -> None:
    model = load(checkpoint, device=GPU, max_positions=run_endurance.POSITIONS)
    counts, found = endure(model, 2000, lanes=2, share=1.0, stay=150)
    assert not found
    assert counts["requests compared"] == counts["requests"] > PART
