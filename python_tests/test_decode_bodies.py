"""The GPU bodies of the decode kernels up to the call of the library, on CPU tensors.

In the library's place is a stand-in that holds each call to the schema of the library's op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import op_samples
import pytest
import torch

from flint_kernels.backends import native, native_decode
from flint_kernels.ops import REGISTRY

BF16 = torch.bfloat16
NAMES = [name for name in REGISTRY if hasattr(native_decode, name)]
# What the kernels read before they wait for the one in front of them.
EARLY = {
    "qkv_norm_rope_kv_write": ("q_weight", "k_weight", "cos_sin", "positions", "slot_mapping"),
    "moe_down": ("topk_weights", "topk_ids"),
}
Bound = dict[str, Any]


class StandIn:
    """The library's decode ops, by name; all answer `launches`."""

    def __init__(self, launches: bool) -> None:
        self.launches = launches
        self.calls: list[Bound] = []

    def __getattr__(self, name: str) -> Callable[..., bool]:
        def call(*given: Any) -> bool:
            self.calls.append(held_to_the_schema(name, given))
            return self.launches

        return call


def held_to_the_schema(name: str, given: tuple[Any, ...]) -> Bound:
    """The arguments by name; their kinds are the schema's where the library has the op."""
    if f"flint_native::{name}" not in native.build_info()["ops"]:
        assert not native.build_info()["cuda_architectures"]
        return {"enable_pdl": given[-1]}
    assert native.is_available()
    schema = getattr(torch.ops.flint_native, name).default._schema
    kinds = {
        "Tensor": torch.Tensor,
        "Optional[Tensor]": (torch.Tensor, type(None)),
        "int": int,
        "float": float,
        "bool": bool,
    }
    bound = {a.name: value for a, value in zip(schema.arguments, given, strict=True)}
    for argument in schema.arguments:
        value = bound[argument.name]
        assert isinstance(value, kinds[str(argument.type)]), (name, argument.name)
        assert isinstance(value, bool) == (str(argument.type) == "bool"), (name, argument.name)
    assert [str(r.type) for r in schema.returns] == ["bool"]
    return bound


@pytest.fixture(autouse=True)
def _on_a_gpu_that_has_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_decode, "_runs_on", lambda device: True)


def stand_in(monkeypatch: pytest.MonkeyPatch, *, launches: bool = True) -> StandIn:
    library = StandIn(launches)
    monkeypatch.setattr(native_decode, "_native", library)
    return library


def run(name: str, arguments: Bound) -> Any:
    return getattr(native_decode, name)(**arguments)


def specs_of(name: str, arguments: Bound) -> tuple[Any, ...]:
    specs = REGISTRY[name].infer(**arguments)
    return specs if isinstance(specs, tuple) else (specs,)


def samples(name: str) -> list[Bound]:
    """Of BF16 activations, 1 to 8 rows, and some of everything."""
    bound = [REGISTRY[name].bind(args, kwargs) for args, kwargs in op_samples.SAMPLES[name]()]
    found = [arguments for arguments in bound if is_few(arguments)]
    assert found, name
    return found


def is_few(arguments: Bound) -> bool:
    x = next(iter(arguments.values()))
    rows = x.shape[0] if "routed_act" in arguments else x.numel() // max(x.shape[-1], 1)
    return x.dtype == BF16 and 0 < rows <= 8 and 0 not in arguments.get("weight", x).shape


@pytest.mark.parametrize("name", NAMES)
def test_outputs_have_the_op_s_form(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = stand_in(monkeypatch)
    for arguments in samples(name):
        results = run(name, arguments)
        results = results if isinstance(results, tuple) else (results,)
        for result, spec in zip(results, specs_of(name, arguments), strict=True):
            assert tuple(result.shape) == tuple(spec.shape)
            assert result.dtype == spec.dtype
            assert result.is_contiguous()
        given = tuple(torch.empty(s.shape, dtype=s.dtype) for s in specs_of(name, arguments))
        buffers = dict(zip(REGISTRY[name].outputs, given, strict=True))
        filled = run(name, {**arguments, **buffers})
        filled = filled if isinstance(filled, tuple) else (filled,)
        assert all(one is two for one, two in zip(filled, given, strict=True))
    assert len(library.calls) == 2 * len(samples(name))


@pytest.mark.parametrize("name", NAMES)
def test_what_the_library_does_not_take_is_handed_back(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = stand_in(monkeypatch, launches=False)
    assert all(run(name, arguments) is NotImplemented for arguments in samples(name))
    assert len(library.calls) == len(samples(name))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("reason", ["rows", "no rows", "FP32", "GPU"])
def test_calls_for_the_general_body_never_come_to_the_library(
    name: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is anything allocated or copied for them."""
    library = stand_in(monkeypatch)
    changes: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "rows": lambda x: x[:1].expand(9, *x.shape[1:]),
        "no rows": lambda x: x[:0],
        "FP32": lambda x: x.float(),
        "GPU": lambda x: x,
    }
    arguments = dict(next(a for a in samples(name) if next(iter(a.values())).dim() > 1))
    for argument in ("x", "residual", "routed_act", "shared_act"):
        if argument in arguments:
            arguments[argument] = changes[reason](arguments[argument])
    if reason == "GPU":
        monkeypatch.setattr(native_decode, "_runs_on", lambda device: False)
    monkeypatch.setattr(native_decode, "_empty", None)
    assert run(name, arguments) is NotImplemented
    assert library.calls == []


@pytest.mark.parametrize("name", NAMES)
def test_no_early_start_behind_a_copy_of_what_is_read_early(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    early = EARLY.get(name.removeprefix("nvfp4_").removeprefix("bf16_"), ())
    library = stand_in(monkeypatch)
    dense = {
        argument: value.contiguous() if argument in early and value is not None else value
        for argument, value in samples(name)[0].items()
    }
    run(name, {**dense, "enable_pdl": True})
    run(name, {**dense, "enable_pdl": False})
    assert [call["enable_pdl"] for call in library.calls] == [True, False]
    for argument in early:
        value = dense[argument]
        if value is None:
            continue
        strided = torch.stack([value, value], dim=-1)[..., 0]
        # Of one element nothing lies apart.
        run(name, {**dense, argument: strided, "enable_pdl": True})
        assert library.calls[-1]["enable_pdl"] == strided.is_contiguous(), argument


@pytest.mark.parametrize(
    "capability, runs", [((9, 0), True), ((10, 0), True), ((10, 3), True), ((12, 0), False)]
)
def test_on_which_gpus_they_run(
    capability: tuple[int, int], runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    native_decode._runs_on.cache_clear()
    try:
        assert native_decode._runs_on(0) is runs
    finally:
        native_decode._runs_on.cache_clear()
