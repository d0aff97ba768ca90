"""The stacks of the ablation without a GPU: each step computes the same forward."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest
import tiny
import torch
from torch import Tensor

from flint_kernels import results
from flint_kernels.backends import gpu_general
from flint_kernels.model import calls
from flint_kernels.model.mlp import MoE
from microbench import ablation, forward_tables
from microbench.forward import stacks
from microbench.forward.case import parse
from microbench.forward.stacks import STEPS, stack
from microbench.forward.step import Step


@pytest.fixture(autouse=True)
def no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The general bodies that are kernels of Triton's: here the ops do the same."""
    names = ("nvfp4_linear", "nvfp4_routed_experts", "attention_decode", "attention_prefill")
    for name in names:
        op = getattr(torch.ops.flint, name)

        def call(*arguments: Any, op: Any = op, **keywords: Any) -> Tensor:
            return op(*arguments, **keywords)

        monkeypatch.setattr(gpu_general, name, call)


@pytest.mark.parametrize("checkpoint", ["nvfp4", "bf16"])
@pytest.mark.parametrize("text", ["decode=1@70", "decode3=3*1@40", "prefill=70"])
@torch.inference_mode()
def test_every_step_computes_the_same_forward(
    checkpoint: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Step(tiny.tiny_model(checkpoint), parse(text))
    apart = ablation.distances(step)
    assert len(apart) == len(STEPS) and apart[-1] == 0.0
    assert 0 < apart[0] < 0.1
    monkeypatch.setattr(stacks, "rotated", lambda x, cos, sin: x)
    with pytest.raises(RuntimeError, match=r"step 0 \(stock\): its hidden states are"):
        ablation.distances(step)


def test_a_prompt_on_top_of_a_past_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"case: got 'chunk=50@120', which has a prompt on top"):
        ablation.measure(tiny.tiny_model(), parse("chunk=50@120"), None)  # type: ignore[arg-type]
    with pytest.raises(SystemExit):
        ablation.main(["mix=20,1@40,8@90"])
    assert "want requests of one token each, or prompts" in capsys.readouterr().err


def test_each_step_takes_away_what_stock_has() -> None:
    functions = {name: value for name, value in vars(calls).items() if callable(value)}
    decode = MoE.decode
    before: set[str] | None = None
    for number in range(len(STEPS)):
        with stack(number):
            replaced = {name for name, own in functions.items() if getattr(calls, name) is not own}
            assert (MoE.decode is MoE.prefill) == (number < 2)
        assert before is None or replaced < before
        before = replaced
        assert all(getattr(calls, name) is own for name, own in functions.items())
        assert MoE.decode is decode
    assert before == set()


def test_the_stock_stack_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASH_ATTENTION_3", raising=False)
    assert "Triton attention" in stacks.description("bf16")
    monkeypatch.setenv("FLASH_ATTENTION_3", "somewhere")
    assert "FlashAttention-3" in stacks.description("nvfp4")
    assert "Triton W4A16" in stacks.description("nvfp4")
    assert "cuBLAS" in stacks.description("bf16")


def rows() -> list[dict[str, Any]]:
    found = []
    for checkpoint in ("nvfp4", "bf16"):
        for number, name in enumerate(STEPS):
            label = f"decode=1@100000 step={number}:{name}"
            of: dict[str, Any] = {"checkpoint": checkpoint}
            if number == 0:
                of["stock"] = f"parts of {checkpoint}"
            found.append(results.row("ablation", label, "us", [4000.0 - 400 * number], **of))
            found.append(results.row("ablation", label, "kernels", [1096 - 100 * number], **of))
    return found


def test_table_and_picture() -> None:
    lines = forward_tables.ablation_lines(rows())
    assert len(lines) == 14
    assert lines[0] == ["decode=1@100000, NVFP4", "0: stock", "4000 (4000 to 4000)", "", "1096"]
    assert lines[1][3:] == ["-10.0%", "996"]
    drawn = forward_tables.ablation_plot(rows(), "GPU")
    ElementTree.fromstring(drawn)
    assert drawn.count('class="ours"') == 14
    assert forward_tables.ablation_plot([], "GPU") == ""
    assert forward_tables.stock_stacks(rows()).endswith("Stock stack of BF16: parts of bf16.")
