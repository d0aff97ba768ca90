"""The shared timer: what one launch costs a GPU, in a CUDA graph and with a cold L2.

A subject is a list of launches. They are captured into one graph, whose replays are timed by
events, so that the time of a launch has no Python, no dispatcher and no gap of the driver in it.
Cold means that a launch finds none of its inputs in the L2: either the sets of buffers that the
launches rotate over are together larger than three times the L2, or a replay uses each set once,
and before every replay a buffer of that size is read. All subjects are replayed in turns, round
after round, in one process: a clock that drifts, drifts for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

# Launches on the current stream and returns its outputs, which are kept while the graph lives: a
# buffer that were free again would be the output of the next launch too, and warm.
Launch = Callable[[], Any]

L2_TIMES = 3  # how much is read, in L2 sizes, until an L2 holds nothing of what was there before

_REPLAY_US = 1000.0  # beside it the few microseconds at a graph's start are nothing
_FEWEST_LAUNCHES, _MOST_LAUNCHES = 4, 512
# What a launch takes at most optimistic; for the length of a replay only, never for a figure.
_SHORTEST_LAUNCH_US, _BYTES_A_US, _FLOP_A_US = 1.5, 4e6, 8e8

_WARM_ROUNDS = 3
# Reads that the GPU is busy with while the CPU launches the graph.
_SWEEPS = 3


@dataclass(frozen=True)
class Plan:
    """How many launches a replay has, and over how many sets of buffers they rotate."""

    launches: int
    sets: int


def plan(launch_bytes: int, l2_bytes: int, launch_flop: int = 0) -> Plan:
    """The plan for launches that move `launch_bytes` and do `launch_flop` each.

    With fewer launches than the sets that would fill three L2s, every launch has a set of its own.
    """
    if launch_bytes <= 0 or l2_bytes <= 0:
        raise ValueError(
            f"launch_bytes, l2_bytes: got {launch_bytes} and {l2_bytes}, want positive numbers; "
            "count what a launch reads and writes"
        )
    estimate = max(_SHORTEST_LAUNCH_US, launch_bytes / _BYTES_A_US, launch_flop / _FLOP_A_US)
    launches = max(_FEWEST_LAUNCHES, min(_MOST_LAUNCHES, round(_REPLAY_US / estimate)))
    wanted = L2_TIMES * l2_bytes // launch_bytes + 1  # the least whose bytes exceed it
    return Plan(launches, min(launches, max(2, wanted)))


def rotated(sets: Sequence[Any], launches: int) -> list[Any]:
    """The set of each launch."""
    return [sets[index % len(sets)] for index in range(launches)]


def interleaved(
    samples: Mapping[str, Callable[[], float]], rounds: int, warm_rounds: int = _WARM_ROUNDS
) -> dict[str, list[float]]:
    """`rounds` samples of each subject, taken in turns; those of the warm rounds are dropped.

    Every other round goes backwards, so that no subject always follows the same one.
    """
    taken: dict[str, list[float]] = {name: [] for name in samples}
    for index in range(warm_rounds + rounds):
        for name in sorted(samples, reverse=bool(index % 2)):
            value = samples[name]()
            if index >= warm_rounds:
                taken[name].append(value)
    return taken


def fitting(rounds: int, round_us: float, at_most_s: float) -> int:
    """As many rounds of that length as fit, 5 at least and `rounds` at most."""
    return max(5, min(rounds, int(at_most_s * 1e6 / round_us)))


class Replay:
    """A captured graph of launches."""

    def __init__(self, launches: Sequence[Launch]) -> None:
        self.launches = len(launches)
        # What compiles or makes a handle at a first call does so outside the capture.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for launch in launches[:3]:
                launch()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._kept = [launch() for launch in launches]
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)

    def run(self) -> None:
        self._graph.replay()

    def sample(self, prepare: Callable[[], None]) -> float:
        """Microseconds a launch, of one replay after `prepare`."""
        prepare()
        self._start.record()
        self._graph.replay()
        self._end.record()
        self._end.synchronize()
        milliseconds: float = self._start.elapsed_time(self._end)
        return milliseconds * 1e3 / self.launches


class Timer:
    """Times launches on the current CUDA device."""

    def __init__(self, rounds: int = 31) -> None:
        self.rounds = rounds
        device = torch.cuda.current_device()
        self.l2_bytes: int = torch.cuda.get_device_properties(device).L2_cache_size
        self._swept = torch.ones(L2_TIMES * self.l2_bytes // 4, dtype=torch.int32, device="cuda")
        self._sink = torch.empty((), dtype=torch.int32, device="cuda")

    def plan(self, launch_bytes: int, launch_flop: int = 0) -> Plan:
        return plan(launch_bytes, self.l2_bytes, launch_flop)

    def measure(
        self, subjects: Mapping[str, Sequence[Launch]], *, hot: bool = False
    ) -> dict[str, list[float]]:
        """Microseconds a launch, a sample for each round, of every subject.

        `hot`: each timed replay follows another of the same graph, instead of the reads that empty
        the L2.
        """
        return self.time({name: Replay(launches) for name, launches in subjects.items()}, hot=hot)

    def time(
        self, replays: Mapping[str, Replay], *, hot: bool = False, at_most_s: float | None = None
    ) -> dict[str, list[float]]:
        """The same of graphs that are captured already.

        `at_most_s`: seconds that all samples may take together, by the first of each; there are 5
        of each at least.
        """
        samples = {
            name: partial(replay.sample, replay.run if hot else self._empty_l2)
            for name, replay in replays.items()
        }
        rounds, warm = self.rounds, _WARM_ROUNDS
        if at_most_s is not None:
            first = sum(samples[name]() * replay.launches for name, replay in replays.items())
            rounds = fitting(rounds, first, at_most_s)
            warm = min(warm, rounds - 4)
        return interleaved(samples, rounds, warm)

    def _empty_l2(self) -> None:
        # Reads: lines that had been written here would cost the subject their way to memory.
        for _ in range(_SWEEPS):
            torch.amax(self._swept, dim=0, out=self._sink)
