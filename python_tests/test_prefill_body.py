"""The GPU body of prefill attention up to the call of the library, on CPU tensors.

In the library's place is the stand-in of test_decode_bodies.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from op_samples import BF16, LAYOUTS, caches, int32, randn
from test_decode_bodies import StandIn

from flint_kernels import ops
from flint_kernels.backends import native_many, native_prefill

Bound = dict[str, Any]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """The stand-in, on a GPU that has the kernel."""
    monkeypatch.setattr(native_many, "_runs_on", lambda device: True)
    stand_in = StandIn(launches=True)
    monkeypatch.setattr(native_prefill, "_native", stand_in)
    return stand_in


def arguments(layout: str = "hnd", *, page: int = 16, rows: int = 5, **changed: Any) -> Bound:
    k_cache, v_cache = caches(layout, 6, page, 2, 128)
    found = {
        "q": randn(rows, 16, 128),
        "k": randn(rows, 2, 128, seed=1),
        "v": randn(rows, 2, 128, seed=2),
        "cu_seqlens": int32(0, 3, rows),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_table": int32(0, 1, 2).expand(2, 3).contiguous(),
        "context_lens": int32(40, 0),
        "sinks": None,
        "window": 0,
        "scale": None,
        "max_query_len": None,
    }
    return {**found, **changed}


def without_a_past(**changed: Any) -> Bound:
    none = dict.fromkeys(("k_cache", "v_cache", "block_table", "context_lens"))
    return arguments(**{**none, **changed})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_output_s_form(layout: str, library: StandIn) -> None:
    for call in (arguments(layout), without_a_past()):
        found = native_prefill.attention_prefill(**call)
        assert found.shape == (5, 16, 128)
        assert found.dtype == BF16
        assert found.is_contiguous()
        given = torch.empty(5, 16, 128, dtype=BF16)
        assert native_prefill.attention_prefill(**call, out=given) is given
    assert len(library.calls) == 4


def test_what_comes_to_the_library(library: StandIn) -> None:
    workspace = ops.make_workspace("cpu")
    sinks = randn(16, 2, dtype=torch.float32)[:, 0]  # strided
    wide = randn(5, 2 * 2 * 128, seed=3)
    call = arguments(
        q=randn(5, 16, 256)[:, :, ::2], v=wide[:, 256:].view(5, 2, 128),
        k=randn(5, 2, 132, seed=4)[..., :128], sinks=sinks, scale=0.5, window=513,
    )  # fmt: skip
    native_prefill.attention_prefill(**call, workspace=workspace, enable_pdl=True)
    native_prefill.attention_prefill(**arguments())
    [one, two] = library.calls
    if "q" not in one:  # the library has no GPU kernels, and so no such schema
        return
    # Elements apart and rows at odd multiples of 8 bytes are copied; v, part of wider rows, is not.
    for name in ("q", "k", "v"):
        assert torch.equal(one[name], call[name])
        assert one[name].stride(2) == 1
        assert all(stride % 8 == 0 for stride in one[name].stride()[:2])
    assert one["v"].data_ptr() == call["v"].data_ptr()
    assert one["sinks"].is_contiguous() and torch.equal(one["sinks"], sinks)
    assert (one["scale"], one["window"], one["enable_pdl"]) == (0.5, 513, True)
    assert one["workspace"] is workspace
    assert two["scale"] == 128**-0.5
    assert two["workspace"].shape == workspace.shape and not two["workspace"].any()


def test_what_the_library_does_not_take_is_handed_back(library: StandIn) -> None:
    library.launches = False
    assert native_prefill.attention_prefill(**arguments()) is NotImplemented


@pytest.mark.parametrize(
    "call",
    [
        arguments(cu_seqlens=torch.zeros(1026, dtype=torch.int32)),
        arguments(rows=0),
        arguments(q=randn(5, 8, 128)),
        arguments(q=randn(5, 32, 128)),
        arguments(page=24),
        arguments(q=randn(5, 16, 64)),
        without_a_past(**{name: randn(5, heads, 128).float()
                          for name, heads in (("q", 16), ("k", 2), ("v", 2))}),
    ],
    ids=["1025 requests", "no row", "4 of a group", "16 of a group", "page", "dim", "FP32"],
)  # fmt: skip
def test_calls_for_the_general_body_never_come_to_the_library(
    call: Bound, library: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is anything allocated for them; and support can be asked for."""
    monkeypatch.setattr(torch, "empty", None)
    assert not native_prefill.takes(call["q"], call["k"], call["cu_seqlens"], call["k_cache"])
    assert native_prefill.attention_prefill(**call) is NotImplemented
    assert library.calls == []


def test_nor_on_another_gpu(library: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    call = arguments()
    names = ("q", "k", "cu_seqlens", "k_cache")
    assert native_prefill.takes(*(call[name] for name in names))
    monkeypatch.setattr(native_many, "_runs_on", lambda device: False)
    assert native_prefill.attention_prefill(**call) is NotImplemented
    assert library.calls == []


def test_the_kernel_and_its_body_have_the_same_limits() -> None:
    csrc = Path(__file__).parents[1] / "csrc"
    text = (csrc / "cuda" / "attention_prefill.h").read_text(encoding="utf-8")
    assert f"kMostPrefillRequests = {native_prefill.MOST_REQUESTS};" in text
    assert f"kPrefillHeadDim = {native_prefill.HEAD_DIM};" in text
    assert f"kPrefillGroup = {native_prefill.GROUP};" in text
    tiles = (csrc / "attention_tiles.h").read_text(encoding="utf-8")
    assert f"kPageGroup = {native_prefill.PAGE_UNIT};" in tiles
