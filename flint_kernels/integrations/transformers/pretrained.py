"""What `from_pretrained` makes of its arguments: files, config, device, and the loaded module."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig

from flint_kernels.integrations.transformers.arguments import unsupported
from flint_kernels.loading import load
from flint_kernels.loading.source import Files, find, read_config
from flint_kernels.model import Flint
from flint_kernels.model import FlintConfig as Shape

if TYPE_CHECKING:
    from flint_kernels.integrations.transformers.config import FlintConfig

# Of downloads, of code from a hub and of how Transformers loads by itself: there is none of these.
_WITHOUT_EFFECT = (
    "_commit_hash",
    "_from_auto",
    "_from_pipeline",
    "adapter_kwargs",
    "cache_dir",
    "force_download",
    "local_files_only",
    "low_cpu_mem_usage",
    "proxies",
    "revision",
    "token",
    "tqdm_class",
    "trust_remote_code",
    "use_safetensors",
    "weights_only",
)
# Where None, or what is named, is the only value there is.
_ONLY: Mapping[str, tuple[object, ...]] = {
    "attn_implementation": ("eager",),  # Transformers' name for what is a model's own
    "experts_implementation": (),
    "quantization_config": (),
    "subfolder": ("",),
    "variant": (),
    "output_loading_info": (False,),
    "max_memory": (),
    "offload_folder": (),
    "tp_plan": (),
    "state_dict": (),
    "dtype": ("auto", "bfloat16", torch.bfloat16),
    "torch_dtype": ("auto", "bfloat16", torch.bfloat16),
}
_REMEDY = {
    "attn_implementation": "Attention is an op of its own. Leave the argument out",
    "dtype": "Dtypes belong to the checkpoint's format. Leave the argument out",
    "quantization_config": "Load the NVFP4 checkpoint, which is quantised already",
}


def locate(path: str | os.PathLike[str], kwargs: dict[str, Any]) -> Files:
    """The checkpoint's files; takes `gguf_file` out of kwargs.

    Raises FileNotFoundError where there are none, ValueError where it is not clear which.
    """
    gguf_file = kwargs.pop("gguf_file", None)
    try:
        return find(path if gguf_file is None else os.path.join(path, gguf_file))
    except FileNotFoundError as error:
        if os.path.exists(path):
            raise
        raise FileNotFoundError(
            f"{error}. Nothing is downloaded here: `hf download {os.fspath(path)} --local-dir "
            "FOLDER` fetches a checkpoint, then pass the folder"
        ) from error


def take_config(kind: type[FlintConfig], files: Files, kwargs: dict[str, Any]) -> FlintConfig:
    """`config` of kwargs, or the folder's, with the fields that kwargs has for it.

    Raises TypeError for a config of another kind.
    """
    config = kwargs.pop("config", None)
    if config is None:
        own = {name: kwargs.pop(name) for name in list(kwargs) if name in kind.__dataclass_fields__}
        read: FlintConfig = kind.from_pretrained(files.folder, **own)
        return read
    if not isinstance(config, kind):
        raise TypeError(
            f"config: got {type(config).__name__} of {type(config).__module__}; want this "
            "package's FlintConfig. AutoConfig.from_pretrained gives one."
        )
    return config


def take_device(kwargs: dict[str, Any]) -> torch.device:
    """The one device of `device_map`; raises ValueError for a map to several, or to a disk."""
    wanted = kwargs.pop("device_map", None)
    if isinstance(wanted, Mapping):
        devices = set(wanted.values())
        if len(devices) != 1:
            raise _device_error(wanted)
        (wanted,) = devices
    if wanted is None:
        return torch.device("cpu")
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if isinstance(wanted, int) and not isinstance(wanted, bool):
        return torch.device("cuda", wanted)
    try:
        device = torch.device(wanted)
    except (RuntimeError, TypeError) as error:
        raise _device_error(wanted) from error
    if device.type not in ("cpu", "cuda"):
        raise _device_error(wanted)
    return device


def check_rest(kwargs: Mapping[str, Any]) -> None:
    """Raises for arguments that would have an effect elsewhere, and that can have none here."""
    for name, value in kwargs.items():
        if name in _WITHOUT_EFFECT or value is None:
            continue
        if name not in _ONLY:
            raise TypeError(
                f"from_pretrained: got the argument {name!r}; want those that its documentation "
                "names. Leave it out."
            )
        if not any(value is want or value == want for want in _ONLY[name]):
            want = " or ".join(["None", *map(repr, _ONLY[name])])
            remedy = _REMEDY.get(name.removeprefix("torch_"), "Leave the argument out")
            raise unsupported(name, repr(value), want, remedy)


def load_model(files: Files, config: FlintConfig, device: torch.device) -> Flint:
    """The checkpoint as the library loads it, for as many positions as the config has."""
    shape = read_config(files)
    check_shape(config, shape)
    positions = min(config.max_position_embeddings, shape.max_position_embeddings)
    return load(
        files.weights[0] if files.is_gguf else files.path,
        device=device,
        config=shape,
        max_positions=positions,
    )


def check_shape(config: FlintConfig, shape: Shape) -> None:
    """Raises ValueError where the config that Transformers has is not that of the weights.

    The two read a file by themselves, and differ in what a field that is absent means.
    """
    asked = config.shape()
    for field in dataclasses.fields(Shape):
        got, want = getattr(asked, field.name), getattr(shape, field.name)
        if field.name == "eos_token_ids":  # generation's, and a choice
            continue
        if field.name == "max_position_embeddings" and got <= want:
            continue
        if got != want:
            raise unsupported(
                f"config.{field.name}",
                str(got),
                f"{want}, that of the weights",
                "Leave it as it is in the config.json; where the file does not say, write it there",
            )


def generation_config(files: Files, default: GenerationConfig) -> GenerationConfig:
    """That of the folder, or `default` where there is none."""
    if not (files.folder / "generation_config.json").is_file():
        return default
    read: GenerationConfig = GenerationConfig.from_pretrained(files.folder)
    return read


def _device_error(got: object) -> ValueError:
    return unsupported(
        "device_map",
        repr(got),
        "one device: 'auto', 'cpu', 'cuda', a number, or {'': device}",
        "The model runs on one GPU, or on the CPU",
    )
