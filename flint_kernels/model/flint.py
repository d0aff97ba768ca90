"""`Flint`, the whole model: it holds tensors and composes the `flint::` ops, nothing more."""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flint_kernels.model import calls
from flint_kernels.model.attention import Attention
from flint_kernels.model.batch import Batch, DecodeBatch, PrefillBatch
from flint_kernels.model.cache import PagedKVCache
from flint_kernels.model.calls import Launch
from flint_kernels.model.config import FlintConfig
from flint_kernels.model.linear import WEIGHT_FORMATS, FormatModule, Weight, make_linear
from flint_kernels.model.mlp import DenseMLP, MoE
from flint_kernels.model.rope import cos_sin_table

COMPUTE_DTYPES = (torch.bfloat16, torch.float32)


class Layer(FormatModule):
    """Norm, attention, norm, MLP. `residual` is None before the first layer's norm."""

    def __init__(
        self, config: FlintConfig, layer: int, weight_format: str, device: torch.device | None
    ) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.input_layernorm = Weight(config.hidden_size, device=device)
        self.self_attn = Attention(config, layer, weight_format, device)
        self.post_attention_layernorm = Weight(config.hidden_size, device=device)
        self.mlp = (DenseMLP if config.is_dense(layer) else MoE)(config, weight_format, device)

    def _input_norm(
        self, x: Tensor, residual: Tensor | None, enable_pdl: bool
    ) -> tuple[Tensor, Tensor]:
        weight = self._modules["input_layernorm"].tensor()
        if residual is None:  # the embedding is the first residual, and nothing is added to it
            return calls.rms_norm(x, weight, self.eps, enable_pdl=enable_pdl), x
        return calls.fused_add_rms_norm(x, residual, weight, self.eps, enable_pdl=enable_pdl)

    def decode(
        self,
        x: Tensor,
        residual: Tensor | None,
        cos_sin: Tensor,
        batch: DecodeBatch,
        cache: PagedKVCache,
        launch: Launch,
    ) -> tuple[Tensor, Tensor]:
        """One row a request, [B, H]: seven ops."""
        held = self._modules
        normed, residual = self._input_norm(x, residual, launch.enable_pdl)
        x = held["self_attn"].decode(normed, cos_sin, batch, cache, launch)
        norm = held["post_attention_layernorm"].tensor()
        output: tuple[Tensor, Tensor] = held["mlp"].decode(x, residual, norm, launch)
        return output

    def prefill(
        self,
        x: Tensor,
        residual: Tensor | None,
        cos_sin: Tensor,
        batch: PrefillBatch,
        cache: PagedKVCache,
    ) -> tuple[Tensor, Tensor]:
        """Chunks of any length, [T, H]."""
        launch = Launch(cache.workspace)
        normed, residual = self._input_norm(x, residual, launch.enable_pdl)
        x = self.self_attn.prefill(normed, cos_sin, batch, cache)
        return self.mlp.prefill(x, residual, self.post_attention_layernorm.weight, launch)


class Flint(FormatModule):
    """The decoder-only transformer of `FlintConfig`, weights in one of two formats.

    Its tensors are uninitialised until a loader (`flint_kernels.loading`) fills them. Casts
    (`.half()`, `.to(dtype)`) change nothing: dtypes belong to the format. Only devices move.

    Args:
        config: the shape.
        weight_format: "nvfp4" (linears, experts and head as ModelOpt's three tensors; embedding,
            norms and router bfloat16; sinks fp32) or "bf16".
        device: of all tensors, "meta" too; None: the default device.
        max_positions: rows of the RoPE table, the longest request that can be served; None: the
            config's max_position_embeddings.
        compute_dtype: of activations and KV cache: bfloat16, or float32, in which the ops round
            nowhere (see `oracle`).

    Raises:
        ValueError: an argument is out of range, or a width does not fit the format.
    """

    cos_sin: Tensor

    def __init__(
        self,
        config: FlintConfig,
        weight_format: str = "nvfp4",
        device: torch.device | str | None = None,
        max_positions: int | None = None,
        compute_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        if weight_format not in WEIGHT_FORMATS:
            raise ValueError(
                f"weight_format: got {weight_format!r}; want one of {', '.join(WEIGHT_FORMATS)}."
            )
        if compute_dtype not in COMPUTE_DTYPES:
            raise ValueError(
                f"compute_dtype: got {compute_dtype}; want torch.bfloat16, or torch.float32 for "
                "arithmetic without rounding."
            )
        if max_positions is None:
            max_positions = config.max_position_embeddings
        if not 1 <= max_positions <= config.max_position_embeddings:
            raise ValueError(
                f"max_positions: got {max_positions}; want 1 to {config.max_position_embeddings}, "
                "the config's max_position_embeddings."
            )
        device = None if device is None else torch.device(device)
        self.config = config
        self.weight_format = weight_format
        self.max_positions = max_positions
        self.compute_dtype = compute_dtype
        self.embed_tokens = Weight(config.vocab_size, config.hidden_size, device=device)
        self.layers = nn.ModuleList(
            Layer(config, layer, weight_format, device) for layer in range(config.num_hidden_layers)
        )
        self.norm = Weight(config.hidden_size, device=device)
        self.lm_head = make_linear(weight_format, config.hidden_size, [config.vocab_size], device)
        self.register_buffer("cos_sin", self._make_cos_sin(device), persistent=False)
        self.register_load_state_dict_post_hook(_complete_after_load)  # type: ignore[no-untyped-call]

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    def forward(self, input_ids: Tensor, batch: Batch, cache: PagedKVCache) -> Tensor:
        """The logits of the step's last rows, from which the next tokens are drawn.

        Args:
            input_ids: [T] int32 or int64 token ids in [0, vocab_size), on the model's device.
            batch: the plan of the step, `cache.plan(...)`'s.
            cache: written in place; of the model's device and compute dtype.

        Returns: [B, vocab_size] fp32 for a DecodeBatch; for a PrefillBatch [len(last_rows), ...].

        Raises:
            ValueError: an id outside the vocabulary, on the CPU; on a GPU, where looking would
                make every step wait, the device stops with an assertion of torch's.
        """
        x, residual = self._layers(input_ids, batch, cache, Launch(cache.workspace))
        if isinstance(batch, PrefillBatch):
            x, residual = x[batch.last_rows], residual[batch.last_rows]
        return self.logits(self._final_norm(x, residual))

    def decode(
        self,
        input_ids: Tensor,
        batch: DecodeBatch,
        cache: PagedKVCache,
        launch: Launch | None = None,
    ) -> Tensor:
        """Final hidden states [B, H] (normed, compute dtype) of one new token a request.

        `launch`: scratch and kind of launch of the ops; None: the cache's scratch, ordinarily.
        """
        launch = Launch(cache.workspace) if launch is None else launch
        x, residual = self._layers(input_ids, batch, cache, launch)
        return self._final_norm(x, residual, launch.enable_pdl)

    def prefill(self, input_ids: Tensor, batch: PrefillBatch, cache: PagedKVCache) -> Tensor:
        """Final hidden states [T, H] (normed, compute dtype) of all rows of all chunks."""
        return self._final_norm(*self._layers(input_ids, batch, cache, Launch(cache.workspace)))

    def logits(self, hidden: Tensor, enable_pdl: bool = False) -> Tensor:
        """[..., H] final hidden states to [..., vocab_size] fp32 logits."""
        return self.lm_head.logits(hidden, enable_pdl)

    def make_cache(
        self, max_requests: int = 1, tokens: int | None = None, page_size: int = 16
    ) -> PagedKVCache:
        """A cache of the model's device, compute dtype and positions; see `PagedKVCache`."""
        return PagedKVCache(
            self.config,
            max_requests=max_requests,
            tokens=tokens,
            page_size=page_size,
            max_positions=self.max_positions,
            dtype=self.compute_dtype,
            device=self.device,
        )

    def oracle(self) -> Flint:
        """This model with compute dtype float32, sharing every tensor: nothing is rounded."""
        other = copy.copy(self)
        other.compute_dtype = torch.float32
        return other

    def to_empty(self, *, device: Any, recurse: bool = True) -> Flint:
        """As nn.Module's: new, uninitialised tensors on `device`; the RoPE table is made anew."""
        super().to_empty(device=device, recurse=recurse)
        self.cos_sin = self._make_cos_sin(torch.device(device) if device is not None else None)
        return self

    def _layers(
        self, input_ids: Tensor, batch: Batch, cache: PagedKVCache, launch: Launch
    ) -> tuple[Tensor, Tensor]:
        """The last layer's output and the residual, which the final norm adds up: [T, H] each."""
        if isinstance(batch, PrefillBatch):  # by which torch.compile knows one size from the other
            torch._check(batch.cu_seqlens.shape[0] == batch.block_table.shape[0] + 1)
        # A kernel of torch's, launched ordinarily: it starts once whatever wrote the batch and the
        # ids is complete, and lets nothing start before its last CTA has ended. So every kernel of
        # the ops finds positions, slots, tables and lengths complete, even one that is launched
        # with PDL and reads them ahead of its own wait, behind a norm that lets it start at once.
        x = self._embed(input_ids).to(self.compute_dtype)
        residual: Tensor | None = None
        cos_sin = self.cos_sin
        for module in self.layers:
            layer = cast(Layer, module)
            if isinstance(batch, DecodeBatch):
                x, residual = layer.decode(x, residual, cos_sin, batch, cache, launch)
            else:
                x, residual = layer.prefill(x, residual, cos_sin, batch, cache)
        assert residual is not None  # num_hidden_layers is at least 1
        return x, residual

    def _embed(self, input_ids: Tensor) -> Tensor:
        try:
            return F.embedding(input_ids, self.embed_tokens.weight)
        except IndexError as error:
            low, high = (end.item() for end in input_ids.aminmax())
            raise ValueError(
                f"input_ids: got ids from {low} to {high}; want ids in "
                f"[0, {self.config.vocab_size}), vocab_size. Is this the model's own tokenizer?"
            ) from error

    def _final_norm(self, x: Tensor, residual: Tensor, enable_pdl: bool = False) -> Tensor:
        eps = self.config.rms_norm_eps
        normed, _ = calls.fused_add_rms_norm(
            x, residual, self.norm.weight, eps, enable_pdl=enable_pdl
        )
        return normed

    def _make_cos_sin(self, device: torch.device | None) -> Tensor:
        config = self.config
        return cos_sin_table(self.max_positions, config.head_dim, config.rope_theta, device)


def _complete_after_load(module: nn.Module, _: Any) -> None:
    """load_state_dict(assign=True) gives a meta module real tensors, but has no RoPE table."""
    assert isinstance(module, Flint)
    if module.cos_sin.is_meta and not module.embed_tokens.weight.is_meta:
        module.cos_sin = module._make_cos_sin(module.device)
