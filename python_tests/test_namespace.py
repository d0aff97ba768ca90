"""Every op of the namespace, enumerated: schema, fake, autograd, out-variant, compilation."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from op_samples import SAMPLES, Call

from flint_kernels import ops
from flint_kernels.backends import cpu, cuda, native, native_cpu
from flint_kernels.ops import REGISTRY, _declare

NAMES = sorted(REGISTRY)


def calls(name: str) -> list[Call]:
    return list(SAMPLES[name]())


def clone(value: Any) -> Any:
    """A copy with the same strides, so that two runs cannot meet in one buffer."""
    if not isinstance(value, torch.Tensor):
        return value
    twin = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)
    return twin.copy_(value)


def fresh(call: Call) -> Call:
    return tuple(clone(v) for v in call[0]), {k: clone(v) for k, v in call[1].items()}


def as_tuple(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else () if result is None else (result,)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor: NaN equals itself, and +0 is not -0."""
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def out_buffers(name: str, call: Call) -> dict[str, torch.Tensor]:
    declaration = REGISTRY[name]
    specs = declaration.infer(**declaration.bind(*call))
    specs = specs if isinstance(specs, tuple) else (specs,)
    return {
        key: torch.full(spec.shape, 77, dtype=torch.float32).to(spec.dtype)
        for key, spec in zip(declaration.outputs, specs, strict=True)
    }


def test_every_op_of_the_namespace_is_declared_and_has_samples() -> None:
    registered = {
        entry.split("::")[1].split(".")[0]
        for entry in torch._C._dispatch_get_all_op_names()
        if entry.startswith("flint::")
    }
    assert registered == set(REGISTRY)
    assert set(SAMPLES) == set(REGISTRY)


@pytest.mark.parametrize("name", NAMES)
def test_schema_has_the_defaults_of_the_public_signature(name: str) -> None:
    declaration = REGISTRY[name]
    schema = declaration.packet.default._schema
    from_schema = {
        a.name: a.default_value if a.has_default_value() else None for a in schema.arguments
    }
    from_python = {
        key: None if value is inspect.Parameter.empty else value
        for key, value in declaration.parameters.items()
    }
    if from_schema.get("dtype") is not None:
        from_schema["dtype"] = torch.float32
    assert list(from_schema) == list(from_python)
    assert from_schema == from_python


@pytest.fixture
def allclose_knows_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """opcheck looks for undeclared writes with torch.allclose, which has no float8 body."""
    plain = torch.allclose

    def allclose(a: torch.Tensor, b: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
        if a.dtype == torch.float8_e4m3fn:
            return torch.equal(bits(a), bits(b))
        return plain(a, b, *args, **kwargs)

    monkeypatch.setattr(torch, "allclose", allclose)


@pytest.mark.usefixtures("allclose_knows_fp8")
@pytest.mark.parametrize("name", NAMES)
def test_C1_opcheck(name: str) -> None:
    for args, kwargs in calls(name):
        torch.library.opcheck(REGISTRY[name].packet.default, args, kwargs)
    if REGISTRY[name].outputs:
        args, kwargs = calls(name)[0]
        outs = out_buffers(name, (args, kwargs))
        torch.library.opcheck(REGISTRY[name].packet.out, args, {**kwargs, **outs})


@pytest.mark.parametrize("name", NAMES)
def test_C3_fake_metadata_equals_real(name: str) -> None:
    for call in calls(name):
        real = as_tuple(REGISTRY[name].packet.default(*call[0], **call[1]))
        with torch._subclasses.FakeTensorMode() as mode:
            to_fake = lambda v: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v  # noqa: E731
            args = [to_fake(v) for v in call[0]]
            kwargs = {k: to_fake(v) for k, v in call[1].items()}
            fake = as_tuple(REGISTRY[name].packet.default(*args, **kwargs))
        assert len(real) == len(fake)
        for r, f in zip(real, fake, strict=True):
            assert r.shape == f.shape
            assert r.stride() == f.stride()
            assert r.dtype == f.dtype
            assert r.device == f.device
            assert r.storage_offset() == f.storage_offset() == 0


@pytest.mark.parametrize("name", [n for n in NAMES if REGISTRY[n].outputs])
def test_out_variant_writes_what_the_op_returns(name: str) -> None:
    for call in calls(name):
        first, second = fresh(call), fresh(call)
        returned = as_tuple(REGISTRY[name].packet.default(*first[0], **first[1]))
        outs = out_buffers(name, call)
        assert REGISTRY[name].packet.out(*second[0], **second[1], **outs) is None
        for want, got in zip(returned, outs.values(), strict=True):
            assert torch.equal(bits(want), bits(got))
        # What the op writes in place, the out-variant writes too.
        for one, two in zip(first[0], second[0], strict=True):
            if isinstance(one, torch.Tensor):
                assert torch.equal(bits(one), bits(two))


Buffers = dict[str, torch.Tensor]


def out_call(body: Any, out_body: Any, outs: Buffers) -> None:
    """fused_add_rms_norm.out by these bodies, on ones."""
    x, weight = torch.ones(3, 16, dtype=torch.bfloat16), torch.ones(16, dtype=torch.bfloat16)
    _declare._out_body(REGISTRY["fused_add_rms_norm"], body, out_body)(x, x.clone(), weight, **outs)


def two_buffers(strided: bool = False) -> Buffers:
    wide = [torch.zeros(3, 32, dtype=torch.bfloat16) for _ in range(2)]
    pair = [b[:, ::2] if strided else b.view(6, 16)[:3] for b in wide]
    return dict(zip(("normed_out", "residual_out"), pair, strict=True))


def unwanted(*_: Any, **__: Any) -> Any:
    raise AssertionError("this body should not run")


def test_an_out_body_writes_in_place_and_nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_body(normed_out: torch.Tensor, residual_out: torch.Tensor, **_: Any) -> Any:
        return normed_out.fill_(3), residual_out.fill_(4)

    outs = two_buffers()
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", unwanted)
        out_call(unwanted, out_body, outs)
    assert [float(t.unique()) for t in outs.values()] == [3, 4]


def test_what_an_out_body_returns_elsewhere_is_copied() -> None:
    def out_body(residual_out: torch.Tensor, **_: Any) -> Any:
        return torch.full_like(residual_out, 3), residual_out.fill_(4)

    outs = two_buffers()
    out_call(unwanted, out_body, outs)
    assert [float(t.unique()) for t in outs.values()] == [3, 4]


def test_buffers_that_are_not_contiguous_never_reach_an_out_body() -> None:
    def body(x: torch.Tensor, **_: Any) -> Any:
        return torch.full_like(x, 3), torch.full_like(x, 4)

    outs = two_buffers(strided=True)
    out_call(body, unwanted, outs)
    assert [float(t.unique()) for t in outs.values()] == [3, 4]


@pytest.mark.parametrize("backend", [cpu, cuda])
@pytest.mark.parametrize("fast_runs", [True, False])
def test_only_the_native_body_of_a_choice_takes_buffers(
    backend: Any, fast_runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "is_available", lambda: fast_runs)
    monkeypatch.setattr(cuda, "why_not", lambda device: None if fast_runs else "switched off")

    def fast(normed_out: torch.Tensor, residual_out: torch.Tensor, **_: Any) -> Any:
        return normed_out.fill_(3), residual_out.fill_(4)

    def slow(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float,
             enable_pdl: bool) -> Any:  # fmt: skip
        return torch.full_like(x, 5), torch.full_like(x, 6)

    choice = backend._choice("fused_add_rms_norm", fast, slow)
    outs = two_buffers()
    out_call(choice, choice, outs)
    assert [float(t.unique()) for t in outs.values()] == ([3, 4] if fast_runs else [5, 6])


def test_a_call_that_a_kernel_hands_back_is_done_by_the_general_body(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda, "why_not", lambda device: None)
    asked = []

    def fast(**arguments: Any) -> Any:
        asked.append(set(arguments))
        return NotImplemented

    def general(x: torch.Tensor, **arguments: Any) -> Any:
        assert not {"normed_out", "residual_out"} & set(arguments)
        return torch.full_like(x, 5), torch.full_like(x, 6)

    choice = cuda._choice("fused_add_rms_norm", fast, general)
    outs = two_buffers()
    out_call(choice, choice, outs)
    assert [float(t.unique()) for t in outs.values()] == [5, 6]
    assert len(asked) == 1
    assert {"normed_out", "residual_out"} < asked[0]


@pytest.mark.parametrize("taken_by", [0, 1, None])
def test_bodies_are_asked_in_turn_until_one_takes_the_call(taken_by: int | None) -> None:
    asked = []

    def of(index: int) -> Any:
        def body(**_: Any) -> Any:
            asked.append(index)
            return index if index == taken_by else NotImplemented

        return body

    result = cuda._first_to_take([of(0), of(1)])(x=1)
    assert result == (NotImplemented if taken_by is None else taken_by)
    assert asked == ([0] if taken_by == 0 else [0, 1])


def test_native_bodies_name_their_buffers_as_the_op_does() -> None:
    """A parameter of another name would never be given, or be given what is no argument."""
    found = 0
    bodies = [(name, body) for name in REGISTRY for body in cuda.fast_bodies(name)]
    for name, body in bodies:
        declaration = REGISTRY[name]
        parameters = inspect.signature(body).parameters
        named = {k for k, p in parameters.items() if p.kind is not inspect.Parameter.VAR_KEYWORD}
        assert named <= set(declaration.parameters) | set(declaration.outputs), name
        takes_any = len(named) < len(parameters)
        assert set(declaration.outputs) <= named, name
        assert takes_any or set(declaration.parameters) <= named, name
        found += 1
    assert found >= 20


@pytest.mark.parametrize("name", sorted(native_cpu.NAMES))
def test_a_native_cpu_op_takes_what_the_op_takes(name: str) -> None:
    """Calls are handed on as they came: same arguments, order, kinds and defaults. Then come the
    buffers, and whether the call was checked."""
    assert native.is_available()
    op = REGISTRY[name]

    def described(schema: Any) -> list[tuple[Any, ...]]:
        return [
            (a.name, str(a.type), a.kwarg_only, a.has_default_value() and a.default_value)
            for a in schema.arguments
        ]

    buffers = [(out, "Optional[Tensor]", True, None) for out in op.outputs]
    wanted = described(op.packet.default._schema) + buffers + [("checked", "bool", True, False)]
    assert described(native_cpu.raw(name)._schema) == wanted
    assert [str(r.type) for r in native_cpu.raw(name)._schema.returns] == ["List[Tensor]"]


@pytest.mark.parametrize("name", [n for n in NAMES if REGISTRY[n].outputs])
def test_out_variant_refuses_a_wrong_buffer(name: str) -> None:
    args, kwargs = calls(name)[0]
    outs = out_buffers(name, (args, kwargs))
    key = next(iter(outs))
    for wrong in (outs[key].new_empty(7, 7, 7), outs[key].to(torch.float64)):
        with pytest.raises((ValueError, RuntimeError), match=key):
            REGISTRY[name].packet.out(*args, **kwargs, **{**outs, key: wrong})


@pytest.mark.parametrize("name", NAMES)
def test_strided_inputs_equal_contiguous_ones(name: str) -> None:
    for call in calls(name):
        plain = tuple(v.contiguous() if isinstance(v, torch.Tensor) else v for v in call[0])
        mine = as_tuple(REGISTRY[name].packet.default(*fresh(call)[0], **call[1]))
        theirs = as_tuple(REGISTRY[name].packet.default(*plain, **call[1]))
        for one, two in zip(mine, theirs, strict=True):
            assert torch.equal(bits(one), bits(two))


@pytest.mark.parametrize("name", NAMES)
def test_compiles_without_a_graph_break(name: str) -> None:
    op = REGISTRY[name].packet.default
    torch._dynamo.reset()
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    call = calls(name)[0]
    first, second = fresh(call), fresh(call)
    eager, traced = as_tuple(op(*first[0], **first[1])), as_tuple(compiled(*second[0], **second[1]))
    for one, two in zip(eager, traced, strict=True):
        assert torch.equal(bits(one), bits(two))
    for one, two in zip(first[0], second[0], strict=True):
        if isinstance(one, torch.Tensor):
            assert torch.equal(bits(one), bits(two))


def differentiable(call: Call) -> Call:
    floating = (torch.float32, torch.bfloat16)
    args = [
        v.detach().clone().requires_grad_()
        if isinstance(v, torch.Tensor) and v.dtype in floating
        else v
        for v in call[0]
    ]
    return tuple(args), call[1]


PURE = [name for name in NAMES if not REGISTRY[name].mutates]
CACHE_WRITERS = [name for name in NAMES if "k_cache" in REGISTRY[name].mutates]
FLOAT_IN = [n for n in PURE if n not in ("gguf_to_modelopt", "modelopt_to_gguf")]


@pytest.mark.parametrize("name", [n for n in FLOAT_IN if n != "nvfp4_dequantize"])
def test_C4_forward_works_and_backward_raises(name: str) -> None:
    declaration = REGISTRY[name]
    for call in calls(name):
        plain = fresh(call)
        args, kwargs = differentiable(fresh(call))
        results = as_tuple(declaration.packet.default(*args, **kwargs))
        expected = as_tuple(declaration.packet.default(*plain[0], **plain[1]))
        for got, want in zip(results, expected, strict=True):
            assert torch.equal(bits(got.detach()), bits(want))
        for got in results:
            if got.requires_grad:
                with pytest.raises(RuntimeError, match="no backward"):
                    got.float().sum().backward(retain_graph=True)
        floating = [r for r in results if r.is_floating_point() and r.dtype.itemsize > 1]
        assert all(result.requires_grad for result in floating)
        with torch.inference_mode():
            again = as_tuple(declaration.packet.default(*fresh(call)[0], **call[1]))
        for got, want in zip(again, expected, strict=True):
            assert torch.equal(bits(got), bits(want))


@pytest.mark.parametrize("name", CACHE_WRITERS)
def test_C4_a_write_into_a_cache_refuses_each_input_that_requires_grad(name: str) -> None:
    """The cache would come out without a gradient, and its readers would miss it silently."""
    op, call = REGISTRY[name].packet.default, calls(name)[0]
    expected = fresh(call)
    results = as_tuple(op(*expected[0], **expected[1]))
    floating = [
        i for i, v in enumerate(call[0]) if isinstance(v, torch.Tensor) and v.is_floating_point()
    ]
    differentiable_ones = [i for i in floating if call[0][i].dtype.itemsize > 1]
    assert len(differentiable_ones) >= 4
    for i in differentiable_ones:
        args, kwargs = fresh(call)
        args[i].requires_grad_()
        before = [clone(v) for v in args]
        with pytest.raises(
            RuntimeError, match=rf"{name} writes into k_cache and v_cache.*no_grad.*detach"
        ):
            op(*args, **kwargs)
        for now, then in zip(args, before, strict=True):
            if isinstance(now, torch.Tensor):
                assert torch.equal(bits(now.detach()), bits(then))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            again = fresh(call)
            args = tuple(
                v.detach().requires_grad_() if i in differentiable_ones else v
                for i, v in enumerate(again[0])
            )
            got = as_tuple(op(*args, **again[1]))
        for one, two in zip((*got, *args), (*results, *expected[0]), strict=True):
            if isinstance(one, torch.Tensor):
                assert torch.equal(bits(one.detach()), bits(two))


def test_C4_out_variant_refuses_an_input_that_requires_grad() -> None:
    x = torch.ones(2, 16, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(16, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="requires grad"):
        ops.rms_norm(x, weight, out=torch.empty(2, 16, dtype=torch.bfloat16))


def test_C2_only_the_caches_and_a_step_s_inputs_are_declared_mutable() -> None:
    step = {"input_ids", "positions", "slots", "window_slots", "seq_lens", "offsets", "history"}
    assert set(REGISTRY["decode_advance"].mutates) == step
    writable = {
        argument.name
        for name, declaration in REGISTRY.items()
        if name != "decode_advance"
        for argument in declaration.packet.default._schema.arguments
        if argument.is_write
    }
    assert writable == {"k_cache", "v_cache"}


def test_C8_a_tensor_on_another_device_is_named() -> None:
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=False):
        q = torch.empty(2, 4, 32, dtype=torch.bfloat16, device="cuda")
        cache = torch.empty(4, 16, 2, 32, dtype=torch.bfloat16, device="cuda")
        table = torch.zeros(2, 2, dtype=torch.int32, device="cuda")
        lens = torch.ones(2, dtype=torch.int32, device="cuda")
        sinks = torch.zeros(4, device="cuda")
        good = {"block_table": table, "seq_lens": lens, "sinks": sinks}
        assert ops.attention_decode(q, cache, cache, **good).device.type == "cuda"
        for argument, tensor in good.items():
            bad = {**good, argument: tensor.cpu()}
            with pytest.raises(ValueError, match=f"'{argument}'.*cpu.*cuda"):
                ops.attention_decode(q, cache, cache, **bad)


def test_every_op_in_one_inductor_graph() -> None:
    """aot_eager shows the trace; what Inductor makes of mutation and optional tensors, only it."""
    inputs = {name: fresh(calls(name)[0]) for name in NAMES}
    twins = {name: fresh(call) for name, call in inputs.items()}

    def everything(inputs: dict[str, Call]) -> dict[str, Any]:
        return {
            name: REGISTRY[name].packet.default(*args, **kwargs)
            for name, (args, kwargs) in inputs.items()
        }

    torch._dynamo.reset()
    compiled = torch.compile(everything, fullgraph=True)(inputs)
    eager = everything(twins)
    for name in NAMES:
        for one, two in zip(as_tuple(compiled[name]), as_tuple(eager[name]), strict=True):
            assert torch.equal(bits(one), bits(two)), name
        for one, two in zip(inputs[name][0], twins[name][0], strict=True):
            if isinstance(one, torch.Tensor):
                assert torch.equal(bits(one), bits(two)), name
