"""Rows C1 to C4, C8 and G1 of the fault table on a GPU: what every op promises of a call.

test_namespace.py has the same for the CPU. LOW_LATENCY_DEVICE=cpu runs what needs no GPU.
"""

from __future__ import annotations

from typing import Any

import op_samples
import pytest
import torch
from low_latency import BF16, DEVICE
from op_samples import SAMPLES, Call
from support import as_tuple, bits
from test_namespace import CACHE_WRITERS, FLOAT_IN, NAMES, allclose_knows_fp8, differentiable

from flint_kernels import ops
from flint_kernels.ops import REGISTRY

pytestmark = pytest.mark.gpu

__all__ = ["allclose_knows_fp8"]  # a fixture


def to(value: Any, device: str) -> Any:
    """A copy there, strides kept."""
    if not isinstance(value, torch.Tensor):
        return value
    room = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)
    return room.copy_(value)


def calls(name: str, device: str = DEVICE) -> list[Call]:
    return [
        (tuple(to(v, device) for v in args), {k: to(v, device) for k, v in kwargs.items()})
        for args, kwargs in SAMPLES[name]()
    ]


def outcome(name: str, call: Call) -> list[torch.Tensor]:
    """What the op returns, and its arguments afterwards: caches are written."""
    results = as_tuple(REGISTRY[name].packet.default(*call[0], **call[1]))
    return [*results, *(v for v in call[0] if isinstance(v, torch.Tensor))]


@pytest.mark.usefixtures("allclose_knows_fp8")
@pytest.mark.parametrize("name", NAMES)
def test_C1_opcheck(name: str) -> None:
    for args, kwargs in calls(name):
        torch.library.opcheck(REGISTRY[name].packet.default, args, kwargs)


def test_C2_a_write_and_a_read_compile_to_the_same_bits() -> None:
    k_cache, v_cache = op_samples.caches("interleaved", 4, 16, 2, 32)
    k, v = op_samples.randn(3, 2, 32, seed=5), op_samples.randn(3, 2, 32, seed=6)
    q, slots = op_samples.randn(1, 4, 32), torch.tensor([32, 33, 34])
    table, length = op_samples.int32(2)[None], op_samples.int32(3)

    def write_then_read(*arguments: torch.Tensor) -> torch.Tensor:
        k, v, slots, k_cache, v_cache, q, table, length = arguments
        ops.kv_cache_write(k, v, slots, k_cache, v_cache)
        return ops.attention_decode(q, k_cache, v_cache, table, length)

    torch._dynamo.reset()
    compiled = torch.compile(write_then_read, fullgraph=True)
    results = []
    for function in (write_then_read, compiled):
        mine = [to(t, DEVICE) for t in (k, v, slots, k_cache, v_cache, q, table, length)]
        results.append([function(*mine), *mine])
    for eager, traced in zip(*results, strict=True):
        assert torch.equal(bits(eager), bits(traced))


@pytest.mark.parametrize("name", NAMES)
def test_C3_fake_metadata_equals_real(name: str) -> None:
    for call in calls(name):
        real = as_tuple(REGISTRY[name].packet.default(*call[0], **call[1]))
        with torch._subclasses.FakeTensorMode() as mode:
            fake_of = lambda v: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v  # noqa: E731
            args = [fake_of(v) for v in call[0]]
            kwargs = {k: fake_of(v) for k, v in call[1].items()}
            fake = as_tuple(REGISTRY[name].packet.default(*args, **kwargs))
        assert len(real) == len(fake)
        for r, f in zip(real, fake, strict=True):
            assert (r.shape, r.stride(), r.dtype, r.device) == (
                f.shape, f.stride(), f.dtype, f.device,
            )  # fmt: skip


@pytest.mark.parametrize("name", [n for n in FLOAT_IN if n != "nvfp4_dequantize"])
def test_C4_forward_works_and_backward_raises(name: str) -> None:
    call = calls(name)[0]
    expected = as_tuple(REGISTRY[name].packet.default(*call[0], **call[1]))
    args, kwargs = differentiable(call)
    results = as_tuple(REGISTRY[name].packet.default(*args, **kwargs))
    for got, want in zip(results, expected, strict=True):
        assert torch.equal(bits(got.detach()), bits(want))
        if got.requires_grad:
            with pytest.raises(RuntimeError, match="no backward"):
                got.float().sum().backward(retain_graph=True)
    floating = [r for r in results if r.is_floating_point() and r.dtype.itemsize > 1]
    assert all(result.requires_grad for result in floating)


@pytest.mark.parametrize("name", CACHE_WRITERS)
def test_C4_a_write_into_a_cache_refuses_an_input_that_requires_grad(name: str) -> None:
    args, kwargs = differentiable(calls(name)[0])
    with pytest.raises(RuntimeError, match="writes into k_cache and v_cache"):
        REGISTRY[name].packet.default(*args, **kwargs)


def assert_misplaced_is_named(name: str, home: str, abroad: str) -> None:
    """Each tensor argument but the first, which fixes the device, is tried elsewhere."""
    declaration = REGISTRY[name]
    for call in calls(name, home):
        bound = declaration.bind(*call)
        tensors = [key for key, value in bound.items() if isinstance(value, torch.Tensor)]
        for argument in tensors[1:]:
            wrong = {**bound, argument: to(bound[argument], abroad)}
            message = f"'{argument}'.*{abroad}.*{home}.*Move it"
            with pytest.raises(ValueError, match=message):
                declaration.packet.default(**wrong)


@pytest.mark.parametrize("name", NAMES)
def test_C8_a_tensor_on_the_cpu_is_named(name: str) -> None:
    if DEVICE == "cpu":
        assert_misplaced_is_named(name, "cpu", "meta")
    else:
        assert_misplaced_is_named(name, "cuda:0", "cpu")


def test_G1_codes_in_order() -> None:
    """One super-block whose first group holds the codes 0 to 15."""
    block = bytes([0x38] * 4) + bytes.fromhex("8091a2b3c4d5e6f7") * 4
    blocks = torch.tensor(list(block), dtype=torch.uint8, device=DEVICE)[None]
    weight, scale = ops.gguf_to_modelopt(blocks)
    assert weight.cpu().numpy().tobytes() == bytes.fromhex("1032547698badcfe") * 4
    values = ops.nvfp4_dequantize(weight, scale, None, BF16)[0, :16].tolist()
    assert values == [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert torch.equal(ops.modelopt_to_gguf(weight, scale), blocks)
