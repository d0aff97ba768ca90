"""Which views of a buffer share memory: against the sets of their bytes."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flint_kernels.ops import _overlap
from flint_kernels.ops._overlap import overlap, overlaps_itself, span

DTYPES = (torch.uint8, torch.bfloat16, torch.float32)
BUFFER = torch.zeros(8192, dtype=torch.uint8)


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """Any view of up to four dimensions near the start of one buffer."""
    rank = draw(st.integers(0, 4))
    shape = draw(st.lists(st.integers(0, 4), min_size=rank, max_size=rank))
    strides = draw(st.lists(st.integers(0, 24), min_size=rank, max_size=rank))
    dtype = draw(st.sampled_from(DTYPES))
    return BUFFER.view(dtype).as_strided(shape, strides, draw(st.integers(0, 40)))


def elements(tensor: torch.Tensor) -> list[int]:
    """The address of every element."""
    start, size = tensor.data_ptr(), tensor.element_size()
    steps = [stride * size for stride in tensor.stride()]
    return [
        start + sum(i * step for i, step in zip(index, steps, strict=True))
        for index in product(*map(range, tensor.shape))
    ]


def addresses(tensor: torch.Tensor) -> set[int]:
    return {at + byte for at in elements(tensor) for byte in range(tensor.element_size())}


@settings(max_examples=600, deadline=None)
@given(views(), views())
def test_overlap_is_that_of_the_bytes(a: torch.Tensor, b: torch.Tensor) -> None:
    shared = bool(addresses(a) & addresses(b))
    assert overlap(a, b) is shared
    assert overlap(b, a) is shared


@settings(max_examples=300, deadline=None)
@given(views(), st.integers(0, 64))
def test_overlap_of_two_views_of_one_form(a: torch.Tensor, distance: int) -> None:
    """Equal shapes and strides: interleaved caches."""
    b = a.as_strided(a.shape, a.stride(), a.storage_offset() + distance)
    assert overlap(a, b) is bool(addresses(a) & addresses(b))


@settings(max_examples=600, deadline=None)
@given(views())
def test_overlap_with_itself_and_span(a: torch.Tensor) -> None:
    places = elements(a)
    assert overlaps_itself(a) is (len(set(places)) < len(places))
    if places:
        assert span(a) == (min(addresses(a)), max(addresses(a)) + 1)


def test_strides_too_entangled_to_tell_count_as_shared() -> None:
    """Even strides reach no odd address, but finding that out by trial takes too long."""
    shape = [2] * 24
    strides = [2 * (1000 + at * at) for at in range(24)]
    storage = torch.empty(2 * sum(strides), dtype=torch.uint8)
    a = storage.as_strided(shape, strides, 0)
    b = storage.as_strided(shape, strides, 1)
    assert overlap(a, b) is True


@pytest.mark.parametrize("distance", [2**20, 2**33])
def test_a_cache_of_many_gigabytes_is_settled_in_few_steps(
    distance: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_overlap, "_MAX_STEPS", 200)
    shape, strides = (2**17, 64, 8, 128), (2 * 2**16, 1024, 128, 1)
    meet = _overlap._meet.__wrapped__
    assert meet(2**17, shape, strides, 2, shape, strides, 2) is False
    assert meet(2**17 - 2, shape, strides, 2, shape, strides, 2) is True
    assert meet(distance, shape, strides, 2, (2**16,), (1,), 2) is True
    assert _overlap._folds.__wrapped__(shape, strides) is False
