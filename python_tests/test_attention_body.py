"""The GPU body of decode attention up to the call of the library, on CPU tensors.

In the library's place is the stand-in of test_decode_bodies.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_samples import BF16, LAYOUTS, caches, int32, randn
from test_decode_bodies import StandIn

from flint_kernels import ops
from flint_kernels.backends import native_attention, native_decode

Bound = dict[str, Any]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """The stand-in, on a GPU that has the kernels."""
    monkeypatch.setattr(native_decode, "_runs_on", lambda device: True)
    stand_in = StandIn(launches=True)
    monkeypatch.setattr(native_attention, "_native", stand_in)
    return stand_in


def arguments(layout: str = "hnd", *, page: int = 16, rows: int = 2, **changed: Any) -> Bound:
    k, v = caches(layout, 6, page, 2, 128)
    found = {
        "q": randn(rows, 16, 128),
        "k_cache": k,
        "v_cache": v,
        "block_table": int32(0, 1, 2).expand(rows, 3).contiguous(),
        "seq_lens": torch.full((rows,), 40, dtype=torch.int32),
        "sinks": None,
        "window": 0,
        "scale": None,
    }
    return {**found, **changed}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_output_s_form(layout: str, library: StandIn) -> None:
    found = native_attention.attention_decode(**arguments(layout))
    assert found.shape == (2, 16, 128)
    assert found.dtype == BF16
    assert found.is_contiguous()
    given = torch.empty(2, 16, 128, dtype=BF16)
    assert native_attention.attention_decode(**arguments(layout), out=given) is given
    assert len(library.calls) == 2


def test_what_comes_to_the_library(library: StandIn) -> None:
    workspace = ops.make_workspace("cpu")
    sinks = randn(16, 2, dtype=torch.float32)[:, 0]  # strided
    call = arguments(q=randn(2, 16, 256)[:, :, ::2], sinks=sinks, scale=0.5, window=513)
    native_attention.attention_decode(**call, workspace=workspace)
    native_attention.attention_decode(**arguments())
    [one, two] = library.calls
    if "q" not in one:  # the library has no GPU kernels, and so no such schema
        return
    assert one["q"].stride(2) == 1 and torch.equal(one["q"], call["q"])
    assert one["sinks"].is_contiguous() and torch.equal(one["sinks"], sinks)
    assert (one["scale"], one["window"]) == (0.5, 513)
    assert one["workspace"] is workspace
    assert two["scale"] == 128**-0.5
    assert two["workspace"].shape == workspace.shape and not two["workspace"].any()


def test_what_the_library_does_not_take_is_handed_back(library: StandIn) -> None:
    library.launches = False
    assert native_attention.attention_decode(**arguments()) is NotImplemented


@pytest.mark.parametrize(
    "call",
    [
        arguments(rows=257),
        arguments(rows=0),
        arguments(q=randn(2, 8, 128)),
        arguments(q=randn(2, 32, 128)),
        arguments(page=24),
        arguments(q=randn(2, 16, 64), k_cache=caches("nhd", 6, 16, 2, 64)[0]),
        {k: v.float() if k in ("q", "k_cache", "v_cache") else v for k, v in arguments().items()},
    ],
    ids=["257 requests", "no request", "4 of a group", "16 of a group", "page", "dim", "FP32"],
)
def test_calls_for_the_general_body_never_come_to_the_library(
    call: Bound, library: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is anything allocated for them; and support can be asked for."""
    monkeypatch.setattr(torch, "empty", None)
    assert not native_attention.takes(call["q"], call["k_cache"])
    assert native_attention.attention_decode(**call) is NotImplemented
    assert library.calls == []


def test_nor_on_another_gpu(library: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    assert native_attention.takes(arguments()["q"], arguments()["k_cache"])
    monkeypatch.setattr(native_decode, "_runs_on", lambda device: False)
    assert native_attention.attention_decode(**arguments()) is NotImplemented
    assert library.calls == []


@pytest.mark.parametrize("name", ["block_table", "seq_lens"])
def test_no_early_start_behind_a_copy_of_what_is_read_early(name: str, library: StandIn) -> None:
    call = arguments(enable_pdl=True)
    native_attention.attention_decode(**call)
    assert library.calls[-1]["enable_pdl"] is True
    native_attention.attention_decode(**{**call, "enable_pdl": False})
    assert library.calls[-1]["enable_pdl"] is False
    strided = torch.stack([call[name], call[name]], dim=-1)[..., 0]
    native_attention.attention_decode(**{**call, name: strided})
    assert library.calls[-1]["enable_pdl"] is False


def test_the_workspace_has_a_counter_for_each_request_and_kv_head() -> None:
    """As cuda::kMostAttentionPairs has it, beyond which the kernels hand a call back."""
    text = (native_attention_source()).read_text(encoding="utf-8")
    assert f"kMostAttentionPairs = {ops.workspace_bytes('cpu') // 4};" in text
    assert f"kMostAttentionRequests = {native_attention.MOST_REQUESTS};" in text


def native_attention_source() -> Any:
    from pathlib import Path

    return Path(__file__).parents[1] / "csrc" / "cuda" / "attention.h"
