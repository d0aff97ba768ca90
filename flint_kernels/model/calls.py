"""The ops as overloads of the dispatcher, which is what the layers call.

The functions of `flint_kernels.ops` choose an overload and look it up at each call; a decode step
makes hundreds of calls, so here that is done once. torch.compile sees the same nodes either way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flint_kernels.ops  # noqa: F401  (declares the namespace)

_flint: Any = torch.ops.flint


class Launch(NamedTuple):
    """How the ops of a step are launched; results do not depend on it."""

    workspace: Tensor  # the ops' scratch, as make_workspace gives it
    enable_pdl: bool = False  # programmatic dependent launch, where a kernel has it


Op = Callable[..., Tensor]
Op2 = Callable[..., tuple[Tensor, Tensor]]
Op4 = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]

rms_norm: Op = _flint.rms_norm.default
fused_add_rms_norm: Op2 = _flint.fused_add_rms_norm.default
fused_add_rms_norm_router_topk: Op4 = _flint.fused_add_rms_norm_router_topk.default
router_topk: Op2 = _flint.router_topk.default

qk_norm_rope_kv_write: Op2 = _flint.qk_norm_rope_kv_write.default
kv_cache_write: Callable[..., None] = _flint.kv_cache_write.default
attention_decode: Op = _flint.attention_decode.default
attention_prefill: Op = _flint.attention_prefill.default

nvfp4_linear: Op = _flint.nvfp4_linear.default
nvfp4_linear_silu_and_mul: Op = _flint.nvfp4_linear_silu_and_mul.default
nvfp4_qkv_norm_rope_kv_write: Op = _flint.nvfp4_qkv_norm_rope_kv_write.default
nvfp4_routed_experts: Op = _flint.nvfp4_routed_experts.default
nvfp4_moe_gate_up: Op2 = _flint.nvfp4_moe_gate_up.default
nvfp4_moe_down: Op = _flint.nvfp4_moe_down.default
nvfp4_lm_head: Op = _flint.nvfp4_lm_head.default

bf16_linear: Op = _flint.bf16_linear.default
bf16_linear_silu_and_mul: Op = _flint.bf16_linear_silu_and_mul.default
bf16_qkv_norm_rope_kv_write: Op = _flint.bf16_qkv_norm_rope_kv_write.default
bf16_routed_experts: Op = _flint.bf16_routed_experts.default
bf16_moe_gate_up: Op2 = _flint.bf16_moe_gate_up.default
bf16_moe_down: Op = _flint.bf16_moe_down.default
bf16_lm_head: Op = _flint.bf16_lm_head.default

sample: Op = _flint.sample.default
decode_advance: Callable[..., None] = _flint.decode_advance.default
