"""flint-tiny's two sets of weights as safetensors files, under their HF names.

`save_bf16`: every parameter in BF16. `save_nvfp4`: linears and head as ModelOpt's three tensors
(`X.weight`, `X.weight_scale`, `X.weight_scale_2`), all others in BF16. Both split a layer's stacked
experts; both loaders stack them again and return fp32 values.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flint_kernels.flint_tiny.model import Parameters
from flint_kernels.flint_tiny.quantization import is_quantized
from flint_kernels.formats import nvfp4

_STACKED = re.compile(r"^(.*\.mlp\.experts)\.(\w+_proj\.weight)$")
_SPLIT = re.compile(r"^(.*\.mlp\.experts)\.(\d+)\.(\w+_proj\.weight)$")


def split_experts(parameters: Parameters) -> dict[str, Tensor]:
    """HF names: `...experts.gate_proj.weight` [E, F, H] to `...experts.{e}.gate_proj.weight`."""
    result = {}
    for name, value in parameters.items():
        stacked = _STACKED.match(name)
        if stacked:
            for expert, matrix in enumerate(value):
                result[f"{stacked[1]}.{expert}.{stacked[2]}"] = matrix.contiguous()
        else:
            result[name] = value.contiguous()
    return result


def stack_experts(tensors: dict[str, Tensor]) -> Parameters:
    """The inverse of `split_experts`, experts in the order of their numbers."""
    result: Parameters = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, value in tensors.items():
        split = _SPLIT.match(name)
        if split:
            experts.setdefault(f"{split[1]}.{split[3]}", {})[int(split[2])] = value
        else:
            result[name] = value
    for name, matrices in experts.items():
        result[name] = torch.stack([matrices[expert] for expert in range(len(matrices))])
    return result


def save_bf16(parameters: Parameters, path: Path) -> None:
    """Write fp32 `parameters`, rounded to BF16, to the safetensors file `path`."""
    tensors = {
        name: value.detach().cpu().bfloat16() for name, value in split_experts(parameters).items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(path), metadata={"format": "pt"})


def load_bf16(path: Path) -> Parameters:
    """The parameters of a file that `save_bf16` wrote, in fp32."""
    return stack_experts({name: value.float() for name, value in load_file(str(path)).items()})


def save_nvfp4(parameters: Parameters, path: Path) -> None:
    """Quantise fp32 `parameters` and write them to the safetensors file `path`.

    On the CPU whatever their device, so that a file depends on the weights alone.
    """
    tensors: dict[str, Tensor] = {}
    on_cpu = {name: value.detach().cpu() for name, value in parameters.items()}
    for name, value in split_experts(on_cpu).items():
        if is_quantized(name):
            weight, scale, scale_2 = nvfp4.quantize(value)
            tensors |= {name: weight, f"{name}_scale": scale, f"{name}_scale_2": scale_2}
        else:
            tensors[name] = value.bfloat16()
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(path), metadata={"format": "pt"})


def load_nvfp4(path: Path) -> Parameters:
    """The values of a file that `save_nvfp4` wrote, dequantised to fp32."""
    tensors = load_file(str(path))
    values = {}
    for name, value in tensors.items():
        if not name.endswith(".weight") and not name.endswith("softmax_offset"):
            continue
        scale = tensors.get(f"{name}_scale")
        if scale is None:
            values[name] = value.float()
        else:
            values[name] = nvfp4.dequantize(value, scale, tensors[f"{name}_scale_2"])
    return stack_experts(values)
