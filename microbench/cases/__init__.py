"""What `microbench.kernels` times: a file for each family of kernels.

A file declares its benchmarks with `@bench(name)` on a function that yields `Group`s; `load`
imports all files of this folder. A group is timed together: kernels of this project, which become
rows, and peers, the best of which stands in those rows.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

# One launch's buffers, in a form of the family's own.
Buffers = Any
Outputs = tuple[torch.Tensor, ...]
Arrange = Callable[[Sequence[Buffers]], list[Buffers]]
Groups = Callable[[torch.device], "Iterator[Group]"]

REGISTRY: dict[str, Groups] = {}
ON_REQUEST: set[str] = set()  # those that run only when they are named
FILES: dict[str, str] = {}  # where the rows of a benchmark go, without .json

# Two correct bodies in BF16 differ by a rounding here and there, 2^-9 of a value; this is a guard
# against timing what computes something else. The tests hold the kernels to far less.
_AGREEMENT = 1e-2


@dataclass(frozen=True)
class Subject:
    """Something that is timed.

    name: of the peer, or of the kernel for messages.
    call: launches the work of one set of buffers and returns its outputs.
    case: the case of its row; "" for a peer, which has none.
    arrange: what is done to a group's sets for this subject (chained, shared).
    part: a peer that does a part of the work only, as its name says; its outputs are not compared.
    """

    name: str
    call: Callable[[Buffers], Outputs]
    case: str = ""
    arrange: Arrange = list
    part: bool = False


@dataclass(frozen=True)
class Group:
    """Subjects that do the same work, and how much it is.

    bytes: each input read once, each output written once. flop: where arithmetic may be the bound.
    make: the buffers of launch number i. hot: all launches share one set, which stays in the L2.
    chained: each launch has a set of its own, since it reads what the one before it wrote.
    checkpoint: whose weights these are. note: what a reader of its rows has to know.
    compared: in how many of the outputs the subjects have to agree; None: in all.
    """

    bench: str
    bytes: int
    make: Callable[[int], Buffers]
    subjects: Sequence[Subject]
    flop: int = 0
    hot: bool = False
    chained: bool = False
    checkpoint: str = ""
    note: str = ""
    compared: int | None = None

    @property
    def label(self) -> str:
        return f"{self.bench} {self.subjects[0].case} {self.checkpoint}".rstrip()


def bench(
    name: str, *, file: str = "kernels", on_request: bool = False
) -> Callable[[Groups], Groups]:
    def add(groups: Groups) -> Groups:
        REGISTRY[name] = groups
        FILES[name] = file
        if on_request:
            ON_REQUEST.add(name)
        return groups

    return add


def load() -> dict[str, Groups]:
    """All benchmarks, by name."""
    for module in sorted(found.name for found in pkgutil.iter_modules(__path__)):
        importlib.import_module(f"{__name__}.{module}")
    return REGISTRY


def generator(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def randn(device: torch.device, seed: int, *shape: int) -> torch.Tensor:
    """Standard normal values in BF16; never zeros, which a GPU can be faster with."""
    return torch.randn(*shape, generator=generator(device, seed), device=device).bfloat16()


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` by torch.compile, for each shape anew: the strongest form of a peer."""
    result: Callable[..., Any] = torch.compile(function, dynamic=False, fullgraph=True)
    return result


def near_one(device: torch.device, seed: int, size: int) -> torch.Tensor:
    """A norm's weight: a chain of norms neither grows nor dies by it."""
    return (1 + 0.05 * randn(device, seed, size).float()).bfloat16()


def checked(group: Group) -> tuple[Group, list[str]]:
    """`group` without the peers that cannot run here, and a line on each of those.

    Every subject is run once. Raises RuntimeError where two of them compute different things.
    """
    outputs: dict[str, list[torch.Tensor]] = {}
    problems = []
    for subject in group.subjects:
        [buffers] = subject.arrange([group.make(0)])
        try:
            got = subject.call(buffers)
            outputs[subject.name] = [output.float() for output in got[: group.compared]]
        except Exception as error:
            if subject.case:
                raise
            problems.append(f"{group.label}: peer {subject.name} cannot run: {error}")
    usable = [subject for subject in group.subjects if subject.name in outputs]
    whole = [subject.name for subject in usable if not subject.part]
    reference = whole[-1]
    for name in whole:
        pairs = zip(outputs[name], outputs[reference], strict=True)
        for index, (output, want) in enumerate(pairs):
            distance = float((output - want).norm() / want.norm())
            if not distance < _AGREEMENT:  # so that NaN fails
                raise RuntimeError(
                    f"{group.label}: output {index} of {name} is {distance:.3g} from that of "
                    f"{reference}, relatively, want less than {_AGREEMENT}; nothing is timed that "
                    "computes something else"
                )
    return replace(group, subjects=usable), problems
