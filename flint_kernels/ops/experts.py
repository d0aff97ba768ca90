"""Router and routed experts."""

from __future__ import annotations

import torch

from flint_kernels.ops._check import ACTIVATIONS, CODES, FLOAT, INT32, Checker
from flint_kernels.ops._declare import Spec, op
from flint_kernels.ops.workspace import check_workspace


@op(
    "router_topk(Tensor logits, int top_k, bool renormalize=True, *, bool enable_pdl=False) "
    "-> (Tensor, Tensor)",
    outputs=("topk_weights_out", "topk_ids_out"),
)
def router_topk(
    logits: torch.Tensor, top_k: int, renormalize: bool = True, *, enable_pdl: bool = False
) -> tuple[Spec, Spec]:
    """The sigmoid router: the top_k logits (not scores), ties to the lower expert index.

    `s = sigmoid(logit)` in fp32 over the chosen; with `renormalize` `s / (sum(s) + 1e-20)`; then
    rounded to the dtype of the logits and not renormalised again. NaN ranks above +inf and ties
    with NaN; -0 ties with +0. A chosen NaN makes the weights of its row NaN; the ids are distinct
    and in range whatever the values.

    Args:
        logits: [M, E], bfloat16 or float32 (the rounded outputs of the router's linear).
        top_k: how many experts a token has, 1 ... E.
        renormalize: whether the weights of a row are made to add up to 1.
        enable_pdl: launch with programmatic dependent launch (GPU only).

    Returns: (topk_weights [M, top_k] float32, topk_ids [M, top_k] int32), by falling logit.
    """
    check = Checker("router_topk", "logits", logits)
    check.tensor("logits", logits, ACTIVATIONS, [None, None])
    check_top_k(check, top_k, logits.shape[1])
    shape = (logits.shape[0], top_k)
    return Spec(shape, torch.float32), Spec(shape, torch.int32)


def check_top_k(check: Checker, top_k: int, experts: int) -> None:
    if not 1 <= top_k <= experts:
        check.fail(
            "top_k", top_k, f"1 to {experts}, the number of experts", "See num_experts_per_tok."
        )


def check_routing(
    check: Checker, x: torch.Tensor, topk_weights: torch.Tensor | None, topk_ids: torch.Tensor
) -> None:
    check.tensor("topk_ids", topk_ids, INT32, [x.shape[0], None])
    if topk_weights is not None:
        check.tensor("topk_weights", topk_weights, FLOAT, list(topk_ids.shape))


def check_expert_ids(name: str, topk_ids: torch.Tensor, experts: int) -> None:
    """-1 skips an entry; every other id must name an expert."""
    if topk_ids.numel() == 0:
        return
    low, high = (int(v) for v in topk_ids.aminmax())
    if low < -1 or high >= experts:
        Checker(name, "topk_ids", topk_ids).fail(
            "topk_ids",
            f"ids from {low} to {high}",
            f"ids in [0, {experts}), or -1 for an entry to skip",
            "Are these ids of another shard's experts? Map those to -1.",
        )


def _values(name: str, topk_ids: torch.Tensor, w13: torch.Tensor, **_: object) -> None:
    check_expert_ids(name, topk_ids, w13.shape[0])


def _check_tokens(check: Checker, x: torch.Tensor, shared_output: torch.Tensor | None) -> None:
    check.tensor("x", x, ACTIVATIONS, [None, None])
    if shared_output is not None:
        check.tensor("shared_output", shared_output, (x.dtype,), list(x.shape))


def check_pair(check: Checker, w13: torch.Tensor, w2_in: int) -> int:
    """The intermediate size that both projections of the experts must have."""
    if w13.shape[1] % 2 != 0 or w13.shape[1] // 2 != w2_in:
        check.fail(
            "w2",
            f"{w2_in} input features",
            f"{w13.shape[1] / 2:g}, half the rows of w13 ({w13.shape[1]})",
            "w13 holds gate rows, then up rows; w2 takes what comes out of their gate.",
        )
    return w2_in


@op(
    "nvfp4_routed_experts(Tensor x, Tensor topk_weights, Tensor topk_ids, "
    "Tensor w13, Tensor w13_scale, Tensor w13_scale_2, "
    "Tensor w2, Tensor w2_scale, Tensor w2_scale_2, Tensor? shared_output=None, *, "
    "Tensor? workspace=None, bool enable_pdl=False) -> Tensor",
    outputs=("out",),
    values=_values,
)
def nvfp4_routed_experts(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w13_scale_2: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    w2_scale_2: torch.Tensor,
    shared_output: torch.Tensor | None = None,
    *,
    workspace: torch.Tensor | None = None,
    enable_pdl: bool = False,
) -> Spec:
    """Routed SwiGLU experts, combined in the order of selection, plus the shared expert's output.

    Per entry, gate and up stay in fp32 after their global scales;
    `act = round(g * sigmoid(g) * u)`; `y = round(scale * sum(act * w2))`;
    `routed = round(sum(weight * y))` in fp32; `out = round(routed + shared_output)`.

    Args:
        x: [M, H], bfloat16 or float32; any strides.
        topk_weights: [M, top_k] float32, used as they are.
        topk_ids: [M, top_k] int32. -1 skips the entry; an expert named twice counts twice.
        w13: [E, 2 * I, H / 2] uint8, gate rows then up rows; w13_scale: [E, 2 * I, H / 16]
            float8_e4m3fn; w13_scale_2: [E, 2] float32, gate's and up's global scale.
        w2: [E, H, I / 2] uint8; w2_scale: [E, H, I / 16]; w2_scale_2: [E] float32.
        shared_output: [M, H], the dtype of x: the shared expert's rounded output, or None.
        workspace: scratch as `make_workspace` gives it; without one the op takes its own.
        enable_pdl: launch with programmatic dependent launch (GPU only).

    Returns: [M, H], the dtype of x, contiguous. Without entries and shared_output: zeros.

    Values: an id outside [-1, E) is an error on the CPU and with FLINT_KERNELS_CHECK_VALUES; on a
    GPU without it the entry is skipped.
    """
    check = Checker("nvfp4_routed_experts", "x", x)
    _check_tokens(check, x, shared_output)
    check_routing(check, x, topk_weights, topk_ids)
    hidden = x.shape[1]
    check.tensor("w13", w13, CODES, [None, None, None])
    check.nvfp4("w13", w13, w13_scale, w13_scale_2, [None, None], hidden, [[w13.shape[0], 2]])
    check.tensor("w2", w2, CODES, [w13.shape[0], hidden, None])
    intermediate = check_pair(check, w13, w2.shape[2] * 2)
    check.nvfp4(
        "w2", w2, w2_scale, w2_scale_2, [w13.shape[0], hidden], intermediate, [[w13.shape[0]]]
    )
    check_workspace(check, workspace)
    return Spec(tuple(x.shape), x.dtype)


@op(
    "bf16_routed_experts(Tensor x, Tensor topk_weights, Tensor topk_ids, Tensor w13, Tensor w2, "
    "Tensor? shared_output=None, *, Tensor? workspace=None, bool enable_pdl=False) -> Tensor",
    outputs=("out",),
    values=_values,
)
def bf16_routed_experts(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    shared_output: torch.Tensor | None = None,
    *,
    workspace: torch.Tensor | None = None,
    enable_pdl: bool = False,
) -> Spec:
    """`nvfp4_routed_experts` with BF16 weights: the same arithmetic without global scales.

    Args:
        x: [M, H], bfloat16 or float32; any strides.
        topk_weights, topk_ids, shared_output, workspace, enable_pdl: as there.
        w13: [E, 2 * I, H] bfloat16, gate rows then up rows.
        w2: [E, H, I] bfloat16.

    Returns: [M, H], the dtype of x, contiguous.
    """
    check = Checker("bf16_routed_experts", "x", x)
    _check_tokens(check, x, shared_output)
    check_routing(check, x, topk_weights, topk_ids)
    check.weight("w13", w13, x, [None, None, x.shape[1]])
    check.weight("w2", w2, x, [w13.shape[0], x.shape[1], None])
    check_pair(check, w13, w2.shape[2])
    check_workspace(check, workspace)
    return Spec(tuple(x.shape), x.dtype)
