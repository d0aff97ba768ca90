"""The C++ matrix products: right to the bound of fp32 sums, and a row's bits are its own."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from op_samples import BF16, experts, gated_experts, int32, quantized, randn, shards
from spec_float64 import f64
from torch import Tensor

from flint_kernels import ops
from flint_kernels.backends import native, native_cpu
from flint_kernels.backends.cpu import reference_body
from flint_kernels.formats import nvfp4

E4M3 = torch.float8_e4m3fn
FP32 = torch.float32
# Beyond a tile of rows, a vector of lanes, and both at once; the last is threaded from 8 rows on.
SHAPES = [(1, 16), (3, 32), (4, 48), (5, 16), (130, 144), (128, 1024)]
ODD_SHAPES = [(1, 1), (2, 15), (3, 17), (7, 65), (6, 1025)]


@pytest.fixture(autouse=True)
def library() -> None:
    assert native.why_not() is None, native.why_not()


def matmul(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    scale_2: Tensor | None = None,
    sizes: tuple[int, ...] = (),
    *,
    dtype: torch.dtype = FP32,
    threads: int = 1,
) -> Tensor:
    # NaN: an output that is left out shows.
    out = torch.full((*x.shape[:-1], weight.shape[0]), math.nan, dtype=dtype)
    torch.ops.flint_native.matmul_out(x, weight, scale, scale_2, sizes, out, threads)
    return out


def expert_matmul(
    x: Tensor,
    ids: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    scale_2: Tensor | None = None,
    *,
    dtype: torch.dtype = FP32,
    threads: int = 1,
) -> Tensor:
    out = torch.full((ids.numel(), weight.shape[1]), math.nan, dtype=dtype)
    torch.ops.flint_native.expert_matmul_out(x, ids, weight, scale, scale_2, out, threads)
    return out


def assert_sums(got: Tensor, x: Tensor, values: Tensor, factor: Tensor | float = 1.0) -> None:
    """got [M, N] = factor * x [M, K] @ values [N, K].T to the bound of any order of fp32 sums.

    k products and k additions round once each (fewer with fused multiply-adds), the factor once
    more: |error| <= gamma(k + 1) * |factor| * sum |x * w|, gamma(n) = n u / (1 - n u), u = 2^-24.
    (Textbook: a product takes at most k roundings: its own and k - 1 additions.)
    """
    count = x.shape[-1] + 1
    gamma = count * 2.0**-24 / (1 - count * 2.0**-24)
    want = f64(x) @ f64(values).T * factor
    bound = gamma * (f64(x).abs() @ f64(values).abs().T * f64(torch.as_tensor(factor)).abs())
    assert torch.isfinite(got).all()
    assert ((f64(got) - want).abs() <= bound).all()


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16 if tensor.dtype == BF16 else torch.int32)


# ------------------------------------------------------------------------------ right


@pytest.mark.parametrize("rows", [0, 1, 2, 9])
@pytest.mark.parametrize("n,k", SHAPES)
def test_nvfp4_sums(n: int, k: int, rows: int) -> None:
    x, (weight, scale, scale_2) = randn(rows, k), quantized(n, k)
    values = nvfp4.dequantize(weight, scale)
    assert_sums(matmul(x, weight, scale), x, values)
    assert_sums(matmul(x, weight, scale, scale_2), x, values, f64(scale_2))


@pytest.mark.parametrize("rows", [0, 1, 2, 9])
@pytest.mark.parametrize("n,k", SHAPES + ODD_SHAPES)
def test_bf16_sums(n: int, k: int, rows: int) -> None:
    x, weight = randn(rows, k), randn(n, k, seed=1)
    assert_sums(matmul(x, weight), x, weight)


def test_no_terms_and_no_rows() -> None:
    assert matmul(randn(3, 0), randn(5, 0)).tolist() == [[0.0] * 5] * 3
    assert matmul(randn(3, 7), randn(0, 7)).shape == (3, 0)


def test_every_code_and_every_scale_byte_is_exact() -> None:
    """One term a sum: each of the 16 codes with each of the 256 scales, a block a weight row."""
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes[0::2] | codes[1::2] << 4).expand(256, 8).contiguous()
    scale = torch.arange(256, dtype=torch.uint8)[:, None].view(E4M3)
    values = nvfp4.dequantize(packed, scale)
    rows = torch.eye(16, dtype=BF16)
    got = matmul(rows, packed, scale).T
    # One row at a time, weights are not written out before they are multiplied.
    alone = torch.cat([matmul(row[None], packed, scale) for row in rows]).T
    assert torch.equal(alone.nan_to_num(9.0), got.nan_to_num(9.0))
    # A NaN scale makes its whole block NaN, and no other row.
    nan = values.isnan()
    assert nan.sum() == 2 * 16 and nan[[0x7F, 0xFF]].all()
    assert torch.equal(got.isnan(), nan)
    assert torch.equal(got[~nan], values[~nan])


def test_bf16_output_is_the_rounded_sum() -> None:
    x, weight = randn(9, 144), quantized(130, 144)
    assert torch.equal(matmul(x, *weight, dtype=BF16), matmul(x, *weight).to(BF16))
    # Ties go to even, 1 + 2^-8 down and 1 + 3 * 2^-8 up; NaN and infinity stay.
    parts = torch.tensor(
        [[1, 2**-8], [1, 3 * 2**-8], [3.3e38, 1e36], [math.inf, 0], [math.inf, -math.inf]]
    )
    got = matmul(parts.to(BF16), torch.ones(1, 2, dtype=BF16), dtype=BF16)
    assert torch.equal(got[:4], matmul(parts[:4].to(BF16), torch.ones(1, 2, dtype=BF16)).to(BF16))
    assert got[:2, 0].tolist() == [1.0, 1.015625] and got[4].isnan()


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("sizes", [(4, 1, 0, 6), (21, 12, 0, 16)])
def test_each_shard_is_scaled_once_by_its_own(sizes: tuple[int, ...], rows: int) -> None:
    weight, scale, _ = quantized(sum(sizes), 48)
    scale_2 = torch.tensor([1e-3, 2e-3, math.nan, -4e-3])
    x = randn(rows, 48)
    got = matmul(x, weight, scale, scale_2, sizes)
    # To the bit: the factor is applied to the finished sum, and nowhere else.
    columns = scale_2.repeat_interleave(torch.tensor(sizes))
    assert torch.equal(got, matmul(x, weight, scale) * columns)
    assert torch.equal(matmul(x, weight, scale, scale_2[1], sizes), matmul(x, weight, scale) * 2e-3)


# ------------------------------------------------------------------------------ experts


@pytest.mark.parametrize("kind", ["nvfp4", "bf16"])
@pytest.mark.parametrize("own_rows", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
def test_an_entry_is_its_row_times_its_expert(kind: str, own_rows: bool, threads: int) -> None:
    """Duplicates, entries without an expert, experts without entries, all of one expert."""
    count, n, k = 8, 14, 48
    packed: tuple[Tensor, ...]
    packed = gated_experts(count, n // 2, k) if kind == "nvfp4" else (randn(count, n, k),)
    ids = int32(3, 0, -1, 3, 3, 8, 7, 7, 7, -1, 2**31 - 1, -(2**31)).view(4, 3)
    x = randn(ids.numel() if own_rows else ids.shape[0], k, seed=5)
    got = expert_matmul(x, ids, *packed, threads=threads)
    for entry, expert in enumerate(ids.flatten().tolist()):
        if not 0 <= expert < count:
            assert got[entry].tolist() == [0.0] * n
            continue
        row = x[entry if own_rows else entry // 3][None]
        matrix = [part[expert] for part in packed]
        # The two sides of an expert are shards of one matrix.
        alone = matmul(row, *matrix, sizes=(n // 2, n // 2) if kind == "nvfp4" else ())
        assert torch.equal(got[entry][None], alone)
        rounded = expert_matmul(x, ids, *packed, dtype=BF16)
        assert torch.equal(rounded[entry], got[entry].to(BF16))


def test_one_scale_an_expert() -> None:
    weight, scale, scale_2 = experts(5, 6, 32)
    ids, x = int32(4, 2, 0), randn(3, 32)
    got = expert_matmul(x, ids, weight, scale, scale_2)
    for row, expert in enumerate(ids.tolist()):
        values = nvfp4.dequantize(weight[expert], scale[expert])
        assert_sums(got[row : row + 1], x[row : row + 1], values, f64(scale_2[expert]))


def test_no_entries() -> None:
    ids = torch.empty(0, 6, dtype=torch.int32)
    assert expert_matmul(randn(0, 32), ids, *experts(2, 6, 32)).shape == (0, 6)


# ------------------------------------------------------------------------------ a row's bits


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(
    "kind,n,k", [("nvfp4", *shape) for shape in SHAPES] + [("bf16", *shape) for shape in ODD_SHAPES]
)
def test_a_row_has_the_same_bits_in_any_call(kind: str, n: int, k: int, dtype: torch.dtype) -> None:
    """1 to 17 rows, 1 and 2 threads, any place in memory."""
    weight = quantized(n, k) if kind == "nvfp4" else (randn(n, k, seed=1),)
    x = randn(17, k)
    whole = matmul(x, *weight, dtype=dtype)
    for rows in range(1, 18):
        for threads in (1, 2):
            got = matmul(x[17 - rows :], *weight, dtype=dtype, threads=threads)
            assert torch.equal(bits(got), bits(whole[17 - rows :]))
    # Each weight row alone, and so at another place of its tile and its buffer.
    for row in range(n):
        parts = [part[row : row + 1] if part.dim() else part for part in weight]
        assert torch.equal(bits(matmul(x, *parts, dtype=dtype)), bits(whole[:, row : row + 1]))
    shifted = torch.empty(x.numel() + 1, dtype=BF16)[1:].view(x.shape).copy_(x)
    assert torch.equal(bits(matmul(shifted, *weight, dtype=dtype)), bits(whole))


@pytest.mark.parametrize("threads", [2, 3, 16])
def test_any_number_of_threads_gives_the_same_bits(threads: int) -> None:
    """Enough work for 16 threads: 2^24 multiply-adds."""
    x, weight = randn(64, 512), quantized(520, 512)
    whole = matmul(x, *weight)
    assert torch.equal(bits(matmul(x, *weight, threads=threads)), bits(whole))
    stack = experts(3, 512, 512)
    ids = (torch.arange(64) % 4 - 1).to(torch.int32)
    alone = expert_matmul(x, ids, *stack)
    assert torch.equal(bits(expert_matmul(x, ids, *stack, threads=threads)), bits(alone))


@pytest.mark.parametrize("n,k", [(6, 48), (7, 65)])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_Q4_nan_and_infinity_stay_in_their_rows(n: int, k: int, bad: float) -> None:
    x, weight = randn(9, k), randn(n, k, seed=1)
    clean = matmul(x, weight)
    for row in range(9):
        poisoned = x.clone()
        poisoned[row, -1] = bad
        got = matmul(poisoned, weight)
        others = torch.arange(9) != row
        assert torch.equal(got[others], clean[others]) and not got[row].isfinite().any()
    for column in range(n):
        poisoned = weight.clone()
        poisoned[column, 0] = bad
        got = matmul(x, poisoned)
        others = torch.arange(n) != column
        assert torch.equal(got[:, others], clean[:, others])
        assert not got[:, column].isfinite().any()


# ------------------------------------------------------------------------------ in the ops


def test_the_ops_agree_with_their_pytorch_bodies() -> None:
    """Two orders of the same sum differ by at most twice the bound of one."""
    x = randn(5, 144)
    fused = shards(9, 13, k=144)
    for name, args in {
        "nvfp4_lm_head": (x, *quantized(130, 144)),
        "bf16_lm_head": (x[:, 3:], randn(34, 141, seed=1)),
        "nvfp4_lm_head ": (x, fused[0], fused[1], fused[2][:1]),
    }.items():
        op = name.strip()
        names = ("x", "weight", "weight_scale", "weight_scale_2")
        want = reference_body(op)(**dict(zip(names, args, strict=False)))
        got = getattr(ops, op)(*args)
        assert torch.equal(got, native_cpu.body(op)(*args))  # it is the native one
        values = args[1] if len(args) == 2 else nvfp4.dequantize(*args[1:])
        slack = 2 * args[0].shape[1] * 2.0**-23 * (args[0].float().abs() @ values.float().abs().T)
        assert ((got - want).abs() <= slack).all()


def test_without_the_library_the_ops_give_the_same_values() -> None:
    """In a process of its own, with the library switched off."""
    program = (
        "import torch; from flint_kernels import ops; from flint_kernels.backends import native\n"
        "from op_samples import quantized, randn\n"
        "x, weight = randn(5, 144), quantized(130, 144)\n"
        "assert not native.is_available()\n"
        "print(ops.nvfp4_lm_head(x, *weight).double().flatten().tolist())"
    )
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    environment = {
        **os.environ,
        native.DISABLE_VARIABLE: "1",
        "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    printed = torch.tensor([float(v) for v in done.stdout.strip("[]\n").split(",")])
    x, (weight, scale, scale_2) = randn(5, 144), quantized(130, 144)
    assert_sums(printed.view(5, 130), x, nvfp4.dequantize(weight, scale), f64(scale_2))
    assert_sums(
        ops.nvfp4_lm_head(x, weight, scale, scale_2),
        x,
        nvfp4.dequantize(weight, scale),
        f64(scale_2),
    )


# ------------------------------------------------------------------------------ wrong buffers


def test_wrong_buffers_are_refused() -> None:
    """The last line before raw pointers; the public ops say it better, and earlier."""
    x, (weight, scale, scale_2) = randn(2, 32), quantized(4, 32)
    for message, call in {
        "x: want rows of 32 values": lambda: matmul(randn(2, 48), weight, scale),
        "x: want a contiguous tensor": lambda: matmul(randn(32, 2).T, weight, scale),
        "x: got scalar type": lambda: matmul(x.float(), weight, scale),
        "weight: got k = 40, want a multiple of 16": lambda: matmul(
            randn(2, 40), weight.flatten()[:40].view(2, 20), scale
        ),
        "weight_scale: got 6 elements, want 8": lambda: matmul(x, weight, scale[:3]),
        "weight_scale_2: got 2 elements, want 1": lambda: matmul(
            x, weight, scale, scale_2.expand(2).contiguous(), (4,)
        ),
        "shard_sizes: got 3 rows in all, want 4": lambda: matmul(
            x, weight, scale, scale_2.expand(2).contiguous(), (1, 2)
        ),
        "shard_sizes: got -1": lambda: matmul(
            x, weight, scale, scale_2.expand(2).contiguous(), (5, -1)
        ),
        "out: got scalar type": lambda: matmul(x, weight, scale, dtype=torch.float64),
        "weight: got 2 experts, want one matrix": lambda: torch.ops.flint_native.matmul_out(
            x, *experts(2, 4, 32), [], torch.empty(2, 4), 1
        ),
        "weight: got 1 dimensions": lambda: matmul(x, weight.flatten(), scale),
        "topk_ids: got 3 ids, want a multiple of the 2 rows": lambda: expert_matmul(
            x, int32(0, 1, 0), *experts(2, 4, 32)
        ),
        "topk_ids: got scalar type": lambda: expert_matmul(
            x, torch.zeros(2, dtype=torch.int64), *experts(2, 4, 32)
        ),
        "weight: got 5 rows, want gate and up": lambda: expert_matmul(
            x, int32(0, 1), *experts(2, 5, 32)[:2], torch.ones(2, 2)
        ),
    }.items():
        with pytest.raises(RuntimeError, match=message):
            call()
