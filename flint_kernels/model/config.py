"""`FlintConfig`: the model's shape, read from a Hugging Face config.json and checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flint_kernels.json_files import read_json

FULL = "full_attention"
SLIDING = "sliding_attention"

# A config is a file from somewhere: no size in it may make us allocate without bound before the
# tensors beside it have been checked. The limits are far above any model of this architecture.
_LIMITS = {
    "num_hidden_layers": 4096,
    "hidden_size": 1 << 17,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "head_dim": 1 << 12,
    "intermediate_size": 1 << 20,
    "num_experts": 1 << 14,
    "num_experts_per_tok": 1 << 14,
    "moe_intermediate_size": 1 << 20,
    "shared_expert_intermediate_size": 1 << 20,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 18,  # the model's own: its RoPE table has a row for each
}

_FP32_TINY = 2.0**-126
_FP32_MAX = (2 - 2.0**-23) * 2.0**127

# Fields whose other values would be another model: the one value that is supported, and why.
_FIXED = {
    "router_score_function": ("sigmoid", "the router op scores by sigmoid"),
    "norm_topk_prob": (True, "the routing weights of a token are always made to add up to 1"),
    "tie_word_embeddings": (False, "the checkpoint must carry its own lm_head"),
    "hidden_act": ("silu", "the MLPs are SwiGLU"),
    "attention_bias": (False, "no op adds a bias to q, k and v"),
    "mlp_bias": (False, "no op adds a bias in the MLP"),
    "decoder_sparse_step": (1, "dense layers are named by mlp_only_layers"),
}

# Keys of rope_scaling and rope_parameters beside rope_theta: the values that change nothing.
_UNSCALED_ROPE = {
    "rope_type": "default",
    "type": "default",
    "factor": 1.0,
    "partial_rotary_factor": 1.0,
}


@dataclass(frozen=True)
class FlintConfig:
    """The shape of a Flint model; the field names are those of config.json.

    Attributes:
        layer_types: "full_attention" or "sliding_attention" for each layer.
        sliding_window: tokens a query of a sliding layer sees, its own included; None: no window,
            whatever `layer_types` says.
        no_rope_layer_indices: layers without positional encoding, independent of `layer_types`.
        mlp_only_layers: layers with one dense SwiGLU (`intermediate_size`) instead of experts.
        rope_theta: base of the rotary frequencies.
        eos_token_ids: the ids that end a text; empty where the file names none.

    Raises:
        TypeError, ValueError: naming the field, what it got and what it wants.
    """

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    layer_types: tuple[str, ...]
    sliding_window: int | None = None
    no_rope_layer_indices: tuple[int, ...] = ()
    mlp_only_layers: tuple[int, ...] = ()
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, limit in _LIMITS.items():
            _check_int(name, getattr(self, name), 1, limit)
        if self.sliding_window is not None:
            _check_int("sliding_window", self.sliding_window, 1, _LIMITS["max_position_embeddings"])
        for name in ("rope_theta", "rms_norm_eps"):
            _check_positive_float(name, getattr(self, name))
        self._check_layers()
        if self.num_attention_heads % self.num_key_value_heads != 0:
            raise _error(
                "num_attention_heads",
                self.num_attention_heads,
                f"a multiple of num_key_value_heads ({self.num_key_value_heads})",
            )
        if self.num_experts_per_tok > self.num_experts:
            raise _error(
                "num_experts_per_tok",
                self.num_experts_per_tok,
                f"at most num_experts ({self.num_experts})",
            )
        if self.head_dim % 2 != 0:
            raise _error("head_dim", self.head_dim, "an even number: RoPE turns pairs")

    def _check_layers(self) -> None:
        if len(self.layer_types) != self.num_hidden_layers:
            raise _error(
                "layer_types",
                f"{len(self.layer_types)} entries",
                f"one for each of the {self.num_hidden_layers} layers (num_hidden_layers)",
            )
        for index, kind in enumerate(self.layer_types):
            if kind not in (FULL, SLIDING):
                raise _error(f"layer_types[{index}]", repr(kind), f"{FULL!r} or {SLIDING!r}")
        for name in ("no_rope_layer_indices", "mlp_only_layers"):
            for layer in getattr(self, name):
                _check_int(name, layer, 0, self.num_hidden_layers - 1)
        for token in self.eos_token_ids:
            _check_int("eos_token_id", token, 0, self.vocab_size - 1)

    def window(self, layer: int) -> int:
        """Tokens that a query of the layer sees, its own included; 0: all."""
        return (self.sliding_window or 0) if self.layer_types[layer] == SLIDING else 0

    def has_rope(self, layer: int) -> bool:
        return layer not in self.no_rope_layer_indices

    def is_dense(self, layer: int) -> bool:
        """Whether the layer's MLP is one dense SwiGLU rather than experts."""
        return layer in self.mlp_only_layers

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Rows of the q, k and v projections."""
        keys = self.num_key_value_heads * self.head_dim
        return self.num_attention_heads * self.head_dim, keys, keys

    def weight_count(self) -> int:
        """Weights of the matrices: embedding, projections, experts, router and head."""
        hidden = self.hidden_size
        dense = len(set(self.mlp_only_layers))
        attention = hidden * (sum(self.qkv_sizes) + self.qkv_sizes[0])
        moe = self.num_experts * hidden * (3 * self.moe_intermediate_size + 1)
        moe += 3 * hidden * self.shared_expert_intermediate_size
        return (
            self.num_hidden_layers * attention
            + (self.num_hidden_layers - dense) * moe
            + dense * 3 * hidden * self.intermediate_size
            + 2 * self.vocab_size * hidden
        )

    def parameter_count(self) -> int:
        """`weight_count` and the norm weights and attention sinks."""
        layer = 2 * self.hidden_size + 2 * self.head_dim + self.num_attention_heads
        return self.weight_count() + self.num_hidden_layers * layer + self.hidden_size

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> FlintConfig:
        """Reads the fields of a config.json; fields that say nothing about the shape are ignored.

        Absent `layer_types`: all layers full; `no_rope_layer_indices` and `mlp_only_layers`: none;
        `use_sliding_window` false: no window; `rope_parameters` beats `rope_theta` (10000).

        Raises:
            TypeError, ValueError: a field is missing, has a wrong type or range, or asks for what
                is not supported (another router score, tied embeddings, a bias, RoPE scaling).
        """
        if not isinstance(fields, Mapping):
            raise TypeError(
                f"config: got {type(fields).__name__}; want the JSON object of a config.json."
            )
        for name, (want, why) in _FIXED.items():
            got = fields.get(name, want)
            if got is not None and (got != want or isinstance(got, bool) != isinstance(want, bool)):
                raise ValueError(
                    f"config field '{name}': got {got!r}; want {want!r}: {why}. "
                    "This model is not one that the package can run."
                )
        missing = [name for name in _LIMITS if name not in fields]
        if missing:
            raise ValueError(
                f"config field '{missing[0]}': got nothing; want an integer "
                f"({len(missing)} missing: {', '.join(missing)}). Is this the config.json of a "
                "Flint checkpoint?"
            )
        sizes = {name: _check_int(name, fields[name], 1, limit) for name, limit in _LIMITS.items()}
        layer_types = fields.get("layer_types")
        if layer_types is None:
            layer_types = (FULL,) * sizes["num_hidden_layers"]
        return cls(
            **sizes,
            layer_types=tuple(_check_list("layer_types", layer_types)),
            sliding_window=_sliding_window(fields, layer_types),
            no_rope_layer_indices=_layer_indices(fields, "no_rope_layer_indices"),
            mlp_only_layers=_layer_indices(fields, "mlp_only_layers"),
            rope_theta=_rope_theta(fields),
            rms_norm_eps=_check_positive_float("rms_norm_eps", fields.get("rms_norm_eps", 1e-6)),
            eos_token_ids=_eos_token_ids(fields),
        )

    @classmethod
    def from_json_file(cls, path: str | Path) -> FlintConfig:
        """Reads `path`, a config.json, or the one in the folder `path`.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it is not JSON, or holds what `from_dict` refuses; the message names it.
        """
        path = Path(path)
        if path.is_dir():
            path = path / "config.json"
        try:
            fields = read_json(path)
        except ValueError as error:
            raise ValueError(
                f"config file {path}: got text that is not JSON ({error}); want a config.json as "
                "it stands beside the checkpoint. Fetch it again."
            ) from error
        try:
            return cls.from_dict(fields)
        except (TypeError, ValueError) as error:
            # Of a wrong type too: what a file says is a value, and no caller's mistake.
            raise ValueError(f"config file {path}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """The fields of a config.json; `from_dict` gives this config back."""
        fields = dataclasses.asdict(self)
        for name, value in fields.items():
            if isinstance(value, tuple):
                fields[name] = list(value)
        fields["eos_token_id"] = fields.pop("eos_token_ids")
        fields["use_sliding_window"] = self.sliding_window is not None
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": self.rope_theta}
        for name in ("router_score_function", "norm_topk_prob", "tie_word_embeddings"):
            fields[name] = _FIXED[name][0]
        fields["hidden_act"] = "silu"
        fields["attention_bias"] = False
        return fields

    @classmethod
    def flint_40b(cls) -> FlintConfig:
        """The 39.8B model's shape.

        Its public texts give the numbers of full and of window layers but not their places, so
        the placement here is ours: layer i is full, and without RoPE, where i mod 7 is 3 or 6. A
        checkpoint's own config.json names the true places.
        """
        full = tuple(layer for layer in range(49) if layer % 7 in (3, 6))
        return cls(
            num_hidden_layers=49,
            hidden_size=2048,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            vocab_size=150144,
            max_position_embeddings=262144,
            intermediate_size=6144,
            num_experts=256,
            num_experts_per_tok=6,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=1024,
            layer_types=tuple(FULL if layer in full else SLIDING for layer in range(49)),
            sliding_window=513,
            no_rope_layer_indices=full,
            mlp_only_layers=(0, 1),
        )


def _error(field: str, got: object, want: str, error: type[Exception] = ValueError) -> Exception:
    return error(f"config field '{field}': got {got}; want {want}. Correct the config.json.")


def _check_int(field: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _error(field, repr(value), "an integer", TypeError)
    if not low <= value <= high:
        raise _error(field, value, f"{low} to {high}")
    return value


def _check_positive_float(field: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _error(field, repr(value), "a number", TypeError)
    # The ops compute in fp32, where anything beyond is 0 or infinite.
    if not _FP32_TINY <= value <= _FP32_MAX:
        raise _error(field, value, f"a number from {_FP32_TINY:.3g} to {_FP32_MAX:.3g}")
    return float(value)


def _check_list(field: str, value: object) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise _error(field, repr(value), "a list", TypeError)
    return list(value)


def _layer_indices(fields: Mapping[str, Any], field: str) -> tuple[int, ...]:
    value = fields.get(field)
    return () if value is None else tuple(_check_list(field, value))


def _sliding_window(fields: Mapping[str, Any], layer_types: Any) -> int | None:
    use = fields.get("use_sliding_window", True)
    if not isinstance(use, bool):
        raise _error("use_sliding_window", repr(use), "true or false", TypeError)
    window = fields.get("sliding_window")
    if not use:
        return None
    if window is None and SLIDING in layer_types:
        raise _error(
            "sliding_window",
            "nothing",
            "an integer, since layer_types names sliding_attention layers "
            "(or use_sliding_window false)",
        )
    return (
        None
        if window is None
        else _check_int("sliding_window", window, 1, _LIMITS["max_position_embeddings"])
    )


def _rope_theta(fields: Mapping[str, Any]) -> float:
    """`rope_parameters.rope_theta`, else `rope_theta`, else 10000; refuses every scaling."""
    theta: object = fields.get("rope_theta")
    for field in ("rope_scaling", "rope_parameters"):  # the latter has the last word
        parameters = fields.get(field)
        if parameters is None:
            continue
        if not isinstance(parameters, Mapping):
            raise _error(field, repr(parameters), "an object or null", TypeError)
        if any(isinstance(value, Mapping) for value in parameters.values()):
            raise _error(field, "an object for each layer type", "one object for all layers")
        for name, value in parameters.items():
            _check_rotation(f"{field}.{name}", name, value)
        if parameters.get("rope_theta") is not None:
            theta = parameters["rope_theta"]
    if fields.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise _error("partial_rotary_factor", fields["partial_rotary_factor"], "1.0")
    return _check_positive_float("rope_theta", 10000.0 if theta is None else theta)


def _check_rotation(field: str, name: str, value: object) -> None:
    """Refuses whatever would turn q and k by other angles than `rope_theta` alone does."""
    if name == "rope_theta" or value is None:
        return
    unscaled = _UNSCALED_ROPE.get(name)
    if unscaled is None:
        names = ", ".join(("rope_theta", *_UNSCALED_ROPE))
        raise _error(field, repr(value), f"no key but {names}: RoPE scaling is unsupported")
    if value != unscaled or isinstance(value, bool):
        raise _error(field, repr(value), f"{unscaled!r}: RoPE scaling is unsupported")


def _eos_token_ids(fields: Mapping[str, Any]) -> tuple[int, ...]:
    value = fields.get("eos_token_id")
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)
