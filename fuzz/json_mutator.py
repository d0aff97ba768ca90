"""Mutates JSON as a tree: bytes that are changed at random are mostly no JSON any more."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**63, 10**400, -(2**64), 0.5, 1e308, float("inf"),
    float("nan"), "", "a", "\x00", "\ud800", "é" * 40, "(a+)+$", "a{1,60000}", "../x", [], {},
    [[]], [0] * 300,
)  # fmt: skip


def mutated(data: bytes, most: int, seed: int, otherwise: Callable[[bytes, int], bytes]) -> bytes:
    """`data` with one to four nodes changed; `otherwise` where it is no JSON, and now and then."""
    draw = random.Random(seed)
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return otherwise(data, most)
    if draw.random() < 0.2:
        return otherwise(data, most)
    for _ in range(draw.randint(1, 4)):
        tree = _changed(tree, draw)
    text = json.dumps(tree).encode("utf-8", "surrogatepass")
    return text if len(text) <= most else data


def _changed(tree: Any, draw: random.Random) -> Any:
    places = list(_places(tree))
    if not places:
        return copy.deepcopy(draw.choice(VALUES))
    holder, key = draw.choice(places)
    value = holder[key]
    change = draw.randrange(6)
    if change == 0:
        del holder[key]
    elif change == 1:
        other, its_key = draw.choice(places)
        holder[key] = copy.deepcopy(other[its_key]) if its_key in _keys(other) else None
    elif change == 2 and isinstance(value, int):
        holder[key] = value + draw.choice((-1, 1, 2**31, -(2**31), 10**9))
    elif change == 3 and isinstance(holder, list):
        holder[key:key] = copy.deepcopy(holder[max(0, key - 8) : key + 1])
    elif change == 4 and isinstance(value, str) and value:
        at = draw.randrange(len(value))
        holder[key] = value[:at] + draw.choice(("", "a", "\\", "*", "^", value)) + value[at + 1 :]
    else:
        holder[key] = copy.deepcopy(draw.choice(VALUES))
    return tree


def _keys(holder: Any) -> Any:
    return range(len(holder)) if isinstance(holder, list) else holder


def _places(node: Any, depth: int = 0) -> Any:
    """(container, key) of every node below."""
    if depth < 40 and isinstance(node, (dict, list)):
        for key in list(_keys(node)):
            yield node, key
            yield from _places(node[key], depth + 1)
