"""The GPU bodies of the kernels for many tokens up to the call of the library, on CPU tensors."""

from __future__ import annotations

from typing import Any

import op_samples
import pytest
import torch

from flint_kernels.backends import native, native_many
from flint_kernels.ops import REGISTRY

BF16 = torch.bfloat16
NAMES = [name for name in REGISTRY if hasattr(native_many, name)]
Bound = dict[str, Any]


class StandIn:
    """The library's ops for many tokens; all answer `launches`."""

    def __init__(self, launches: bool) -> None:
        self.launches = launches
        self.calls: list[tuple[str, int]] = []

    def routed_experts_many_words(self, tokens: int, top_k: int, experts: int) -> int:
        return tokens * top_k + experts

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any) -> bool:
            if f"flint_native::{name}" in native.build_info()["ops"]:
                assert native.is_available()
                schema = getattr(torch.ops.flint_native, name).default._schema
                assert len(given) == len(schema.arguments)
                assert [str(r.type) for r in schema.returns] == ["bool"]
            self.calls.append((name, len(given)))
            return self.launches

        return call


@pytest.fixture(autouse=True)
def _on_a_gpu_that_has_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_many, "_runs_on", lambda device: True)


def samples(name: str) -> list[Bound]:
    """Of BF16 activations, some of everything."""
    bound = [REGISTRY[name].bind(args, kwargs) for args, kwargs in op_samples.SAMPLES[name]()]
    found = [a for a in bound if next(iter(a.values())).dtype == BF16 and is_some(a)]
    assert found, name
    return found


def is_some(arguments: Bound) -> bool:
    tensors = [v for v in arguments.values() if isinstance(v, torch.Tensor)]
    return all(tensor.numel() > 0 for tensor in tensors)


def run(name: str, arguments: Bound) -> Any:
    return getattr(native_many, name)(**arguments)


@pytest.mark.parametrize("name", NAMES)
def test_outputs_have_the_op_s_form(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = StandIn(launches=True)
    monkeypatch.setattr(native_many, "_native", library)
    for arguments in samples(name):
        specs = REGISTRY[name].infer(**arguments)
        specs = specs if isinstance(specs, tuple) else (specs,)
        results = run(name, arguments)
        results = results if isinstance(results, tuple) else (results,)
        for result, spec in zip(results, specs, strict=True):
            assert tuple(result.shape) == tuple(spec.shape)
            assert result.dtype == spec.dtype
            assert result.is_contiguous()
        given = tuple(torch.empty(s.shape, dtype=s.dtype) for s in specs)
        filled = run(name, {**arguments, **dict(zip(REGISTRY[name].outputs, given, strict=True))})
        filled = filled if isinstance(filled, tuple) else (filled,)
        assert all(one is two for one, two in zip(filled, given, strict=True))
    assert len(library.calls) == 2 * len(samples(name))


@pytest.mark.parametrize("name", NAMES)
def test_what_the_library_does_not_take_is_handed_back(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_many, "_native", StandIn(launches=False))
    assert all(run(name, arguments) is NotImplemented for arguments in samples(name))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("reason", ["no rows", "FP32", "GPU"])
def test_calls_for_the_general_body_never_come_to_the_library(
    name: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = StandIn(launches=True)
    monkeypatch.setattr(native_many, "_native", library)
    arguments = dict(samples(name)[0])
    first = next(iter(arguments))
    if reason == "no rows":
        arguments[first] = arguments[first][:0]
    elif reason == "FP32":
        arguments[first] = arguments[first].float()
    else:
        monkeypatch.setattr(native_many, "_runs_on", lambda device: False)
    assert run(name, arguments) is NotImplemented
    assert library.calls == []


def test_rows_that_cannot_be_described_are_copied() -> None:
    base = torch.zeros(12, 1024, dtype=BF16)
    kept = base[:, 8:520], base[:1, 16:], base[3:4].expand(1, -1)
    copied = base[:, 1:257], base[:, ::2], base[:1].expand(9, -1), base.as_strided((4, 64), (12, 1))
    for rows in kept:
        assert native_many._rows(rows) is rows
    for rows in copied:
        dense = native_many._rows(rows)
        assert dense.is_contiguous()
        assert dense.data_ptr() % 16 == 0
        assert torch.equal(dense, rows)


@pytest.mark.parametrize("capability, runs", [((9, 0), True), ((10, 0), False), ((12, 0), False)])
def test_on_which_gpus_they_run(
    capability: tuple[int, int], runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    native_many._runs_on.cache_clear()
    try:
        assert native_many._runs_on(0) is runs
    finally:
        native_many._runs_on.cache_clear()
