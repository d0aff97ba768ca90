"""The device that a command runs on."""

from __future__ import annotations

import torch

from flint_kernels.ops import REGISTRY

# A device's type -> the dispatch key under which every op may have a body for it.
_KEYS = {"cpu": "CPU", "cuda": "CUDA"}


def choose_device(name: str | None) -> torch.device:
    """The device of that name; None: "cuda" where there is a GPU and bodies for it, else "cpu".

    Raises:
        ValueError: there is no such device here, or the ops have no bodies for it.
    """
    if name is None:
        return torch.device("cuda" if _has_bodies("cuda") and torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise _error(name, "torch knows no such device") from error
    if not _has_bodies(device.type):
        raise _error(name, "the ops have no bodies for it")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise _error(name, "torch sees no GPU here")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise _error(name, f"torch sees {torch.cuda.device_count()} GPUs here")
    return device


def _has_bodies(kind: str) -> bool:
    key = _KEYS.get(kind)
    return all(key in declaration.bodies for declaration in REGISTRY.values())


def _error(name: str, why: str) -> ValueError:
    usable = [kind for kind in _KEYS if _has_bodies(kind)]
    return ValueError(f"--device: got {name!r}, but {why}; want {' or '.join(usable)}.")
