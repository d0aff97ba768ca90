"""Which tensor of a checkpoint goes where in the module: the one map that all formats share.

`checkpoint_tensors` lists what a checkpoint of a config holds, each tensor under its HF and its
GGUF name, with the place of its values in a `Flint`. Loaders, savers and checks are generated
from that list, so that no name is written twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from flint_kernels.model.config import FlintConfig


class Kind(Enum):
    """What a tensor is in memory."""

    LINEAR = "linear"
    """A matrix product: BF16, or NVFP4 with its two scale tensors."""
    BF16 = "bf16"
    """Norms, router and embedding: BF16 in either checkpoint."""
    FP32 = "fp32"
    """Sinks."""


@dataclass(frozen=True)
class Target:
    """Where in the module the values of one checkpoint tensor live."""

    path: str
    """The parameter. Of NVFP4, `path + "_scale"` and `path + "_scale_2"` are the scales."""
    kind: Kind
    shape: tuple[int, ...]
    """Of the values, as the checkpoint has them: [N, K], [experts, N, K], [H], ..."""
    first_row: int = 0
    """Of N, where a fused parameter (q|k|v, gate|up) holds several tensors."""
    shard: int = 0
    """Index of the tensor's global scale among those of the fused parameter."""
    expert: int | slice | None = None
    """Expert, or all experts stacked, where the parameter has an expert axis."""

    def weight(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """The view to be written: [..., N, K] (NVFP4: [..., N, K/2] uint8)."""
        return self._rows(parameters[self.path])

    def weight_scale(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Of an NVFP4 linear: [..., N, K/16] float8_e4m3fn."""
        return self._rows(parameters[self.path + "_scale"])

    def weight_scale_2(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Of an NVFP4 linear: fp32, [] or, for stacked experts, [experts]."""
        scales = parameters[self.path + "_scale_2"]
        if self.expert is None:
            return scales[self.shard]
        return scales[self.expert] if scales.dim() == 1 else scales[self.expert, self.shard]

    def views(self, parameters: Mapping[str, Tensor], weight_format: str) -> dict[str, Tensor]:
        """All that the tensor fills: path of a parameter -> its part there."""
        views = {self.path: self.weight(parameters)}
        if self.kind is Kind.LINEAR and weight_format == "nvfp4":
            views[self.path + "_scale"] = self.weight_scale(parameters)
            views[self.path + "_scale_2"] = self.weight_scale_2(parameters)
        return views

    def _rows(self, parameter: Tensor) -> Tensor:
        if self.kind is not Kind.LINEAR:
            return parameter
        rows = slice(self.first_row, self.first_row + self.shape[-2])
        return parameter[rows] if self.expert is None else parameter[self.expert, rows]


@dataclass(frozen=True)
class CheckpointTensor:
    """One tensor of a checkpoint; a layer's routed experts are one, stacked, as GGUF has them."""

    hf: str
    """HF name; `{e}` stands for the expert in the name of stacked ones."""
    gguf: str
    target: Target

    def hf_targets(self) -> Iterator[tuple[str, Target]]:
        """HF names and targets: one for each expert."""
        if not isinstance(self.target.expert, slice):
            yield self.hf, self.target
            return
        experts, *shape = self.target.shape
        for expert in range(experts):
            yield (
                self.hf.format(e=expert),
                replace(self.target, expert=expert, shape=tuple(shape)),
            )


def checkpoint_tensors(config: FlintConfig) -> Iterator[CheckpointTensor]:
    """Every tensor of a checkpoint of this config, in the order of the forward pass."""
    hidden = config.hidden_size

    def plain(hf: str, gguf: str, path: str, *shape: int) -> CheckpointTensor:
        return CheckpointTensor(hf, gguf, Target(path, Kind.BF16, shape))

    vocabulary = (config.vocab_size, hidden)
    yield plain(
        "model.embed_tokens.weight", "token_embd.weight", "embed_tokens.weight", *vocabulary
    )
    for layer in range(config.num_hidden_layers):
        module, hf, gguf = f"layers.{layer}", f"model.layers.{layer}", f"blk.{layer}"
        norm = "input_layernorm.weight"
        yield plain(f"{hf}.{norm}", f"{gguf}.attn_norm.weight", f"{module}.{norm}", hidden)
        yield from _attention(config, module, hf, gguf)
        norm = "post_attention_layernorm.weight"
        yield plain(f"{hf}.{norm}", f"{gguf}.ffn_norm.weight", f"{module}.{norm}", hidden)
        module, hf = f"{module}.mlp", f"{hf}.mlp"
        if config.is_dense(layer):
            yield from _swiglu(
                module, hf, gguf, suffix="", hidden=hidden, width=config.intermediate_size
            )
            continue
        router = (config.num_experts, hidden)
        yield plain(
            f"{hf}.gate.weight", f"{gguf}.ffn_gate_inp.weight", f"{module}.gate.weight", *router
        )
        yield from _experts(config, module, hf, gguf)
        yield from _swiglu(
            f"{module}.shared_expert",
            f"{hf}.shared_expert",
            gguf,
            suffix="_shexp",
            hidden=hidden,
            width=config.shared_expert_intermediate_size,
        )
    yield plain("model.norm.weight", "output_norm.weight", "norm.weight", hidden)
    yield CheckpointTensor(
        "lm_head.weight", "output.weight", Target("lm_head.weight", Kind.LINEAR, vocabulary)
    )


def _attention(config: FlintConfig, module: str, hf: str, gguf: str) -> Iterator[CheckpointTensor]:
    module, hf = f"{module}.self_attn", f"{hf}.self_attn"
    first = 0
    for shard, (letter, rows) in enumerate(zip("qkv", config.qkv_sizes, strict=True)):
        target = Target(
            f"{module}.qkv_proj.weight", Kind.LINEAR, (rows, config.hidden_size), first, shard
        )
        yield CheckpointTensor(f"{hf}.{letter}_proj.weight", f"{gguf}.attn_{letter}.weight", target)
        first += rows
    for letter in "qk":
        name = f"{letter}_norm.weight"
        target = Target(f"{module}.{name}", Kind.BF16, (config.head_dim,))
        yield CheckpointTensor(f"{hf}.{name}", f"{gguf}.attn_{name}", target)
    target = Target(f"{module}.sinks", Kind.FP32, (config.num_attention_heads,))
    yield CheckpointTensor(f"{hf}.softmax_offset", f"{gguf}.attn_sinks.weight", target)
    target = Target(
        f"{module}.o_proj.weight", Kind.LINEAR, (config.hidden_size, config.qkv_sizes[0])
    )
    yield CheckpointTensor(f"{hf}.o_proj.weight", f"{gguf}.attn_output.weight", target)


def _swiglu(
    module: str, hf: str, gguf: str, *, suffix: str, hidden: int, width: int
) -> Iterator[CheckpointTensor]:
    """A dense MLP or the shared expert: gate and up fused, down alone."""
    for shard, part in enumerate(("gate", "up")):
        target = Target(
            f"{module}.gate_up_proj.weight", Kind.LINEAR, (width, hidden), shard * width, shard
        )
        yield CheckpointTensor(
            f"{hf}.{part}_proj.weight", f"{gguf}.ffn_{part}{suffix}.weight", target
        )
    target = Target(f"{module}.down_proj.weight", Kind.LINEAR, (hidden, width))
    yield CheckpointTensor(f"{hf}.down_proj.weight", f"{gguf}.ffn_down{suffix}.weight", target)


def _experts(config: FlintConfig, module: str, hf: str, gguf: str) -> Iterator[CheckpointTensor]:
    experts, hidden, width = config.num_experts, config.hidden_size, config.moe_intermediate_size
    every = slice(0, experts)
    for part, path, rows, columns, shard in (
        ("gate", "w13", width, hidden, 0),
        ("up", "w13", width, hidden, 1),
        ("down", "w2", hidden, width, 0),
    ):
        target = Target(
            f"{module}.experts.{path}",
            Kind.LINEAR,
            (experts, rows, columns),
            shard * rows,
            shard,
            every,
        )
        yield CheckpointTensor(
            f"{hf}.experts.{{e}}.{part}_proj.weight", f"{gguf}.ffn_{part}_exps.weight", target
        )


def hf_targets(config: FlintConfig) -> dict[str, Target]:
    """HF name -> target, of every tensor of a BF16 checkpoint."""
    return dict(pair for tensor in checkpoint_tensors(config) for pair in tensor.hf_targets())


def gguf_targets(config: FlintConfig) -> dict[str, Target]:
    """GGUF name -> target; the `.scale` companions of the linears are not listed."""
    return {tensor.gguf: tensor.target for tensor in checkpoint_tensors(config)}


def gguf_to_hf(config: FlintConfig) -> dict[str, str]:
    """GGUF name -> HF name (`{e}` for the expert in that of stacked ones)."""
    return {tensor.gguf: tensor.hf for tensor in checkpoint_tensors(config)}
