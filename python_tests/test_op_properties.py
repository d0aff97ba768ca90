"""Every op on random legal and illegal calls, on each device and with each of its bodies.

A legal call does what `op_judges` says, within a derived bound, twice with the same bits, in the
out-variant too, and writes nothing else. An illegal one is an exception with a message of the
package or of torch's dispatcher, and writes nothing; it never ends the process.

The default profile is small and the same each time. `make properties` runs many more examples, and
`make gpu-properties` the same tests on a GPU.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from op_judges import JUDGES, Call, problems
from op_strategies import BF16, CALLS, FP32, Bound, broken_calls, legal_calls

from flint_kernels.backends import cuda, native
from flint_kernels.ops import REGISTRY

NAMES = sorted(REGISTRY)
WITHOUT_ACTIVATIONS = (
    "nvfp4_dequantize",
    "gguf_to_modelopt",
    "modelopt_to_gguf",
    "sample",
    "decode_advance",
)
EXAMPLES: Counter[str] = Counter()
"""Examples run so far, by test."""

anything = settings(suppress_health_check=list(HealthCheck))


class Way:
    """A device, and whether the library's bodies are in use there."""

    def __init__(self, device: str, general: bool) -> None:
        self.device, self.general = device, general

    def __repr__(self) -> str:
        return f"{self.device}-{'general' if self.general else 'installed'}"

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            if self.general and self.device == "cpu":
                patch.setattr(native, "is_available", lambda: False)
            if self.general and self.device == "cuda":
                patch.setattr(cuda, "why_not", lambda device: "switched off by the test")
            yield
            if self.device == "cuda":
                torch.cuda.synchronize()


WAYS = [
    Way("cpu", False),
    Way("cpu", True),
    pytest.param(Way("cuda", False), marks=pytest.mark.gpu),
    pytest.param(Way("cuda", True), marks=pytest.mark.gpu),
]
each_way = pytest.mark.parametrize("way", WAYS, ids=repr)
each_op = pytest.mark.parametrize("name", NAMES)


def copied(arguments: Bound, device: str) -> Bound:
    """Copies there, strides kept; views of one buffer stay views of one buffer."""
    buffers: dict[int, torch.Tensor] = {}

    def twin(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.device.type == "meta":
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() not in buffers:
            raw = torch.empty(0, dtype=torch.uint8).set_(storage)  # all of it, whatever the dtype
            buffers[storage.data_ptr()] = raw.to(device, copy=True)
        room = buffers[storage.data_ptr()]
        typed = torch.empty(0, dtype=value.dtype, device=device)
        return typed.set_(
            room.untyped_storage(), value.storage_offset(), value.shape, value.stride()
        )

    return {name: twin(value) for name, value in arguments.items()}


def bits(value: torch.Tensor) -> torch.Tensor:
    # A clone: the one element of a [1] of any stride is contiguous as it is.
    dense = value.cpu().clone(memory_format=torch.contiguous_format)
    return dense.reshape(-1).view(torch.uint8)


def same_bits(one: Bound, two: Bound, but: tuple[str, ...] = ()) -> bool:
    return all(
        torch.equal(bits(value), bits(two[key]))
        for key, value in one.items()
        if isinstance(value, torch.Tensor) and value.device.type != "meta" and key not in but
    )


def run(name: str, arguments: Bound) -> tuple[torch.Tensor, ...]:
    result = REGISTRY[name].packet.default(**arguments)
    return result if isinstance(result, tuple) else () if result is None else (result,)


def specs(name: str, arguments: Bound) -> tuple[Any, ...]:
    found = REGISTRY[name].infer(**arguments)
    return found if isinstance(found, tuple) else (found,)


def out_buffers(name: str, arguments: Bound, device: str) -> Bound:
    """Full of ones, bit by bit: NaN, or -1."""
    buffers = {}
    for output, spec in zip(REGISTRY[name].outputs, specs(name, arguments), strict=True):
        buffers[output] = torch.empty(spec.shape, dtype=spec.dtype, device=device)
        buffers[output].view(torch.uint8).fill_(0xFF) if spec.shape else None
    return buffers


def assert_right(name: str, arguments: Bound, way: Way) -> None:
    """One call by either variant: the same bits, and what the judge says."""
    mine = copied(arguments, way.device)
    results = run(name, mine)
    for result, spec in zip(results, specs(name, arguments), strict=True):
        assert (result.shape, result.dtype) == (spec.shape, spec.dtype)
        assert result.is_contiguous()
    mutated = REGISTRY[name].mutates
    assert same_bits(arguments, mine, but=mutated), "an argument was written"
    here = tuple(result.cpu() for result in results)
    after = {key: v.cpu() if isinstance(v, torch.Tensor) else v for key, v in mine.items()}
    call = Call(name, arguments, here, after, on_gpu=way.device == "cuda")
    assert not (wrong := problems(call)), wrong

    again = copied(arguments, way.device)
    if REGISTRY[name].outputs:
        buffers = out_buffers(name, arguments, way.device)
        REGISTRY[name].packet.out(**again, **buffers)
        repeated = tuple(buffers.values())
    else:
        repeated = run(name, again)
    for one, two in zip(results, repeated, strict=True):
        assert torch.equal(bits(one), bits(two)), "the same call gave other bits"
    assert same_bits(mine, again), "the same call left other bits in a cache"


def test_every_op_has_strategies_and_a_judge() -> None:
    assert set(CALLS) == set(REGISTRY)
    assert set(JUDGES) == set(REGISTRY)


@each_way
@each_op
@anything
@given(data=st.data())
def test_a_legal_call_is_right(name: str, way: Way, data: st.DataObject) -> None:
    EXAMPLES["legal"] += 1
    only = name in WITHOUT_ACTIVATIONS
    dtype = BF16 if only else data.draw(st.sampled_from([BF16, BF16, FP32]), "activations")
    arguments = data.draw(legal_calls(name, dtype))
    with way():
        assert_right(name, arguments, way)


# Of the package, or of the dispatcher, which checks a call against the schema before it comes here.
MESSAGES = re.compile(
    r"flint::\w+(\.out)?: (argument|no)|flint::\w+.*(writes into|has no backward)"
    r"|flint::\w+\(\) (Expected|is missing|takes)|flint::\w+\(\): argument"
    r"|Could not run 'flint::|Expected a value of type|Unable to cast|Overflow when unpacking"
    r"|There were no tensor arguments",
    re.DOTALL,
)


@each_way
@each_op
@anything
@given(data=st.data())
def test_an_illegal_call_is_an_exception(name: str, way: Way, data: st.DataObject) -> None:
    EXAMPLES["illegal"] += 1
    dtype = BF16 if name in WITHOUT_ACTIVATIONS else data.draw(st.sampled_from([BF16, FP32]))
    arguments = data.draw(broken_calls(name, dtype))
    with way():
        mine = copied(arguments, way.device)
        try:
            run(name, mine)
        except Exception as error:
            assert MESSAGES.search(str(error)), f"{type(error).__name__}: {error}"
            assert same_bits(arguments, mine), "a refused call has written"
            return
        given = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
        # Legal after all. A GPU does not see values, and all on the meta device is a call of fakes.
        if way.device == "cpu" and all(tensor.device.type == "cpu" for tensor in given):
            assert_right(name, arguments, way)
