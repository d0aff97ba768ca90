"""The FP32 mode against `transformers`' own modules, so that no misreading can hide in both.

Random weights, no hub. `transformers` belongs to the extra `test`: where it is missing these tests
fail, they do not skip.
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from op_samples import int32, randn
from transformers import DeepseekV3Config, GptOssConfig, Qwen3Config
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from flint_kernels import ops
from flint_kernels.model.rope import cos_sin_table

FP32 = torch.float32
THETA = 1_000_000.0


def fp32(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return randn(*shape, seed=seed, dtype=FP32, scale=scale)


def randomise(module: torch.nn.Module, seed: int = 0) -> None:
    """Weights that differ from their defaults, norms among them."""
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            parameter.copy_(fp32(*parameter.shape, seed=seed + index, scale=0.3))


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 2e-6) -> None:
    """Two fp32 computations: relative to the largest value."""
    assert got.shape == want.shape
    assert float((got - want).abs().max() / want.abs().max()) <= tolerance


def qwen3_config(**changes: object) -> Qwen3Config:
    return Qwen3Config(
        **{
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
            "attn_implementation": "eager",
            **changes,
        }
    )


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_rms_norm(eps: float) -> None:
    module = Qwen3RMSNorm(96, eps=eps)
    randomise(module)
    x, residual = fp32(7, 96, seed=1), fp32(7, 96, seed=2)
    weight = module.weight.detach()
    close(ops.rms_norm(x, weight, eps), module(x).detach())
    close(ops.fused_add_rms_norm(x, residual, weight, eps)[0], module(x + residual).detach())


def test_swiglu_mlp() -> None:
    module = Qwen3MLP(qwen3_config())
    randomise(module)
    x = fp32(5, 64, seed=9)
    gate_up = torch.cat([module.gate_proj.weight, module.up_proj.weight]).detach()
    acts = ops.bf16_linear_silu_and_mul(x, gate_up)
    close(ops.bf16_linear(acts, module.down_proj.weight.detach()), module(x).detach())


def test_rope_table() -> None:
    """cos | sin of the halves, in fp32 throughout, to the bit."""
    config = qwen3_config(head_dim=128, max_position_embeddings=16_384)
    positions = torch.tensor([[0, 1, 513, 15_962, 16_383]])
    cos, sin = Qwen3RotaryEmbedding(config)(fp32(1, 1, 1, seed=0), positions)
    table = cos_sin_table(16_384, 128, THETA)[positions[0]]
    assert torch.equal(table, torch.cat([cos[0, :, :64], sin[0, :, :64]], dim=-1))
    assert torch.equal(cos[..., :64], cos[..., 64:])


@pytest.mark.parametrize("rotary", [True, False])
def test_qk_norm_and_rope(rotary: bool) -> None:
    config = qwen3_config()
    attention = Qwen3Attention(config, layer_idx=0)
    randomise(attention)
    x, positions = fp32(1, 9, 64, seed=20), torch.tensor([[0, 1, 2, 5, 100, 101, 700, 900, 1023]])
    q = attention.q_norm(attention.q_proj(x).view(1, 9, 4, 32)).transpose(1, 2)
    k = attention.k_norm(attention.k_proj(x).view(1, 9, 2, 32)).transpose(1, 2)
    v = attention.v_proj(x).view(9, 2, 32)
    if rotary:
        q, k = apply_rotary_pos_emb(q, k, *Qwen3RotaryEmbedding(config)(x, positions))

    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    weight = torch.cat([projection.weight for projection in projections]).detach()
    norms = attention.q_norm.weight.detach(), attention.k_norm.weight.detach()
    table = cos_sin_table(1024, 32, THETA) if rotary else None
    cache = torch.zeros(1, 16, 2, 32), torch.zeros(1, 16, 2, 32)
    rest = table, positions[0], torch.arange(9), *cache, config.rms_norm_eps
    got_q, got_k = ops.qk_norm_rope_kv_write(ops.bf16_linear(x[0], weight), *norms, *rest)
    close(got_q, q[0].transpose(0, 1).detach())
    close(got_k, k[0].transpose(0, 1).detach())
    close(cache[0][0, :9], k[0].transpose(0, 1).detach())
    close(cache[1][0, :9], v.detach())
    close(ops.bf16_qkv_norm_rope_kv_write(x[0], weight, *norms, *rest), got_q)


# ------------------------------------------------------------------ gpt-oss attention with sinks


class Sinks(torch.nn.Module):
    """What `eager_attention_forward` reads of its module."""

    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.sinks = fp32(heads, seed=4, scale=2.0)
        self.num_key_value_groups = heads // kv_heads
        self.eval()


def gpt_oss_mask(tokens: int, window: int) -> torch.Tensor:
    """transformers' own mask, additive, [1, 1, tokens, tokens]; window 0: causal alone."""
    config = GptOssConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=window or None,
        attn_implementation="eager",
    )
    make = create_sliding_window_causal_mask if window else create_causal_mask
    mask = make(config, torch.zeros(1, tokens, 64), None, None, torch.arange(tokens)[None])
    assert mask is not None
    return mask


def test_both_windows_count_the_current_token() -> None:
    """A `sliding_window` of 513 in transformers' mask is our window of 513: p - 512 ... p."""
    allowed = gpt_oss_mask(601, 513)[0, 0, 600] == 0
    assert int(allowed.sum()) == 513
    assert allowed.nonzero().flatten()[[0, -1]].tolist() == [88, 600]
    # And ours by value: with q = 0 every key that is seen has a weight of 1/513.
    q, k = torch.zeros(601, 1, 1), torch.zeros(601, 1, 1)
    for key, weight in ((87, 0.0), (88, 1 / 513)):
        v = torch.zeros(601, 1, 1)
        v[key] = 1.0
        out = ops.attention_prefill(q, k, v, int32(0, 601), window=513)
        assert out[600].item() == pytest.approx(weight, rel=1e-6)


@pytest.mark.parametrize("window", [0, 1, 9, 64])
def test_attention_with_sinks(window: int) -> None:
    tokens, heads, kv_heads, dim = 60, 4, 2, 16
    module = Sinks(heads, kv_heads)
    q = fp32(tokens, heads, dim, seed=1, scale=2.0)
    k, v = fp32(tokens, kv_heads, dim, seed=2, scale=2.0), fp32(tokens, kv_heads, dim, seed=3)
    as_theirs = [t.transpose(0, 1)[None] for t in (q, k, v)]
    mask = gpt_oss_mask(tokens, window)
    want, _ = eager_attention_forward(module, *as_theirs, mask, scaling=dim**-0.5)
    sinks = module.sinks
    got = ops.attention_prefill(q, k, v, int32(0, tokens), sinks=sinks, window=window)
    close(got, want[0])
    # The sink matters here, or the test would not see it.
    without = ops.attention_prefill(q, k, v, int32(0, tokens), window=window)
    assert float((without - want[0]).abs().max()) > 0.1

    cache = torch.zeros(4, 16, kv_heads, dim), torch.zeros(4, 16, kv_heads, dim)
    ops.kv_cache_write(k, v, torch.arange(tokens), *cache)
    table = torch.arange(4, dtype=torch.int32).expand(tokens, 4)
    lengths = torch.arange(1, tokens + 1, dtype=torch.int32)
    close(ops.attention_decode(q, *cache, table, lengths, sinks, window), want[0])
    past = *cache, table[:1], int32(41)
    chunk = ops.attention_prefill(q[41:], k[41:], v[41:], int32(0, 19), *past, sinks, window)
    close(chunk, want[0, 41:])


# ------------------------------------------------------------------ a sigmoid-routed MoE


def test_sigmoid_router_experts_and_shared_expert() -> None:
    """DeepSeek-V3's block without groups, bias or factor is ours: top-k of sigmoids, renormalised,
    SwiGLU experts, one ungated shared expert."""
    config = DeepseekV3Config(
        hidden_size=64,
        moe_intermediate_size=32,
        n_routed_experts=16,
        num_local_experts=16,
        num_experts_per_tok=6,
        n_shared_experts=2,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
        hidden_act="silu",
        experts_implementation="eager",
    )
    module = DeepseekV3MoE(config)
    randomise(module)
    module.eval()
    assert not module.gate.e_score_correction_bias.any()
    x = fp32(12, 64, seed=30)
    with torch.no_grad():
        want = module(x[None])[0]
        _, want_weights, want_ids = module.gate(x)

    gate, shared = module.gate.weight.detach(), module.shared_experts
    topk_weights, topk_ids = ops.router_topk(ops.bf16_linear(x, gate), 6)
    for token in range(12):  # theirs come in any order
        ours = dict(zip(topk_ids[token].tolist(), topk_weights[token].tolist(), strict=True))
        theirs = dict(zip(want_ids[token].tolist(), want_weights[token].tolist(), strict=True))
        assert ours == pytest.approx(theirs, rel=2e-6)

    w13, w2 = module.experts.gate_up_proj.detach(), module.experts.down_proj.detach()
    shared_w13 = torch.cat([shared.gate_proj.weight, shared.up_proj.weight]).detach()
    shared_w2 = shared.down_proj.weight.detach()
    shared_output = ops.bf16_linear(ops.bf16_linear_silu_and_mul(x, shared_w13), shared_w2)
    close(ops.bf16_routed_experts(x, topk_weights, topk_ids, w13, w2, shared_output), want)
    # The fused decode steps, from the norm on.
    norm = Qwen3RMSNorm(64)
    randomise(norm, seed=90)
    residual = fp32(12, 64, seed=31)
    with torch.no_grad():
        want = module(norm(x + residual)[None])[0]
    normed, _, topk_weights, topk_ids = ops.fused_add_rms_norm_router_topk(
        x, residual, norm.weight.detach(), gate, 6
    )
    acts = ops.bf16_moe_gate_up(normed, topk_ids, w13, shared_w13)
    close(ops.bf16_moe_down(*acts, topk_weights, topk_ids, w2, shared_w2), want)


def test_a_whole_attention_layer() -> None:
    """Qwen3's layer, projections to output, against the chain of our ops with no sinks."""
    config = qwen3_config()
    attention = Qwen3Attention(config, layer_idx=0)
    randomise(attention)
    attention.eval()
    x, positions = fp32(1, 20, 64, seed=40), torch.arange(20)[None]
    rotary = Qwen3RotaryEmbedding(config)(x, positions)
    with torch.no_grad():
        want, _ = attention(x, rotary, gpt_oss_mask(20, 0))

    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    weight = torch.cat([projection.weight for projection in projections]).detach()
    norms = attention.q_norm.weight.detach(), attention.k_norm.weight.detach()
    cache = torch.zeros(2, 16, 2, 32), torch.zeros(2, 16, 2, 32)
    table = cos_sin_table(32, 32, THETA)
    qkv = ops.bf16_linear(x[0], weight)
    q, k = ops.qk_norm_rope_kv_write(qkv, *norms, table, positions[0], torch.arange(20), *cache)
    v = qkv.view(20, 8, 32)[:, 6:]
    out = ops.attention_prefill(q, k, v, int32(0, 20))
    close(ops.bf16_linear(out.flatten(1), attention.o_proj.weight.detach()), want[0])
