"""The GPU bodies of the library's own kernels, for BF16 and FP32.

Each takes what the reference body of the same name takes, and the outputs' buffers where there are
any: contiguous, and written in place. A row's bits depend on the row alone.
They allocate what outputs they are not given, launch on the current stream, and read nothing back,
so a CUDA graph can hold them; the repack's check of its scales is the one exception (see
`_refuse`).

The kernels take rows any stride apart whose elements are contiguous. What is not of that kind, such
as a transposed tensor, is copied first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flint_kernels.formats import nvfp4
from flint_kernels.reference.nvfp4 import errors_of
from flint_kernels.shapes import flat_rows

_native = torch.ops.flint_native


def _rows(x: Tensor) -> Tensor:
    """x [..., D] as [rows, D] with contiguous elements; D is at least 1."""
    rows = x if x.dim() == 2 else flat_rows(x)
    return _contiguous_elements(rows)


def _contiguous_elements(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def _weight(weight: Tensor, x: Tensor) -> Tensor:
    # FP32 activations may come with BF16 weights, which FP32 holds exactly.
    return weight.to(x.dtype).contiguous()


def _empty(given: Tensor | None, shape: Sequence[int], like: Tensor) -> Tensor:
    """The buffer that was given, or a new one."""
    if given is not None:
        return given
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    enable_pdl: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    out = _empty(out, x.shape, x)
    if x.numel() > 0:
        weight = _weight(weight, x)
        _native.rms_norm_cuda_out(_rows(x), None, weight, eps, out, None, enable_pdl)
    return out


def fused_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    enable_pdl: bool = False,
    normed_out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    normed_out = _empty(normed_out, x.shape, x)
    residual_out = _empty(residual_out, x.shape, x)
    if x.numel() > 0:
        weight = _weight(weight, x)
        _native.rms_norm_cuda_out(
            _rows(x), _rows(residual), weight, eps, normed_out, residual_out, enable_pdl
        )
    return normed_out, residual_out


def silu_and_mul(x: Tensor, enable_pdl: bool = False, out: Tensor | None = None) -> Tensor:
    out = _empty(out, (*x.shape[:-1], x.shape[-1] // 2), x)
    if out.numel() > 0:
        _native.silu_and_mul_cuda_out(_rows(x), out, enable_pdl)
    return out


def qk_norm_rope_kv_write(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin: Tensor | None,
    positions: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    eps: float,
    enable_pdl: bool = False,
    q_out: Tensor | None = None,
    k_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    rows, kv_heads, dim = qkv.shape[0], k_cache.shape[2], k_cache.shape[3]
    heads = qkv.shape[1] // dim - 2 * kv_heads
    q_out = _empty(q_out, (rows, heads, dim), qkv)
    k_out = _empty(k_out, (rows, kv_heads, dim), qkv)
    if rows > 0:
        _native.qk_norm_rope_kv_write_cuda_out(
            _contiguous_elements(qkv),
            _weight(q_weight, qkv),
            _weight(k_weight, qkv),
            None if cos_sin is None else cos_sin.contiguous(),
            positions.contiguous(),
            slot_mapping.contiguous(),
            k_cache,
            v_cache,
            eps,
            q_out,
            k_out,
            enable_pdl,
        )
    return q_out, k_out


def kv_cache_write(
    k: Tensor,
    v: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    enable_pdl: bool = False,
    **_: object,
) -> None:
    if slot_mapping.numel() > 0:
        _native.kv_cache_write_cuda_out(
            _contiguous_elements(k),
            _contiguous_elements(v),
            slot_mapping.contiguous(),
            k_cache,
            v_cache,
            enable_pdl,
        )


def decode_advance(
    tokens: Tensor,
    block_table: Tensor,
    window_block_table: Tensor,
    page_size: int,
    input_ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    window_slots: Tensor,
    seq_lens: Tensor,
    offsets: Tensor,
    history: Tensor,
    enable_pdl: bool = False,
) -> None:
    if tokens.numel() == 0:
        return
    read = [tensor.contiguous() for tensor in (tokens, block_table, window_block_table)]
    written = (input_ids, positions, slots, window_slots, seq_lens, offsets, history)
    dense = [tensor.contiguous() for tensor in written]
    _native.decode_advance_cuda_out(*read, page_size, *dense, enable_pdl)
    for tensor, copy in zip(written, dense, strict=True):
        if copy is not tensor:
            tensor.copy_(copy)


def gguf_to_modelopt(
    blocks: Tensor, weight_out: Tensor | None = None, weight_scale_out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    given = None
    if weight_out is not None and weight_scale_out is not None:
        given = weight_out, weight_scale_out
    weight, scale = nvfp4.repack_outputs(blocks, given, "blocks")
    first_bad = _none_yet(blocks.device)
    _native.gguf_to_modelopt_cuda_out(blocks.contiguous(), weight, scale, first_bad)
    with errors_of("gguf_to_modelopt"):
        _refuse(first_bad, lambda at: nvfp4.bad_gguf_scale(at, blocks, "blocks"))
    return weight, scale


def modelopt_to_gguf(
    weight: Tensor, weight_scale: Tensor, blocks_out: Tensor | None = None
) -> Tensor:
    blocks = nvfp4.blocks_output(weight, weight_scale, blocks_out)
    first_bad = _none_yet(weight.device)
    _native.modelopt_to_gguf_cuda_out(
        weight.contiguous(), weight_scale.contiguous(), blocks, first_bad
    )
    with errors_of("modelopt_to_gguf"):
        _refuse(first_bad, lambda at: nvfp4.bad_modelopt_scale(at, weight_scale, "weight_scale"))
    return blocks


_NO_INDEX = torch.iinfo(torch.int64).max


def _none_yet(device: torch.device) -> Tensor:
    return torch.full((1,), _NO_INDEX, dtype=torch.int64, device=device)


def _refuse(first_bad: Tensor, error: Callable[[int], ValueError]) -> None:
    """Raises where a scale had no form in the other layout. The kernel has written it as ggml reads
    it; while a graph is captured nothing can be read back, and that stands."""
    if torch.cuda.is_current_stream_capturing():
        return
    at = int(first_bad)
    if at != _NO_INDEX:
        raise error(at)
