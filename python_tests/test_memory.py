"""Memory that is not there: an error that says what was needed, and a process that goes on."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import tiny
import torch

from flint_kernels import cli, memory
from flint_kernels.json_files import MAX_BYTES, read_json
from flint_kernels.loading import load, loader, transfer
from flint_kernels.loading.source import packaged_folder
from flint_kernels.model import FlintConfig, PagedKVCache

# ------------------------------------------------------------------ what is free, and what is not


def test_more_than_there_is_is_refused_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 3 << 30)
    with memory.room_for(3 << 30, "model", "cpu"):
        pass
    with (
        pytest.raises(MemoryError, match=r"model: 3\.5 GiB are needed on cpu, and 3\.0 GiB are f"),
        memory.room_for(7 << 29, "model", "cpu"),
    ):
        raise AssertionError("the allocation was tried")


def test_an_allocation_that_fails_says_what_was_needed() -> None:
    with (
        pytest.raises(MemoryError, match=r"cache: 1\.0 KiB are needed on cpu, and .*DefaultCPU"),
        memory.room_for(1024, "cache", "cpu"),
    ):
        torch.empty(1 << 60, dtype=torch.uint8)
    with (
        pytest.raises(MemoryError, match=r"cache: 10 bytes .* CUDA out of memory"),
        memory.room_for(10, "cache", "cpu"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried ...\nmore")


def test_other_errors_come_through() -> None:
    for error in (RuntimeError("other"), ValueError("bad"), KeyboardInterrupt()):
        with pytest.raises(type(error)), memory.room_for(1, "model", "cpu"):
            raise error


def test_free_memory_is_the_least_of_machine_and_control_group(tmp_path: Path) -> None:
    assert memory._free_host_bytes(tmp_path) is None
    (tmp_path / "proc").mkdir()
    meminfo = "MemTotal:  900 kB\nMemAvailable:  100 kB\nSwapFree:  20 kB\nHugePages_Free:  5\n"
    (tmp_path / "proc/meminfo").write_text(meminfo)
    assert memory._free_host_bytes(tmp_path) == 120 << 10
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.current").write_text("50000\n")
    (group / "memory.stat").write_text("anon 3\ninactive_file 8000\n")
    (group / "memory.max").write_text("max\n")
    assert memory._free_host_bytes(tmp_path) == 120 << 10
    (group / "memory.max").write_text("60000\n")
    assert memory._free_host_bytes(tmp_path) == 18000


def test_every_size_has_a_unit() -> None:
    assert memory.size(999) == "999 bytes"
    assert memory.size(1 << 10) == "1.0 KiB"
    assert memory.size(3 << 19) == "1.5 MiB"
    assert memory.size(5 << 40) == "5.0 TiB"


# ------------------------------------------------------------------ models and caches


@pytest.fixture
def _little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"cpu": 1 << 30}
    monkeypatch.setattr(memory, "free_bytes", lambda device: free.get(device.type))


@pytest.mark.usefixtures("_little_memory")
def test_a_model_that_does_not_fit_is_refused_before_it_is_made() -> None:
    with pytest.raises(MemoryError, match=r"model: 2\d\.\d GiB are needed on cpu, and 1\.0 GiB"):
        loader.allocate(FlintConfig.flint_40b(), "nvfp4", "cpu", None)


@pytest.mark.usefixtures("_little_memory")
def test_a_cache_that_does_not_fit_is_refused_before_it_is_made() -> None:
    config = FlintConfig.flint_40b()
    with pytest.raises(MemoryError, match=r"cache: \d+\.\d GiB are needed on cpu, and 1\.0 GiB"):
        PagedKVCache(config, device="cpu")
    assert PagedKVCache(config, device="meta").bytes() > 1 << 30  # which allocates nothing


def test_the_command_says_so_in_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1 << 10)
    assert cli.main(["generate", "flint-tiny", "--prompt", "x", "--max-new-tokens", "1"]) == 2
    error = capsys.readouterr().err
    assert "error: model: " in error
    assert "1.0 KiB are free" in error


def test_running_out_in_the_middle_of_a_load_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first attempt fails at its 20th tensor; its module is gone, and the next one works."""
    modules = []
    calls = 0
    plain = transfer.Transfer.gguf_blocks

    def fails(self: transfer.Transfer, *arguments: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 20:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
        plain(self, *arguments)

    allocate = loader.allocate

    def watched(*arguments: object) -> object:
        model = allocate(*arguments)
        modules.append(weakref.ref(model))
        return model

    monkeypatch.setattr(transfer.Transfer, "gguf_blocks", fails)
    monkeypatch.setattr(loader, "allocate", watched)
    with pytest.raises(MemoryError, match=r"gguf: .* beside the module, and .*DefaultCPU"):
        load("flint-tiny")
    gc.collect()
    assert modules[0]() is None
    want = tiny.one_shot(load("flint-tiny"), torch.arange(8))
    assert bool(want.isfinite().all())


_UNDER_A_LIMIT = """
import resource, sys
import torch
from flint_kernels.loading import load, synthetic
from flint_kernels.loading.loader import allocate
from flint_kernels.model import FlintConfig

load("flint-tiny")  # code and libraries are there before the limit
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (256 << 20), resource.RLIM_INFINITY))
config = FlintConfig.from_dict({**FlintConfig.flint_40b().to_dict(), "num_hidden_layers": 2,
    "layer_types": ["full_attention"] * 2, "no_rope_layer_indices": [], "mlp_only_layers": [0]})
for _ in range(3):
    try:
        allocate(config, "bf16", "cpu", 64)
    except MemoryError as error:
        print(error)
model = load("flint-tiny")
print(float(sum(p.float().sum() for p in model.parameters() if p.dtype == torch.bfloat16)))
"""


def test_a_process_under_a_limit_goes_on() -> None:
    """What the machine has free is not what the process may have: the allocation fails, thrice."""
    run = subprocess.run(
        [sys.executable, "-c", _UNDER_A_LIMIT], capture_output=True, text=True, check=True
    )
    *errors, total = run.stdout.splitlines()
    assert len(errors) == 3
    for error in errors:
        assert error.startswith("model: 2.")
        assert "GiB are needed on cpu" in error
    assert float(total) == float(total)


# ------------------------------------------------------------------ files that are not files


def test_json_is_read_within_bounds(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(MAX_BYTES + 1)  # holes: nothing is on the disk
    with pytest.raises(ValueError, match="bytes, of which"):
        read_json(path)
    path.write_text('{"a": 1, "b": {"c": 1, "c": 2}}')
    with pytest.raises(ValueError, match="it has 'c' twice"):
        read_json(path)
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="nested too deep"):
        read_json(path)
    path.write_text("1" * 10_000)
    with pytest.raises(ValueError, match="digits"):
        read_json(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match="no regular file"):  # and no waiting for a writer
        read_json(path)
    with pytest.raises(OSError):
        read_json(tmp_path)


def test_a_config_that_is_a_pipe_is_a_value_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ValueError, match=r"config file .*it is no regular file"):
        FlintConfig.from_json_file(tmp_path)


def test_the_packaged_checkpoints_are_far_below_the_limits() -> None:
    for name in ("flint-tiny", "flint-tiny-bf16"):
        folder = packaged_folder(name)
        assert folder
        assert isinstance(read_json(folder / "config.json"), dict)
