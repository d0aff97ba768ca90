"""Whether tensors share memory: told exactly, from pointers, shapes and strides alone.

Two views of one buffer may interleave and share nothing (the K and V halves of a paged cache), so
their address ranges say too little. Nothing here reads the data or waits for a device. What depends
on shapes and strides alone is remembered, since a cache has the same ones in every call.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

# Strides of a real layout nest, and a few dozen steps settle them. Beyond this many the strides are
# entangled on purpose, and the answer is the safe one.
_MAX_STEPS = 10_000

Terms = list[tuple[int, int]]


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first byte and of the one after the last."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():  # so is a tensor without elements
        return start, start + tensor.nbytes
    return start, start + _extent(tensor.shape, tensor.stride()) * tensor.itemsize


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether some byte belongs to both. True also where the strides are too entangled to tell.

    Where their spans do not meet, it is False, which a caller may have found out already.
    """
    distance = b.data_ptr() - a.data_ptr()
    return _meet(distance, a.shape, a.stride(), a.itemsize, b.shape, b.stride(), b.itemsize)


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements share memory, as in an expanded tensor."""
    return not tensor.is_contiguous() and _folds(tensor.shape, tensor.stride())


@lru_cache(maxsize=4096)
def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last, both counted."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


@lru_cache(maxsize=4096)
def _meet(
    distance: int,
    a_shape: Sequence[int],
    a_strides: Sequence[int],
    a_itemsize: int,
    b_shape: Sequence[int],
    b_strides: Sequence[int],
    b_itemsize: int,
) -> bool:
    """Whether a byte of a lies where one of b does; b starts `distance` bytes after a.

    A byte is an index, `sum(i * stride)`. With j' = size - 1 - j for b's, i and j' all enter with a
    plus: both meet where `sum(i * stride) + sum(j' * stride) = distance + b's last byte`.
    """
    if 0 in a_shape or 0 in b_shape:
        return False
    terms = _bytes(a_shape, a_strides, a_itemsize) + _bytes(b_shape, b_strides, b_itemsize)
    return _reachable(distance + _extent(b_shape, b_strides) * b_itemsize - 1, terms)


@lru_cache(maxsize=4096)
def _folds(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two different indices of [*shape] lead to one element.

    The indices differ first in some dimension, there by 1 or more, and by anything in the later
    ones: `(1 + i) * stride + sum(d * stride) = 0`, and d + size - 1 is again 0 or more.
    """
    dims = [(stride, size - 1) for size, stride in zip(shape, strides, strict=True) if size > 1]
    return any(
        _reachable(
            sum(last * later for later, last in dims[at + 1 :]) - stride,
            [(stride, last - 1), *((later, 2 * last) for later, last in dims[at + 1 :])],
        )
        for at, (stride, last) in enumerate(dims)
    )


def _bytes(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> Terms:
    """The (stride, last index) of each dimension in bytes, those of an element being one more."""
    dims = [(stride * itemsize, size - 1) for size, stride in zip(shape, strides, strict=True)]
    return [*dims, (1, itemsize - 1)]


def _reachable(target: int, terms: Terms) -> bool:
    """Whether `target = sum(x * stride)` with each x in 0 ... last; True if that takes too long."""
    merged: dict[int, int] = {}
    for stride, last in terms:
        if stride > 0:
            merged[stride] = merged.get(stride, 0) + last
    ordered = sorted(merged.items(), reverse=True)
    rests = [sum(stride * last for stride, last in ordered[at:]) for at in range(len(ordered) + 1)]

    # Largest stride first: what the smaller ones can make up bounds the choice of its x.
    open_ends = [(target, 0)]
    for _ in range(_MAX_STEPS):
        if not open_ends:
            return False
        left, at = open_ends.pop()
        if at == len(ordered):
            return left == 0
        stride, last = ordered[at]
        least = max(0, -((rests[at + 1] - left) // stride))
        most = min(last, left // stride, least + _MAX_STEPS)
        open_ends.extend((left - x * stride, at + 1) for x in range(least, most + 1))
    return True
