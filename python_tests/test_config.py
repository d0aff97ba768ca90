"""FlintConfig: what a config.json may say, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flint_kernels.model import Flint, FlintConfig


def _fields(**changes: object) -> dict[str, object]:
    """A config.json of four layers, with `changes`; a change to `...` drops the field."""
    fields: dict[str, object] = {
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 96,
        "max_position_embeddings": 512,
        "intermediate_size": 96,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 33,
        "no_rope_layer_indices": [1],
        "mlp_only_layers": [0],
        "rope_theta": 5000.0,
        "rms_norm_eps": 1e-5,
        "router_score_function": "sigmoid",
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "hidden_act": "silu",
        "model_type": "flint",
        "some_field_of_next_year": {"ignored": [1, 2, 3]},
    }
    fields.update(changes)
    return {name: value for name, value in fields.items() if value is not ...}


def test_fields_are_read() -> None:
    config = FlintConfig.from_dict(_fields(eos_token_id=[0, 5]))
    assert config.qkv_sizes == (128, 64, 64)
    assert [config.window(layer) for layer in range(4)] == [33, 0, 33, 0]
    assert [config.has_rope(layer) for layer in range(4)] == [True, False, True, True]
    assert [config.is_dense(layer) for layer in range(4)] == [True, False, False, False]
    assert (config.rope_theta, config.rms_norm_eps) == (5000.0, 1e-5)
    assert config.eos_token_ids == (0, 5)


def test_absent_fields_have_the_model_s_defaults() -> None:
    config = FlintConfig.from_dict(
        _fields(
            layer_types=...,
            no_rope_layer_indices=...,
            mlp_only_layers=...,
            rope_theta=...,
            rms_norm_eps=...,
            sliding_window=None,
        )
    )
    assert config.layer_types == ("full_attention",) * 4
    assert all(config.has_rope(layer) and not config.window(layer) for layer in range(4))
    assert config.mlp_only_layers == ()
    assert (config.rope_theta, config.rms_norm_eps) == (10000.0, 1e-6)


def test_use_sliding_window_false_means_no_window() -> None:
    config = FlintConfig.from_dict(_fields(use_sliding_window=False))
    assert [config.window(layer) for layer in range(4)] == [0, 0, 0, 0]
    assert not config.has_rope(1), "RoPE follows no_rope_layer_indices alone"


def test_rope_parameters_beat_rope_theta() -> None:
    parameters = {"rope_type": "default", "rope_theta": 1e6}
    assert FlintConfig.from_dict(_fields(rope_parameters=parameters)).rope_theta == 1e6
    assert FlintConfig.from_dict(_fields(rope_parameters={})).rope_theta == 5000.0
    unscaled = {"type": "default", "factor": 1, "partial_rotary_factor": 1.0, "beta_fast": None}
    assert FlintConfig.from_dict(_fields(rope_scaling=unscaled)).rope_theta == 5000.0


@pytest.mark.parametrize(
    "config",
    [FlintConfig.flint_40b(), FlintConfig.from_dict(_fields(use_sliding_window=False))],
    ids=["40b", "no-window"],
)
def test_to_dict_and_back(config: FlintConfig, tmp_path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.to_dict()))
    assert FlintConfig.from_json_file(path) == config
    assert FlintConfig.from_json_file(tmp_path) == config


@pytest.mark.parametrize(
    ("changes", "field", "got"),
    [
        ({"attention_bias": True}, "attention_bias", "True"),
        ({"router_score_function": "softmax"}, "router_score_function", "softmax"),
        ({"norm_topk_prob": False}, "norm_topk_prob", "False"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings", "True"),
        ({"hidden_act": "gelu"}, "hidden_act", "gelu"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.rope_type", "linear"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "rope_parameters.partial_rotary_factor",
            "0.5",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rope_scaling.type", "yarn"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling.factor", "2.0"),
        (
            {"rope_parameters": {"rope_type": "default", "type": "yarn"}},
            "rope_parameters.type",
            "yarn",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "mscale": 0.7}},
            "rope_parameters.mscale",
            "0.7",
        ),
        ({"max_position_embeddings": 1 << 22}, "max_position_embeddings", "1 to 262144"),
        ({"rope_theta": 10**400}, "rope_theta", "1000"),
        ({"rms_norm_eps": 1e-60}, "rms_norm_eps", "1e-60"),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters", "layer type"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor", "0.25"),
        ({"hidden_size": ...}, "hidden_size", "nothing"),
        ({"hidden_size": -64}, "hidden_size", "-64"),
        ({"hidden_size": 10**12}, "hidden_size", "1000000000000"),
        ({"num_hidden_layers": 10**9, "layer_types": ...}, "num_hidden_layers", "1000000000"),
        ({"num_hidden_layers": 5}, "layer_types", "4 entries"),
        ({"layer_types": ["chunked_attention"] * 4}, "layer_types[0]", "chunked_attention"),
        ({"sliding_window": 0}, "sliding_window", "0"),
        ({"sliding_window": None}, "sliding_window", "nothing"),
        ({"no_rope_layer_indices": [4]}, "no_rope_layer_indices", "4"),
        ({"mlp_only_layers": [-1]}, "mlp_only_layers", "-1"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok", "9"),
        ({"num_key_value_heads": 3}, "num_attention_heads", "4"),
        ({"head_dim": 33}, "head_dim", "33"),
        ({"rope_theta": 0}, "rope_theta", "0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps", "nan"),
        ({"eos_token_id": 96}, "eos_token_id", "96"),
    ],
)
def test_error_names_field_and_value(changes: dict[str, object], field: str, got: str) -> None:
    with pytest.raises(ValueError) as raised:
        FlintConfig.from_dict(_fields(**changes))
    message = str(raised.value)
    assert f"'{field}'" in message and got in message and "want" in message, message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", "64"),
        ("hidden_size", 64.0),
        ("hidden_size", True),
        ("layer_types", "full_attention"),
        ("no_rope_layer_indices", 3),
        ("rope_theta", "10000"),
        ("rope_parameters", [1]),
        ("use_sliding_window", 1),
        ("mlp_only_layers", ["0"]),
    ],
)
def test_wrong_type_is_a_type_error(field: str, value: object) -> None:
    with pytest.raises(TypeError, match=field):
        FlintConfig.from_dict(_fields(**{field: value}))


def test_file_that_is_no_json(tmp_path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff{]")
    with pytest.raises(ValueError, match=r"config\.json"):
        FlintConfig.from_json_file(path)
    path.write_text("[1]")
    with pytest.raises(ValueError, match=r"config\.json: config: got list; want the JSON object"):
        FlintConfig.from_json_file(path)
    path.write_text(json.dumps(_fields(hidden_size="128")))
    with pytest.raises(ValueError, match=r"config\.json: .*'hidden_size': got '128'; want"):
        FlintConfig.from_json_file(path)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(_fields())), _JSON, max_size=3))
def test_no_value_of_a_field_escapes_the_checks(changes: dict[str, object]) -> None:
    """Whatever JSON stands in a field: a config that is consistent, or a clean error."""
    try:
        config = FlintConfig.from_dict(_fields(**changes))
    except (ValueError, TypeError) as error:
        assert "config field" in str(error)
        return
    assert len(config.layer_types) == config.num_hidden_layers <= 4096
    assert FlintConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("weight_format", ["nvfp4", "bf16"])
def test_parameter_count_of_the_full_model(weight_format: str) -> None:
    """The sum of the model's public sizes, held against the module itself."""
    config = FlintConfig.flint_40b()
    assert config.layer_types.count("full_attention") == 14
    assert config.weight_count() == 39_785_070_592

    model = Flint(config, weight_format, device="meta")
    matrices = vectors = 0
    for name, tensor in model.named_parameters():
        if name.endswith(("_scale", "_scale_2")):
            continue
        codes_per_byte = 2 if tensor.dtype == torch.uint8 else 1
        if tensor.dim() > 1:
            matrices += tensor.numel() * codes_per_byte
        else:
            vectors += tensor.numel()
    norms_and_sinks = 49 * (2 * 2048 + 2 * 128 + 32) + 2048
    assert matrices == 39_785_070_592
    assert vectors == norms_and_sinks
    assert config.parameter_count() == matrices + vectors
