"""Device functions that several kernels share: rounding, and the decoding of NVFP4."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rounded(x, DTYPE: tl.constexpr, EMULATE: tl.constexpr):
    """fp32 x as activations hold it: in DTYPE, or (EMULATE) in fp32 with the bits of BF16."""
    if EMULATE:
        bits = x.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        result = tl.where(x == x, nearest.to(tl.float32, bitcast=True), x)
    else:
        result = x.to(DTYPE)
    return result


@triton.jit
def e2m1(code):
    """int32 codes 0 ... 15 -> fp32."""
    magnitude = code & 7
    # From 1.0 on, a code is an exponent and a mantissa bit as fp32 has them, at another bias.
    normal = ((magnitude << 22) + 0x3F000000).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, normal)
    return tl.where((code & 8) != 0, -value, value)


@triton.jit
def e4m3(byte):
    """int32 bytes of E4M3FN -> fp32, by integers: no architecture needs an instruction for it."""
    magnitude = byte & 0x7F
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    value = tl.where(magnitude == 0x7F, float("nan"), value)
    return tl.where((byte & 0x80) != 0, -value, value)


@triton.jit
def nvfp4_tile(
    codes,
    scales,
    rows,
    inside,
    start,
    in_features,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """`e2m1 * e4m3` of weight rows, columns start ... start + BLOCK_K: [BLOCK_N, BLOCK_K] DTYPE.

    rows [BLOCK_N] int64, read where `inside`; zeros elsewhere. Exact in BF16: two significands of
    2 and 4 bits make one of 6.
    """
    byte = start // 2 + tl.arange(0, BLOCK_K // 2)
    byte_inside = inside[:, None] & (byte < in_features // 2)[None, :]
    packed = tl.load(
        codes + rows[:, None] * (in_features // 2) + byte[None, :], mask=byte_inside, other=0
    ).to(tl.int32)
    group = start // 16 + tl.arange(0, BLOCK_K // 16)
    group_inside = inside[:, None] & (group < in_features // 16)[None, :]
    scale = e4m3(
        tl.load(
            scales + rows[:, None] * (in_features // 16) + group[None, :],
            mask=group_inside,
            other=0,
        ).to(tl.int32)
    )
    scale = tl.broadcast_to(scale[:, :, None], (BLOCK_N, BLOCK_K // 16, 8))
    scale = tl.reshape(scale, (BLOCK_N, BLOCK_K // 2))
    low = (e2m1(packed & 15) * scale).to(DTYPE)
    high = (e2m1(packed >> 4) * scale).to(DTYPE)
    return tl.interleave(low, high)


@triton.jit
def weight_tile(
    weight,
    scales,
    rows,
    inside,
    start,
    in_features,
    NVFP4: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The tile of an NVFP4 weight (without its global scale), or of a BF16 or FP32 one."""
    if NVFP4:
        tile = nvfp4_tile(weight, scales, rows, inside, start, in_features, BLOCK_N, BLOCK_K, DTYPE)
    else:
        column = start + tl.arange(0, BLOCK_K)
        mask = inside[:, None] & (column < in_features)[None, :]
        tile = tl.load(weight + rows[:, None] * in_features + column[None, :], mask=mask, other=0)
        tile = tile.to(DTYPE)
    return tile
