"""What measures the full-size model, on a GPU at a small size."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from loading_support import tiny_config
from support import GPU

from flint_kernels.loading import synthetic
from flint_kernels.model import Flint
from microbench import ablation, load
from microbench.forward import timing, token, validate
from microbench.forward.case import parse
from microbench.forward.stacks import STEPS
from microbench.forward.validate import Sizes
from microbench.roofs import Roofs
from microbench.timer import Timer

pytestmark = pytest.mark.gpu

FORMATS = ("nvfp4", "bf16")
ROOF = Roofs(bytes_a_us=4e6, flop_a_us=8e8)
ROUNDS = 3
CASES = ("decode=1@100", "decode3=3*1@70", "chunk=50@120", "mix=40,2*1@64")


def tiny_on_gpu(weight_format: str) -> Flint:
    return synthetic(tiny.CONFIG, weight_format, seed=7, device=GPU)


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize(
    "text", ["decode=1@100", "decode3=3*1@70", "chunk=50@120", "mix=40,2*1@64"]
)
@torch.inference_mode()
def test_a_forward_has_rows_and_kernels(weight_format: str, text: str) -> None:
    model = tiny_on_gpu(weight_format)
    rows, kernels = timing.measure(model, parse(text), Timer(ROUNDS), ROOF)
    assert [row["metric"] for row in rows] == ["us", "us", "kernels"]
    assert all(0 < row["p20"] <= row["median"] <= row["p80"] for row in rows)
    assert len(kernels) == rows[2]["median"] > 4 * 7
    assert all(kernel.time > 0 for kernel in kernels)
    assert timing.kernel_rows(f"{text} {weight_format}", kernels)


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("text", ["decode=1@70", "decode3=3*1@40", "prefill=70"])
@torch.inference_mode()
def test_every_stack_computes_the_same_and_is_timed(weight_format: str, text: str) -> None:
    rows = ablation.measure(tiny_on_gpu(weight_format), parse(text), Timer(ROUNDS))
    kernels = [row["median"] for row in rows if row["metric"] == "kernels"]
    assert len(kernels) == len(STEPS)
    # Of many tokens the stock has one kernel for what the project does in several.
    assert kernels[0] > kernels[-1] or text.startswith("prefill")
    assert all(row["median"] > 0 for row in rows)


@torch.inference_mode()
def test_tokens_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token, "_WARM", 4)
    monkeypatch.setattr(token, "_PART", 5)
    row = token.measure(tiny_on_gpu("nvfp4"), parse("decode2=2*1@40"), 40, ROOF)
    assert 0 < row["p20"] <= row["median"] <= row["p80"]


@pytest.mark.parametrize("weight_format", FORMATS)
@torch.inference_mode()
def test_validation_and_memory(weight_format: str) -> None:
    sizes = Sizes(
        prompts=3, tokens=60, decoded=4, compared=10, batches=(1, 3), context=100, chunk=48,
        longest=256,
    )  # fmt: skip
    model = tiny_on_gpu(weight_format)
    rows = list(validate.measure(model, sizes))
    errors = [row for row in rows if row["metric"] == "error"]
    # See test_microbench_size.py.
    assert all(row["layers"][0] < 0.01 for row in errors)
    assert all(0 < row["median"] < 0.3 for row in errors)
    same = [row for row in errors if row["bodies"] == validate.SAME_EXPERTS]
    assert len(same) == 5 and all(max(row["layers"]) < 0.02 for row in same)
    for row in validate.memory(model, sizes):
        assert row["median"] >= row["weights"] + row["cache"]
        assert row["step"] >= 0


def test_a_file_is_written_and_loaded(tmp_path: Path) -> None:
    rows = load.measure(tiny_config(), tmp_path, torch.device(GPU), "gguf tiny")
    assert len(rows) in (4, 7)  # without those of the disk where the system keeps the pages


def test_pinned_memory_is_the_hosts() -> None:
    torch.zeros(1, device=GPU)
    with load.Peak() as peak:
        held = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
        del held
    assert 64 << 20 <= peak.extra < 200 << 20
