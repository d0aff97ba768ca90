"""The ops as overloads of the dispatcher, which is what the layers call.

The functions of `flint_kernels.ops` choose an overload and look it up at each call; a decode step
makes hundreds of calls, so here that is done once. torch.compile sees the same nodes either way.
"""

from __future__ import annotations

import torch

import flint_kernels.ops  # noqa: F401  (declares the namespace)

_flint = torch.ops.flint

rms_norm = _flint.rms_norm.default
fused_add_rms_norm = _flint.fused_add_rms_norm.default
fused_add_rms_norm_router_topk = _flint.fused_add_rms_norm_router_topk.default
router_topk = _flint.router_topk.default

qk_norm_rope_kv_write = _flint.qk_norm_rope_kv_write.default
kv_cache_write = _flint.kv_cache_write.default
attention_decode = _flint.attention_decode.default
attention_prefill = _flint.attention_prefill.default

nvfp4_linear = _flint.nvfp4_linear.default
nvfp4_linear_silu_and_mul = _flint.nvfp4_linear_silu_and_mul.default
nvfp4_qkv_norm_rope_kv_write = _flint.nvfp4_qkv_norm_rope_kv_write.default
nvfp4_routed_experts = _flint.nvfp4_routed_experts.default
nvfp4_moe_gate_up = _flint.nvfp4_moe_gate_up.default
nvfp4_moe_down = _flint.nvfp4_moe_down.default
nvfp4_lm_head = _flint.nvfp4_lm_head.default

bf16_linear = _flint.bf16_linear.default
bf16_linear_silu_and_mul = _flint.bf16_linear_silu_and_mul.default
bf16_qkv_norm_rope_kv_write = _flint.bf16_qkv_norm_rope_kv_write.default
bf16_routed_experts = _flint.bf16_routed_experts.default
bf16_moe_gate_up = _flint.bf16_moe_gate_up.default
bf16_moe_down = _flint.bf16_moe_down.default
bf16_lm_head = _flint.bf16_lm_head.default

sample = _flint.sample.default
