"""The fuzz targets on what the fuzzer starts from and on everything that it once found.

fuzz/inputs has the findings; `make fuzz` looks for more.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).parents[1] / "fuzz"
sys.path.insert(0, str(FUZZ))

import targets  # noqa: E402
from json_mutator import mutated  # noqa: E402

NAMES = sorted(targets.TARGETS)
INPUTS = [(name, path) for name in NAMES for path in sorted((targets.INPUTS / name).glob("*"))]


@pytest.mark.parametrize("name", NAMES)
def test_seeds_are_good_inputs(name: str) -> None:
    """They get through, so that a mutation starts deep inside and not at the first check."""
    refused = {"outside.json", *(["flint.json"] if name == "checkpoint" else [])}
    for seed, content in targets._SEEDS[name]():
        with pytest.MonkeyPatch.context() as patch:
            if seed not in refused:
                patch.setattr(targets, "REFUSED", ())
            if name == "index" and seed not in refused:
                targets.written("model-00001-of-00002.safetensors", b"")
            targets.within_memory(targets.TARGETS[name], content)


@pytest.mark.parametrize(("name", "path"), INPUTS, ids=lambda v: getattr(v, "name", v))
def test_what_was_found_once(name: str, path: Path) -> None:
    targets.within_memory(targets.TARGETS[name], path.read_bytes())


@pytest.mark.parametrize("name", NAMES)
def test_a_few_mutations(name: str) -> None:
    """Of the tree where it is JSON, else of single bytes, most of them in the header."""
    draw = random.Random(0)
    seeds = list(targets.seeds(name))
    for round_ in range(60):
        content = bytearray(draw.choice(seeds)[1])
        if name in ("config", "checkpoint", "index", "tokenizer"):
            content = bytearray(mutated(bytes(content), 1 << 16, round_, lambda data, _: data[:-1]))
        else:
            for _ in range(draw.randint(1, 4)):
                at = int(len(content) * draw.random() ** 3)
                content[at] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))
        targets.TARGETS[name](bytes(content))


def test_the_kept_inputs_belong_to_targets() -> None:
    folders = {path.name for path in targets.INPUTS.iterdir()}
    assert folders <= set(NAMES)
