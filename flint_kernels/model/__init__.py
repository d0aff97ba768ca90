"""The `Flint` module: configuration, paged KV cache and the layers that compose the ops."""

from flint_kernels.model.batch import Batch, DecodeBatch, PrefillBatch
from flint_kernels.model.buffers import DecodeBuffers
from flint_kernels.model.cache import LayerCache, OutOfPagesError, PagedKVCache
from flint_kernels.model.calls import Launch
from flint_kernels.model.config import FlintConfig
from flint_kernels.model.dynamic import mark_any_size
from flint_kernels.model.flint import Flint
from flint_kernels.model.rope import cos_sin_table

__all__ = [
    "Batch",
    "DecodeBatch",
    "DecodeBuffers",
    "Flint",
    "FlintConfig",
    "Launch",
    "LayerCache",
    "OutOfPagesError",
    "PagedKVCache",
    "PrefillBatch",
    "cos_sin_table",
    "mark_any_size",
]
