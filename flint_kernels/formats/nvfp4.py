"""NVFP4 in plain PyTorch: quantise, dequantise, and change between its two layouts.

A value is ``e2m1(code) * e4m3(block scale) * global scale``; 16 values along the input
dimension K share a block scale, a tensor (or an expert, or a shard) shares a global scale.

**ModelOpt layout**, the one that every op of this package takes:

=================  =====================  ==================================================
``weight``         uint8 [..., N, K/2]    two consecutive values a byte, low nibble first
``weight_scale``   float8_e4m3fn          [..., N, K/16]
``weight_scale_2`` float32                one value, or one for each leading index
=================  =====================  ==================================================

**GGUF layout** (ggml type 40): super-blocks of 64 values in 36 bytes, uint8
[..., N, K/64 * 36]. Four scale bytes come first, then four times eight code bytes; in each
eight the low nibbles are values 0-7 of a block and the high nibbles values 8-15. ggml reads
a scale byte without its sign bit, and 0x7F as zero; the global scale is a tensor of its own.

Everything here runs on any device of a little-endian machine. It is the fallback where the C++
library is not built; :mod:`flint_kernels.formats.repack` chooses between the two.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_VALUES = 16
"""Values that share one E4M3 scale."""
SUPERBLOCK_VALUES = 64
"""Values of one GGUF super-block."""
SUPERBLOCK_BYTES = 36
"""Bytes of one GGUF super-block: 4 scales and 32 bytes of codes."""
SUPERBLOCK_SCALES = SUPERBLOCK_VALUES // BLOCK_VALUES

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of codes 0-7; code 8 + i is the negative of code i (8 itself is -0)."""
E2M1_MAX = 6.0
E4M3_MAX = 448.0

# Large tensors are worked on slice by slice, which bounds the temporaries. On a CPU a slice and
# its temporaries also stay in L2 (one thread, 4M values: 1.6 times as fast; repack: 1.8).
_REPACK_SLICE = 1 << 15  # super-blocks
_DEQUANT_SLICE_CPU = 1 << 17  # values
_DEQUANT_SLICE_GPU = 1 << 27

# The two layouts differ by a perfect shuffle of a block's 16 nibbles, taken as one
# little-endian 64-bit word: three swaps of neighbouring nibbles, bytes, 16-bit halves
# (GGUF to ModelOpt; the way back is the same swaps in the opposite order).
_SHUFFLE = ((0x00F000F000F000F0, 4), (0x0000FF000000FF00, 8), (0x00000000FFFF0000, 16))

_OUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# --------------------------------------------------------------------------- quantise


def quantize(
    x: Tensor, global_scale: Tensor | float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantises ``x`` [..., N, K] (any float type, finite) to NVFP4 in the ModelOpt layout.

    The recipe is the usual one, every step in fp32:

    - ``weight_scale_2 = amax(|x|) / (6 * 448)``, one for the whole tensor, unless
      ``global_scale`` brings it (finite, above 0): one value, or one for each leading index of
      ``x`` (shape ``x.shape[:-2]``: an expert each);
    - block scale ``= e4m3(amax(|block|) / 6 / weight_scale_2)``, nearest even, at most 448;
    - code = the E2M1 value nearest to ``x / (block scale * weight_scale_2)``, ties to the even
      code, saturating at 6; the sign bit is that of ``x``.

    A block whose scale is zero (all zeros, or far below the tensor's maximum) gets codes of
    magnitude zero. A tensor of zeros gets a global scale of 1, so that nothing divides by zero.

    Returns ``(weight, weight_scale, weight_scale_2)``: uint8 [..., N, K/2], float8_e4m3fn
    [..., N, K/16], float32 [] (or ``x.shape[:-2]``).

    Raises ValueError for a K that is no multiple of 16 (pad the input dimension with zeros, on
    both operands of the product), for NaN or infinity, and for a bad ``global_scale``.
    """
    if not x.is_floating_point() or x.dim() < 2:
        raise ValueError(
            f"x: got {x.dtype} {list(x.shape)}, want a floating-point tensor [..., N, K]; "
            "reshape or cast it first"
        )
    k = x.shape[-1]
    if k % BLOCK_VALUES:
        raise ValueError(
            f"x: got K = {k}, want a multiple of {BLOCK_VALUES}; pad the last dimension with "
            "zeros (and that of the activations it is multiplied with)"
        )
    if not bool(torch.isfinite(_block_maxima(_blocks(x))).all()):
        raise ValueError(
            f"x: got NaN or infinity in {list(x.shape)}, want finite values (in fp32); "
            "NVFP4 can hold neither: repair the weights first"
        )
    if global_scale is not None:
        global_scale = torch.as_tensor(global_scale, dtype=torch.float32, device=x.device)
        if not bool((torch.isfinite(global_scale) & (global_scale > 0)).all()):
            raise ValueError(
                "global_scale: got a value that is zero, negative or not finite, want finite "
                "values above 0; leave it out to have it computed"
            )
    return encode(x, global_scale)


def encode(x: Tensor, global_scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`quantize` that trusts its arguments and so reads no value back from the device.

    Of NaN, infinity or a bad ``global_scale`` it makes codes and scales without a meaning.
    """
    k = x.shape[-1]
    blocks = _blocks(x)
    block_amax = _block_maxima(blocks)
    if global_scale is None:
        amax = block_amax.max() if block_amax.numel() else block_amax.new_zeros(())
        # The floor is the smallest normal number: a subnormal global scale has too few bits.
        floor = torch.finfo(torch.float32).tiny
        scale_2 = torch.where(amax > 0, (amax / (E2M1_MAX * E4M3_MAX)).clamp_min(floor), 1.0)
    else:
        scale_2 = global_scale
    spread = _spread_global(scale_2, x.shape[:-2], "global_scale")

    scale = (block_amax / E2M1_MAX / spread).clamp_max(E4M3_MAX).to(torch.float8_e4m3fn)
    step = (scale.float() * spread).unsqueeze(-1)
    ratio = torch.where(step > 0, blocks.abs() / step, 0.0)
    # E2M1 is a grid of steps 0.5 below 2, 1 below 4 and 2 above: rounding on each of the three
    # grids (torch.round is half to even, and an even multiple is an even code) and taking the
    # smallest code picks the right one, saturation included.
    ratio.clamp_(max=E2M1_MAX)
    code = torch.minimum((ratio * 2).round_(), ratio.round().add_(2))
    code = torch.minimum(code, ratio.mul_(0.5).round_().add_(4)).to(torch.uint8)
    code |= torch.signbit(blocks).to(torch.uint8) << 3
    code = code.view(*x.shape[:-1], k // 2, 2)
    return code[..., 0] | (code[..., 1] << 4), scale, scale_2


def _blocks(x: Tensor) -> Tensor:
    """[..., K] -> [..., K / 16, 16] fp32."""
    return x.float().reshape(*x.shape[:-1], x.shape[-1] // BLOCK_VALUES, BLOCK_VALUES)


def _block_maxima(blocks: Tensor) -> Tensor:
    return blocks.abs().amax(dim=-1)


def _spread_global(scale_2: Tensor, leading: torch.Size, name: str) -> Tensor:
    """The global scale(s) shaped to multiply [*leading, N, anything]."""
    if scale_2.numel() == 1:
        return scale_2.reshape(())
    if scale_2.shape != leading:
        raise ValueError(
            f"{name}: got shape {list(scale_2.shape)}, want one value or {list(leading)} "
            "(one for each leading index); for rows of different global scales, call once a shard"
        )
    return scale_2[..., None, None]


# --------------------------------------------------------------------------- dequantise


def dequantize(
    weight: Tensor,
    weight_scale: Tensor,
    weight_scale_2: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """``e2m1(weight) * e4m3(weight_scale) [* weight_scale_2]`` as [..., N, K].

    Without ``weight_scale_2`` the result is exact in every ``dtype`` taken (float32, bfloat16,
    float16): a product of a 2-bit and a 4-bit significand, between 2^-10 and 2,688. With it,
    the product is rounded to fp32 once, and once more for a narrower ``dtype``. A NaN scale
    gives NaN; :func:`check_modelopt_scales` refuses those at load.

    weight: uint8 [..., N, K/2]; weight_scale: float8_e4m3fn [..., N, K/16]; weight_scale_2:
    float32, one value or shape ``weight.shape[:-2]``. ``out``, contiguous, of the result's shape
    and of type ``dtype``, takes the result instead of a new tensor.
    """
    small = weight.numel() * 2 <= _dequant_slice(weight.device)
    if small and out is None:
        _, spread = _check_dequantize(weight, weight_scale, weight_scale_2, dtype)
        values = _decode(weight, weight_scale)
        return (values if spread is None else values.mul_(spread)).to(dtype)

    result, spread = dequantize_output(weight, weight_scale, weight_scale_2, dtype, out)
    k = result.shape[-1]
    if result.numel() == 0:
        return result
    if spread is not None and spread.dim():
        spread = spread.expand(*result.shape[:-1], 1).reshape(-1, 1)
    rows = result.view(-1, k)
    weight, weight_scale = weight.reshape(-1, k // 2), weight_scale.reshape(-1, k // BLOCK_VALUES)
    step = max(1, _dequant_slice(weight.device) // k)
    for start in range(0, rows.shape[0], step):
        part = slice(start, start + step)
        values = _decode(weight[part], weight_scale[part])
        if spread is not None:
            values.mul_(spread[part] if spread.dim() else spread)
        rows[part] = values
    return result


def dequantize_output(
    weight: Tensor,
    weight_scale: Tensor,
    weight_scale_2: Tensor | None,
    dtype: torch.dtype,
    out: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Checks the inputs of :func:`dequantize`; checks or makes its output.

    Also returns the global scale in fp32, shaped to multiply the output.
    """
    shape, spread = _check_dequantize(weight, weight_scale, weight_scale_2, dtype)
    if out is None:
        return torch.empty(shape, dtype=dtype, device=weight.device), spread
    _check_out(out, "out", shape, dtype, weight.device)
    return out, spread


def _check_dequantize(
    weight: Tensor, weight_scale: Tensor, weight_scale_2: Tensor | None, dtype: torch.dtype
) -> tuple[torch.Size, Tensor | None]:
    shape = _check_modelopt(weight, weight_scale)
    if dtype not in _OUT_DTYPES:
        raise ValueError(f"dtype: got {dtype}, want one of {_OUT_DTYPES}; cast the result instead")
    if weight_scale_2 is None:
        return shape, None
    if weight_scale_2.device != weight.device:
        raise ValueError(
            f"weight_scale_2: got device {weight_scale_2.device}, want that of weight, "
            f"{weight.device}"
        )
    return shape, _spread_global(weight_scale_2.float(), weight.shape[:-2], "weight_scale_2")


def _dequant_slice(device: torch.device) -> int:
    return _DEQUANT_SLICE_CPU if device.type == "cpu" else _DEQUANT_SLICE_GPU


def _decode(weight: Tensor, weight_scale: Tensor) -> Tensor:
    """``e2m1 * e4m3`` in fp32, [..., K].

    One gathered 8-byte row holds the two values of a byte. On a CPU this is the fastest way that
    PyTorch has: int32 indices, an in-place product, fp32 throughout (its bf16 product is slower).
    """
    index = weight.reshape(-1).to(torch.int32)
    pairs = _pair_lut(weight.device).index_select(0, index)
    values = pairs.view(torch.float32).view(*weight_scale.shape, BLOCK_VALUES)
    return values.mul_(weight_scale.float().unsqueeze(-1)).flatten(-2)


_pair_luts: dict[torch.device, Tensor] = {}


def _pair_lut(device: torch.device) -> Tensor:
    """int64 [256]: for each byte, the fp32 bits of its low and its high nibble's value."""
    lut = _pair_luts.get(device)
    if lut is None:
        grid = [*E2M1_VALUES, *(-v for v in E2M1_VALUES)]
        pairs = [[grid[byte & 15], grid[byte >> 4]] for byte in range(256)]
        lut = torch.tensor(pairs, dtype=torch.float32, device="cpu").view(torch.int64)
        lut = lut.flatten().to(device)
        # Under a fake or functional tensor mode the table is a stand-in: never keep that one.
        if type(lut) is Tensor:
            _pair_luts[device] = lut
    return lut


def check_modelopt_scales(weight_scale: Tensor, name: str = "weight_scale") -> None:
    """Raises ValueError where an E4M3 ``weight_scale`` holds NaN (bytes 0x7F and 0xFF).

    Every other byte is a number and legal in a ModelOpt file, negative scales included. To be
    called once, at load: a NaN scale would otherwise turn up as NaN logits much later.
    """
    if weight_scale.dtype != torch.float8_e4m3fn:
        raise ValueError(f"{name}: got {weight_scale.dtype}, want torch.float8_e4m3fn")
    bad = (weight_scale.view(torch.uint8) & 0x7F) == 0x7F
    if bool(bad.any()):
        where = bad.nonzero()[0].tolist()
        raise ValueError(
            f"{name}: got NaN (byte {_byte_at(weight_scale, where):#04x}) at index {where}, one of "
            f"{int(bad.sum())} such scales; want numbers: the file is damaged or was "
            "quantised from NaN weights, so quantise it again"
        )


# --------------------------------------------------------------------------- repack


def gguf_to_modelopt(
    blocks: Tensor, *, out: tuple[Tensor, Tensor] | None = None, name: str = "blocks"
) -> tuple[Tensor, Tensor]:
    """GGUF super-blocks, uint8 [..., N, K/64 * 36], to ``(weight, weight_scale)`` of ModelOpt.

    Lossless: the values read from the result equal those that ggml reads from ``blocks``. To
    that end the sign bit of each scale is cleared and 0x7F, which ggml reads as zero, becomes 0.
    Temporaries are bounded (about 4 MiB), whatever the size; ``out`` takes preallocated,
    contiguous results of the right shapes.

    Raises ValueError for a scale byte 0xFF (it would be 480, which E4M3FN does not have), with
    its place; ``out`` is then partly written. ``name`` is what messages call the tensor.
    """
    weight, scale = repack_outputs(blocks, out, name)
    source = blocks.reshape(-1, SUPERBLOCK_BYTES)
    codes_out = weight.view(-1, SUPERBLOCK_VALUES // 2)
    scale_out = scale.view(torch.uint8).view(-1, SUPERBLOCK_SCALES)
    for start in range(0, source.shape[0], _REPACK_SLICE):
        part = slice(start, start + _REPACK_SLICE)
        scales = source[part, :SUPERBLOCK_SCALES]
        bad = scales == 0xFF
        if bool(bad.any()):
            at = start * SUPERBLOCK_SCALES + int(bad.flatten().nonzero()[0])
            raise bad_gguf_scale(at, blocks, name)
        scales = scales & 0x7F
        scale_out[part] = scales.masked_fill_(scales == 0x7F, 0)

        codes = _as_words(source[part, SUPERBLOCK_SCALES:])
        for mask, shift in _SHUFFLE:
            _swap_bits(codes, mask, shift)
        codes_out[part] = codes.view(torch.uint8)
    return weight, scale


def _as_words(codes: Tensor) -> Tensor:
    """A copy (always: the swaps are in place, and a single row may pass as contiguous)."""
    return codes.clone(memory_format=torch.contiguous_format).view(torch.int64)


def _swap_bits(words: Tensor, mask: int, shift: int) -> None:
    """Swaps the bits of ``mask`` with those ``shift`` higher, in place, in int64 ``words``."""
    moved = words >> shift
    moved.bitwise_xor_(words).bitwise_and_(mask)
    words.bitwise_xor_(moved)
    words.bitwise_xor_(moved.bitwise_left_shift_(shift))


def modelopt_to_gguf(
    weight: Tensor, weight_scale: Tensor, *, out: Tensor | None = None, name: str = "weight_scale"
) -> Tensor:
    """``(weight, weight_scale)`` of ModelOpt to GGUF super-blocks, uint8 [..., N, K/64 * 36].

    The inverse of :func:`gguf_to_modelopt`, lossless; K must be a multiple of 64. A scale of -0
    becomes +0 (its values are zeros either way). Raises ValueError for a negative scale, which
    has no GGUF form, and for NaN; ``out`` is then partly written. ``name`` is what messages call
    the scales.
    """
    blocks = blocks_output(weight, weight_scale, out)
    target = blocks.view(-1, SUPERBLOCK_BYTES)
    codes_in = weight.reshape(-1, SUPERBLOCK_VALUES // 2)
    scale_in = weight_scale.view(torch.uint8).reshape(-1, SUPERBLOCK_SCALES)
    for start in range(0, target.shape[0], _REPACK_SLICE):
        part = slice(start, start + _REPACK_SLICE)
        scales = scale_in[part]
        bad = (scales > 0x80) | (scales == 0x7F)
        if bool(bad.any()):
            at = start * SUPERBLOCK_SCALES + int(bad.flatten().nonzero()[0])
            raise bad_modelopt_scale(at, weight_scale, name)
        target[part, :SUPERBLOCK_SCALES] = scales & 0x7F

        codes = _as_words(codes_in[part])
        for mask, shift in reversed(_SHUFFLE):
            _swap_bits(codes, mask, shift)
        target[part, SUPERBLOCK_SCALES:] = codes.view(torch.uint8)
    return blocks


def repack_outputs(
    blocks: Tensor, out: tuple[Tensor, Tensor] | None, name: str
) -> tuple[Tensor, Tensor]:
    """Checks the input of :func:`gguf_to_modelopt`; checks or makes its outputs."""
    if blocks.dtype != torch.uint8 or blocks.dim() < 1 or blocks.shape[-1] % SUPERBLOCK_BYTES:
        raise ValueError(
            f"{name}: got {blocks.dtype} {list(blocks.shape)}, want uint8 [..., N, K/64 * "
            f"{SUPERBLOCK_BYTES}]; view the tensor's bytes as whole rows of super-blocks"
        )
    lead, supers = blocks.shape[:-1], blocks.shape[-1] // SUPERBLOCK_BYTES
    shape = torch.Size((*lead, supers * (SUPERBLOCK_VALUES // 2)))
    scale_shape = torch.Size((*lead, supers * SUPERBLOCK_SCALES))
    if out is None:
        return (
            torch.empty(shape, dtype=torch.uint8, device=blocks.device),
            torch.empty(scale_shape, dtype=torch.float8_e4m3fn, device=blocks.device),
        )
    _check_out(out[0], "out[0]", shape, torch.uint8, blocks.device)
    _check_out(out[1], "out[1]", scale_shape, torch.float8_e4m3fn, blocks.device)
    return out


def blocks_output(weight: Tensor, weight_scale: Tensor, out: Tensor | None) -> Tensor:
    """Checks the inputs of :func:`modelopt_to_gguf`; checks or makes its output."""
    *lead, k = _check_modelopt(weight, weight_scale)
    if k % SUPERBLOCK_VALUES:
        raise ValueError(
            f"weight: got K = {k}, want a multiple of {SUPERBLOCK_VALUES} (a GGUF super-block); "
            "pad weight and weight_scale with zeros along K"
        )
    shape = torch.Size((*lead, k // SUPERBLOCK_VALUES * SUPERBLOCK_BYTES))
    if out is None:
        return torch.empty(shape, dtype=torch.uint8, device=weight.device)
    _check_out(out, "out", shape, torch.uint8, weight.device)
    return out


def bad_gguf_scale(at: int, blocks: Tensor, name: str) -> ValueError:
    """The error for a 0xFF scale; ``at``: its flat index among all scales of ``blocks``."""
    superblock, group = divmod(at, SUPERBLOCK_SCALES)
    row, superblock = divmod(superblock, blocks.shape[-1] // SUPERBLOCK_BYTES)
    return ValueError(
        f"{name}: got scale byte 0xff in row {_row_index(row, blocks.shape[:-1])}, super-block "
        f"{superblock}, block {group}; want 0x00-0xfe: 480 does not exist in float8_e4m3fn, so "
        "this tensor has no lossless ModelOpt form: write the file again"
    )


def bad_modelopt_scale(at: int, weight_scale: Tensor, name: str) -> ValueError:
    """The error for a scale that GGUF cannot hold; ``at``: its flat index."""
    row, column = divmod(at, weight_scale.shape[-1])
    index = [*_row_index(row, weight_scale.shape[:-1]), column]
    byte = _byte_at(weight_scale, index)
    place = f"{name}: got byte {byte:#04x} at index {index}"
    if byte & 0x7F == 0x7F:
        return ValueError(f"{place}, a NaN; want numbers: quantise the weights again")
    return ValueError(
        f"{place}, a negative scale; want scales without a sign: GGUF reads bit 7 as nothing. "
        "Negate the block's codes (weight ^ 0x88 over its 8 bytes) and clear the scale's bit 7"
    )


def _row_index(row: int, lead: torch.Size) -> list[int]:
    index: list[int] = []
    for size in reversed(lead):
        row, position = divmod(row, size)
        index.insert(0, position)
    return index


def _byte_at(scale: Tensor, index: list[int]) -> int:
    return int(scale.view(torch.uint8)[tuple(index)])


def _check_modelopt(weight: Tensor, weight_scale: Tensor) -> torch.Size:
    """Checks types and shapes of a ModelOpt pair; returns [..., N, K]."""
    if weight.dtype != torch.uint8 or weight.dim() < 1:
        raise ValueError(
            f"weight: got {weight.dtype} {list(weight.shape)}, want uint8 [..., N, K/2]"
        )
    if weight_scale.dtype != torch.float8_e4m3fn:
        raise ValueError(
            f"weight_scale: got {weight_scale.dtype}, want torch.float8_e4m3fn; view raw bytes "
            "as that type"
        )
    *lead, half = weight.shape
    if half % (BLOCK_VALUES // 2) or weight_scale.shape != (*lead, half * 2 // BLOCK_VALUES):
        raise ValueError(
            f"weight, weight_scale: got {list(weight.shape)} and {list(weight_scale.shape)}, want "
            "[..., N, K/2] and [..., N, K/16] with the same leading sizes"
        )
    if weight_scale.device != weight.device:
        raise ValueError(
            f"weight_scale: got device {weight_scale.device}, want that of weight, {weight.device}"
        )
    return torch.Size((*lead, half * 2))


def _check_out(
    out: Tensor, name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> None:
    if (out.shape, out.dtype, out.device) != (shape, dtype, device) or not out.is_contiguous():
        raise ValueError(
            f"{name}: got {out.dtype} {list(out.shape)} on {out.device}, strides "
            f"{out.stride()}; want a contiguous {dtype} {list(shape)} on {device}"
        )
