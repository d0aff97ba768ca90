"""Projections that hold NVFP4 or BF16 weights and call the ops made for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flint_kernels.model import calls
from flint_kernels.model.calls import Launch

WEIGHT_FORMATS = ("nvfp4", "bf16")


def parameter(*shape: int, dtype: torch.dtype, device: torch.device | None) -> nn.Parameter:
    """An uninitialised tensor as a parameter: inference only, so packed types are allowed."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


class FormatModule(nn.Module):
    """A module whose dtypes belong to the checkpoint's format: casts leave them, devices move.

    `.half()`, `.float()` and `.to(dtype)` would otherwise turn E4M3 scales or the RoPE table into
    something that looks alike and computes nonsense.

    What runs in every step reads `_parameters` and `_modules` by name, which is what nn.Module does
    for an attribute once Python has failed to find it. The failure costs ten times as much as the
    look-up, and a decode step makes hundreds.
    """

    _parameters: dict[str, Any]
    _modules: dict[str, Any]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return super()._apply(_keeping_dtypes(fn), recurse)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *arguments: Any
    ) -> None:
        """As nn.Module's, which would convert values: bytes of E4M3 scales, say, as numbers.

        A module's parameters are checked with those of all modules in it, before one is changed.
        """
        for name, parameter in self.named_parameters(prefix.rstrip(".")):
            given = state_dict.get(name)
            if isinstance(given, Tensor) and given.dtype != parameter.dtype:
                raise TypeError(
                    f"state_dict[{name!r}]: got {given.dtype}; want {parameter.dtype}, the type of "
                    "the format. View raw bytes as that type (.view); convert values (.to) only "
                    "where they are values."
                )
        super()._load_from_state_dict(state_dict, prefix, *arguments)


class _KeepDtypes:
    def __init__(self, fn: Callable[[Tensor], Tensor]) -> None:
        self.fn = fn

    def __call__(self, tensor: Tensor) -> Tensor:
        probe = self.fn(tensor.new_empty(0))
        return self.fn(tensor) if probe.dtype == tensor.dtype else tensor.to(probe.device)


def _keeping_dtypes(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return fn if isinstance(fn, _KeepDtypes) else _KeepDtypes(fn)


class Weight(FormatModule):
    """One tensor named `weight`: a norm, the embedding, the router."""

    weight: nn.Parameter

    def __init__(self, *shape: int, device: torch.device | None) -> None:
        super().__init__()
        self.weight = parameter(*shape, dtype=torch.bfloat16, device=device)

    def tensor(self) -> Tensor:
        weight: Tensor = self._parameters["weight"]
        return weight


class Linear(FormatModule):
    """Rows of one or more projections, one under the other, that share their input.

    x is [M, K] in BF16 (or FP32, the oracle's mode); the methods are the ops of one format, and
    `enable_pdl` is theirs.
    """

    def __init__(self, in_features: int, shards: Sequence[int]) -> None:
        super().__init__()
        self.in_features = in_features
        self.shards = list(shards)

    @property
    def out_features(self) -> int:
        return sum(self.shards)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, shards={self.shards}"

    def operands(self) -> tuple[Tensor, ...]:
        """The weight's tensors as the ops of the format take them."""
        raise NotImplementedError

    def forward(self, x: Tensor, enable_pdl: bool = False) -> Tensor:
        """[M, N] in the dtype of x."""
        raise NotImplementedError

    def silu_and_mul(self, x: Tensor, enable_pdl: bool = False) -> Tensor:
        """For gate | up rows: [M, N / 2] in the dtype of x."""
        raise NotImplementedError

    def qkv_norm_rope_kv_write(self, x: Tensor, *arguments: Any, launch: Launch) -> Tensor:
        """For q | k | v rows: q [M, Hq, D]; `arguments` are the op's, from q_weight to eps."""
        raise NotImplementedError

    def logits(self, x: Tensor, enable_pdl: bool = False) -> Tensor:
        """For the head: [M, N] fp32."""
        raise NotImplementedError


class NVFP4Linear(Linear):
    """ModelOpt's three tensors.

    `weight` [N, K/2] uint8; `weight_scale` [N, K/16] float8_e4m3fn; `weight_scale_2` [shards] fp32.
    """

    def __init__(
        self, in_features: int, shards: Sequence[int], device: torch.device | None
    ) -> None:
        super().__init__(in_features, shards)
        check_nvfp4_width("in_features", in_features)
        rows = self.out_features
        self.weight = parameter(rows, in_features // 2, dtype=torch.uint8, device=device)
        self.weight_scale = parameter(
            rows, in_features // 16, dtype=torch.float8_e4m3fn, device=device
        )
        self.weight_scale_2 = parameter(len(self.shards), dtype=torch.float32, device=device)

    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """The three tensors, in the order of every op."""
        held = self._parameters
        return held["weight"], held["weight_scale"], held["weight_scale_2"]

    def forward(self, x: Tensor, enable_pdl: bool = False) -> Tensor:
        return calls.nvfp4_linear(x, *self.operands(), self.shards, enable_pdl=enable_pdl)

    def silu_and_mul(self, x: Tensor, enable_pdl: bool = False) -> Tensor:
        return calls.nvfp4_linear_silu_and_mul(x, *self.operands(), enable_pdl=enable_pdl)

    def qkv_norm_rope_kv_write(self, x: Tensor, *arguments: Any, launch: Launch) -> Tensor:
        return calls.nvfp4_qkv_norm_rope_kv_write(
            x,
            *self.operands(),
            *arguments,
            workspace=launch.workspace,
            enable_pdl=launch.enable_pdl,
        )

    def logits(self, x: Tensor, enable_pdl: bool = False) -> Tensor:
        return calls.nvfp4_lm_head(x, *self.operands(), enable_pdl=enable_pdl)


class BF16Linear(Linear):
    """`weight` [N, K] bfloat16."""

    def __init__(
        self, in_features: int, shards: Sequence[int], device: torch.device | None
    ) -> None:
        super().__init__(in_features, shards)
        self.weight = parameter(self.out_features, in_features, dtype=torch.bfloat16, device=device)

    def operands(self) -> tuple[Tensor]:
        """The one tensor, in the order of every op."""
        return (self._parameters["weight"],)

    def forward(self, x: Tensor, enable_pdl: bool = False) -> Tensor:
        return calls.bf16_linear(x, *self.operands(), enable_pdl=enable_pdl)

    def silu_and_mul(self, x: Tensor, enable_pdl: bool = False) -> Tensor:
        return calls.bf16_linear_silu_and_mul(x, *self.operands(), enable_pdl=enable_pdl)

    def qkv_norm_rope_kv_write(self, x: Tensor, *arguments: Any, launch: Launch) -> Tensor:
        return calls.bf16_qkv_norm_rope_kv_write(
            x,
            *self.operands(),
            *arguments,
            workspace=launch.workspace,
            enable_pdl=launch.enable_pdl,
        )

    def logits(self, x: Tensor, enable_pdl: bool = False) -> Tensor:
        return calls.bf16_lm_head(x, *self.operands(), enable_pdl=enable_pdl)


def make_linear(
    weight_format: str, in_features: int, shards: Sequence[int], device: torch.device | None
) -> Linear:
    return (NVFP4Linear if weight_format == "nvfp4" else BF16Linear)(in_features, shards, device)


def check_nvfp4_width(name: str, width: int) -> None:
    if width % 16 != 0:
        raise ValueError(
            f"{name}: got {width}; want a multiple of 16, since NVFP4 has one scale for 16 "
            "weights of a row. Use weight_format='bf16' for this config."
        )
