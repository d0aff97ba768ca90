"""The ops of the namespace `flint`: this package alone declares them.

Each function here is an op, `torch.ops.flint.<name>`, and takes `out=` where it has an
out-variant, `torch.ops.flint.<name>.out`. Importing it needs torch and nothing else.

The promise: a schema changes between versions only by arguments added at its end with a default;
whatever else must change comes under a new name, and the old name stays for at least one minor
version and warns. Shapes, dtypes and rounding points of an op are part of its schema.
"""

from flint_kernels.ops._declare import (
    NAMESPACE,
    REGISTRY,
    VALUE_CHECKS_VARIABLE,
    Declaration,
    Spec,
    implement,
    value_checks_enabled,
)
from flint_kernels.ops.attention import attention_decode, attention_prefill
from flint_kernels.ops.experts import bf16_routed_experts, nvfp4_routed_experts, router_topk
from flint_kernels.ops.kv_write import kv_cache_write, qk_norm_rope_kv_write
from flint_kernels.ops.linear import (
    bf16_linear,
    bf16_linear_silu_and_mul,
    bf16_lm_head,
    nvfp4_linear,
    nvfp4_linear_silu_and_mul,
    nvfp4_lm_head,
)
from flint_kernels.ops.low_latency import (
    bf16_moe_down,
    bf16_moe_gate_up,
    bf16_qkv_norm_rope_kv_write,
    fused_add_rms_norm_router_topk,
    nvfp4_moe_down,
    nvfp4_moe_gate_up,
    nvfp4_qkv_norm_rope_kv_write,
)
from flint_kernels.ops.norm import fused_add_rms_norm, rms_norm, silu_and_mul
from flint_kernels.ops.nvfp4 import (
    gguf_to_modelopt,
    modelopt_to_gguf,
    nvfp4_dequantize,
    nvfp4_quantize,
)
from flint_kernels.ops.sampling import decode_advance, sample
from flint_kernels.ops.workspace import make_workspace, workspace_bytes

__all__ = [
    "NAMESPACE",
    "REGISTRY",
    "VALUE_CHECKS_VARIABLE",
    "Declaration",
    "Spec",
    "attention_decode",
    "attention_prefill",
    "bf16_linear",
    "bf16_linear_silu_and_mul",
    "bf16_lm_head",
    "bf16_moe_down",
    "bf16_moe_gate_up",
    "bf16_qkv_norm_rope_kv_write",
    "bf16_routed_experts",
    "decode_advance",
    "fused_add_rms_norm",
    "fused_add_rms_norm_router_topk",
    "gguf_to_modelopt",
    "implement",
    "kv_cache_write",
    "make_workspace",
    "modelopt_to_gguf",
    "nvfp4_dequantize",
    "nvfp4_linear",
    "nvfp4_linear_silu_and_mul",
    "nvfp4_lm_head",
    "nvfp4_moe_down",
    "nvfp4_moe_gate_up",
    "nvfp4_qkv_norm_rope_kv_write",
    "nvfp4_quantize",
    "nvfp4_routed_experts",
    "qk_norm_rope_kv_write",
    "rms_norm",
    "router_topk",
    "sample",
    "silu_and_mul",
    "value_checks_enabled",
    "workspace_bytes",
]
