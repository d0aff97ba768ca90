"""The fused decode steps as compositions: `flint_kernels/ops/low_latency.py` declares them."""

from __future__ import annotations

import torch

from flint_kernels.reference import experts, kv_write, linear, norm


def nvfp4_qkv_norm_rope_kv_write(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_scale_2: torch.Tensor,
    k_cache: torch.Tensor,
    **rest: object,
) -> torch.Tensor:
    shared = k_cache.shape[2] * k_cache.shape[3]
    shards = [weight.shape[0] - 2 * shared, shared, shared]
    qkv = linear.nvfp4_linear(x, weight, weight_scale, weight_scale_2, shards)
    return kv_write.qk_norm_rope_kv_write(qkv, k_cache=k_cache, **rest)[0]  # type: ignore[arg-type]


def bf16_qkv_norm_rope_kv_write(
    x: torch.Tensor, weight: torch.Tensor, **rest: object
) -> torch.Tensor:
    qkv = linear.bf16_linear(x, weight)
    return kv_write.qk_norm_rope_kv_write(qkv, **rest)[0]  # type: ignore[arg-type]


def fused_add_rms_norm_router_topk(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    router_weight: torch.Tensor,
    top_k: int,
    eps: float,
    **_: object,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    normed, residual_out = norm.fused_add_rms_norm(x, residual, weight, eps)
    logits = linear.bf16_linear(normed, router_weight)
    topk_weights, topk_ids = experts.router_topk(logits, top_k, True)
    return normed, residual_out, topk_weights, topk_ids


def nvfp4_moe_gate_up(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w13_scale_2: torch.Tensor,
    shared_w13: torch.Tensor,
    shared_w13_scale: torch.Tensor,
    shared_w13_scale_2: torch.Tensor,
    **_: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    expand = experts.expand_nvfp4(w13, w13_scale)
    routed = experts.routed_gate_up(x, topk_ids, expand, w13_scale_2, w13.shape[1])
    shared = linear.nvfp4_linear_silu_and_mul(x, shared_w13, shared_w13_scale, shared_w13_scale_2)
    return routed, shared


def bf16_moe_gate_up(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor,
    shared_w13: torch.Tensor,
    **_: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    expand = experts.expand_bf16(w13)
    routed = experts.routed_gate_up(x, topk_ids, expand, None, w13.shape[1])
    return routed, linear.bf16_linear_silu_and_mul(x, shared_w13)


def nvfp4_moe_down(
    routed_act: torch.Tensor,
    shared_act: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    w2_scale_2: torch.Tensor,
    shared_w2: torch.Tensor,
    shared_w2_scale: torch.Tensor,
    shared_w2_scale_2: torch.Tensor,
    **_: object,
) -> torch.Tensor:
    expand = experts.expand_nvfp4(w2, w2_scale)
    routed = experts.routed_down(
        routed_act, topk_weights, topk_ids, expand, w2_scale_2, w2.shape[1]
    )
    shared = linear.nvfp4_linear(shared_act, shared_w2, shared_w2_scale, shared_w2_scale_2, None)
    return experts.add_shared(routed, shared)


def bf16_moe_down(
    routed_act: torch.Tensor,
    shared_act: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w2: torch.Tensor,
    shared_w2: torch.Tensor,
    **_: object,
) -> torch.Tensor:
    expand = experts.expand_bf16(w2)
    routed = experts.routed_down(routed_act, topk_weights, topk_ids, expand, None, w2.shape[1])
    return experts.add_shared(routed, linear.bf16_linear(shared_act, shared_w2))
