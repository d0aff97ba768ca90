"""What the loader tests share: a small config, comparisons, and a GGUF writer that can lie."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from flint_kernels.formats.gguf import GGUFFile
from flint_kernels.model.config import FULL, SLIDING, FlintConfig
from flint_kernels.model.flint import Flint

TYPE_IDS = {"F32": 0, "F16": 1, "Q4_K": 12, "BF16": 30, "NVFP4": 40}


def tiny_config(**changes: object) -> FlintConfig:
    """Three layers (dense, MoE without RoPE, MoE), every width a multiple of 64."""
    config = FlintConfig(
        num_hidden_layers=3,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=128,
        max_position_embeddings=256,
        intermediate_size=128,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=192,
        layer_types=(SLIDING, FULL, SLIDING),
        sliding_window=17,
        no_rope_layer_indices=(1,),
        mlp_only_layers=(0,),
    )
    return replace(config, **changes)


def assert_same_parameters(got: Flint, want: Flint) -> None:
    """Bit for bit, types included."""
    ours, theirs = dict(got.named_parameters()), dict(want.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor.view(torch.uint8), theirs[name].view(torch.uint8)), name


def forbid_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any module that is not on the meta device fails the test."""

    def refuse(*arguments: object) -> Flint:
        raise AssertionError("memory was taken before the file had been found faulty")

    monkeypatch.setattr("flint_kernels.loading.loader.allocate", refuse)


_MEASURE = """
import re, sys
from pathlib import Path
from flint_kernels.loading import load

def status(field):
    return int(re.search(field + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

load(sys.argv[1])  # what is loaded and allocated once is no part of the measurement
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
model = load(sys.argv[2], max_positions=1)
print(status("VmHWM") - before - sum(p.nbytes for p in model.parameters()))
"""


def peak_extra_memory(small: Path, large: Path) -> int:
    """Bytes of a fresh process beside the module, at most, while it loads `large` on the CPU.

    Pages of the mapped file count. `small` is loaded first, so that code does not.
    """
    command = [sys.executable, "-c", _MEASURE, str(small), str(large)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@dataclass(frozen=True)
class RawTensor:
    """One tensor of a GGUF file to be written."""

    name: str
    type_id: int
    shape: tuple[int, ...]
    data: bytes


def raw_tensors(path: Path) -> list[RawTensor]:
    """All tensors of a file, in order."""
    with GGUFFile(path) as file:
        return [
            RawTensor(
                tensor.name, tensor.type_id, tensor.shape, file.raw(tensor.name).numpy().tobytes()
            )
            for tensor in file.tensors.values()
        ]


def write_gguf(
    path: Path, tensors: Iterable[RawTensor], metadata: Iterable[tuple[str, bytes]] = ()
) -> None:
    """A little-endian GGUF 3 file; `metadata` values are type id and value, encoded."""
    tensors, metadata = list(tensors), list(metadata)
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata:
        header += _string(key) + value
    offset = 0
    for tensor in tensors:
        header += _string(tensor.name) + struct.pack("<I", len(tensor.shape))
        header += struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape))
        header += struct.pack("<IQ", tensor.type_id, offset)
        offset += -(-len(tensor.data) // 32) * 32
    with path.open("wb") as file:
        file.write(header + b"\0" * (-len(header) % 32))
        for tensor in tensors:
            file.write(tensor.data + b"\0" * (-len(tensor.data) % 32))


def bool_array(*values: bool) -> bytes:
    """A metadata value: an array of bools."""
    return struct.pack("<IIQ", 9, 7, len(values)) + bytes(values)


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def edited(
    tensors: list[RawTensor], name: str, edit: Callable[[RawTensor], RawTensor | None]
) -> list[RawTensor]:
    """The list with one tensor changed, or taken out where `edit` gives None."""
    assert any(tensor.name == name for tensor in tensors), name
    result = (edit(tensor) if tensor.name == name else tensor for tensor in tensors)
    return [tensor for tensor in result if tensor is not None]
