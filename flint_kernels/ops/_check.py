"""Argument checks that the declarations share: each error names argument, got, want, remedy."""

from __future__ import annotations

from collections.abc import Sequence

import torch

ACTIVATIONS = (torch.bfloat16, torch.float32)
INDICES = (torch.int32, torch.int64)
CODES = (torch.uint8,)
SCALES = (torch.float8_e4m3fn,)
FLOAT = (torch.float32,)
INT32 = (torch.int32,)

FP32_TINY = torch.finfo(torch.float32).tiny
FP32_MAX = torch.finfo(torch.float32).max


def _fits(sizes: Sequence[int], wanted: Sequence[int | None]) -> bool:
    if len(sizes) != len(wanted):
        return False
    # A loop, not all(): no generator for each of the many tensors of a step.
    for size, want in zip(sizes, wanted, strict=True):
        if want is not None and size != want:
            return False
    return True


class Checker:
    """Checks the arguments of one call; `reference` fixes the device all tensors must share."""

    __slots__ = ("device", "op", "reference")

    def __init__(self, op: str, reference: str, tensor: torch.Tensor) -> None:
        self.op = op
        self.reference = reference
        self.device = tensor.device

    def fail(
        self, argument: str, got: object, want: object, remedy: str, error: type = ValueError
    ) -> None:
        raise error(f"flint::{self.op}: argument '{argument}': got {got}; want {want}. {remedy}")

    def tensor(
        self,
        argument: str,
        tensor: torch.Tensor,
        dtypes: Sequence[torch.dtype],
        shape: Sequence[int | None] | None = None,
        remedy: str = "",
    ) -> None:
        """Device, dtype and shape (None in `shape` matches any size)."""
        if tensor.device != self.device:
            self.fail(
                argument,
                f"a tensor on {tensor.device}",
                f"{self.device}, where '{self.reference}' is",
                f"Move it with .to('{self.device}').",
            )
        if tensor.dtype not in dtypes:
            wanted = " or ".join(str(dtype) for dtype in dtypes)
            self.fail(
                argument, tensor.dtype, wanted, remedy or "Convert it before the call.", TypeError
            )
        if shape is not None and not _fits(tensor.shape, shape):
            wanted = "[" + ", ".join("any" if s is None else str(s) for s in shape) + "]"
            self.fail(
                argument,
                f"shape {list(tensor.shape)}",
                f"shape {wanted}",
                remedy or "See the op's documentation for how the sizes hang together.",
            )

    def rows(self, argument: str, tensor: torch.Tensor, last: int | None = None) -> None:
        """An activation of shape [..., last], at least one-dimensional."""
        self.tensor(argument, tensor, ACTIVATIONS)
        if tensor.dim() < 1 or (last is not None and tensor.shape[-1] != last):
            self.fail(
                argument,
                f"shape {list(tensor.shape)}",
                f"shape [..., {'any' if last is None else last}]",
                "The last dimension is the feature dimension.",
            )

    def same_dtype(self, argument: str, tensor: torch.Tensor, other: torch.Tensor) -> None:
        if tensor.dtype != other.dtype:
            self.fail(
                argument,
                tensor.dtype,
                f"{other.dtype}, the dtype of '{self.reference}'",
                "Activations, residual and KV cache share one dtype.",
                TypeError,
            )

    def weight(
        self, argument: str, tensor: torch.Tensor, x: torch.Tensor, shape: Sequence[int | None]
    ) -> None:
        """A BF16 weight; FP32 weights too where the activations are FP32 (the oracle's mode)."""
        dtypes = (torch.bfloat16,) if x.dtype == torch.bfloat16 else ACTIVATIONS
        self.tensor(argument, tensor, dtypes, shape)

    def positive(self, argument: str, value: float) -> None:
        """A normal number of FP32, in which bodies compute: beyond, it would be 0 or infinite."""
        if not FP32_TINY <= value <= FP32_MAX:
            remedy = "Pass the one of the model's config."
            wanted = f"a value from {FP32_TINY:.3g} to {FP32_MAX:.3g}"
            self.fail(argument, value, wanted, remedy)

    def nvfp4(
        self,
        prefix: str,
        weight: torch.Tensor,
        scale: torch.Tensor,
        scale_2: torch.Tensor,
        lead: Sequence[int | None],
        in_features: int,
        shards: Sequence[Sequence[int]],
    ) -> None:
        """The three ModelOpt tensors of a linear of shape [*lead, in_features].

        `shards`: the shapes that the global scale may have.
        """
        layout = "ModelOpt NVFP4 holds two codes a byte and one scale for 16 codes."
        if in_features % 16 != 0:
            self.fail(self.reference, f"{in_features} features", "a multiple of 16", layout)
        self.tensor(prefix, weight, CODES, [*lead, in_features // 2], layout)
        lead = list(weight.shape[:-1])
        self.tensor(f"{prefix}_scale", scale, SCALES, [*lead, in_features // 16], layout)
        self.tensor(f"{prefix}_scale_2", scale_2, FLOAT)
        if list(scale_2.shape) not in [list(shape) for shape in shards]:
            self.fail(
                f"{prefix}_scale_2",
                f"shape {list(scale_2.shape)}",
                " or ".join(f"shape {list(shape)}" for shape in shards),
                "One fp32 global scale for the tensor, or one for each of its shards.",
            )

    def paged_cache(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor, dtype_of: torch.Tensor
    ) -> None:
        """[blocks, page, kv_heads, head_dim], any strides, last dimension contiguous."""
        for argument, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
            self.tensor(argument, cache, ACTIVATIONS, [None, None, None, None])
            self.same_dtype(argument, cache, dtype_of)
            if cache.stride(-1) != 1 and cache.shape[-1] > 1:
                self.fail(
                    argument,
                    f"strides {list(cache.stride())}",
                    "a last stride of 1",
                    "Any layout will do (NHD, HND, K|V interleaved) whose head_dim is contiguous; "
                    "pass a view such as cache.permute(0, 2, 1, 3).",
                )
        if k_cache.shape != v_cache.shape:
            self.fail(
                "v_cache",
                f"shape {list(v_cache.shape)}",
                f"shape {list(k_cache.shape)}, that of k_cache",
                "Both caches are [blocks, page_size, kv_heads, head_dim].",
            )
        if 0 in k_cache.shape[1:]:
            self.fail(
                "k_cache",
                f"shape {list(k_cache.shape)}",
                "a page_size, kv_heads and head_dim of 1 or more",
                "Only the number of blocks may be 0.",
            )
