"""What the benchmarks of the decode path share: sizes, weights, launches and how they are linked.

A launch is an op's out-variant with buffers of its own. In a chain its outputs lie in the memory
that the next launch reads, wholly or in part, so that nothing stands between the two. Weights come
from pools that no L2 holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flint_kernels import ops
from flint_kernels.ops import REGISTRY
from microbench.cases import Outputs, generator, randn
from microbench.timer import L2_TIMES

CHECKPOINTS = ("nvfp4", "bf16")
EPS = 1e-6
PAGE = 16
E4M3 = torch.float8_e4m3fn

# Codes and block scales below are 3 in the root mean square: a global scale of 1 / (3 * sqrt(K))
# keeps the size of what comes in.
SCALES = (0x28, 0x41)  # 1/4 to 2
CODE_TIMES_SCALE = 3.0

ACTIVATIONS = ("x", "residual", "routed_act", "shared_act")
CACHES = ("k_cache", "v_cache")


@dataclass(frozen=True)
class Sizes:
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    experts: int
    width: int  # of a routed expert
    top_k: int
    shared: int
    dense: int
    vocabulary: int
    positions: int  # rows of the RoPE table
    layers: int
    window: int

    @property
    def kv_rows(self) -> int:
        return self.kv_heads * self.dim

    @property
    def qkv_rows(self) -> int:
        return self.heads * self.dim + 2 * self.kv_rows


FLINT = Sizes(2048, 32, 4, 128, 256, 512, 6, 1024, 6144, 150_144, 1 << 16, 49, 513)
TINY = Sizes(128, 4, 1, 64, 16, 64, 6, 64, 256, 1040, 256, 3, 33)  # for tests without a GPU
MODEL = FLINT  # what is benchmarked


# ---------------------------------------------------------------------------------- weights


def weights(
    name: str,
    checkpoint: str,
    device: torch.device,
    seed: int,
    *shape: int,
    scales: tuple[int, ...] = (),
) -> dict[str, Tensor]:
    """The arguments that a random weight [..., N, K] is, with global scales of shape `scales`."""
    *lead, columns = shape
    random = generator(device, seed)
    if checkpoint == "bf16":
        weight = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return {name: weight.normal_(0, columns**-0.5, generator=random)}
    codes, scale = (
        torch.empty(*lead, columns // step, dtype=torch.uint8, device=device) for step in (2, 16)
    )
    return {
        name: codes.random_(0, 256, generator=random),
        f"{name}_scale": scale.random_(*SCALES, generator=random).view(E4M3),
        f"{name}_scale_2": torch.full(scales, global_scale(columns), device=device),
    }


def global_scale(columns: int) -> float:
    """A power of two: what a row of one code gives can then be exact."""
    return 2.0 ** round(-math.log2(CODE_TIMES_SCALE * math.sqrt(columns)))


def expanded(name: str, arguments: Mapping[str, Tensor]) -> Tensor:
    """The weight of `weights` in BF16, for peers; it has one global scale."""
    if f"{name}_scale" not in arguments:
        return arguments[name]
    values: Tensor = ops.nvfp4_dequantize(
        arguments[name], arguments[f"{name}_scale"], None, torch.bfloat16
    )
    return values.mul_(float(arguments[f"{name}_scale_2"].flatten()[0]))


class Pool:
    """Weights by index: as many sets as no L2 holds together, then the first one again."""

    def __init__(self, make: Callable[[int], dict[str, Tensor]], device: torch.device) -> None:
        self._make = make
        self._made = [make(0)]
        size = sum(tensor.nbytes for tensor in self._made[0].values())
        self._count = max(2, L2_TIMES * l2_bytes(device) // size + 1)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        index %= self._count
        while len(self._made) <= index:
            self._made.append(self._make(len(self._made)))
        return self._made[index]


def l2_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 1 << 14  # of a test: a few sets of its small weights
    size: int = torch.cuda.get_device_properties(device).L2_cache_size
    return size


def choice(rows: int, index: int, device: torch.device) -> Tensor:
    """ids [rows, top_k] int32 of launch `index`, rising: no expert twice, where there are enough.

    Launch by launch all experts have their turn, so that a launch finds none of its own in the L2.
    """
    entries = rows * MODEL.top_k
    order = torch.randperm(MODEL.experts, generator=generator(device, 0), device=device)
    places = (index * entries + torch.arange(entries, device=device)) % MODEL.experts
    return order[places].sort().values.int().view(rows, MODEL.top_k)


# ---------------------------------------------------------------------------------- launches


@dataclass(frozen=True)
class Buffers:
    """One launch: what it takes and fills.

    links: arguments of the next launch in a chain; their memory is, in part at least, that of this
    launch's outputs. dense: what peers take in place of the weights.
    """

    arguments: dict[str, Any]
    outputs: dict[str, Tensor]
    links: dict[str, Tensor] = field(default_factory=dict)
    dense: dict[str, Tensor] = field(default_factory=dict)

    @property
    def x(self) -> Tensor:
        """The activations that a chain links."""
        x: Tensor = self.arguments[next(name for name in ACTIVATIONS if name in self.arguments)]
        return x


def linked(
    device: torch.device,
    seed: int,
    out_shape: Sequence[int],
    x_shape: Sequence[int],
    fed: int,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:
    """An output, and the next launch's BF16 input, whose first `fed` elements are its last bytes.

    The rest of the input is random and stays. An op whose output is not as large as its input, or
    not of its size (a gate is of the square of it), makes a chain of steady values so.
    """
    out_bytes = math.prod(out_shape) * dtype.itemsize
    elements = math.prod(x_shape)
    memory = randn(device, seed, out_bytes // 2 + elements - fed)
    out = memory[: out_bytes // 2].view(dtype).view(*out_shape)
    return out, memory[memory.numel() - elements :].view(*x_shape)


def chained(sets: Sequence[Buffers]) -> list[Buffers]:
    """Each launch takes what the one before it has written."""
    later = [replace(b, arguments={**b.arguments, **a.links}) for a, b in pairwise(sets)]
    return [sets[0], *later]


def shared_activations(sets: Sequence[Buffers]) -> list[Buffers]:
    """For the peers of a chain: activations as warm as a chain's, weights as cold."""
    warm = {name: sets[0].arguments[name] for name in ACTIVATIONS if name in sets[0].arguments}
    return [replace(each, arguments={**each.arguments, **warm}) for each in sets]


def launch(op: str, buffers: Buffers, *, enable_pdl: bool) -> Outputs:
    arguments, outputs = buffers.arguments, buffers.outputs
    REGISTRY[op].packet.out(**arguments, **outputs, enable_pdl=enable_pdl)
    return *outputs.values(), *(arguments[name] for name in CACHES if name in arguments)


def launch_bytes(arguments: Mapping[str, Any], outputs: Mapping[str, Tensor]) -> int:
    """Each input read once, each output written once; of experts those that were chosen, of the
    RoPE table and of the caches the rows of the launch."""
    total = sum(output.nbytes for output in outputs.values())
    for name, value in arguments.items():
        if not isinstance(value, Tensor) or name == "workspace":
            continue
        if name == "cos_sin":
            total += arguments["positions"].numel() * value.shape[1] * value.itemsize
        elif name in CACHES:
            total += arguments["slot_mapping"].numel() * value[0, 0].nbytes
        elif name.startswith(("w13", "w2")):
            used = arguments["topk_ids"].unique().numel()
            total += value.nbytes * used // value.shape[0]
        else:
            total += value.nbytes
    return total
