"""NVFP4 itself: quantise, dequantise, and the repack between GGUF and ModelOpt."""

from __future__ import annotations

import torch

from flint_kernels.ops._check import ACTIVATIONS, CODES, FLOAT, SCALES, Checker
from flint_kernels.ops._declare import Spec, op

_SUPERBLOCK_VALUES = 64
_SUPERBLOCK_BYTES = 36


@op("nvfp4_quantize(Tensor x, Tensor? global_scale=None) -> (Tensor, Tensor, Tensor)")
def nvfp4_quantize(
    x: torch.Tensor, global_scale: torch.Tensor | None = None
) -> tuple[Spec, Spec, Spec]:
    """Quantises to ModelOpt's NVFP4: E2M1 codes, an E4M3 scale for 16 values, an fp32 scale.

    Args:
        x: [..., N, K], bfloat16 or float32, finite; K a multiple of 16.
        global_scale: [] float32; None: max|x| / (6 * 448).

    Returns: (weight [..., N, K / 2] uint8, weight_scale [..., N, K / 16] float8_e4m3fn,
        weight_scale_2 [] float32).

    Values: NaN, infinity, or a global_scale that is not finite and above 0 is an error on the CPU;
    a GPU makes codes without a meaning of them.
    """
    check = Checker("nvfp4_quantize", "x", x)
    check.rows("x", x)
    if x.dim() < 2 or x.shape[-1] % 16 != 0:
        check.fail(
            "x", f"shape {list(x.shape)}", "[..., N, K], K a multiple of 16", "Pad the input."
        )
    if global_scale is not None:
        check.tensor("global_scale", global_scale, FLOAT, [])
    lead = x.shape[:-1]
    return (
        Spec((*lead, x.shape[-1] // 2), torch.uint8),
        Spec((*lead, x.shape[-1] // 16), torch.float8_e4m3fn),
        Spec((), torch.float32),
    )


@op(
    "nvfp4_dequantize(Tensor weight, Tensor weight_scale, Tensor? weight_scale_2=None, "
    "ScalarType dtype=float) -> Tensor",
    outputs=("out",),
)
def nvfp4_dequantize(
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_scale_2: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Spec:
    """`round(e2m1 * e4m3 [* weight_scale_2])`; without the global scale exact in every dtype.

    Args:
        weight: [..., N, K / 2] uint8; weight_scale: [..., N, K / 16] float8_e4m3fn.
        weight_scale_2: [] or [1] float32, or None.
        dtype: torch.float32 or torch.bfloat16.

    Returns: [..., N, K] in `dtype`, contiguous.
    """
    check = Checker("nvfp4_dequantize", "weight", weight)
    check.tensor("weight", weight, CODES)
    if weight.dim() < 1 or weight.shape[-1] % 8 != 0:
        check.fail(
            "weight",
            f"shape {list(weight.shape)}",
            "[..., K / 2], K a multiple of 16",
            "Two codes a byte; a scale covers 16.",
        )
    lead, half = weight.shape[:-1], weight.shape[-1]
    check.tensor("weight_scale", weight_scale, SCALES, [*lead, half // 8])
    if weight_scale_2 is not None:
        check.tensor("weight_scale_2", weight_scale_2, FLOAT)
        if list(weight_scale_2.shape) not in ([], [1]):
            check.fail(
                "weight_scale_2",
                f"shape {list(weight_scale_2.shape)}",
                "shape [] or [1]",
                "Dequantise each shard or expert by itself.",
            )
    if dtype not in ACTIVATIONS:
        check.fail(
            "dtype", dtype, "torch.float32 or torch.bfloat16", "Convert afterwards.", TypeError
        )
    return Spec((*lead, half * 2), dtype)


@op(
    "gguf_to_modelopt(Tensor blocks) -> (Tensor, Tensor)",
    outputs=("weight_out", "weight_scale_out"),
)
def gguf_to_modelopt(blocks: torch.Tensor) -> tuple[Spec, Spec]:
    """Repacks llama.cpp's NVFP4 super-blocks to ModelOpt's tensors, without loss.

    A super-block is 36 bytes for 64 values: 4 scale bytes, then 4 x 8 bytes of codes, values 0-7
    of a group of 16 in the low nibbles and 8-15 in the high ones. Bit 7 of a scale is dropped and
    0x7F becomes 0, as ggml reads them; 0xFF is an error (480 does not exist in E4M3FN).

    Args:
        blocks: [..., N, K / 64 * 36] uint8; any strides.

    Returns: (weight [..., N, K / 2] uint8, weight_scale [..., N, K / 16] float8_e4m3fn).

    Values: while a CUDA graph is captured or replayed 0xFF raises nothing and is read as 0x7F. On a
    GPU the check comes last: a refused call of the out-variant may have written its buffers.
    """
    check = Checker("gguf_to_modelopt", "blocks", blocks)
    check.tensor("blocks", blocks, CODES)
    if blocks.dim() < 1 or blocks.shape[-1] % _SUPERBLOCK_BYTES != 0:
        check.fail(
            "blocks",
            f"shape {list(blocks.shape)}",
            "[..., K / 64 * 36]",
            "A row is a whole number of super-blocks of 36 bytes.",
        )
    lead = blocks.shape[:-1]
    columns = blocks.shape[-1] // _SUPERBLOCK_BYTES * _SUPERBLOCK_VALUES
    return (
        Spec((*lead, columns // 2), torch.uint8),
        Spec((*lead, columns // 16), torch.float8_e4m3fn),
    )


@op("modelopt_to_gguf(Tensor weight, Tensor weight_scale) -> Tensor", outputs=("blocks_out",))
def modelopt_to_gguf(weight: torch.Tensor, weight_scale: torch.Tensor) -> Spec:
    """The way back: ModelOpt's tensors to llama.cpp's super-blocks, without loss.

    A scale with its sign bit set, or NaN, has no GGUF form and is an error.

    Args:
        weight: [..., N, K / 2] uint8, K a multiple of 64; any strides.
        weight_scale: [..., N, K / 16] float8_e4m3fn.

    Returns: [..., N, K / 64 * 36] uint8.

    On a GPU the check reads one number back, and comes last: a refused call of the out-variant may
    have written its buffer. While a CUDA graph is captured it cannot: there, and
    in the graph's replays, such a scale loses its sign bit.
    """
    check = Checker("modelopt_to_gguf", "weight", weight)
    check.tensor("weight", weight, CODES)
    if weight.dim() < 1 or weight.shape[-1] % (_SUPERBLOCK_VALUES // 2) != 0:
        check.fail(
            "weight",
            f"shape {list(weight.shape)}",
            "[..., K / 2] with K a multiple of 64",
            "GGUF packs 64 values to a super-block.",
        )
    lead, half = weight.shape[:-1], weight.shape[-1]
    check.tensor("weight_scale", weight_scale, SCALES, [*lead, half // 8])
    return Spec((*lead, half * 2 // _SUPERBLOCK_VALUES * _SUPERBLOCK_BYTES), torch.uint8)
