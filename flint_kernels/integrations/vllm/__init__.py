"""Flint in vLLM, with these ops: a plug-in that vLLM finds by itself (`vllm.general_plugins`).

vLLM has a Flint of its own, whose fast kernels are for data-center Blackwell. On Hopper the model
here takes its place; anywhere else it is chosen by its own architecture, `ARCHITECTURE`. vLLM's
scheduler, cache manager, sampler and servers stay as they are.
"""

from __future__ import annotations

ARCHITECTURE = "FlintKernelsForCausalLM"
REPLACED = "FlintForCausalLM"  # vLLM's own
BACKEND = "FLINT_KERNELS"
HOPPER = 9

_MODEL = f"{__name__}.model:FlintForCausalLM"


def register() -> None:
    """What the entry point calls, in every process of vLLM; once or more often."""
    from vllm import ModelRegistry
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if BACKEND not in AttentionBackendEnum.__members__:
        register_backend(BACKEND, f"{__name__}.attention.FlintBackend")
    ModelRegistry.register_model(ARCHITECTURE, _MODEL)
    # Asked of the driver's library: a plug-in must not start CUDA in a process that may fork.
    capability = current_platform.get_device_capability()
    if current_platform.is_cuda() and capability is not None and capability.major == HOPPER:
        ModelRegistry.register_model(REPLACED, _MODEL)
