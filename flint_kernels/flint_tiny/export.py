"""Make flint-tiny's two checkpoints from what `train` wrote, and read both back.

    python -m flint_kernels.flint_tiny.export --data build/flint_tiny --run build/flint_tiny_run \\
        [--output flint_kernels/flint_tiny/checkpoint]

writes, 13.8 MB in all,

    bf16/   model.safetensors       config.json generation_config.json tokenizer(_config).json
    nvfp4/  flint-tiny-nvfp4.gguf   the same four
    training_log.json

Needs the `gguf` package. The GGUF holds the very codes and scales of the run's ModelOpt tensors;
`check_gguf` compares the values that `gguf` itself decodes with theirs, all of them, and raises
where one differs. The same run gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as GgmlType
from safetensors.torch import load_file
from torch import Tensor

from flint_kernels.flint_tiny.model import parameter_shapes, tiny_config
from flint_kernels.flint_tiny.tensors import load_nvfp4, stack_experts
from flint_kernels.flint_tiny.tokenizer import END_OF_TEXT_ID
from flint_kernels.formats import nvfp4
from flint_kernels.model.config import FlintConfig

log = logging.getLogger(__name__)

GGUF_FILE = "flint-tiny-nvfp4.gguf"

_LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "self_attn.softmax_offset": "attn_sinks.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    **{
        f"mlp.{theirs}{part}_proj.weight": f"ffn_{part}{ours}.weight"
        for theirs, ours in (("", ""), ("experts.", "_exps"), ("shared_expert.", "_shexp"))
        for part in ("gate", "up", "down")
    },
}
_OTHER_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_name(name: str) -> str:
    """The GGUF name of the parameter `name` (stacked experts)."""
    if name in _OTHER_NAMES:
        return _OTHER_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[rest]}"


def config_json(config: FlintConfig) -> dict[str, Any]:
    """The fields of config.json."""
    return {
        "architectures": ["FlintForCausalLM"],
        "model_type": "flint",
        "torch_dtype": "bfloat16",
        **config.to_dict(),
        "rope_theta": config.rope_theta,
        "bos_token_id": END_OF_TEXT_ID,
        "eos_token_id": END_OF_TEXT_ID,
    }


def generation_config_json() -> dict[str, Any]:
    """The fields of generation_config.json: Flint's default sampling."""
    return {
        "bos_token_id": END_OF_TEXT_ID,
        "eos_token_id": END_OF_TEXT_ID,
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 0.95,
        "top_k": 20,
    }


def write_companions(config: FlintConfig, data: Path, folder: Path) -> None:
    """Write the two config files into `folder` and copy the tokenizer from `data`."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {"config.json": config_json(config), "generation_config.json": generation_config_json()}
    for file, fields in files.items():
        (folder / file).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(data / file, folder / file)


def gguf_tensors(
    config: FlintConfig, modelopt: dict[str, Tensor]
) -> Iterator[tuple[str, np.ndarray, GgmlType]]:
    """Name, bytes and type of each GGUF tensor, in the order of the forward pass.

    `modelopt`: the file that `tensors.save_nvfp4` wrote. NVFP4 tensors come as uint8
    [..., N, K/64 * 36], each followed by its `.scale`, F32 [1] or [experts]. Embedding and router
    are BF16; norms and sinks, being vectors, F32.
    """
    for name in parameter_shapes(config):
        target = gguf_name(name)
        parts = list(_parts(name, modelopt, config))
        if f"{parts[0]}_scale" not in modelopt:
            yield target, *_plain(modelopt[name])
            continue
        blocks = [
            nvfp4.modelopt_to_gguf(modelopt[part], modelopt[f"{part}_scale"], name=part)
            for part in parts
        ]
        scales = [modelopt[f"{part}_scale_2"].reshape(()) for part in parts]
        packed = torch.stack(blocks) if len(parts) > 1 else blocks[0]
        yield target, packed.numpy(), GgmlType.NVFP4
        name_of_scale = target.removesuffix(".weight") + ".scale"
        yield name_of_scale, torch.stack(scales).float().numpy(), GgmlType.F32


def _parts(name: str, modelopt: dict[str, Tensor], config: FlintConfig) -> Iterator[str]:
    """The HF names that the parameter `name` is made of: one, or one for each expert."""
    if ".experts." not in name:
        yield name
        return
    for expert in range(config.num_experts):
        yield name.replace(".experts.", f".experts.{expert}.")


def _plain(value: Tensor) -> tuple[np.ndarray, GgmlType]:
    if value.dim() == 1:
        return value.float().numpy(), GgmlType.F32
    return value.bfloat16().view(torch.uint8).numpy(), GgmlType.BF16


def write_gguf(config: FlintConfig, modelopt: dict[str, Tensor], path: Path) -> None:
    """Write the NVFP4 GGUF `path` from ModelOpt tensors."""
    writer = gguf.GGUFWriter(path, "flint")
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name("flint-tiny")
    writer.add_description("Flint's architecture in small, trained on CPython's standard library")
    writer.add_license("apache-2.0")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_NVFP4)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_leading_dense_block_count(len(config.mlp_only_layers))
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_sliding_window(config.sliding_window or 0)
    writer.add_sliding_window_pattern(
        [config.window(layer) > 0 for layer in range(config.num_hidden_layers)]
    )
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_shared_count(1)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_norm(True)
    for name, value, kind in gguf_tensors(config, modelopt):
        writer.add_tensor(name, value, raw_dtype=kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def check_gguf(config: FlintConfig, path: Path, run: Path) -> None:
    """Decode `path` with the `gguf` package and compare every value with the run's NVFP4 file.

    Raises ValueError naming the first tensor that is missing, unexpected or differs.
    """
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    expected = load_nvfp4(run / "nvfp4" / "model.safetensors")
    for name in parameter_shapes(config):
        target = gguf_name(name)
        if target not in found:
            raise ValueError(f"{path}: no tensor {target}, wanted one for {name}; export again")
        tensor = found.pop(target)
        value = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy()).float()
        if tensor.tensor_type == GgmlType.NVFP4:
            scale = torch.from_numpy(found.pop(target.removesuffix("weight") + "scale").data.copy())
            value = value * (scale[:, None, None] if len(scale) > 1 else scale)
        if value.shape != expected[name].shape or not bool((value == expected[name]).all()):
            raise ValueError(
                f"{path}: {target} {list(value.shape)} differs from {name} "
                f"{list(expected[name].shape)} of {run}; wanted equal values, export again"
            )
    if found:
        raise ValueError(f"{path}: tensors {sorted(found)} that no parameter has; export again")


def export(data: Path, run: Path, output: Path) -> int:
    """Write both checkpoints into `output`, check them and return their size in bytes."""
    config = tiny_config()
    weights = load_file(str(run / "bf16" / "model.safetensors"))
    shapes = {name: tuple(value.shape) for name, value in stack_experts(weights).items()}
    types = {value.dtype for value in weights.values()}
    if shapes != parameter_shapes(config) or types != {torch.bfloat16}:
        raise ValueError(
            f"run: the tensors of {run}/bf16/model.safetensors are not flint-tiny's in BF16; "
            "pass the output folder of flint_kernels.flint_tiny.train"
        )
    for kind in ("bf16", "nvfp4"):
        write_companions(config, data, output / kind)
    shutil.copyfile(run / "bf16" / "model.safetensors", output / "bf16" / "model.safetensors")
    modelopt = load_file(str(run / "nvfp4" / "model.safetensors"))
    write_gguf(config, modelopt, output / "nvfp4" / GGUF_FILE)
    check_gguf(config, output / "nvfp4" / GGUF_FILE, run)
    shutil.copyfile(run / "training_log.json", output / "training_log.json")
    return sum(path.stat().st_size for path in output.rglob("*") if path.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="what `corpus` wrote")
    parser.add_argument("--run", type=Path, required=True, help="what `train` wrote")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "checkpoint")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    size = export(arguments.data, arguments.run, arguments.output)
    log.info("%s: %.2f MB, values equal to the run's", arguments.output, size / 1e6)


if __name__ == "__main__":
    main()
