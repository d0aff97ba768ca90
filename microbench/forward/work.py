"""What a forward has to do at the least: bytes that it moves, operations that it does.

Bytes are the weights that the step's tokens need, each once (of routed experts those that some
token takes), the cached keys and values that some query sees, and those that are written.
Activations are left out: they can stay on the chip. Operations are those of the matrix products
and of attention. The head is no part of a forward, and only the last norm's rows are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flint_kernels.model import Flint, FlintConfig
from microbench.forward.case import Case, Request


@dataclass(frozen=True)
class Work:
    bytes: int
    flop: int


def of_forward(model: Flint, case: Case, experts: Sequence[int]) -> Work:
    """The work of a step in which layer i has `experts[i]` distinct experts (dense layers: any)."""
    config = model.config
    return Work(
        _weight_bytes(model, experts) + _cache_bytes(config, case.requests),
        _product_flop(config, case.tokens) + _attention_flop(config, case.requests),
    )


def head(model: Flint, rows: int) -> Work:
    """The work of the logits of `rows` tokens, which are written in fp32."""
    config = model.config
    read = sum(parameter.nbytes for parameter in model.lm_head.parameters())
    return Work(
        read + 4 * rows * config.vocab_size, 2 * rows * config.hidden_size * config.vocab_size
    )


def _weight_bytes(model: Flint, experts: Sequence[int]) -> int:
    total = model.norm.weight.nbytes
    for layer, used in zip(model.layers, experts, strict=True):
        for name, parameter in layer.named_parameters():
            routed = name.startswith("mlp.experts.")
            total += parameter.nbytes * used // parameter.shape[0] if routed else parameter.nbytes
    return total


def _cache_bytes(config: FlintConfig, requests: Sequence[Request]) -> int:
    row = 2 * 2 * config.num_key_value_heads * config.head_dim  # K and V of a token, BF16
    total = 0
    for layer in range(config.num_hidden_layers):
        window = config.window(layer)
        for request in requests:
            past = request.length - request.new
            seen = min(past, window - 1) if window else past
            written = min(request.new, window) if window else request.new
            total += row * (seen + written)
    return total


def _product_flop(config: FlintConfig, tokens: int) -> int:
    hidden = config.hidden_size
    attention = hidden * (sum(config.qkv_sizes) + config.qkv_sizes[0])
    dense = 3 * hidden * config.intermediate_size
    expert, shared = config.moe_intermediate_size, config.shared_expert_intermediate_size
    moe = 3 * hidden * (config.num_experts_per_tok * expert + shared) + hidden * config.num_experts
    weights = sum(
        attention + (dense if config.is_dense(layer) else moe)
        for layer in range(config.num_hidden_layers)
    )
    return 2 * tokens * weights


def _attention_flop(config: FlintConfig, requests: Sequence[Request]) -> int:
    """Two products of head_dim for each query head and key that its query sees."""
    pairs = sum(
        keys_seen(request, config.window(layer))
        for layer in range(config.num_hidden_layers)
        for request in requests
    )
    return 4 * config.num_attention_heads * config.head_dim * pairs


def keys_seen(request: Request, window: int) -> int:
    """Keys that the queries of a request see, all queries together; window 0: none."""
    first, last = request.length - request.new + 1, request.length  # of the first, the last query
    if window == 0 or last <= window:
        return (first + last) * request.new // 2
    growing = max(0, window - first)  # queries that see fewer keys than the window has
    return (first + window - 1) * growing // 2 + window * (request.new - growing)
