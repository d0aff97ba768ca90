"""Self-attention of a layer: projections, q/k norm, RoPE, paged KV cache, sinks."""

from __future__ import annotations

import torch
from torch import Tensor

from flint_kernels.model import calls
from flint_kernels.model.batch import DecodeBatch, PrefillBatch
from flint_kernels.model.cache import PagedKVCache
from flint_kernels.model.calls import Launch
from flint_kernels.model.config import FlintConfig
from flint_kernels.model.linear import FormatModule, Weight, make_linear, parameter


class Attention(FormatModule):
    """Attention over the whole past (window 0) or over the last `window` tokens.

    In both paths x is [T, H], normed, in the compute dtype, and so is the result. `cos_sin` is the
    fp32 table [positions, D], used where the layer is rotary; the cache is written in place.
    """

    def __init__(
        self, config: FlintConfig, layer: int, weight_format: str, device: torch.device | None
    ) -> None:
        super().__init__()
        heads, head_dim = config.num_attention_heads, config.head_dim
        self.layer = layer
        self.window = config.window(layer)
        self.rope = config.has_rope(layer)
        self.eps = config.rms_norm_eps
        self.qkv_proj = make_linear(weight_format, config.hidden_size, config.qkv_sizes, device)
        self.o_proj = make_linear(weight_format, heads * head_dim, [config.hidden_size], device)
        self.q_norm = Weight(head_dim, device=device)
        self.k_norm = Weight(head_dim, device=device)
        self.sinks = parameter(heads, dtype=torch.float32, device=device)

    def decode(
        self,
        x: Tensor,
        cos_sin: Tensor,
        batch: DecodeBatch,
        cache: PagedKVCache,
        launch: Launch,
    ) -> Tensor:
        """One row a request: writes its K and V, then attends over the cache alone."""
        held = self._modules
        k_cache, v_cache = cache.layers[self.layer]
        windowed = self.window > 0
        q = held["qkv_proj"].qkv_norm_rope_kv_write(
            x,
            held["q_norm"].tensor(),
            held["k_norm"].tensor(),
            cos_sin if self.rope else None,
            batch.positions,
            batch.window_slots if windowed else batch.slots,
            k_cache,
            v_cache,
            self.eps,
            launch=launch,
        )
        mixed = calls.attention_decode(
            q,
            k_cache,
            v_cache,
            batch.window_block_table if windowed else batch.block_table,
            batch.seq_lens,
            self._parameters["sinks"],
            self.window,
            workspace=launch.workspace,
            enable_pdl=launch.enable_pdl,
        )
        out: Tensor = held["o_proj"](mixed.flatten(1), launch.enable_pdl)
        return out

    def prefill(
        self,
        x: Tensor,
        cos_sin: Tensor,
        batch: PrefillBatch,
        cache: PagedKVCache,
    ) -> Tensor:
        """Chunks: attends over the cached past and the chunk's own K and V.

        A window layer's cache is a ring of pages, and a chunk would overwrite what its own first
        queries still see: so its rows are written after the attention, and only those that a later
        query can see.
        """
        k_cache, v_cache = cache.layers[self.layer]
        windowed = self.window > 0
        qkv = self.qkv_proj(x)
        q, k = calls.qk_norm_rope_kv_write(
            qkv,
            self.q_norm.weight,
            self.k_norm.weight,
            cos_sin if self.rope else None,
            batch.positions,
            batch.no_slots if windowed else batch.slots,
            k_cache,
            v_cache,
            self.eps,
        )
        v = qkv[:, q.shape[1] * q.shape[2] + k.shape[1] * k.shape[2] :].view(k.shape)
        mixed = calls.attention_prefill(
            q,
            k,
            v,
            batch.cu_seqlens,
            k_cache,
            v_cache,
            batch.window_block_table if windowed else batch.block_table,
            batch.context_lens,
            self.sinks,
            self.window,
            None,
            batch.max_query_len,
            workspace=cache.workspace,
        )
        if windowed:
            calls.kv_cache_write(k, v, batch.window_slots, k_cache, v_cache, mixed)
        out: Tensor = self.o_proj(mixed.flatten(1))
        return out
