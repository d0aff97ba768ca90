"""A model small enough for a test: 4 layers of every kind, random weights, 96 tokens."""

from __future__ import annotations

import functools

import torch

from flint_kernels.loading import synthetic
from flint_kernels.model import Flint, FlintConfig, PagedKVCache

# A window layer with RoPE, a full one without, a window layer without RoPE, a full one with it;
# the first is dense. A window of 33 needs a ring of 3 pages: prompts of more than 48 tokens wrap.
CONFIG = FlintConfig(
    num_hidden_layers=4,
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=96,
    max_position_embeddings=512,
    intermediate_size=96,
    num_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=48,
    layer_types=("sliding_attention", "full_attention") * 2,
    sliding_window=33,
    no_rope_layer_indices=(1, 2),
    mlp_only_layers=(0,),
)


@functools.cache
def tiny_model(weight_format: str = "nvfp4") -> Flint:
    """The same weights at every call; tests do not write them, or put back what they wrote."""
    with torch.inference_mode(False):  # whoever asks first: no one else could write them then
        return synthetic(CONFIG, weight_format, seed=7)


def random_tokens(count: int, seed: int = 0) -> torch.Tensor:
    """[count] int64 ids of the tiny vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, CONFIG.vocab_size, (count,), generator=generator)


@torch.inference_mode()
def one_shot(model: Flint, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [T, V] of all positions by a single prefill into a fresh cache."""
    return chunked(model, tokens, [len(tokens)])


@torch.inference_mode()
def chunked(
    model: Flint, tokens: torch.Tensor, counts: list[int], cache: PagedKVCache | None = None
) -> torch.Tensor:
    """Logits [T, V] of all positions by prefills of `counts` tokens."""
    cache = model.make_cache() if cache is None else cache
    request = cache.add()
    logits = []
    for part in tokens.split(counts):
        hidden = model.prefill(part, cache.plan([request], [len(part)]), cache)
        logits.append(model.logits(hidden))
    cache.release(request)
    return torch.cat(logits)


@torch.inference_mode()
def token_by_token(model: Flint, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [T, V] of all positions by decode steps alone."""
    cache = model.make_cache()
    request = cache.add()
    steps = [model(token, cache.plan_decode([request]), cache) for token in tokens.split(1)]
    return torch.cat(steps)
