"""flint-tiny's forward pass as a differentiable function of a dict of tensors: for training alone.

The parameters carry their HF names, except that a layer's routed experts are stacked on a leading
axis (`...mlp.experts.gate_proj.weight` is [experts, intermediate, hidden]); `export` splits them.
Being a function of its parameters, the same compiled blocks serve the model, the quantised student
and the teacher.

Matrix products run in `dtype` (BF16 in training), the residual stream, norms, softmax and the
router in fp32: the arithmetic is close to, but not, the one that the `flint::` ops promise.
Shapes: B sequences, T tokens, H hidden, D head_dim, Q query heads, E experts, F expert
intermediate.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from flint_kernels.flint_tiny.tokenizer import END_OF_TEXT_ID
from flint_kernels.model.config import FULL, SLIDING, FlintConfig

Parameters = dict[str, Tensor]


def tiny_config() -> FlintConfig:
    """The shape of flint-tiny: Flint's in small, 5,109,432 parameters."""
    full = (3, 6)
    return FlintConfig(
        num_hidden_layers=7,
        hidden_size=128,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=128,
        vocab_size=2048,
        max_position_embeddings=262144,
        intermediate_size=384,
        num_experts=16,
        num_experts_per_tok=6,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=128,
        layer_types=tuple(FULL if layer in full else SLIDING for layer in range(7)),
        sliding_window=65,
        no_rope_layer_indices=full,
        mlp_only_layers=(0, 1),
        eos_token_ids=(END_OF_TEXT_ID,),
    )


def parameter_shapes(config: FlintConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter, in the order of the forward pass."""
    hidden, head_dim = config.hidden_size, config.head_dim
    queries, keys, _ = config.qkv_sizes

    def swiglu(prefix: str, width: int, stack: tuple[int, ...] = ()) -> dict[str, tuple[int, ...]]:
        return {
            f"{prefix}.gate_proj.weight": (*stack, width, hidden),
            f"{prefix}.up_proj.weight": (*stack, width, hidden),
            f"{prefix}.down_proj.weight": (*stack, hidden, width),
        }

    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (queries, hidden),
            f"{prefix}.self_attn.k_proj.weight": (keys, hidden),
            f"{prefix}.self_attn.v_proj.weight": (keys, hidden),
            f"{prefix}.self_attn.q_norm.weight": (head_dim,),
            f"{prefix}.self_attn.k_norm.weight": (head_dim,),
            f"{prefix}.self_attn.softmax_offset": (config.num_attention_heads,),
            f"{prefix}.self_attn.o_proj.weight": (hidden, queries),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
        }
        if config.is_dense(layer):
            shapes |= swiglu(f"{prefix}.mlp", config.intermediate_size)
        else:
            stack = (config.num_experts,)
            shapes[f"{prefix}.mlp.gate.weight"] = (config.num_experts, hidden)
            shapes |= swiglu(f"{prefix}.mlp.experts", config.moe_intermediate_size, stack)
            shapes |= swiglu(f"{prefix}.mlp.shared_expert", config.shared_expert_intermediate_size)
    shapes["model.norm.weight"] = (hidden,)
    shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def initial_parameters(config: FlintConfig, seed: int, device: torch.device) -> Parameters:
    """FP32 parameters: unit norms, zero sinks, projections N(0, 1/fan_in), those that write the
    residual stream smaller by sqrt(2 · layers). Drawn on the CPU, so the device does not matter."""
    generator = torch.Generator().manual_seed(seed)
    residual = 1 / math.sqrt(2 * config.num_hidden_layers)
    parameters = {}
    for name, shape in parameter_shapes(config).items():
        if name.endswith("softmax_offset"):
            value = torch.zeros(shape)
        elif len(shape) == 1:
            value = torch.ones(shape)
        else:
            value = torch.randn(shape, generator=generator)
            if name == "model.embed_tokens.weight":
                value *= 0.1
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                value *= residual / math.sqrt(shape[-1])
            else:
                value *= 1 / math.sqrt(shape[-1])
        parameters[name] = value.to(device)
    return parameters


def rope_table(config: FlintConfig, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, each [length, D/2] fp32."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device)
    inverse_frequency = 1.0 / config.rope_theta ** (half / config.head_dim)
    angle = torch.arange(length, dtype=torch.float32, device=device)[:, None] * inverse_frequency
    return angle.cos(), angle.sin()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE in NeoX halves; `x` is [B, T, heads, D] fp32."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def softmax_with_sink(logits: Tensor, sink: Tensor, dtype: torch.dtype) -> Tensor:
    """Softmax over the last axis in fp32 whose denominator has one more term, exp(sink)."""
    logits = logits.float()
    # The shift leaves the value as it is, so it needs no gradient.
    shift = torch.maximum(logits.detach().amax(-1, keepdim=True), sink.detach())
    weights = torch.exp(logits - shift)
    return (weights / (weights.sum(-1, keepdim=True) + torch.exp(sink - shift))).to(dtype)


def full_attention(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    """Causal attention; q [B, T, Q, D], k and v [B, T, D] (one KV head), sink [Q] → [B, T, Q·D]."""
    batch, length, heads, dim = q.shape
    logits = q.reshape(batch, length * heads, dim) @ k.transpose(1, 2) * dim**-0.5
    logits = logits.view(batch, length, heads, length)
    position = torch.arange(length, device=q.device)
    visible = position[None, :] <= position[:, None]
    logits = logits.masked_fill(~visible[:, None, :], -math.inf)
    weights = softmax_with_sink(logits, sink[:, None], q.dtype)
    return (weights.view(batch, length * heads, length) @ v).view(batch, length, heads * dim)


def window_attention(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, window: int) -> Tensor:
    """As `full_attention`, but a token sees itself and the `window - 1` tokens before it.

    Cut into blocks of window - 1 tokens, a query needs the keys of its own block and of the one
    before, no others. T must be a multiple of window - 1.
    """
    batch, length, heads, dim = q.shape
    size = window - 1
    blocks = length // size

    def with_previous_block(x: Tensor) -> Tensor:
        x = x.view(batch, blocks, size, dim)
        previous = F.pad(x[:, :-1], (0, 0, 0, 0, 1, 0))
        return torch.cat((previous, x), dim=2)

    k, v = with_previous_block(k), with_previous_block(v)
    q = q.reshape(batch, blocks, size * heads, dim)
    logits = (q @ k.transpose(2, 3) * dim**-0.5).view(batch, blocks, size, heads, 2 * size)
    query = torch.arange(size, device=q.device)[:, None]
    key = torch.arange(2 * size, device=q.device)[None, :]
    visible = (key >= query) & (key <= query + size)
    exists = (torch.arange(blocks, device=q.device)[:, None, None] > 0) | (key >= size)
    logits = logits.masked_fill(~(visible & exists)[:, :, None, :], -math.inf)
    weights = softmax_with_sink(logits, sink[:, None], q.dtype)
    return (weights.view(batch, blocks, size * heads, 2 * size) @ v).view(
        batch, length, heads * dim
    )


def attention(
    x: Tensor,
    w: Parameters,
    rope: tuple[Tensor, Tensor],
    *,
    window: int,
    rotary: bool,
    config: FlintConfig,
) -> Tensor:
    """Self-attention of one layer; `x` [B, T, H] in the compute type, `w` the layer's weights,
    `rope` from `rope_table`, `window` 0: all tokens before."""
    batch, length, _ = x.shape
    dtype, eps = x.dtype, config.rms_norm_eps
    q = F.linear(x, w["self_attn.q_proj.weight"].to(dtype))
    k = F.linear(x, w["self_attn.k_proj.weight"].to(dtype))
    v = F.linear(x, w["self_attn.v_proj.weight"].to(dtype))
    q = rms_norm(q.view(batch, length, -1, config.head_dim), w["self_attn.q_norm.weight"], eps)
    k = rms_norm(k.view(batch, length, 1, config.head_dim), w["self_attn.k_norm.weight"], eps)
    if rotary:
        q, k = rotate(q, *rope), rotate(k, *rope)
    q, k = q.to(dtype), k.to(dtype).squeeze(2)
    sink = w["self_attn.softmax_offset"].float()
    mixed = window_attention(q, k, v, sink, window) if window else full_attention(q, k, v, sink)
    return F.linear(mixed, w["self_attn.o_proj.weight"].to(dtype))


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    dtype = x.dtype
    return F.linear(F.silu(F.linear(x, gate.to(dtype))) * F.linear(x, up.to(dtype)), down.to(dtype))


def route(x: Tensor, gate: Tensor, config: FlintConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Sigmoid routing of `x` [B, T, H].

    Returns the weights [B, T, E] (zero where an expert is not selected, summing to 1), the
    balance loss (1 when load and probability are even, more otherwise) and the load [E], which
    sums to 1.
    """
    logits = F.linear(x.float(), gate.float())
    selected = logits.topk(config.num_experts_per_tok, dim=-1).indices
    mask = torch.zeros_like(logits).scatter(-1, selected, 1.0)
    scores = torch.sigmoid(logits)
    chosen = scores * mask
    weights = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
    load = mask.mean((0, 1)) / config.num_experts_per_tok
    probability = (scores / (scores.sum(-1, keepdim=True) + 1e-20)).mean((0, 1))
    return weights, config.num_experts * (load * probability).sum(), load


def moe(x: Tensor, w: Parameters, config: FlintConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Routed and shared experts; returns the output and `route`'s balance loss and load.

    All experts run on all tokens as one wide SwiGLU whose activations are scaled by the routing
    weights: 16 experts of 64 are too small for anything else to be faster.
    """
    weights, balance, load = route(x, w["mlp.gate.weight"], config)
    dtype, hidden = x.dtype, config.hidden_size
    gate = w["mlp.experts.gate_proj.weight"].to(dtype).reshape(-1, hidden)
    up = w["mlp.experts.up_proj.weight"].to(dtype).reshape(-1, hidden)
    down = w["mlp.experts.down_proj.weight"].to(dtype).transpose(0, 1).reshape(hidden, -1)
    activation = F.silu(F.linear(x, gate)) * F.linear(x, up)
    activation = activation.unflatten(-1, (config.num_experts, -1)) * weights[..., None].to(dtype)
    routed = F.linear(activation.flatten(-2), down)
    shared = swiglu(
        x,
        w["mlp.shared_expert.gate_proj.weight"],
        w["mlp.shared_expert.up_proj.weight"],
        w["mlp.shared_expert.down_proj.weight"],
    )
    return routed + shared, balance, load


def drop(x: Tensor, rate: Tensor | None) -> Tensor:
    """Dropout whose rate is a tensor, so that a change of rate is no new compilation."""
    if rate is None:
        return x
    return x * (torch.rand_like(x) >= rate) / (1 - rate)


def block(
    x: Tensor,
    w: Parameters,
    rope: tuple[Tensor, Tensor],
    rate: Tensor | None,
    *,
    window: int,
    rotary: bool,
    dtype: torch.dtype,
    config: FlintConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """One layer on the fp32 residual stream `x` [B, T, H]; dense layers report no balance."""
    eps = config.rms_norm_eps
    normed = rms_norm(x, w["input_layernorm.weight"], eps).to(dtype)
    mixed = attention(normed, w, rope, window=window, rotary=rotary, config=config)
    x = x + drop(mixed.float(), rate)
    normed = rms_norm(x, w["post_attention_layernorm.weight"], eps).to(dtype)
    if "mlp.gate.weight" in w:
        output, balance, load = moe(normed, w, config)
    else:
        output = swiglu(
            normed,
            w["mlp.gate_proj.weight"],
            w["mlp.up_proj.weight"],
            w["mlp.down_proj.weight"],
        )
        balance, load = x.new_zeros(()), x.new_zeros(config.num_experts)
    return x + drop(output.float(), rate), balance, load


class TinyForward:
    """The forward pass, its blocks compiled one by one when asked: layers of one kind share a
    program, so that start-up compiles three small ones and not a large one."""

    def __init__(self, config: FlintConfig, dtype: torch.dtype, compile_blocks: bool) -> None:
        self.config = config
        self.dtype = dtype
        # Whole blocks of window attention.
        self.multiple = (config.sliding_window or 2) - 1
        self.block = torch.compile(block, dynamic=False) if compile_blocks else block

    def hidden(
        self, parameters: Parameters, tokens: Tensor, rate: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Final-norm hidden states of `tokens` [B, T] (int64), T a multiple of sliding_window - 1.

        Returns [B, T, H] in the compute type, the balance loss averaged over the MoE layers, and
        their loads [layers, E].
        """
        config = self.config
        size = self.multiple
        if tokens.shape[1] % size:
            raise ValueError(
                f"tokens: {tokens.shape[1]} tokens a sequence, wanted a multiple of {size}; "
                "pad on the right, later tokens do not change earlier ones"
            )
        rope = rope_table(config, tokens.shape[1], tokens.device)
        x = drop(F.embedding(tokens, parameters["model.embed_tokens.weight"]).float(), rate)
        balances, loads = [], []
        for layer in range(config.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            weights = {
                name.removeprefix(prefix): value
                for name, value in parameters.items()
                if name.startswith(prefix)
            }
            x, balance, load = self.block(
                x,
                weights,
                rope,
                rate,
                window=config.window(layer),
                rotary=config.has_rope(layer),
                dtype=self.dtype,
                config=config,
            )
            if not config.is_dense(layer):
                balances.append(balance)
                loads.append(load)
        x = rms_norm(x, parameters["model.norm.weight"], config.rms_norm_eps).to(self.dtype)
        return x, torch.stack(balances).mean(), torch.stack(loads)

    def logits(self, parameters: Parameters, tokens: Tensor) -> Tensor:
        """Next-token logits [B, T, vocabulary] of `tokens` [B, T], any T, in the compute type."""
        length = tokens.shape[1]
        padded = F.pad(tokens, (0, -length % self.multiple))
        hidden, _, _ = self.hidden(parameters, padded)
        return F.linear(hidden[:, :length], parameters["lm_head.weight"].to(self.dtype))
