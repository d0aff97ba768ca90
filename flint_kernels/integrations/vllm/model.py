"""Flint as a model of vLLM: this library's module and loaders, vLLM's cache and scheduler."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention

from flint_kernels.integrations.vllm.attention import FlintBackend, FlintMetadata
from flint_kernels.integrations.vllm.step import Caches, batch_of, layer_cache, profiling, rows_of
from flint_kernels.loading.loader import load_into, open_checkpoint
from flint_kernels.loading.source import find, read_config
from flint_kernels.model import DecodeBatch, Flint, Launch, LayerCache, PagedKVCache
from flint_kernels.model.flint import Layer
from flint_kernels.ops import make_workspace


class FlintForCausalLM(nn.Module):
    """A `Flint`, and for each of its layers the object by which vLLM gives that layer a cache.

    vLLM calls it with the rows of all requests of a step and finds the step itself in its forward
    context. A step in which each request has one row is the decode composition, any other prefill.

    Raises:
        ValueError: the model is not a local folder or file, several GPUs share it, or its
            activations or cache are not BF16.
    """

    workspace: Tensor
    no_slots: Tensor

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        check(vllm_config)
        self.source = vllm_config.model_config.model
        files = find(self.source)
        config = read_config(files)
        with closing(open_checkpoint(files, config)) as checkpoint:
            weight_format = checkpoint.weight_format
        positions = min(vllm_config.model_config.max_model_len, config.max_position_embeddings)
        self.model = Flint(config, weight_format, max_positions=positions)
        self.caches = nn.ModuleList(
            Attention(
                config.num_attention_heads,
                config.head_dim,
                config.head_dim**-0.5,
                num_kv_heads=config.num_key_value_heads,
                cache_config=vllm_config.cache_config,
                per_layer_sliding_window=config.window(layer) or None,
                prefix=f"{prefix}.layers.{layer}.attn".removeprefix("."),
                attn_backend=FlintBackend,
            )
            for layer in range(config.num_hidden_layers)
        )
        for layer, cache in enumerate(self.caches):
            if (cache.sliding_window or 0) != config.window(layer):
                raise ValueError(
                    f"layer {layer}: got a cache with the window {cache.sliding_window} from vLLM; "
                    f"want {config.window(layer) or None}. Leave out --disable-sliding-window."
                )
        self.register_buffer("workspace", make_workspace(self.model.device), persistent=False)
        no_slots = torch.empty(0, dtype=torch.int32, device=self.model.device)
        self.register_buffer("no_slots", no_slots, persistent=False)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """[T] ids to [T, H] BF16."""
        return self.model._embed(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Final hidden states [T, H] of all rows; those that pad the step are zero."""
        x = (
            self.embed_input_ids(cast(Tensor, input_ids))
            if inputs_embeds is None
            else inputs_embeds
        )
        steps = self._steps(len(x))
        rows = rows_of(steps[0])
        hidden = self._layers(x[:rows], positions, steps)
        if rows == len(x):
            return hidden
        return torch.cat([hidden, hidden.new_zeros(len(x) - rows, hidden.shape[1])])

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """[N, H] to [N, V] fp32."""
        return self.model.logits(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Loads the files by this library's own loader, checks and all.

        `weights` is not read: vLLM's iterator opens its files with the first tensor.
        """
        load_into(self.model, self.source)
        return {name for name, _ in self.named_parameters()}

    def _steps(self, rows: int) -> list[FlintMetadata]:
        """Each layer's metadata; layers of one group share one object."""
        found = get_forward_context().attn_metadata
        if found is None:
            return [profiling(rows, self.workspace.device)] * len(self.caches)
        return [found[cache.layer_name] for cache in self.caches]

    def _layers(self, x: Tensor, positions: Tensor, steps: list[FlintMetadata]) -> Tensor:
        model = self.model
        head_dim = model.config.head_dim
        batches = {id(step): batch_of(step, positions, self.no_slots) for step in steps}
        held = Caches([self._cache(cache, head_dim) for cache in self.caches], self.workspace)
        caches = cast(PagedKVCache, held)  # of which layers read no more than these two
        launch = Launch(self.workspace)
        residual: Tensor | None = None
        for module, step in zip(model.layers, steps, strict=True):
            layer, batch = cast(Layer, module), batches[id(step)]
            if isinstance(batch, DecodeBatch):
                x, residual = layer.decode(x, residual, model.cos_sin, batch, caches, launch)
            else:
                x, residual = layer.prefill(x, residual, model.cos_sin, batch, caches)
        assert residual is not None
        return model._final_norm(x, residual)

    def _cache(self, cache: Attention, head_dim: int) -> LayerCache:
        kv_cache = cache.kv_cache
        if kv_cache.numel() == 0:  # profiling: none is bound yet
            shape = (0, cache.num_kv_heads, 16, 2 * head_dim)
            kv_cache = torch.empty(shape, dtype=torch.bfloat16, device=self.workspace.device)
        return layer_cache(kv_cache, head_dim)


def check(vllm_config: VllmConfig) -> None:
    """Raises ValueError for what this model does not serve."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, name) != 1:
            raise ValueError(
                f"{name}: got {getattr(parallel, name)}; want 1: the model lies on one GPU. More "
                "GPUs serve it with --data-parallel-size, a replica each."
            )
    if model.dtype != torch.bfloat16:
        raise ValueError(f"dtype: got {model.dtype}; want torch.bfloat16, as the ops compute.")
    cache_dtype = vllm_config.cache_config.cache_dtype
    if cache_dtype not in FlintBackend.supported_kv_cache_dtypes:
        raise ValueError(f"kv_cache_dtype: got {cache_dtype!r}; want 'auto' or 'bfloat16'.")
    if not Path(model.model).exists():
        raise ValueError(
            f"model: got {model.model!r}, which is no folder here; want a local checkpoint. "
            "`hf download` fetches one."
        )
