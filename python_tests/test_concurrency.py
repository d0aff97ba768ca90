"""Threads and processes side by side: the same tokens as alone, and one library for all of them."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from flint_kernels import ops
from flint_kernels.generation import SamplingParams, generate
from flint_kernels.loading import load, load_tokenizer
from flint_kernels.model import Flint

CHECKPOINTS = ("flint-tiny", "flint-tiny-bf16")
PROMPTS = ("def main():", "import os\n", "class Cache:")
PARAMS = SamplingParams(seed=0, max_new_tokens=12)


def together(*jobs: Callable[[], Any]) -> list[Any]:
    """Results of the jobs, each in a thread of its own, started at once; errors come through."""
    barrier = threading.Barrier(len(jobs))

    def run(job: Callable[[], Any]) -> Any:
        barrier.wait()
        return job()

    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result() for future in [pool.submit(run, job) for job in jobs]]


def continued(model: Flint, checkpoint: str, text: str) -> list[int]:
    tokenizer = load_tokenizer(checkpoint)
    [completion] = generate(model, [tokenizer.encode(text).ids], PARAMS)
    return completion.tokens


def test_threads_load_and_decode_as_one_does_alone() -> None:
    """Six threads, two checkpoints, a model each."""
    jobs = [(checkpoint, text) for checkpoint in CHECKPOINTS for text in PROMPTS]
    alone = [continued(load(checkpoint), checkpoint, text) for checkpoint, text in jobs]
    got = together(*(lambda j=job: continued(load(j[0]), *j) for job in jobs))
    assert got == alone


def test_threads_share_a_model_with_caches_of_their_own() -> None:
    model = load("flint-tiny")
    alone = [continued(model, "flint-tiny", text) for text in PROMPTS]
    got = together(*(lambda t=text: continued(model, "flint-tiny", t) for text in PROMPTS * 2))
    assert got == alone * 2


def test_threads_make_calls_that_look_new_and_old() -> None:
    """More kinds of calls than are remembered: one thread forgets them while another asks."""
    weight = torch.ones(8, dtype=torch.bfloat16)

    def calls(first: int) -> int:
        wrong = 0
        for rows in range(first, first + 1500):
            x = torch.ones(rows % 1400, 8, dtype=torch.bfloat16)
            wrong += not torch.equal(ops.rms_norm(x, weight, 1e-30), x)
            if rows % 100 == 0:
                with pytest.raises(ValueError, match="'weight'"):
                    ops.rms_norm(x, weight[:7])
        return wrong

    assert together(*(lambda f=first: calls(f) for first in (0, 300, 600))) == [0, 0, 0]


_FIRST_CALLS = """
import threading, time, torch
import flint_kernels
from flint_kernels.backends import native

plain = torch.ops.load_library
def slow(path):
    plain(path)
    time.sleep(0.2)  # the ops are there, and who loads them is not back yet
torch.ops.load_library = slow

answers, barrier = [], threading.Barrier(8)
def first():
    barrier.wait()
    answers.append(native.why_not())
threads = [threading.Thread(target=first) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print({answer for answer in answers} | {native.why_not()})
"""


def in_processes(count: int, *command: str) -> list[str]:
    """What each of `count` processes prints, all running at once."""
    running = [
        subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    printed = [process.communicate(timeout=300)[0] for process in running]
    assert [process.returncode for process in running] == [0] * count
    return printed


def test_threads_whose_first_calls_come_together_load_one_library() -> None:
    """To a thread that comes while another loads, the ops would look like another copy's."""
    assert in_processes(1, "-c", _FIRST_CALLS) == ["{None}\n"]


def test_two_processes_at_once() -> None:
    command = [
        "-m", "flint_kernels.cli", "generate", "flint-tiny", "--greedy", "--max-new-tokens", "12",
    ]  # fmt: skip
    first, second = in_processes(2, *command)
    assert first == second
    assert len(first.splitlines()) > 1


def test_a_file_is_loaded_while_another_thread_loads_it() -> None:
    """Mappings of one file, which each loader releases page by page as it goes."""
    models = together(*(lambda: load("flint-tiny") for _ in range(4)))
    want = dict(models[0].named_parameters())
    for model in models[1:]:
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.view(torch.uint8), want[name].view(torch.uint8)), name
