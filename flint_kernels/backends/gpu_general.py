"""General GPU bodies of every op: torch and Triton, for any legal shape, in BF16 and FP32.

They are what runs where an op has no hand-written kernel or the kernel does not take the call, and
the yardstick for those that there are.
All follow the rounding points of the reference, give the same bits in every run, and can be
captured in a CUDA graph: whatever the data decides is decided on the device. `register` puts them
under the key "CUDA"; they take CPU tensors too (their Triton parts: in Triton's interpreter).

Sums of BF16 products are taken in fp32 to the end: torch.mm is asked for an fp32 result, which is
rounded once here, since with a BF16 result cuBLAS may round partial sums too
(torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction). FP32 products are Triton's, in
full FP32, whatever torch's TF32 switches say.

Importing this module needs no Triton; calling a body that has a kernel does.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flint_kernels.formats import nvfp4
from flint_kernels.ops import REGISTRY, implement
from flint_kernels.reference import kv_write as reference_kv_write
from flint_kernels.reference import norm as reference_norm
from flint_kernels.reference import sampling as reference_sampling
from flint_kernels.reference.numerics import rms_normalise
from flint_kernels.reference.nvfp4 import errors_of
from flint_kernels.shapes import flat_rows

_flint: Any = torch.ops.flint
_MASK = 0xFFFFFFFF
_SCAN_CHUNK = 512


def register() -> None:
    """Gives every op that has no body under "CUDA" yet the one of its name in this module."""
    for name, declaration in REGISTRY.items():
        if "CUDA" not in declaration.bodies:
            implement(name, "CUDA", general_body(name))


def general_body(name: str) -> Callable[..., Any]:
    """The body of op `name`; it takes the op's arguments by name."""
    body: Callable[..., Any] = globals()[name]
    return body


def _triton(module: str) -> Any:
    """A module of `flint_kernels.backends.triton`."""
    try:
        return importlib.import_module(f"flint_kernels.backends.triton.{module}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "triton":
            raise
        raise RuntimeError(
            "triton: got no such package; want Triton 3.6 or newer, which runs these ops on a GPU. "
            "Install it (pip install triton; a CUDA build of torch brings it), or use the CPU."
        ) from error


# ------------------------------------------------------------------------------ norms, activation


def rms_norm(x: Tensor, weight: Tensor, eps: float, **_: object) -> Tensor:
    return reference_norm.rms_norm(x, weight, eps)


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, **_: object
) -> tuple[Tensor, Tensor]:
    normed, residual_out = reference_norm.fused_add_rms_norm(x, residual, weight, eps)
    return normed, residual_out


def silu_and_mul(x: Tensor, **_: object) -> Tensor:
    gate, up = x.to(torch.float32).chunk(2, dim=-1)
    return (gate / (1.0 + torch.exp(-gate)) * up).to(x.dtype)


# ------------------------------------------------------------------------------- q, k, v and cache


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
    **_: object,
) -> tuple[Tensor, Tensor]:
    rows, kv_heads, head_dim = qkv.shape[0], k_cache.shape[2], k_cache.shape[3]
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    projected = qkv.reshape(rows, heads + 2 * kv_heads, head_dim)
    qk, v = projected.split([heads + kv_heads, kv_heads], dim=1)
    weights = torch.cat([q_weight.expand(heads, -1), k_weight.expand(kv_heads, -1)])
    qk = rms_normalise(qk.to(torch.float32), weights, eps).to(qkv.dtype)

    # Rows beyond the last slot are padding, as those with the slot -1 are.
    slots = F.pad(slot_mapping, (0, rows - slot_mapping.shape[0]), value=-1)
    padding = slots == -1
    broken = ~padding & ((slots < 0) | (slots >= k_cache.shape[0] * k_cache.shape[1]))
    if cos_sin is not None:
        outside = (positions < 0) | (positions >= cos_sin.shape[0])
        if cos_sin.shape[0] > 0:
            turns = cos_sin.index_select(0, positions.masked_fill(outside, 0))
            qk = reference_kv_write.rotate(qk, turns, qkv.dtype)
        qk = qk.masked_fill((padding & outside)[:, None, None], 0)
        broken = broken | (~padding & outside)
    qk = qk.masked_fill(broken[:, None, None], torch.nan)
    q, k = qk.split([heads, kv_heads], dim=1)
    kv_cache_write(k, v, slots.masked_fill(broken, -1), k_cache, v_cache)
    return q, k


def kv_cache_write(
    k: Tensor, v: Tensor, slot_mapping: Tensor, k_cache: Tensor, v_cache: Tensor, **_: object
) -> None:
    _triton("kv_write").kv_write(k, v, slot_mapping, k_cache, v_cache)


def nvfp4_qkv_norm_rope_kv_write(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_scale_2: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin: Tensor | None,
    positions: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    eps: float,
    **_: object,
) -> Tensor:
    kv_rows = k_cache.shape[2] * k_cache.shape[3]
    shards = [weight.shape[0] - 2 * kv_rows, kv_rows, kv_rows]
    qkv = nvfp4_linear(x, weight, weight_scale, weight_scale_2, shards)
    rest = (q_weight, k_weight, cos_sin, positions, slot_mapping, k_cache, v_cache, eps)
    q: Tensor = _flint.qk_norm_rope_kv_write(qkv, *rest)[0]
    return q


def bf16_qkv_norm_rope_kv_write(
    x: Tensor,
    weight: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin: Tensor | None,
    positions: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    eps: float,
    **_: object,
) -> Tensor:
    rest = (q_weight, k_weight, cos_sin, positions, slot_mapping, k_cache, v_cache, eps)
    q: Tensor = _flint.qk_norm_rope_kv_write(bf16_linear(x, weight), *rest)[0]
    return q


# --------------------------------------------------------------------------------------- attention


def attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    sinks: Tensor | None,
    window: int,
    scale: float | None,
    **_: object,
) -> Tensor:
    scale = q.shape[2] ** -0.5 if scale is None else scale
    out: Tensor = _triton("attention").decode(
        q, k_cache, v_cache, block_table, seq_lens, sinks, window, scale
    )
    return out


def attention_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    k_cache: Tensor | None,
    v_cache: Tensor | None,
    block_table: Tensor | None,
    context_lens: Tensor | None,
    sinks: Tensor | None,
    window: int,
    scale: float | None,
    max_query_len: int | None,
    **_: object,
) -> Tensor:
    scale = q.shape[2] ** -0.5 if scale is None else scale
    past = (k_cache, v_cache, block_table, context_lens)
    out: Tensor = _triton("attention").prefill(
        q, k, v, cu_seqlens, *past, sinks, window, scale, max_query_len
    )
    return out


# ------------------------------------------------------------------------------------- projections


def nvfp4_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_scale_2: Tensor,
    shard_sizes: Sequence[int] | None,
    **_: object,
) -> Tensor:
    scale_2 = weight_scale_2.reshape(-1)
    if scale_2.numel() != 1:  # one a column: the product kernel knows no shards
        assert shard_sizes is not None  # the declaration has checked it
        scale_2 = torch.cat([scale_2[i].expand(size) for i, size in enumerate(shard_sizes)])
    return _nvfp4_product(x, weight, weight_scale, scale_2, x.dtype)


def _nvfp4_product(
    x: Tensor, weight: Tensor, scale: Tensor, scale_2: Tensor, dtype: torch.dtype
) -> Tensor:
    rows = flat_rows(x)
    rounds = dtype == x.dtype
    out: Tensor = _triton("matmul").matmul(rows, weight, scale, scale_2, dtype, rounds=rounds)
    return out.reshape(*x.shape[:-1], weight.shape[0])


def bf16_linear(x: Tensor, weight: Tensor, **_: object) -> Tensor:
    return _bf16_sums(x, weight).to(x.dtype)


def _bf16_sums(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., K] times weight [N, K] transposed -> fp32 [..., N], not rounded."""
    rows = flat_rows(x)
    if rows.numel() == 0 or weight.numel() == 0:
        return torch.zeros(*x.shape[:-1], weight.shape[0], dtype=torch.float32, device=x.device)
    if not x.is_cuda:
        sums = rows.to(torch.float32) @ weight.to(torch.float32).T
    elif x.dtype == torch.bfloat16:
        sums = torch.mm(rows, weight.T, out_dtype=torch.float32)
    else:
        sums = _triton("matmul").matmul(rows, weight, None, None, torch.float32)
    return sums.reshape(*x.shape[:-1], weight.shape[0])


def nvfp4_linear_silu_and_mul(
    x: Tensor, weight: Tensor, weight_scale: Tensor, weight_scale_2: Tensor, **_: object
) -> Tensor:
    halves = [weight.shape[0] // 2] * 2
    gate_up = nvfp4_linear(x, weight, weight_scale, weight_scale_2, halves)
    act: Tensor = _flint.silu_and_mul(gate_up)
    return act


def bf16_linear_silu_and_mul(x: Tensor, weight: Tensor, **_: object) -> Tensor:
    act: Tensor = _flint.silu_and_mul(bf16_linear(x, weight))
    return act


def nvfp4_lm_head(
    x: Tensor, weight: Tensor, weight_scale: Tensor, weight_scale_2: Tensor, **_: object
) -> Tensor:
    return _nvfp4_product(x, weight, weight_scale, weight_scale_2.reshape(-1), torch.float32)


def bf16_lm_head(x: Tensor, weight: Tensor, **_: object) -> Tensor:
    return _bf16_sums(x, weight)


# -------------------------------------------------------------------------------- router, experts


def router_topk(
    logits: Tensor, top_k: int, renormalize: bool, **_: object
) -> tuple[Tensor, Tensor]:
    values = logits.to(torch.float32)
    # The key orders as the logits do, NaN above all, then by falling index; no two are equal, so
    # nothing is left for topk to settle. Adding 0 turns -0 into +0.
    bits = (values + 0.0).view(torch.int32).to(torch.int64)
    rank = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    rank = torch.where(values.isnan(), 0x7FFFFFFF, rank)
    index = torch.arange(logits.shape[1], device=logits.device)
    chosen = ((rank << 32) + (_MASK - index)).topk(top_k, dim=1).values
    ids = _MASK - (chosen & _MASK)
    scores = 1.0 / (1.0 + torch.exp(-values.gather(1, ids)))
    if renormalize:
        total = scores[:, 0:1]
        for column in range(1, top_k):
            total = total + scores[:, column : column + 1]
        scores = scores / (total + 1e-20)
    return scores.to(logits.dtype).to(torch.float32), ids.to(torch.int32)


def fused_add_rms_norm_router_topk(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    router_weight: Tensor,
    top_k: int,
    eps: float,
    **_: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    normed, residual_out = _flint.fused_add_rms_norm(x, residual, weight, eps)
    topk_weights, topk_ids = _flint.router_topk(bf16_linear(normed, router_weight), top_k)
    return normed, residual_out, topk_weights, topk_ids


def _gate_up(
    x: Tensor, topk_ids: Tensor, w13: Tensor, scale: Tensor | None, scale_2: Tensor | None
) -> Tensor:
    """[M, top_k, I]; zeros for a skipped entry."""
    width = w13.shape[1] // 2
    act = torch.zeros(*topk_ids.shape, width, dtype=x.dtype, device=x.device)
    if act.numel() > 0 and w13.numel() > 0:
        experts = _triton("experts")
        plan = experts.plan_blocks(topk_ids, w13.shape[0])
        entries = act.view(topk_ids.numel(), width)
        experts.expert_matmul(x, plan, entries, w13, scale, scale_2, gated=True)
    return act


def _down(
    act: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w2: Tensor,
    scale: Tensor | None,
    scale_2: Tensor | None,
    shared: Tensor | None,
) -> Tensor:
    """act [M, top_k, I] -> [M, H]."""
    experts = _triton("experts")
    outputs = torch.zeros(topk_ids.numel(), w2.shape[1], dtype=act.dtype, device=act.device)
    if act.numel() > 0 and w2.numel() > 0:
        rows = flat_rows(act)
        plan = experts.plan_blocks(topk_ids, w2.shape[0])
        experts.expert_matmul(rows, plan, outputs, w2, scale, scale_2, gated=False)
    out: Tensor = experts.combine(outputs, topk_weights, topk_ids, w2.shape[0], shared)
    return out


def nvfp4_routed_experts(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w13_scale_2: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    w2_scale_2: Tensor,
    shared_output: Tensor | None,
    **_: object,
) -> Tensor:
    act = _gate_up(x, topk_ids, w13, w13_scale, w13_scale_2)
    return _down(act, topk_weights, topk_ids, w2, w2_scale, w2_scale_2, shared_output)


def bf16_routed_experts(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w13: Tensor,
    w2: Tensor,
    shared_output: Tensor | None,
    **_: object,
) -> Tensor:
    act = _gate_up(x, topk_ids, w13, None, None)
    return _down(act, topk_weights, topk_ids, w2, None, None, shared_output)


def nvfp4_moe_gate_up(
    x: Tensor,
    topk_ids: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w13_scale_2: Tensor,
    shared_w13: Tensor,
    shared_w13_scale: Tensor,
    shared_w13_scale_2: Tensor,
    **_: object,
) -> tuple[Tensor, Tensor]:
    shared = nvfp4_linear_silu_and_mul(x, shared_w13, shared_w13_scale, shared_w13_scale_2)
    return _gate_up(x, topk_ids, w13, w13_scale, w13_scale_2), shared


def bf16_moe_gate_up(
    x: Tensor, topk_ids: Tensor, w13: Tensor, shared_w13: Tensor, **_: object
) -> tuple[Tensor, Tensor]:
    return _gate_up(x, topk_ids, w13, None, None), bf16_linear_silu_and_mul(x, shared_w13)


def nvfp4_moe_down(
    routed_act: Tensor,
    shared_act: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    w2_scale_2: Tensor,
    shared_w2: Tensor,
    shared_w2_scale: Tensor,
    shared_w2_scale_2: Tensor,
    **_: object,
) -> Tensor:
    shared = nvfp4_linear(shared_act, shared_w2, shared_w2_scale, shared_w2_scale_2, None)
    return _down(routed_act, topk_weights, topk_ids, w2, w2_scale, w2_scale_2, shared)


def bf16_moe_down(
    routed_act: Tensor,
    shared_act: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w2: Tensor,
    shared_w2: Tensor,
    **_: object,
) -> Tensor:
    shared = bf16_linear(shared_act, shared_w2)
    return _down(routed_act, topk_weights, topk_ids, w2, None, None, shared)


# ---------------------------------------------------------------------------------------- sampling


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seed: Tensor,
    offset: Tensor,
    max_top_k: int = 0,
    **_: object,
) -> Tensor:
    largest = torch.finfo(torch.float32).max
    logits = torch.nan_to_num(logits, nan=-torch.inf, posinf=largest, neginf=-torch.inf)
    count = logits.shape[1]
    # Adding 0 turns -0 into +0: they tie. Ranks and ids by falling logit, then rising id.
    ranked, ids = torch.sort(logits + 0.0, dim=1, descending=True, stable=True)
    rank = torch.arange(count, device=logits.device)
    limit = torch.where(top_k > 0, top_k, count)[:, None]
    candidate = (rank < limit) & (ranked > -torch.inf)
    candidates = candidate.sum(dim=1, keepdim=True)

    heat = temperature.to(torch.float64)[:, None]
    scaled = ranked.to(torch.float64) / torch.where(heat > 0, heat, 1.0)
    probabilities = torch.exp(scaled - scaled[:, :1]).masked_fill(~candidate, 0.0)
    probabilities = probabilities / probabilities.sum(dim=1, keepdim=True)
    cumulative = _running_sums(probabilities)
    below = (cumulative < top_p.to(torch.float64)[:, None]) & (rank < candidates - 1)
    kept = 1 + below.sum(dim=1, keepdim=True)
    kept_sum = cumulative.gather(1, (kept - 1).clamp(0, count - 1))
    target = _uniform(seed, offset)[:, None] * kept_sum
    chosen = ((cumulative <= target) & (rank < kept)).sum(dim=1, keepdim=True)
    chosen = torch.minimum(chosen, kept - 1)
    chosen = torch.where(heat == 0, 0, chosen).clamp(0, count - 1)

    legal = torch.isfinite(temperature) & (temperature >= 0) & (top_k >= 0)
    if max_top_k:  # what breaks the promise is illegal here too, as in a kernel that relies on it
        legal = legal & ((temperature == 0) | ((top_k >= 1) & (top_k <= max_top_k)))
    legal = legal & (top_p > 0) & (top_p <= 1) & (ranked[:, 0] > -torch.inf)
    return torch.where(legal, ids.gather(1, chosen)[:, 0], -1)


def decode_advance(**arguments: Any) -> None:
    reference_sampling.decode_advance(**arguments)


def _running_sums(rows: Tensor) -> Tensor:
    """Cumulative sums of each row of [M, V] fp64, added in the same order each time.

    A row is summed in chunks, side by side. torch scans a lone row on the GPU in an order that
    depends on timing, but several rows block by block: so there is always one more.
    """
    count = rows.shape[1]
    padded = F.pad(rows, (0, -count % _SCAN_CHUNK, 0, 1))
    sums: Tensor = padded.unflatten(1, (-1, _SCAN_CHUNK)).cumsum(dim=2)
    before = F.pad(sums[:, :, -1], (1, -1)).cumsum(dim=1)
    return (sums + before[:, :, None]).flatten(1)[:-1, :count]


def _uniform(seed: Tensor, offset: Tensor) -> Tensor:
    """53 bits of Philox4x32-10 in [0, 1): int64 [M], int64 [M] -> fp64 [M].

    32-bit words in int64: a product wraps modulo 2^64, which leaves all of its bits right.
    """
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    c0, c1 = offset & _MASK, (offset >> 32) & _MASK
    c2 = c3 = torch.zeros_like(offset)
    for _ in range(10):
        low, high = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((high >> 32) & _MASK) ^ c1 ^ k0,
            high & _MASK,
            ((low >> 32) & _MASK) ^ c3 ^ k1,
            low & _MASK,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return ((c0 >> 5).to(torch.float64) * 2.0**26 + (c1 >> 6).to(torch.float64)) / 2.0**53


# ----------------------------------------------------------------------------------------- formats


def nvfp4_quantize(x: Tensor, global_scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    # Unlike the CPU's, it cannot refuse NaN or a bad scale: that would read values back.
    weight, scale, scale_2 = nvfp4.encode(x, global_scale)
    return weight, scale, scale_2.clone()


def nvfp4_dequantize(
    weight: Tensor, weight_scale: Tensor, weight_scale_2: Tensor | None, dtype: torch.dtype
) -> Tensor:
    out: Tensor = _triton("dequantize").dequantize(weight, weight_scale, weight_scale_2, dtype)
    return out


def gguf_to_modelopt(blocks: Tensor) -> tuple[Tensor, Tensor]:
    if _capturing(blocks):
        return _repack_unread(blocks)
    with errors_of("gguf_to_modelopt"):
        return nvfp4.gguf_to_modelopt(blocks)


def modelopt_to_gguf(weight: Tensor, weight_scale: Tensor) -> Tensor:
    if _capturing(weight):
        return _pack_unread(weight, weight_scale)
    with errors_of("modelopt_to_gguf"):
        return nvfp4.modelopt_to_gguf(weight, weight_scale)


def _capturing(tensor: Tensor) -> bool:
    """Whether nothing can be read back, so that a bad scale cannot be refused."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _repack_unread(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """GGUF to ModelOpt; the scale 0xFF becomes 0, as ggml reads it."""
    supers = blocks.reshape(-1, nvfp4.SUPERBLOCK_BYTES)
    scales = supers[:, : nvfp4.SUPERBLOCK_SCALES] & 0x7F
    scales = scales.masked_fill(scales == 0x7F, 0).contiguous().view(torch.float8_e4m3fn)
    # Of each 8 bytes, the low nibbles are values 0-7 and the high ones 8-15.
    codes = supers[:, nvfp4.SUPERBLOCK_SCALES :].reshape(-1, 4, 8)
    values = torch.cat([codes & 15, codes >> 4], dim=2)
    weight = values[..., 0::2] | (values[..., 1::2] << 4)
    lead, count = blocks.shape[:-1], blocks.shape[-1] // nvfp4.SUPERBLOCK_BYTES
    return weight.reshape(*lead, 32 * count), scales.reshape(*lead, 4 * count)


def _pack_unread(weight: Tensor, weight_scale: Tensor) -> Tensor:
    """ModelOpt to GGUF; bit 7 of a scale is dropped, and NaN (0x7F) is zero to ggml."""
    codes = weight.reshape(-1, 4, 8)
    values = torch.stack([codes & 15, codes >> 4], dim=3).reshape(-1, 4, 16)
    packed = values[..., :8] | (values[..., 8:] << 4)
    scales = weight_scale.contiguous().view(torch.uint8).reshape(-1, 4) & 0x7F
    blocks = torch.cat([scales, packed.reshape(-1, 32)], dim=1)
    return blocks.reshape(*weight.shape[:-1], weight.shape[-1] // 32 * nvfp4.SUPERBLOCK_BYTES)
