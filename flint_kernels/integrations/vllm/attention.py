"""What vLLM's cache manager and its builder of metadata are told of the ops' attention.

The model calls the ops itself, since they fuse more than attention. So this backend has the form of
the cache and the metadata, and no forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)

from flint_kernels.integrations.vllm import BACKEND


class FlintBackend(AttentionBackend):  # type: ignore[misc]
    """Pages of a multiple of 16 tokens, in any layout whose K and V rows are contiguous."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return BACKEND

    @staticmethod
    def get_impl_cls() -> type[FlintImpl]:
        return FlintImpl

    @staticmethod
    def get_builder_cls() -> type[FlintMetadataBuilder]:
        return FlintMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True


@dataclass
class FlintMetadata(AttentionMetadata):  # type: ignore[misc]
    """A step of one group of layers; the tensors are vLLM's own, on the device.

    T rows of B requests. A row or request that pads the step to a graph's size has slot -1 and
    length 0.
    """

    slots: Tensor  # [T] int64
    block_table: Tensor  # [B, width] int32
    seq_lens: Tensor  # [B] int32, this step's tokens among them
    query_start_loc: Tensor  # [B + 1] int32
    rows: int
    requests: int
    max_query_len: int


class FlintMetadataBuilder(AttentionMetadataBuilder[FlintMetadata]):  # type: ignore[misc]
    """Passes on what vLLM has; nothing is planned, so a graph's replay cannot find a stale plan."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = (
        AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    )

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> FlintMetadata:
        common = common_attn_metadata
        return FlintMetadata(
            slots=common.slot_mapping[: common.num_actual_tokens],
            block_table=common.block_table_tensor[: common.num_reqs],
            seq_lens=common.seq_lens[: common.num_reqs],
            query_start_loc=common.query_start_loc[: common.num_reqs + 1],
            rows=common.num_actual_tokens,
            requests=common.num_reqs,
            max_query_len=common.max_query_len,
        )


class FlintImpl(AttentionImpl[FlintMetadata]):  # type: ignore[misc]
    """Holds what vLLM reads of an implementation."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
    ) -> None:
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name

    def forward(self, *arguments: Any, **keywords: Any) -> Tensor:
        raise NotImplementedError("the model calls the ops itself; vLLM's attention is not run")
