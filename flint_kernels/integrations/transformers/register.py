"""Makes the Auto classes of Transformers give the classes of this package."""

from __future__ import annotations

from transformers import AutoConfig, AutoModelForCausalLM

from flint_kernels.integrations.transformers.config import FlintConfig
from flint_kernels.integrations.transformers.model import FlintForCausalLM


def register() -> None:
    """For the model type "flint", in this process. `exist_ok`: Transformers has classes for it."""
    AutoConfig.register(FlintConfig.model_type, FlintConfig, exist_ok=True)
    AutoModelForCausalLM.register(FlintConfig, FlintForCausalLM, exist_ok=True)
