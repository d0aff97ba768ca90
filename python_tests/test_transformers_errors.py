"""Flint in Transformers: what it does not do is an error that says so; importing stays light."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers_support import TEXTS, batch, folder, ids_of, model_of, tokenizer

from flint_kernels.integrations.transformers import FlintCache, FlintForCausalLM, requirement

IDS = torch.tensor([[5, 6, 7]])


# ---------------------------------------------------------------------------------------- importing


def test_importing_the_package_imports_no_transformers() -> None:
    code = "import sys, flint_kernels, flint_kernels.cli; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_transformers_or_an_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "5.9.1")
    with pytest.raises(ImportError, match=r"got 5\.9\.1; want 5\.24 or newer. pip install"):
        requirement.check()

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ImportError, match=r"got none; want 5\.24 or newer. pip install"):
        requirement.check()


def test_the_extra_asks_for_the_version_that_is_checked() -> None:
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    wanted = ".".join(map(str, requirement.MINIMUM))
    found = re.findall(r'"transformers(?:\[\w+\])?>=([\d.]+)"', text)
    assert found and set(found) == {wanted}


# ------------------------------------------------------------------------------------------ loading


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.float32}, "dtype: got torch.float32; want None or 'auto'"),
        ({"attn_implementation": "sdpa"}, "does not support an attention implementation"),
        ({"attn_implementation": "flash_attention_2"}, "does not support Flash Attention"),
        ({"attn_implementation": "flex_attention"}, r"does not support .* flex_attention"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: got .*NVFP4 checkpoint"),
        ({"device_map": {"a": "cpu", "b": 0}}, "device_map: got .*; want one device"),
        ({"device_map": "balanced"}, "device_map: got 'balanced'; want one device"),
        ({"device_map": "meta"}, "device_map: got 'meta'; want one device"),
        ({"output_loading_info": True}, "output_loading_info: got True; want None or False"),
        ({"num_experts": 8}, "config.num_experts: got 8; want 16, that of the weights"),
        ({"sliding_window": 64}, "config.sliding_window: got 64; want 65, that of the weights"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_without_a_meaning(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(folder("flint-tiny"), **options)


def test_arguments_that_nobody_has() -> None:
    with pytest.raises(TypeError, match="from_pretrained: got the argument 'no_such_thing'"):
        AutoModelForCausalLM.from_pretrained(folder("flint-tiny"), no_such_thing=1)
    with pytest.raises(TypeError, match="args: got 1 positional"):
        FlintForCausalLM.from_pretrained(folder("flint-tiny"), 1)
    with pytest.raises(FileNotFoundError, match="Nothing is downloaded here: `hf download org/x"):
        FlintForCausalLM.from_pretrained("org/x")
    config = transformers.FlintConfig()
    with pytest.raises(TypeError, match=r"config: got FlintConfig of transformers.models.flint"):
        FlintForCausalLM.from_pretrained(folder("flint-tiny"), config=config)
    with pytest.raises(TypeError, match=r"config: got FlintConfig of transformers.models.flint"):
        FlintForCausalLM(config, model_of().model)
    with pytest.raises(ValueError, match="model: got none; want a loaded Flint"):
        FlintForCausalLM(model_of().config)
    with pytest.raises(ValueError, match="from_config: got a config without weights"):
        AutoModelForCausalLM.from_config(model_of().config)
    with pytest.raises(ValueError, match=r"save_pretrained: .*save_bf16, save_gguf"):
        model_of().save_pretrained("anywhere")


def test_a_gguf_file_and_names_of_packaged_models_are_taken() -> None:
    path = folder("flint-tiny")
    config = AutoConfig.from_pretrained(path)
    name = "flint-tiny-nvfp4.gguf"
    for model in (
        AutoModelForCausalLM.from_pretrained(path, config=config, gguf_file=name),
        FlintForCausalLM.from_pretrained(f"{path}/{name}"),
        FlintForCausalLM.from_pretrained("flint-tiny", dtype="auto", device_map="cpu"),
    ):
        assert model.model.weight_format == "nvfp4"


@pytest.mark.parametrize("field", ["no_rope_layer_indices", "layer_types", "mlp_only_layers"])
def test_a_config_that_the_two_read_otherwise(field: str, tmp_path: Path) -> None:
    """Transformers and this library take the absent field for different models."""
    for file in Path(folder("flint-tiny")).iterdir():
        shutil.copy(file, tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    del fields[field]
    if field == "mlp_only_layers":
        fields["intermediate_size"] = 384
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    with pytest.raises(ValueError, match=field):
        AutoModelForCausalLM.from_pretrained(tmp_path)


# ------------------------------------------------------------------------------------------ forward


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output_attentions": True}, "output_attentions: got True; want nothing"),
        ({"output_hidden_states": True}, "output_hidden_states: got True; want nothing"),
        ({"output_router_logits": True}, "output_router_logits: got True; want nothing"),
        ({"inputs_embeds": torch.zeros(1, 3, 128)}, r"inputs_embeds: got a tensor of shape \[1, 3"),
        ({"cu_seq_lens_q": torch.tensor([0, 3])}, "cu_seq_lens_q: .*not packed"),
        ({"is_causal": False}, "is_causal: got False; want True"),
        ({"cache": DynamicCache()}, "cache: got a DynamicCache of another model or kind"),
        ({"attention_mask": torch.ones(1, 1, 3, 3)}, r"attention_mask: got shape \[1, 1, 3, 3\]"),
        (
            {"attention_mask": torch.ones(1, 2)},
            r"attention_mask: got shape \[1, 2\]; want \[1, 3\]",
        ),
        (
            {"attention_mask": torch.tensor([[1, 0, 1]])},
            "attention_mask: got padding between tokens in row 0",
        ),
        ({"position_ids": torch.tensor([[0, 1, 3]])}, r"position_ids: got \[0, 1, 3\]"),
        (
            {"labels": torch.ones(1, 3, dtype=torch.int64), "logits_to_keep": 1},
            r"labels: got shape \[1, 3\]; want \[1, 1\]",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_forward_refuses(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_of()(IDS, **options)


def test_forward_refuses_what_is_no_batch_of_ids() -> None:
    model = model_of()
    with pytest.raises(ValueError, match="input_ids: got none"):
        model()
    with pytest.raises(ValueError, match=r"input_ids: got shape \[3\]; want \[rows, tokens\]"):
        model(IDS[0])
    with pytest.raises(TypeError, match=r"input_ids: got torch.float32; want .*int64"):
        model(IDS.float())
    with pytest.raises(ValueError, match=r"input_ids: got ids from 5 to 9999; want"):
        model(torch.tensor([[5, 9999]]))
    with pytest.raises(TypeError, match="forward: got the argument 'no_such_thing'"):
        model(IDS, no_such_thing=1)


def test_what_a_config_asks_of_every_call() -> None:
    model = FlintForCausalLM.from_pretrained("flint-tiny", output_hidden_states=True)
    with pytest.raises(ValueError, match=r"config.output_hidden_states: got True; want False"):
        model(IDS)


@torch.inference_mode()
def test_a_cache_that_does_not_fit_the_call() -> None:
    model = model_of()
    inputs = batch(*TEXTS[:2])
    cache = model(**inputs).cache
    columns, one = inputs["input_ids"].shape[1], torch.tensor([[5], [6]])
    grown = torch.cat([inputs["attention_mask"], torch.ones(2, 1, dtype=torch.int64)], 1)
    before = cache.lengths
    with pytest.raises(ValueError, match=r"attention_mask: got nothing, which is no padding"):
        model(one, cache=cache)
    with pytest.raises(ValueError, match=rf"shape \[2, 1\]; want \[2, {columns + 1}\]"):
        model(one, attention_mask=torch.ones(2, 1), cache=cache)
    with pytest.raises(ValueError, match="tokens in the cached columns of row 0; want"):
        model(one, attention_mask=torch.ones(2, columns + 1), cache=cache)
    with pytest.raises(ValueError, match="input_ids: got 1 rows; want 2, those of the cache"):
        model(one[:1], attention_mask=grown[:1], cache=cache)
    assert cache.lengths == before and cache.get_seq_length() == columns
    with pytest.raises(ValueError, match="past_key_values: got another one beside `cache`"):
        model(one, cache=cache, past_key_values=FlintCache(model.model))

    right = tokenizer()(list(TEXTS[:2]), padding=True, padding_side="right", return_tensors="pt")
    cache = model(**right).cache
    grown = torch.cat([right["attention_mask"], torch.ones(2, 1, dtype=torch.int64)], 1)
    with pytest.raises(ValueError, match="padding between tokens in row 0"):
        model(one, attention_mask=grown, cache=cache)


def test_what_a_cache_refuses() -> None:
    cache = model_of()(IDS).cache
    with pytest.raises(NotImplementedError, match="crop: got 1 tokens to remove"):
        cache.crop(1)
    with pytest.raises(NotImplementedError, match="a call of update"):
        cache.update(torch.zeros(1), torch.zeros(1), 0)
    with pytest.raises(ValueError, match="max_length: got 262145 tokens in a row"):
        FlintCache(model_of().model, 262145)
    with pytest.raises(RuntimeError, match="cache: got no rows yet"):
        _ = FlintCache(model_of().model).room


# ----------------------------------------------------------------------------------------- generate


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_lookup_num_tokens": 3}, "generate: got assisted generation"),
        ({"cache_implementation": "offloaded"}, "cache_implementation: got 'offloaded'"),
        ({"cache_implementation": "quantized"}, "cache_implementation: got 'quantized'"),
        ({"cache_implementation": "offloaded_static"}, "cache_implementation: got 'offloaded_st"),
        ({"cache_implementation": "paged"}, "generate_batch: .*Generation batches continuously"),
        ({"cache": DynamicCache()}, "cache: got a DynamicCache of another model or kind"),
        (
            {"output_hidden_states": True, "return_dict_in_generate": True},
            "output_hidden_states: got True",
        ),
        ({"inputs_embeds": torch.zeros(1, 3, 128)}, "inputs_embeds"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_generate_refuses(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_of().generate(IDS, max_new_tokens=4, do_sample=False, **options)


def test_generate_refuses_an_assistant_and_being_one() -> None:
    options = {"max_new_tokens": 4, "do_sample": False}
    with pytest.raises(ValueError, match="generate: got assisted generation"):
        model_of().generate(IDS, assistant_model=model_of("flint-tiny-bf16"), **options)


def test_generate_batch_refuses() -> None:
    with pytest.raises(ValueError, match="generate_batch: got Transformers' continuous batching"):
        model_of().generate_batch([ids_of(TEXTS[0])])


def test_generate_refuses_a_prompt_that_ends_in_padding() -> None:
    inputs = tokenizer()(list(TEXTS), padding=True, padding_side="right", return_tensors="pt")
    with pytest.raises(ValueError, match=r"end of row 0; .* tokenizer.padding_side = 'left'"):
        model_of().generate(**inputs, max_new_tokens=4)
