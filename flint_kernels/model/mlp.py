"""The second half of a layer, its norm included: one dense SwiGLU, or routed and shared experts.

The norm belongs here because the low-latency path fuses it with the router. Every method takes x,
the rounded output of o_proj, and the residual, both [T, H] in the compute dtype, and returns the
MLP's output and the new residual.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flint_kernels.model import calls
from flint_kernels.model.calls import Launch
from flint_kernels.model.config import FlintConfig
from flint_kernels.model.linear import (
    FormatModule,
    Linear,
    Weight,
    check_nvfp4_width,
    make_linear,
    parameter,
)


class SwiGLU(FormatModule):
    """`down(silu(gate(x)) * up(x))`: a dense layer's MLP, or the shared expert."""

    def __init__(
        self, hidden: int, intermediate: int, weight_format: str, device: torch.device | None
    ) -> None:
        super().__init__()
        self.gate_up_proj = make_linear(weight_format, hidden, [intermediate] * 2, device)
        self.down_proj = make_linear(weight_format, intermediate, [hidden], device)

    def forward(self, x: Tensor, enable_pdl: bool = False) -> Tensor:
        held = self._modules
        act = held["gate_up_proj"].silu_and_mul(x, enable_pdl)
        out: Tensor = held["down_proj"](act, enable_pdl)
        return out


class DenseMLP(SwiGLU):
    """The MLP of a layer named by `mlp_only_layers`; decode and prefill run the same ops."""

    def __init__(
        self, config: FlintConfig, weight_format: str, device: torch.device | None
    ) -> None:
        super().__init__(config.hidden_size, config.intermediate_size, weight_format, device)
        self.eps = config.rms_norm_eps

    def decode(
        self, x: Tensor, residual: Tensor, norm: Tensor, launch: Launch
    ) -> tuple[Tensor, Tensor]:
        pdl = launch.enable_pdl
        normed, residual = calls.fused_add_rms_norm(x, residual, norm, self.eps, enable_pdl=pdl)
        return self(normed, pdl), residual

    prefill = decode


class NVFP4Experts(FormatModule):
    """`w13` [E, 2I, H/2] uint8, `w13_scale` [E, 2I, H/16] e4m3, `w13_scale_2` [E, 2] fp32 (gate's
    and up's); `w2` [E, H, I/2], `w2_scale` [E, H, I/16], `w2_scale_2` [E]."""

    def __init__(self, config: FlintConfig, device: torch.device | None) -> None:
        super().__init__()
        experts, hidden = config.num_experts, config.hidden_size
        width = config.moe_intermediate_size
        check_nvfp4_width("moe_intermediate_size", width)
        scale = torch.float8_e4m3fn
        self.w13 = parameter(experts, 2 * width, hidden // 2, dtype=torch.uint8, device=device)
        self.w13_scale = parameter(experts, 2 * width, hidden // 16, dtype=scale, device=device)
        self.w13_scale_2 = parameter(experts, 2, dtype=torch.float32, device=device)
        self.w2 = parameter(experts, hidden, width // 2, dtype=torch.uint8, device=device)
        self.w2_scale = parameter(experts, hidden, width // 16, dtype=scale, device=device)
        self.w2_scale_2 = parameter(experts, dtype=torch.float32, device=device)

    def gate_up(
        self, x: Tensor, ids: Tensor, shared: Linear, launch: Launch
    ) -> tuple[Tensor, Tensor]:
        return calls.nvfp4_moe_gate_up(
            x,
            ids,
            *self._tensors("w13"),
            *shared.operands(),
            workspace=launch.workspace,
            enable_pdl=launch.enable_pdl,
        )

    def down(
        self,
        routed: Tensor,
        shared_act: Tensor,
        weights: Tensor,
        ids: Tensor,
        shared: Linear,
        launch: Launch,
    ) -> Tensor:
        return calls.nvfp4_moe_down(
            routed,
            shared_act,
            weights,
            ids,
            *self._tensors("w2"),
            *shared.operands(),
            workspace=launch.workspace,
            enable_pdl=launch.enable_pdl,
        )

    def forward(
        self, x: Tensor, weights: Tensor, ids: Tensor, shared: Tensor, workspace: Tensor
    ) -> Tensor:
        return calls.nvfp4_routed_experts(
            x,
            weights,
            ids,
            *self._tensors("w13"),
            *self._tensors("w2"),
            shared,
            workspace=workspace,
        )

    def _tensors(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        held = self._parameters
        return held[name], held[name + "_scale"], held[name + "_scale_2"]


class BF16Experts(FormatModule):
    """`w13` [E, 2I, H], gate rows then up rows, and `w2` [E, H, I], both bfloat16."""

    def __init__(self, config: FlintConfig, device: torch.device | None) -> None:
        super().__init__()
        experts, hidden = config.num_experts, config.hidden_size
        width = config.moe_intermediate_size
        self.w13 = parameter(experts, 2 * width, hidden, dtype=torch.bfloat16, device=device)
        self.w2 = parameter(experts, hidden, width, dtype=torch.bfloat16, device=device)

    def gate_up(
        self, x: Tensor, ids: Tensor, shared: Linear, launch: Launch
    ) -> tuple[Tensor, Tensor]:
        return calls.bf16_moe_gate_up(
            x,
            ids,
            self._parameters["w13"],
            *shared.operands(),
            workspace=launch.workspace,
            enable_pdl=launch.enable_pdl,
        )

    def down(
        self,
        routed: Tensor,
        shared_act: Tensor,
        weights: Tensor,
        ids: Tensor,
        shared: Linear,
        launch: Launch,
    ) -> Tensor:
        w2 = self._parameters["w2"]
        return calls.bf16_moe_down(
            routed,
            shared_act,
            weights,
            ids,
            w2,
            *shared.operands(),
            workspace=launch.workspace,
            enable_pdl=launch.enable_pdl,
        )

    def forward(
        self, x: Tensor, weights: Tensor, ids: Tensor, shared: Tensor, workspace: Tensor
    ) -> Tensor:
        held = self._parameters
        return calls.bf16_routed_experts(
            x, weights, ids, held["w13"], held["w2"], shared, workspace=workspace
        )


class MoE(FormatModule):
    """Sigmoid router, `num_experts_per_tok` of `num_experts` experts, one shared expert."""

    def __init__(
        self, config: FlintConfig, weight_format: str, device: torch.device | None
    ) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.eps = config.rms_norm_eps
        self.gate = Weight(config.num_experts, config.hidden_size, device=device)
        self.experts = (NVFP4Experts if weight_format == "nvfp4" else BF16Experts)(config, device)
        self.shared_expert = SwiGLU(
            config.hidden_size, config.shared_expert_intermediate_size, weight_format, device
        )

    def decode(
        self, x: Tensor, residual: Tensor, norm: Tensor, launch: Launch
    ) -> tuple[Tensor, Tensor]:
        """The low-latency composition: three ops."""
        held = self._modules
        router, experts, shared = held["gate"], held["experts"], held["shared_expert"]._modules
        normed, residual, weights, ids = calls.fused_add_rms_norm_router_topk(
            x,
            residual,
            norm,
            router.tensor(),
            self.top_k,
            self.eps,
            workspace=launch.workspace,
            enable_pdl=launch.enable_pdl,
        )
        routed, shared_act = experts.gate_up(normed, ids, shared["gate_up_proj"], launch)
        output = experts.down(routed, shared_act, weights, ids, shared["down_proj"], launch)
        return output, residual

    def prefill(
        self, x: Tensor, residual: Tensor, norm: Tensor, launch: Launch
    ) -> tuple[Tensor, Tensor]:
        """The composition for many rows: the experts' rows grouped inside one op."""
        normed, residual = calls.fused_add_rms_norm(x, residual, norm, self.eps)
        weights, ids = calls.router_topk(calls.bf16_linear(normed, self.gate.weight), self.top_k)
        shared = self.shared_expert(normed)
        return self.experts(normed, weights, ids, shared, launch.workspace), residual
