"""`FlintConfig` as Transformers has it, with the fields of a config.json that it leaves out."""

from __future__ import annotations

from typing import Any

import transformers
from huggingface_hub.dataclasses import strict

from flint_kernels.model import FlintConfig as Shape
from flint_kernels.model.config import FULL

# `transformers serve` looks the name of the architecture up in the package `transformers`, where
# the model's own name gives the class that Transformers has by itself. This name is looked up there
# too, and sends it through the registry, where this integration is.
_THROUGH_THE_REGISTRY = "AutoModelForCausalLM"
_ARCHITECTURE = "FlintForCausalLM"


@strict
class FlintConfig(transformers.FlintConfig):
    """The config of Transformers for the model type "flint".

    Attributes:
        no_rope_layer_indices: layers without positional encoding. Transformers' own model takes the
            full-attention layers whatever the file says; here it has to be said.

    `architectures` is ["AutoModelForCausalLM"], by which `transformers serve` finds the registered
    class; a saved file says ["FlintForCausalLM"].
    """

    no_rope_layer_indices: list[int] | None = None
    # None where use_sliding_window is false; Transformers' own wants a number.
    sliding_window: int | None = 513  # type: ignore[assignment]

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]
        self.architectures = [_THROUGH_THE_REGISTRY]

    def to_dict(self) -> dict[str, Any]:
        """The fields of a config.json."""
        fields: dict[str, Any] = super().to_dict()
        fields["architectures"] = [_ARCHITECTURE]
        return fields

    def shape(self) -> Shape:
        """The model's shape, checked.

        Raises:
            TypeError, ValueError: what `flint_kernels.model.FlintConfig` refuses, or no
                `no_rope_layer_indices`.
        """
        if self.no_rope_layer_indices is None:
            full = [layer for layer, kind in enumerate(self.layer_types or ()) if kind == FULL]
            raise ValueError(
                "config field 'no_rope_layer_indices': got nothing; want the layers without RoPE. "
                f"Write {full} into the config.json for the full-attention layers, which is what "
                "Transformers' own model takes, or [] for none."
            )
        return Shape.from_dict(self.to_dict())
