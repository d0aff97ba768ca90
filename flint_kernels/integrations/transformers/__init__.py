"""Flint in Hugging Face Transformers, with these ops: importing this package registers it.

From then on `AutoConfig` and `AutoModelForCausalLM` take every checkpoint of the model type "flint"
to the classes here. They take the place of the ones that Transformers has for it by itself, which
stay reachable by their own names (`transformers.FlintForCausalLM`).

Raises ImportError where Transformers is missing or too old.
"""

from flint_kernels.integrations.transformers import requirement

requirement.check()

from flint_kernels.integrations.transformers.cache import FlintCache  # noqa: E402
from flint_kernels.integrations.transformers.config import FlintConfig  # noqa: E402
from flint_kernels.integrations.transformers.model import FlintForCausalLM  # noqa: E402
from flint_kernels.integrations.transformers.register import register  # noqa: E402

__all__ = ["FlintCache", "FlintConfig", "FlintForCausalLM"]

register()
