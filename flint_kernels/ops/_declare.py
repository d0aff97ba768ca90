"""How an op of the namespace `flint` is declared: once, in Python, for every backend.

`@op(schema, outputs)` turns one function into a whole operator. The function checks the arguments
and says what comes out (`Spec`s); from it and the schema follow

* `flint::name`          returns fresh, contiguous tensors;
* `flint::name.out`      the same into the caller's buffers (never an alias in the return value);
* the fake (meta) body   the same checks and the same `Spec`s, so that metadata cannot differ;
* the autograd body      forward works, backward raises: the ops are for inference. What writes
                         into a cache or a given buffer raises in forward: a write carries no
                         gradient, and whoever reads the buffer later would miss it silently.

A backend adds a body with `implement(name, key, body)` (see `flint_kernels/backends`). It sees
every argument by name, after all checks, and has no check of its own to forget. With an `out_body`
the out-variant writes in place; without one it copies what the body returns. With a `shortcut` a
call that looks like an earlier one, and whose values are good, never comes to the checks here.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from flint_kernels.ops._check import Checker
from flint_kernels.ops._overlap import overlap, overlaps_itself, span

NAMESPACE = "flint"
VALUE_CHECKS_VARIABLE = "FLINT_KERNELS_CHECK_VALUES"

_MOST_REMEMBERED = 1024  # of an op; serving has a few shapes, a sweep over sizes has many

# "FRAGMENT": a native library may add to the namespace in the same process.
_library = torch.library.Library(NAMESPACE, "FRAGMENT")

Body = Callable[..., Any]


@dataclass(frozen=True)
class Spec:
    """One output: its shape and dtype. It is contiguous, on the device of the inputs."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def laid_out(self, result: torch.Tensor) -> torch.Tensor:
        """`result` with exactly the strides that the fake body reports."""
        strides, step = [], 1
        for size in reversed(self.shape):
            strides.append(step)
            step *= max(size, 1)
        if result.stride() == tuple(reversed(strides)):
            return result
        return torch.empty(self.shape, dtype=self.dtype, device=result.device).copy_(result)


@dataclass
class Declaration:
    """What is known of one op; `REGISTRY` holds them all and the docs list it."""

    name: str
    schema: str
    infer: Callable[..., tuple[Spec, ...]]
    outputs: tuple[str, ...]
    values: Callable[..., None] | None
    over: dict[str, str]  # output -> the input that it may be
    parameters: dict[str, Any]  # name -> default, or inspect.Parameter.empty
    mutates: tuple[str, ...] = ()  # the arguments that are written in place
    required: tuple[str, ...] = ()  # the tensors without which there is no call
    bodies: dict[str, Body] = field(default_factory=dict)
    # Calls whose arguments have passed, by what the checks see of them.
    passed: dict[tuple[Any, ...], tuple[Spec, ...]] = field(default_factory=dict)

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Every argument by name; the dispatcher leaves trailing defaults out."""
        bound = dict(self.parameters)
        bound.update(zip(bound, args, strict=False))
        bound.update(kwargs)
        return bound

    @property
    def packet(self) -> Any:
        return getattr(getattr(torch.ops, NAMESPACE), self.name)

    @property
    def overloads(self) -> list[Any]:
        return [self.packet.default] + ([self.packet.out] if self.outputs else [])


REGISTRY: dict[str, Declaration] = {}


def value_checks_enabled() -> bool:
    """Whether values on an accelerator are read back and checked (slow; for finding a fault)."""
    return os.environ.get(VALUE_CHECKS_VARIABLE, "0") not in ("", "0")


def op(
    schema: str,
    outputs: Sequence[str] = (),
    values: Callable[..., None] | None = None,
    over: dict[str, str] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare `flint::<schema>`; the decorated function checks arguments and returns `Spec`s.

    `outputs` names the returned tensors, which are the out-variant's keyword arguments. `values`
    takes the op's name and its arguments and checks what only the data shows (an id, a position);
    it runs on the CPU always, and elsewhere when the environment variable
    FLINT_KERNELS_CHECK_VALUES is set. `over` says which output's buffer may be which input itself:
    every body then reads an element before it writes it.
    """

    def wrap(infer: Callable[..., Any]) -> Callable[..., Any]:
        name = schema.split("(", 1)[0]
        parameters = {
            key: parameter.default for key, parameter in inspect.signature(infer).parameters.items()
        }
        declaration = Declaration(
            name, schema, infer, tuple(outputs), values, over or {}, parameters
        )
        REGISTRY[name] = declaration
        _library.define(schema)
        arguments = declaration.packet.default._schema.arguments
        declaration.mutates = tuple(argument.name for argument in arguments if argument.is_write)
        tensors = {a.name for a in arguments if str(a.type) == "Tensor"}
        declaration.required = tuple(name for name in parameters if name in tensors)
        _register(declaration, declaration.packet.default, name, _functional_fake(declaration))
        if outputs:
            _library.define(_out_schema(schema, outputs))
            _register(declaration, declaration.packet.out, f"{name}.out", _out_fake(declaration))
        return _public(declaration)

    return wrap


def implement(
    name: str, key: str, body: Body, out_body: Body | None = None, shortcut: Body | None = None
) -> None:
    """Register `body` for op `name` under dispatch key `key` ("CPU", "CUDA").

    The body is called with all arguments by name and returns the outputs as the op does. `out_body`
    is called with the output buffers by name as well, each contiguous, and returns the outputs too:
    a buffer that it has written, or a tensor that is then copied into the buffer.

    `shortcut` is called first, with the call as it came, and returns a sequence: the outputs,
    contiguous, or nothing. Then it has done nothing, and the call goes through the checks to
    `body`. It may do a call of its own accord only where the same checks have passed before and
    would again: of a call with the same shapes, strides, types, devices, host values and shared
    memory, whose values in tensors it has looked at itself.
    """
    declaration = REGISTRY[name]
    declaration.bodies[key] = body
    checked = _functional_body(declaration, body)
    whole = checked if shortcut is None else _with_shortcut(declaration, shortcut, checked)
    _library.impl(name, whole, key)
    if declaration.outputs:
        _library.impl(f"{name}.out", _out_body(declaration, body, out_body), key)


def _out_schema(schema: str, outputs: Sequence[str]) -> str:
    name, rest = schema.split("(", 1)
    arguments = rest[: _closing_parenthesis(rest)]
    separator = ", " if re.search(r"(^|, )\*", arguments) else ", *, "
    tensors = ", ".join(f"Tensor({chr(ord('p') + i)}!) {out}" for i, out in enumerate(outputs))
    # An op that returns what it was given cannot be functionalised, so the out-variant returns ().
    return f"{name}.out({arguments}{separator}{tensors}) -> ()"


def _closing_parenthesis(text: str) -> int:
    depth = 0
    for index, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth < 0:
            return index
    raise ValueError(f"no closing parenthesis in the schema {text!r}")


def _device(bound: dict[str, Any]) -> torch.device:
    return next(value.device for value in bound.values() if isinstance(value, torch.Tensor))


def _check_given(declaration: Declaration, bound: dict[str, Any]) -> None:
    """The dispatcher lets None through for any tensor."""
    for name in declaration.required:
        if bound[name] is None:
            raise TypeError(
                f"flint::{declaration.name}: argument '{name}': got None; want a tensor. "
                "It is not optional."
            )


def _check(declaration: Declaration, bound: dict[str, Any]) -> tuple[Spec, ...]:
    _check_given(declaration, bound)
    specs = declaration.infer(**bound)
    return specs if isinstance(specs, tuple) else (specs,) if specs is not None else ()


def _check_once(declaration: Declaration, bound: dict[str, Any]) -> tuple[Spec, ...]:
    """`_check` of real tensors, remembered: it sees shapes, strides, types and host values alone,
    and a decode step makes the same few calls again and again."""
    key = tuple(
        (value.shape, value.stride(), value.dtype, value.device)
        if isinstance(value, torch.Tensor)
        else tuple(value)
        if isinstance(value, list)
        else value
        for value in bound.values()
    )
    specs = declaration.passed.get(key)
    if specs is None:
        specs = _check(declaration, bound)
        if len(declaration.passed) >= _MOST_REMEMBERED:
            declaration.passed.clear()
        declaration.passed[key] = specs
    return specs


def _check_values(declaration: Declaration, bound: dict[str, Any]) -> None:
    if declaration.values is None:
        return
    device = _device(bound)
    if device.type != "cpu":
        if not value_checks_enabled():
            return
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"flint::{declaration.name}: {VALUE_CHECKS_VARIABLE} is set, and values cannot be "
                "read back while a CUDA graph is captured; unset it for the capture."
            )
    declaration.values(declaration.name, **bound)


def _check_memory(declaration: Declaration, bound: dict[str, Any], outs: dict[str, Any]) -> None:
    """What is written shares memory with nothing else, or a result hangs on who writes last."""
    written = {**outs, **{name: bound[name] for name in declaration.mutates}}
    if not written:
        return
    spans: dict[str, tuple[int, int]] = {}  # of what is written
    for name, tensor in (written | bound).items():
        if not isinstance(tensor, torch.Tensor):
            continue
        start, end = span(tensor)
        for other, (other_start, other_end) in spans.items():
            if start >= other_end or other_start >= end or not overlap(tensor, written[other]):
                continue
            if declaration.over.get(other) != name or not _same_view(tensor, written[other]):
                blamed = (name, other) if name in written else (other, name)
                _refuse_shared(declaration, written, *blamed)
        if name in written:
            if overlaps_itself(tensor):
                _refuse_shared(declaration, written, name, name)
            spans[name] = start, end


def _same_view(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.data_ptr(), a.shape, a.stride()) == (b.data_ptr(), b.shape, b.stride())


def _refuse_shared(
    declaration: Declaration, written: dict[str, torch.Tensor], name: str, other: str
) -> None:
    tensor = written[name]
    sharing = "elements that share memory" if name == other else f"memory that '{other}' has too"
    Checker(declaration.name, name, tensor).fail(
        name,
        f"{sharing}, shape {list(tensor.shape)} with strides {list(tensor.stride())}",
        "memory of its own: it is written",
        "Views of one buffer may interleave, but not overlap; clone() one of them.",
    )


def _returned(results: tuple[torch.Tensor, ...]) -> Any:
    return results[0] if len(results) == 1 else results if results else None


def _functional_fake(declaration: Declaration) -> Body:
    def fake(*args: Any, **kwargs: Any) -> Any:
        bound = declaration.bind(args, kwargs)
        specs = _check(declaration, bound)
        device = _device(bound)
        return _returned(tuple(torch.empty(s.shape, dtype=s.dtype, device=device) for s in specs))

    return fake


def _functional_body(declaration: Declaration, body: Body) -> Body:
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = declaration.bind(args, kwargs)
        specs = _check_once(declaration, bound)
        _check_memory(declaration, bound, {})
        _check_values(declaration, bound)
        results = body(**bound)
        if not specs:
            return None
        results = results if len(specs) > 1 else (results,)
        return _returned(tuple(spec.laid_out(r) for spec, r in zip(specs, results, strict=True)))

    return call


def _with_shortcut(declaration: Declaration, shortcut: Body, checked: Body) -> Body:
    single = len(declaration.outputs) == 1

    def call(*args: Any, **kwargs: Any) -> Any:
        results = shortcut(*args, **kwargs)
        if not results:
            return checked(*args, **kwargs)
        return results[0] if single else tuple(results)

    return call


def _split_out(
    declaration: Declaration, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], tuple[torch.Tensor, ...]]:
    outs = tuple(kwargs[name] for name in declaration.outputs)
    rest = {key: value for key, value in kwargs.items() if key not in declaration.outputs}
    return declaration.bind(args, rest), outs


def _check_out(
    declaration: Declaration, bound: dict[str, Any], outs: tuple[torch.Tensor, ...]
) -> None:
    specs = _check(declaration, bound)
    device = _device(bound)
    for name, out, spec in zip(declaration.outputs, outs, specs, strict=True):
        got = (tuple(out.shape), out.dtype, out.device)
        want = (tuple(spec.shape), spec.dtype, device)
        if got != want:
            raise ValueError(
                f"flint::{declaration.name}.out: argument '{name}': got shape {got[0]}, {got[1]} "
                f"on {got[2]}; want shape {want[0]}, {want[1]} on {want[2]}. "
                "Pass a buffer of exactly that form, or call the op without out=."
            )


def _out_fake(declaration: Declaration) -> Body:
    def fake(*args: Any, **kwargs: Any) -> None:
        bound, outs = _split_out(declaration, args, kwargs)
        _check_out(declaration, bound, outs)

    return fake


def _out_body(declaration: Declaration, body: Body, out_body: Body | None) -> Body:
    def call(*args: Any, **kwargs: Any) -> None:
        bound, outs = _split_out(declaration, args, kwargs)
        _check_out(declaration, bound, outs)
        buffers = dict(zip(declaration.outputs, outs, strict=True))
        _check_memory(declaration, bound, buffers)
        _check_values(declaration, bound)
        if out_body is not None and all(out.is_contiguous() for out in outs):
            results = out_body(**bound, **buffers)
        else:
            results = body(**bound)
        for out, result in zip(outs, results if len(outs) > 1 else (results,), strict=True):
            if result is not out:
                out.copy_(result)

    return call


def _register(declaration: Declaration, overload: Any, qualified: str, fake: Body) -> None:
    torch.library.register_fake(f"{NAMESPACE}::{qualified}", fake, lib=_library)
    _library.impl(qualified, _autograd_body(declaration, overload), "Autograd", with_keyset=True)


class _NoBackward(torch.autograd.Function):
    """Marks the outputs of an op as having no derivative, loudly."""

    @staticmethod
    def forward(ctx: Any, name: str, call: Callable[[], Any], *tensors: torch.Tensor) -> Any:
        ctx.name = name
        return call()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(
            f"flint::{ctx.name} has no backward: the ops are for inference. Run under "
            "torch.inference_mode() or torch.no_grad(), or detach the inputs."
        )


def _autograd_body(declaration: Declaration, overload: Any) -> Body:
    def call(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        def below() -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return overload.redispatch(
                    keyset & torch._C._after_autograd_keyset, *args, **kwargs
                )

        if not torch.is_grad_enabled():
            return below()
        tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
        if not any(tensor.requires_grad for tensor in tensors):
            return below()
        out_variant = overload is not declaration.packet.default
        if out_variant or declaration.mutates:
            written = "a given buffer" if out_variant else " and ".join(declaration.mutates)
            raise RuntimeError(
                f"flint::{declaration.name}{'.out' if out_variant else ''} writes into {written} "
                "and has no backward, but an input requires grad, and what is written would lose "
                "it. Run under torch.inference_mode() or torch.no_grad(), or detach the inputs."
            )
        return _NoBackward.apply(declaration.name, below, *tensors)  # type: ignore[no-untyped-call]

    return call


def _public(declaration: Declaration) -> Callable[..., Any]:
    """The Python function users call: the op, with `out=` choosing the out-variant."""

    @functools.wraps(declaration.infer)
    def call(*args: Any, out: Any = None, **kwargs: Any) -> Any:
        if out is None:
            return declaration.packet.default(*args, **kwargs)
        outs = out if isinstance(out, (tuple, list)) else (out,)
        if len(outs) != len(declaration.outputs):
            raise ValueError(
                f"flint::{declaration.name}: argument 'out': got {len(outs)} tensors; want "
                f"{len(declaration.outputs)}: {', '.join(declaration.outputs) or 'no out-variant'}."
            )
        declaration.packet.out(*args, **kwargs, **dict(zip(declaration.outputs, outs, strict=True)))
        return out

    signature = inspect.signature(declaration.infer)
    extra = inspect.Parameter("out", inspect.Parameter.KEYWORD_ONLY, default=None)
    parameters = [*signature.parameters.values()] + ([extra] if declaration.outputs else [])
    call.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=parameters, return_annotation=inspect.Signature.empty
    )
    call.__annotations__ = {}
    return call
