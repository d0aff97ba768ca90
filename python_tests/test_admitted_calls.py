"""Which calls the C++ library runs by itself: those that Python's checks have passed before.

`native_cpu.raw(name)` is what the shortcut calls; where it leaves a call to Python it returns
nothing and has written nothing.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_samples import BF16, int32, randn
from test_errors import legal, split, tensors
from test_namespace import as_tuple, bits

from flint_kernels import ops
from flint_kernels.backends import cpu, native, native_cpu
from flint_kernels.ops import REGISTRY

NAMES = sorted(native_cpu.NAMES)


@pytest.fixture(autouse=True)
def library() -> None:
    assert native.is_available()


def raw(name: str, arguments: dict[str, Any]) -> list[torch.Tensor]:
    args, kwargs = split(name, arguments)
    before = [v.clone() for v in arguments.values() if isinstance(v, torch.Tensor)]
    results = native_cpu.raw(name)(*args, **kwargs)
    after = [v for v in arguments.values() if isinstance(v, torch.Tensor)]
    if not results:
        for old, new in zip(before, after, strict=True):
            assert torch.equal(bits(old), bits(new))
    return results


def public(name: str, arguments: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    args, kwargs = split(name, arguments)
    return as_tuple(REGISTRY[name].packet.default(*args, **kwargs))


@pytest.mark.parametrize("name", NAMES)
def test_a_call_that_has_passed_runs_and_gives_the_same(name: str) -> None:
    first, second, third = legal(name), legal(name), legal(name)
    want = public(name, first)
    for got in (raw(name, second), public(name, third)):
        for one, two in zip(want, got, strict=True):
            assert torch.equal(bits(one), bits(two))
            assert (one.shape, one.stride(), one.dtype) == (two.shape, two.stride(), two.dtype)
    for key in REGISTRY[name].mutates:
        assert torch.equal(bits(first[key]), bits(second[key]))
        assert torch.equal(bits(first[key]), bits(third[key]))


def test_where_the_library_is_not_in_use_no_remembered_call_is_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, weight = randn(256, 2048), randn(2048, seed=1)
    installed = ops.rms_norm(x, weight)
    plain = cpu.reference_body("rms_norm")(x, weight, 1e-6)
    assert not torch.equal(installed, plain)  # else this test would see nothing
    monkeypatch.setattr(native, "is_available", lambda: False)
    assert torch.equal(ops.rms_norm(x, weight), plain)
    monkeypatch.undo()
    assert torch.equal(ops.rms_norm(x, weight), installed)


def wider(tensor: torch.Tensor, at: int) -> torch.Tensor:
    """The same values with a stride that no sample has, of each dimension before `at`."""
    shape = list(tensor.shape)
    shape[at] += 29
    return torch.empty(shape, dtype=tensor.dtype).narrow(at, 7, tensor.shape[at]).copy_(tensor)


@pytest.mark.parametrize("name", NAMES)
def test_another_look_is_left_to_python(name: str) -> None:
    """Another rank, type or stride of any tensor, or none; another value of any other argument."""
    public(name, legal(name))
    assert raw(name, legal(name))
    for key, value in legal(name).items():
        others: list[Any]
        if isinstance(value, torch.Tensor):
            others = [value.new_zeros(*value.shape, 1), value.to(torch.complex64)]
            others += [wider(value, at) for at in range(1, value.dim())]
            others += [None] if key not in tensors(name)[:1] and takes_none(name, key) else []
        elif isinstance(value, bool):
            others = [not value]
        elif isinstance(value, list):
            others = [[*value, 3], value[:-1]]
        elif value is None:
            continue
        else:
            others = [value * 2 + 5]
        for other in others:
            assert not raw(name, {**legal(name), key: other}), (key, other)


def takes_none(name: str, argument: str) -> bool:
    schema = REGISTRY[name].packet.default._schema
    return any(a.name == argument and "Optional" in str(a.type) for a in schema.arguments)


def test_fp32_calls_are_the_reference_s() -> None:
    x, weight = torch.ones(2, 16), torch.ones(16)
    arguments = {"x": x, "weight": weight, "eps": 1e-6}
    public("rms_norm", arguments)
    assert not raw("rms_norm", arguments)


# ------------------------------------------------------------------ memory


def cache_write(k_cache: torch.Tensor, v_cache: torch.Tensor) -> dict[str, Any]:
    """A call whose caches are [4, 16, 1, 32]."""
    ones = torch.ones(32, dtype=BF16)
    return {
        "qkv": randn(2, 4 * 32),
        "q_weight": ones,
        "k_weight": ones,
        "cos_sin": None,
        "positions": int32(0, 1),
        "slot_mapping": int32(5, 40),
        "k_cache": k_cache,
        "v_cache": v_cache,
    }


def test_where_written_memory_may_meet_other_memory_decides() -> None:
    """Each of these has the shapes and strides of one that was admitted."""
    name = "qk_norm_rope_kv_write"

    def memory() -> torch.Tensor:
        return torch.zeros(8, 16, 1, 32, dtype=BF16)

    def interleaved(by: int) -> dict[str, Any]:
        """K and V in turns in one buffer; V begins `by` elements after K."""
        flat = memory().flatten()
        shape, stride = (4, 16, 1, 32), (1024, 32, 32, 1)
        pair = [torch.as_strided(flat, shape, stride, at) for at in (0, by)]
        return cache_write(pair[0], pair[1])

    public(name, cache_write(memory()[:4], memory()[:4]))
    assert raw(name, cache_write(memory()[:4], memory()[:4]))
    both = memory()
    assert raw(name, cache_write(both[:4], both[4:]))  # one buffer, in which they never meet
    for shared in (both[:4], both[1:5], both[3:7]):
        arguments = cache_write(both[:4], shared)
        assert not raw(name, arguments)
        with pytest.raises(ValueError, match="argument 'v_cache': got memory that 'k_cache' has"):
            public(name, arguments)
        assert not raw(name, arguments)

    # Their spans meet, and Python found that their elements do not: at this distance alone.
    arguments = interleaved(512)
    assert not raw(name, arguments)
    public(name, arguments)
    assert raw(name, interleaved(512))
    for by in (0, 32, 480):
        assert not raw(name, interleaved(by))

    # What is read may not lie in what is written either.
    arguments = cache_write(memory()[:4], memory()[:4])
    inside = arguments["k_cache"].view(-1)[:256].view(2, 128)
    with pytest.raises(ValueError, match="argument 'k_cache': got memory that 'qkv' has too"):
        public(name, {**arguments, "qkv": inside})
    assert not raw(name, {**arguments, "qkv": inside})


def test_only_so_many_calls_are_remembered() -> None:
    weight = randn(16)
    for rows in range(1, 1100):
        public("rms_norm", {"x": randn(rows, 16), "weight": weight})
    remembered = [
        rows for rows in range(1, 1100) if raw("rms_norm", {"x": randn(rows, 16), "weight": weight})
    ]
    assert 1099 in remembered
    assert len(remembered) < 1024
