"""The fused steps of a decode layer.

One MoE layer of a small decode batch is seven launches, and these are the ones that no other
family holds: 1 `fused_add_rms_norm`; 2 `*_qkv_norm_rope_kv_write`; 3 `attention_decode`;
4 `*_linear`; 5 `fused_add_rms_norm_router_topk`; 6 `*_moe_gate_up`; 7 `*_moe_down`. Each equals the
composition of the ops it fuses, rounding point by rounding point. They take any number of rows;
the fast kernels are made for up to 8.

With `enable_pdl` a kernel starts while the one in front still runs, reads weights, and then waits.
So no weight may be written while a chain of such launches is in flight. What else is read before
the wait is said under `enable_pdl` of the op.
"""

from __future__ import annotations

import torch

from flint_kernels.ops._check import ACTIVATIONS, CODES, Checker
from flint_kernels.ops._declare import Spec, op
from flint_kernels.ops.experts import (
    check_expert_ids,
    check_routing,
    check_top_k,
)
from flint_kernels.ops.kv_write import check_rope_and_slots, check_slot_values
from flint_kernels.ops.workspace import check_workspace


def _qkv_values(
    name: str,
    cos_sin: torch.Tensor | None,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    **_: object,
) -> None:
    check_slot_values(name, cos_sin, positions, slot_mapping, k_cache)


def _query_heads(check: Checker, rows: int, k_cache: torch.Tensor) -> int:
    kv_heads, head_dim = k_cache.shape[2], k_cache.shape[3]
    heads = rows // head_dim - 2 * kv_heads
    if heads <= 0 or (heads + 2 * kv_heads) * head_dim != rows:
        check.fail(
            "weight",
            f"{rows} rows",
            f"(Hq + 2 * {kv_heads}) * {head_dim} rows with at least one query head",
            "The q, k and v projections stand one under the other.",
        )
    return heads


@op(
    "nvfp4_qkv_norm_rope_kv_write(Tensor x, Tensor weight, Tensor weight_scale, "
    "Tensor weight_scale_2, Tensor q_weight, Tensor k_weight, Tensor? cos_sin, Tensor positions, "
    "Tensor slot_mapping, Tensor(a!) k_cache, Tensor(b!) v_cache, float eps=1e-6, *, "
    "Tensor? workspace=None, bool enable_pdl=False) -> Tensor",
    outputs=("q_out",),
    values=_qkv_values,
)
def nvfp4_qkv_norm_rope_kv_write(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_scale_2: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin: torch.Tensor | None,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    eps: float = 1e-6,
    *,
    workspace: torch.Tensor | None = None,
    enable_pdl: bool = False,
) -> Spec:
    """`qk_norm_rope_kv_write(nvfp4_linear(x, q | k | v))`: step 2 of a decode layer.

    Args:
        x: [M, K], bfloat16 or float32, the normed hidden state; any strides.
        weight, weight_scale: as in `nvfp4_linear`, N = (Hq + 2 * Hkv) * D rows: q, k, v.
        weight_scale_2: float32: [] or [1], or [3]: q's, k's and v's.
        q_weight, k_weight, cos_sin, positions, slot_mapping, k_cache, v_cache, eps: as in
            `qk_norm_rope_kv_write`.
        workspace: scratch as `make_workspace` gives it; without one the op takes its own.
        enable_pdl: launch with programmatic dependent launch (GPU only). cos_sin, positions
            and slot_mapping are then read before the wait for the kernel in front, like the
            weights: what writes them must be complete before that kernel starts.

    Returns: q [M, Hq, D], the dtype of x, contiguous.

    Values: as in `qk_norm_rope_kv_write`.
    """
    check = Checker("nvfp4_qkv_norm_rope_kv_write", "x", x)
    check.tensor("x", x, ACTIVATIONS, [None, None])
    check.nvfp4("weight", weight, weight_scale, weight_scale_2, [None], x.shape[1], [[], [1], [3]])
    check_rope_and_slots(
        check, x, q_weight, k_weight, cos_sin, positions, slot_mapping, k_cache, v_cache, eps
    )
    check_workspace(check, workspace)
    heads = _query_heads(check, weight.shape[0], k_cache)
    return Spec((x.shape[0], heads, k_cache.shape[3]), x.dtype)


@op(
    "bf16_qkv_norm_rope_kv_write(Tensor x, Tensor weight, Tensor q_weight, Tensor k_weight, "
    "Tensor? cos_sin, Tensor positions, Tensor slot_mapping, Tensor(a!) k_cache, "
    "Tensor(b!) v_cache, float eps=1e-6, *, Tensor? workspace=None, bool enable_pdl=False) "
    "-> Tensor",
    outputs=("q_out",),
    values=_qkv_values,
)
def bf16_qkv_norm_rope_kv_write(
    x: torch.Tensor,
    weight: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin: torch.Tensor | None,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    eps: float = 1e-6,
    *,
    workspace: torch.Tensor | None = None,
    enable_pdl: bool = False,
) -> Spec:
    """`qk_norm_rope_kv_write(bf16_linear(x, q | k | v))`: step 2 of a decode layer.

    Args:
        x: [M, K], bfloat16 or float32, the normed hidden state; any strides.
        weight: [(Hq + 2 * Hkv) * D, K] bfloat16: q, k, v.
        q_weight, k_weight, cos_sin, positions, slot_mapping, k_cache, v_cache, eps: as in
            `qk_norm_rope_kv_write`.
        workspace: scratch as `make_workspace` gives it; without one the op takes its own.
        enable_pdl: launch with programmatic dependent launch (GPU only). cos_sin, positions
            and slot_mapping are then read before the wait for the kernel in front, like the
            weights: what writes them must be complete before that kernel starts.

    Returns: q [M, Hq, D], the dtype of x, contiguous.

    Values: as in `qk_norm_rope_kv_write`.
    """
    check = Checker("bf16_qkv_norm_rope_kv_write", "x", x)
    check.tensor("x", x, ACTIVATIONS, [None, None])
    check.weight("weight", weight, x, [None, x.shape[1]])
    check_rope_and_slots(
        check, x, q_weight, k_weight, cos_sin, positions, slot_mapping, k_cache, v_cache, eps
    )
    check_workspace(check, workspace)
    heads = _query_heads(check, weight.shape[0], k_cache)
    return Spec((x.shape[0], heads, k_cache.shape[3]), x.dtype)


@op(
    "fused_add_rms_norm_router_topk(Tensor x, Tensor residual, Tensor weight, "
    "Tensor router_weight, int top_k, float eps=1e-6, *, Tensor? workspace=None, "
    "bool enable_pdl=False) -> (Tensor, Tensor, Tensor, Tensor)",
    outputs=("normed_out", "residual_out", "topk_weights_out", "topk_ids_out"),
)
def fused_add_rms_norm_router_topk(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    router_weight: torch.Tensor,
    top_k: int,
    eps: float = 1e-6,
    *,
    workspace: torch.Tensor | None = None,
    enable_pdl: bool = False,
) -> tuple[Spec, Spec, Spec, Spec]:
    """`router_topk(bf16_linear(fused_add_rms_norm(x, residual), router))`: step 5 of a layer.

    Args:
        x, residual: [M, H], bfloat16 or float32; any strides.
        weight: [H], the norm's.
        router_weight: [E, H] bfloat16.
        top_k: how many experts a token has, 1 ... E; the weights are renormalised.
        eps: of the norm.
        workspace: scratch as `make_workspace` gives it; without one the op takes its own.
        enable_pdl: launch with programmatic dependent launch (GPU only).

    Returns: (normed [M, H], residual_out [M, H], topk_weights [M, top_k] float32,
        topk_ids [M, top_k] int32), contiguous.
    """
    check = Checker("fused_add_rms_norm_router_topk", "x", x)
    check.tensor("x", x, ACTIVATIONS, [None, None])
    check.tensor("residual", residual, (x.dtype,), list(x.shape))
    check.weight("weight", weight, x, [x.shape[1]])
    check.weight("router_weight", router_weight, x, [None, x.shape[1]])
    check_top_k(check, top_k, router_weight.shape[0])
    check.positive("eps", eps)
    check_workspace(check, workspace)
    rows = Spec(tuple(x.shape), x.dtype)
    chosen = (x.shape[0], top_k)
    return rows, rows, Spec(chosen, torch.float32), Spec(chosen, torch.int32)


def _gate_up_values(name: str, topk_ids: torch.Tensor, w13: torch.Tensor, **_: object) -> None:
    check_expert_ids(name, topk_ids, w13.shape[0])


def _down_values(name: str, topk_ids: torch.Tensor, w2: torch.Tensor, **_: object) -> None:
    check_expert_ids(name, topk_ids, w2.shape[0])


def _acts(
    x: torch.Tensor, ids: torch.Tensor, w13: torch.Tensor, shared: torch.Tensor
) -> tuple[Spec, Spec]:
    return (
        Spec((x.shape[0], ids.shape[1], w13.shape[1] // 2), x.dtype),
        Spec((x.shape[0], shared.shape[0] // 2), x.dtype),
    )


def _even_rows(check: Checker, argument: str, rows: int) -> None:
    if rows % 2 != 0:
        check.fail(argument, f"{rows} rows", "an even number", "Gate rows first, then up rows.")


@op(
    "nvfp4_moe_gate_up(Tensor x, Tensor topk_ids, Tensor w13, Tensor w13_scale, "
    "Tensor w13_scale_2, Tensor shared_w13, Tensor shared_w13_scale, Tensor shared_w13_scale_2, *, "
    "Tensor? workspace=None, bool enable_pdl=False) -> (Tensor, Tensor)",
    outputs=("routed_act_out", "shared_act_out"),
    values=_gate_up_values,
)
def nvfp4_moe_gate_up(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w13_scale_2: torch.Tensor,
    shared_w13: torch.Tensor,
    shared_w13_scale: torch.Tensor,
    shared_w13_scale_2: torch.Tensor,
    *,
    workspace: torch.Tensor | None = None,
    enable_pdl: bool = False,
) -> tuple[Spec, Spec]:
    """Gate, up and SiLU of the selected experts and of the shared expert: step 6 of a layer.

    Routed: gate and up stay in fp32, `round(g * sigmoid(g) * u)`. Shared: gate and up are rounded,
    then `round((g / (1 + exp(-g))) * u)`.

    Args:
        x: [M, H], bfloat16 or float32; any strides.
        topk_ids: [M, top_k] int32; -1 skips an entry, whose activations are zeros.
        w13 [E, 2 * I, H / 2], w13_scale [E, 2 * I, H / 16], w13_scale_2 [E, 2]: as in
            `nvfp4_routed_experts`.
        shared_w13 [2 * S, H / 2], shared_w13_scale [2 * S, H / 16], shared_w13_scale_2 [], [1] or
            [2]: as in `nvfp4_linear_silu_and_mul`.
        workspace: scratch as `make_workspace` gives it; without one the op takes its own.
        enable_pdl: launch with programmatic dependent launch (GPU only).

    Returns: (routed_act [M, top_k, I], shared_act [M, S]), the dtype of x, contiguous.

    Values: as in `nvfp4_routed_experts`.
    """
    check = Checker("nvfp4_moe_gate_up", "x", x)
    check.tensor("x", x, ACTIVATIONS, [None, None])
    check_routing(check, x, None, topk_ids)
    hidden = x.shape[1]
    check.tensor("w13", w13, CODES, [None, None, None])
    check.nvfp4("w13", w13, w13_scale, w13_scale_2, [None, None], hidden, [[w13.shape[0], 2]])
    check.nvfp4(
        "shared_w13",
        shared_w13,
        shared_w13_scale,
        shared_w13_scale_2,
        [None],
        hidden,
        [[], [1], [2]],
    )
    _even_rows(check, "w13", w13.shape[1])
    _even_rows(check, "shared_w13", shared_w13.shape[0])
    check_workspace(check, workspace)
    return _acts(x, topk_ids, w13, shared_w13)


@op(
    "bf16_moe_gate_up(Tensor x, Tensor topk_ids, Tensor w13, Tensor shared_w13, *, "
    "Tensor? workspace=None, bool enable_pdl=False) -> (Tensor, Tensor)",
    outputs=("routed_act_out", "shared_act_out"),
    values=_gate_up_values,
)
def bf16_moe_gate_up(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor,
    shared_w13: torch.Tensor,
    *,
    workspace: torch.Tensor | None = None,
    enable_pdl: bool = False,
) -> tuple[Spec, Spec]:
    """`nvfp4_moe_gate_up` with BF16 weights.

    Args:
        x: [M, H], bfloat16 or float32; any strides.
        topk_ids: [M, top_k] int32; -1 skips an entry, whose activations are zeros.
        w13: [E, 2 * I, H] bfloat16; shared_w13: [2 * S, H] bfloat16; gate rows, then up rows.
        workspace, enable_pdl: as there.

    Returns: (routed_act [M, top_k, I], shared_act [M, S]), the dtype of x, contiguous.
    """
    check = Checker("bf16_moe_gate_up", "x", x)
    check.tensor("x", x, ACTIVATIONS, [None, None])
    check_routing(check, x, None, topk_ids)
    check.weight("w13", w13, x, [None, None, x.shape[1]])
    check.weight("shared_w13", shared_w13, x, [None, x.shape[1]])
    _even_rows(check, "w13", w13.shape[1])
    _even_rows(check, "shared_w13", shared_w13.shape[0])
    check_workspace(check, workspace)
    return _acts(x, topk_ids, w13, shared_w13)


def _check_acts(
    check: Checker,
    routed_act: torch.Tensor,
    shared_act: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
) -> None:
    check.tensor("routed_act", routed_act, ACTIVATIONS, [None, None, None])
    check.tensor("shared_act", shared_act, (routed_act.dtype,), [routed_act.shape[0], None])
    check_routing(check, routed_act, topk_weights, topk_ids)
    check.tensor("topk_ids", topk_ids, (torch.int32,), list(routed_act.shape[:2]))


@op(
    "nvfp4_moe_down(Tensor routed_act, Tensor shared_act, Tensor topk_weights, Tensor topk_ids, "
    "Tensor w2, Tensor w2_scale, Tensor w2_scale_2, Tensor shared_w2, Tensor shared_w2_scale, "
    "Tensor shared_w2_scale_2, *, Tensor? workspace=None, bool enable_pdl=False) -> Tensor",
    outputs=("out",),
    values=_down_values,
)
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
    *,
    workspace: torch.Tensor | None = None,
    enable_pdl: bool = False,
) -> Spec:
    """Down projections, weighted combine and shared add: step 7 of a layer.

    `y_e = round(scale_e * sum(act * w2_e))`, `routed = round(sum(weight_e * y_e))` in the order of
    selection, `shared = round(scale * sum(act * w2))`, `out = round(routed + shared)`.

    Args:
        routed_act: [M, top_k, I], bfloat16 or float32; shared_act: [M, S], the same dtype.
        topk_weights: [M, top_k] float32; topk_ids: [M, top_k] int32, -1 skips an entry.
        w2 [E, H, I / 2], w2_scale [E, H, I / 16], w2_scale_2 [E]: as in `nvfp4_routed_experts`.
        shared_w2 [H, S / 2], shared_w2_scale [H, S / 16], shared_w2_scale_2 [] or [1]: as in
            `nvfp4_linear`.
        workspace: scratch as `make_workspace` gives it; without one the op takes its own.
        enable_pdl: launch with programmatic dependent launch (GPU only). topk_ids and topk_weights
            are then read before the wait for the kernel in front, like the weights. They must be
            complete before that kernel starts, or before it lets this one start: `*_moe_gate_up`
            does so when it has itself waited for the router. A norm and the router do so at once,
            and may not be in front of this where what they wait for has written ids or weights.

    Returns: [M, H], the dtype of routed_act, contiguous.

    Values: as in `nvfp4_routed_experts`.
    """
    check = Checker("nvfp4_moe_down", "routed_act", routed_act)
    _check_acts(check, routed_act, shared_act, topk_weights, topk_ids)
    check.tensor("w2", w2, CODES, [None, None, None])
    check.nvfp4("w2", w2, w2_scale, w2_scale_2, [None, None], routed_act.shape[2], [[w2.shape[0]]])
    check.nvfp4(
        "shared_w2",
        shared_w2,
        shared_w2_scale,
        shared_w2_scale_2,
        [w2.shape[1]],
        shared_act.shape[1],
        [[], [1]],
    )
    check_workspace(check, workspace)
    return Spec((routed_act.shape[0], w2.shape[1]), routed_act.dtype)


@op(
    "bf16_moe_down(Tensor routed_act, Tensor shared_act, Tensor topk_weights, Tensor topk_ids, "
    "Tensor w2, Tensor shared_w2, *, Tensor? workspace=None, bool enable_pdl=False) -> Tensor",
    outputs=("out",),
    values=_down_values,
)
def bf16_moe_down(
    routed_act: torch.Tensor,
    shared_act: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w2: torch.Tensor,
    shared_w2: torch.Tensor,
    *,
    workspace: torch.Tensor | None = None,
    enable_pdl: bool = False,
) -> Spec:
    """`nvfp4_moe_down` with BF16 weights.

    Args:
        routed_act: [M, top_k, I], bfloat16 or float32; shared_act: [M, S], the same dtype.
        topk_weights: [M, top_k] float32; topk_ids: [M, top_k] int32, -1 skips an entry.
        w2: [E, H, I] bfloat16; shared_w2: [H, S] bfloat16.
        workspace, enable_pdl: as there.

    Returns: [M, H], the dtype of routed_act, contiguous.
    """
    check = Checker("bf16_moe_down", "routed_act", routed_act)
    _check_acts(check, routed_act, shared_act, topk_weights, topk_ids)
    check.weight("w2", w2, routed_act, [None, None, routed_act.shape[2]])
    check.weight("shared_w2", shared_w2, routed_act, [w2.shape[1], shared_act.shape[1]])
    check_workspace(check, workspace)
    return Spec((routed_act.shape[0], w2.shape[1]), routed_act.dtype)
