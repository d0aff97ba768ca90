"""The kernels of a few tokens, from their own sources, on the CPU.

As test_emulated_attention.py: the whole arithmetic, where things stand in shared memory, who waits
for whom, and what is read ahead of the wait; not a GPU's order of memory. Sizes are Flint's in the
width and small in the rows, since the ways of known widths are what is tested.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated import EMULATION, ROOT, SOURCES
from torch import Tensor

from flint_kernels import ops
from flint_kernels.backends.cpu import reference_body
from flint_kernels.model import cos_sin_table
from flint_kernels.ops import REGISTRY

KERNELS = (
    "linear", "linear_one", "qkv", "qkv_one", "moe_down", "moe_down_one", "moe_gate_up",
    "moe_gate_up_one", "moe_gate_up_several",
)  # fmt: skip
# What is `extern __shared__` in a kernel is defined in front of it and needs no code.
FLAGS = (
    "-std=c++20", "-O2", "-fPIC", "-pthread", "-Wno-unknown-pragmas", "-fno-extern-tls-init",
)  # fmt: skip
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
TOKENS = (1, 2, 5, 8)
ROUNDED, SILU_AND_MUL, LOGITS = range(3)


def compiled(work: Path) -> Path:
    compiler = os.environ.get("CXX") or shutil.which("g++") or "g++"
    command = [compiler, *FLAGS, f"-I{EMULATION}", f"-I{ROOT / 'csrc'}"]
    units = {name: work / f"{name}.cc" for name in KERNELS}
    for name, unit in units.items():
        unit.write_text(f'#include "few_tokens.h"\n#include "cuda/{name}.cu"\n')
    units["few_tokens"] = EMULATION / "few_tokens.cc"

    def compile_one(name: str) -> Path:
        made = work / f"{name}.o"
        subprocess.run([*command, "-c", str(units[name]), "-o", str(made)], check=True)
        return made

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, units))
    made = work / "few_tokens.new"
    subprocess.run([*command, "-shared", *map(str, objects), "-o", str(made)], check=True)
    return made


@pytest.fixture(scope="session")
def library() -> Any:
    """The kernels as a shared library, compiled anew where a source is newer."""
    work = ROOT / "build" / "emulation"
    work.mkdir(parents=True, exist_ok=True)
    path = work / "few_tokens.so"
    with (work / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        newest = max(source.stat().st_mtime for source in SOURCES)
        if not path.exists() or path.stat().st_mtime < newest:
            compiled(work).rename(path)
    return ctypes.CDLL(str(path))


class Run(ctypes.Structure):
    _fields_ = [
        ("multiprocessors", ctypes.c_int), ("late_copies", ctypes.c_int), ("seed", ctypes.c_uint),
        ("where", ctypes.c_void_p), ("from_", ctypes.c_void_p), ("bytes", ctypes.c_int64),
    ]  # fmt: skip


def call(function: Any, written: Tensor, *arguments: Any, seed: int) -> None:
    """`written` holds NaN until the kernel in front has ended; copies are late for odd seeds."""
    values = written.clone()
    written.fill_(torch.nan)
    run = Run(3, seed % 2, seed, written.data_ptr(), values.data_ptr(), values.nbytes)

    def argument(value: Any) -> Any:
        if isinstance(value, Tensor):
            assert value.is_contiguous()
            return ctypes.c_void_p(value.data_ptr())
        return ctypes.c_void_p(None) if value is None else value

    assert function(ctypes.byref(run), *map(argument, arguments)) == 0
    assert torch.equal(written.view(torch.int16), values.view(torch.int16))


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=rng(seed)).to(BF16)


def nvfp4(*shape: int, scales: tuple[int, ...], seed: int) -> list[Tensor]:
    """Codes, block scales, and global scales that differ."""
    *lead, columns = shape
    codes, scale = (
        torch.randint(low, high, (*lead, columns // step), generator=rng(seed), dtype=torch.uint8)
        for low, high, step in ((0, 256, 2), (0x28, 0x41, 16))
    )
    spread = 1 + torch.rand(scales, generator=rng(seed))
    return [codes, scale.view(E4M3), spread / (3 * columns**0.5)]


def assert_near(got: Tensor, name: str, arguments: dict[str, Any], index: int = 0) -> None:
    """No further from FP32 than plain PyTorch with BF16 activations is, which rounds at the same
    points: in the root mean square by a tenth, and of one element by half, since sums in another
    order round otherwise here and there."""

    def result(given: dict[str, Any]) -> Tensor:
        found = reference_body(name)(**REGISTRY[name].bind((), given))
        return (found[index] if isinstance(found, tuple) else found).double()

    exact = result(
        {
            key: value.float() if isinstance(value, Tensor) and value.dtype == BF16 else value
            for key, value in arguments.items()
        }
    )
    mine, plain = got.double() - exact, result(arguments) - exact
    order = exact.abs().max() * 2**-20  # of logits nothing is rounded
    assert mine.square().mean().sqrt() <= 1.1 * plain.square().mean().sqrt() + order
    assert mine.abs().max() <= 1.5 * plain.abs().max() + order


# ---------------------------------------------------------------------------------- projections


def activations(tokens: int, width: int, kind: str) -> Tensor:
    """`huge` and `tiny` are outside of what one token's way takes at once; in part of the row."""
    x = randn(tokens, width, seed=tokens + width)
    if kind != "ordinary":
        x[:, : width // 2] *= 2.0**70 if kind == "huge" else 2.0**-60
        x[:, width // 2 :] *= 2.0**69 if kind == "huge" else 2.0**-61
    return x


def linear(
    library: Any, x: Tensor, weight: list[Tensor], output: int, shard: int, seed: int
) -> Tensor:
    rows, (tokens, width) = weight[0].shape[0], x.shape
    columns = rows // 2 if output == SILU_AND_MUL else rows
    out = torch.full(
        (tokens, columns), torch.nan, dtype=torch.float32 if output == LOGITS else BF16
    )
    call(
        library.emulated_linear, x, *weight, len(weight[2]), ctypes.c_int64(shard), x, tokens,
        width, ctypes.c_int64(rows), output, out, seed=seed,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("kind", ["ordinary", "huge", "tiny"])
@pytest.mark.parametrize("width", [2048, 4096, 6144])
def test_linear(library: Any, width: int, kind: str) -> None:
    """One token, and several, whose bits do not depend on how many they are; two shards, of which
    the first ends inside of a tile."""
    weight = nvfp4(32, width, scales=(2,), seed=width)
    x = activations(8, width, kind)
    together = linear(library, x, weight, ROUNDED, 24, seed=8)
    for seed, tokens in enumerate(TOKENS):
        arguments = dict(zip(("weight", "weight_scale", "weight_scale_2"), weight, strict=True))
        some = x[:tokens].clone()
        got = linear(library, some, weight, ROUNDED, 24, seed)
        assert_near(got, "nvfp4_linear", {"x": some, **arguments, "shard_sizes": [24, 8]})
        if tokens > 1:
            assert torch.equal(got.view(torch.int16), together[:tokens].view(torch.int16))


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("width", [2048, 4096, 6144])
def test_what_is_not_finite_stays_where_it_belongs(library: Any, width: int, tokens: int) -> None:
    """An infinity among x: infinite or, where the weight is zero, NaN; of its token alone."""
    weight = nvfp4(48, width, scales=(1,), seed=width)
    x = activations(tokens, width, "ordinary")
    x[0, width - 3] = torch.inf
    got = linear(library, x, weight, ROUNDED, 0, seed=3)
    want = reference_body("nvfp4_linear")(**REGISTRY["nvfp4_linear"].bind((x, *weight), {}))
    assert bool(want[0].isnan().any()) and bool(want[0].isinf().any())
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got[got.isinf()], want[want.isinf()])


@pytest.mark.parametrize("kind", ["ordinary", "tiny"])
def test_gate_and_head(library: Any, kind: str) -> None:
    for tokens in (1, 3):
        x = activations(tokens, 2048, kind)
        gate, head = nvfp4(48, 2048, scales=(2,), seed=1), nvfp4(48, 2048, scales=(1,), seed=2)
        names = ("weight", "weight_scale", "weight_scale_2")
        got = linear(library, x, gate, SILU_AND_MUL, 24, seed=tokens)
        arguments = {"x": x, **dict(zip(names, gate, strict=True))}
        assert_near(got, "nvfp4_linear_silu_and_mul", arguments)
        got = linear(library, x, head, LOGITS, 0, seed=tokens)
        head[2] = head[2].reshape(())
        assert_near(got, "nvfp4_lm_head", {"x": x, **dict(zip(names, head, strict=True))})


@pytest.mark.parametrize("checkpoint", ["nvfp4", "bf16"])
@pytest.mark.parametrize("rope", [True, False])
def test_qkv(library: Any, checkpoint: str, rope: bool) -> None:
    heads, kv_heads, width, pages, page = 2, 1, 2048, 4, 16
    rows = (heads + 2 * kv_heads) * 128
    name = f"{checkpoint}_qkv_norm_rope_kv_write"
    table = cos_sin_table(64, 128, theta=10000.0) if rope else None
    norms = [1 + 0.1 * randn(128, seed=seed) for seed in (1, 2)]
    for seed, tokens in enumerate(TOKENS):
        x = randn(tokens, width, seed=tokens)
        if checkpoint == "nvfp4":
            weight: list[Tensor | None] = list(nvfp4(rows, width, scales=(3,), seed=5))
        else:
            weight = [randn(rows, width, seed=5) / width**0.5, None, None]
        positions = torch.arange(tokens, dtype=torch.int32) * 7 + 1
        slots = torch.arange(tokens, dtype=torch.int32) * 5 + 3
        slots[-1] = -1  # is not cached
        caches = [torch.zeros(pages, page, kv_heads, 128, dtype=BF16) for _ in range(4)]
        q = torch.full((tokens, heads, 128), torch.nan, dtype=BF16)
        call(
            library.emulated_qkv, x, *weight, 3, x, tokens, width, heads, kv_heads, *norms, table,
            ctypes.c_int64(64), positions, slots, *caches[:2], ctypes.c_int64(pages), page,
            ctypes.c_float(1e-6), q, seed=seed,
        )  # fmt: skip
        arguments = {
            "x": x, "weight": weight[0], "q_weight": norms[0], "k_weight": norms[1],
            "cos_sin": table, "positions": positions, "slot_mapping": slots,
            "k_cache": caches[2], "v_cache": caches[3], "eps": 1e-6,
        }  # fmt: skip
        if checkpoint == "nvfp4":
            arguments |= {"weight_scale": weight[1], "weight_scale_2": weight[2]}
        # Behind the projection's rounding and the norm's there are two more: compared in BF16.
        want = getattr(ops, name)(**arguments)
        for got, expected in zip((q, *caches[:2]), (want, *caches[2:]), strict=True):
            error = (got.float() - expected.float()).abs()
            assert bool((error <= expected.float().abs() * 2**-7 + 2**-7).all())
            assert torch.equal(got == 0, expected == 0)


# ---------------------------------------------------------------------------------- experts


def routing(kind: str, tokens: int, top_k: int, experts: int) -> Tensor:
    ids = torch.stack([torch.randperm(experts, generator=rng(t))[:top_k] for t in range(tokens)])
    if kind == "one for all":
        ids[:] = ids[:1]
    if kind == "odd":  # twice the same, and none
        ids[:, 1] = ids[:, 0]
        ids[0, 2], ids[-1, 3] = -1, experts
    return ids.int()


ROUTINGS = ("random", "one for all", "odd")


def named(ids: Tensor, experts: int) -> Tensor:
    """As the reference wants them: what names no expert is -1."""
    return torch.where(ids < experts, ids, -1)


@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_gate_up(library: Any, tokens: int, kind: str) -> None:
    hidden, width, shared, experts, top_k = 2048, 16, 32, 7, 6
    x = randn(tokens, hidden, seed=tokens)
    ids = routing(kind, tokens, top_k, experts)
    routed_weight = nvfp4(experts, 2 * width, hidden, scales=(experts, 2), seed=1)
    shared_weight = nvfp4(2 * shared, hidden, scales=(2,), seed=2)
    routed = torch.full((tokens, top_k, width), torch.nan, dtype=BF16)
    common = torch.full((tokens, shared), torch.nan, dtype=BF16)
    call(
        library.emulated_moe_gate_up, x, ids, tokens, top_k, experts, x, hidden, width, shared,
        *routed_weight, *shared_weight, 2, routed, common, seed=tokens,
    )  # fmt: skip
    names = ("w13", "w13_scale", "w13_scale_2", "shared_w13", "shared_w13_scale",
             "shared_w13_scale_2")  # fmt: skip
    weights = dict(zip(names, [*routed_weight, *shared_weight], strict=True))
    arguments = {"x": x, "topk_ids": named(ids, experts), **weights}
    assert_near(routed, "nvfp4_moe_gate_up", arguments, 0)
    assert_near(common, "nvfp4_moe_gate_up", arguments, 1)


@pytest.mark.parametrize("checkpoint", ["nvfp4", "bf16"])
@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_down(library: Any, tokens: int, kind: str, checkpoint: str) -> None:
    hidden, width, shared, experts, top_k = 32, 512, 1024, 7, 6
    ids = routing(kind, tokens, top_k, experts)
    acts = [randn(tokens, top_k, width, seed=3), randn(tokens, shared, seed=4)]
    weights = torch.rand(tokens, top_k, generator=rng(5)) / top_k
    if checkpoint == "nvfp4":
        matrices: list[Tensor | None] = [
            *nvfp4(experts, hidden, width, scales=(experts,), seed=1),
            *nvfp4(hidden, shared, scales=(1,), seed=2),
        ]
    else:
        routed = randn(experts, hidden, width, seed=1) / width**0.5
        matrices = [routed, None, None, randn(hidden, shared, seed=2) / shared**0.5, None, None]
    out = torch.full((tokens, hidden), torch.nan, dtype=BF16)
    call(
        library.emulated_moe_down, acts[0], ids, tokens, top_k, experts, weights, *acts, hidden,
        width, shared, *matrices, out, seed=tokens,
    )  # fmt: skip
    names = ("w2", "w2_scale", "w2_scale_2", "shared_w2", "shared_w2_scale", "shared_w2_scale_2")
    given = {n: m for n, m in zip(names, matrices, strict=True) if m is not None}
    if checkpoint == "nvfp4":
        given["shared_w2_scale_2"] = given["shared_w2_scale_2"].reshape(())
    arguments = {
        "routed_act": acts[0], "shared_act": acts[1], "topk_weights": weights,
        "topk_ids": named(ids, experts), **given,
    }  # fmt: skip
    assert_near(out, f"{checkpoint}_moe_down", arguments)


def test_a_call_that_no_kernel_takes_is_told(library: Any) -> None:
    x, weight = randn(9, 2048, seed=1), nvfp4(16, 2048, scales=(1,), seed=1)
    run = Run(1, 0, 1, x.data_ptr(), x.data_ptr(), 0)
    pointers = [ctypes.c_void_p(each.data_ptr()) for each in (*weight, x)]
    assert library.emulated_linear(
        ctypes.byref(run), *pointers[:3], 1, ctypes.c_int64(0), pointers[3], 9, 2048,
        ctypes.c_int64(16), ROUNDED, None,
    ) == -1  # fmt: skip
