"""A `Flint` of any config with random weights, made where it is to run.

For measuring and testing at any size: NVFP4 codes and scales are drawn in packed form, in place, so
that the full model needs no memory beside its own. The values are chosen so that the model behaves
like a trained one where kernels could tell the difference: logits have a standard deviation of
about 3, all experts are used, attention is selective, the layers matter, and every tensor (expert,
shard) has a global scale of its own. And it is as well conditioned as a trained one: BF16 and FP32
agree on the top token of some 95% of positions (measured at 14 layers).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flint_kernels.formats.nvfp4 import E2M1_VALUES
from flint_kernels.loading.names import Kind, Target, checkpoint_tensors
from flint_kernels.model.config import FlintConfig
from flint_kernels.model.flint import Flint

LOGIT_STD = 3.0

# Block scales 0.5 to 1.875: two binades with every significand.
_SCALE_BYTES = (0x30, 0x40)
# Mean of q_norm and k_norm: attention logits get a standard deviation of 1.25^2, so that some keys
# out of a window of hundreds stand out. Norm weights of one would average all of them away.
_QK_NORM = 1.25
# What each layer adds, times the root of their number. At 2 the model is chaotic: routing that
# flips in one layer changes all later ones, and BF16 agrees with FP32 on 68% of the top tokens.
_RESIDUAL = 1.0
_NORM_SPREAD = 0.1


def synthetic(
    config: FlintConfig,
    weight_format: str = "nvfp4",
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    max_positions: int | None = None,
) -> Flint:
    """Random weights, the same for the same seed, config and kind of device.

    Args:
        config: any shape.
        weight_format: "nvfp4" or "bf16".
        seed: of the device's own generator.
        device: where the tensors are made and stay.
        max_positions: as `Flint` takes it.

    Raises:
        ValueError: `weight_format` or `max_positions` is not one that `Flint` takes.
    """
    model = Flint(config, weight_format, device, max_positions)
    generator = torch.Generator(device=model.device).manual_seed(seed)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for tensor in checkpoint_tensors(config):
        target = tensor.target
        if target.kind is Kind.LINEAR and weight_format == "nvfp4":
            _draw_nvfp4(target, parameters, _weight_std(target, config), generator)
        else:
            _draw_plain(target, target.weight(parameters), config, generator)
    return model


def _weight_std(target: Target, config: FlintConfig) -> float:
    """Keeps what a projection puts out near 1, given inputs near 1.

    What writes to the residual stream is made smaller by the root of the number of layers, so that
    the stream grows by the same factor over all of them, however many there are.
    """
    std = 1 / math.sqrt(target.shape[-1])
    residual = _RESIDUAL / math.sqrt(config.num_hidden_layers)
    if target.path == "lm_head.weight":
        return LOGIT_STD * std
    if target.path.endswith(("o_proj.weight", "down_proj.weight")):
        return residual * std
    if target.path.endswith("experts.w2"):
        # Averaging over the selected experts takes this root away again.
        return residual * std * math.sqrt(config.num_experts_per_tok)
    return std


def _draw_nvfp4(
    target: Target, parameters: dict[str, Tensor], std: float, generator: torch.Generator
) -> None:
    """Uniform codes and block scales; the global scale makes the values' deviation `std`.

    It varies by tensor (expert, shard) within a factor of 1.7, with mean square 1.
    """
    target.weight(parameters).random_(0, 256, generator=generator)
    scale = target.weight_scale(parameters).view(torch.uint8)
    scale.random_(*_SCALE_BYTES, generator=generator)
    global_scale = target.weight_scale_2(parameters)
    square = torch.rand(global_scale.shape, generator=generator, device=global_scale.device) + 0.5
    global_scale.copy_(square.sqrt() * (std / _packed_rms()))


def _packed_rms() -> float:
    """Of `e2m1 * e4m3` for uniform codes and scale bytes."""
    codes = torch.tensor(E2M1_VALUES, device="cpu").double()
    scales = torch.arange(*_SCALE_BYTES, dtype=torch.uint8, device="cpu")
    scales = scales.view(torch.float8_e4m3fn).double()
    return math.sqrt(codes.square().mean().item() * scales.square().mean().item())


def _draw_plain(
    target: Target, weight: Tensor, config: FlintConfig, generator: torch.Generator
) -> None:
    mean, std = 0.0, 1.0  # sinks, embedding
    if target.kind is Kind.LINEAR or target.path.endswith("mlp.gate.weight"):
        std = _weight_std(target, config)
    elif len(target.shape) == 1 and target.kind is Kind.BF16:
        mean = _QK_NORM if target.path.endswith(("q_norm.weight", "k_norm.weight")) else 1.0
        std = _NORM_SPREAD * mean
    weight.normal_(mean, std, generator=generator)
