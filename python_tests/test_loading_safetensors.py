"""BF16 and ModelOpt NVFP4 safetensors: what is loaded, and that everything wrong is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from loading_support import (
    assert_same_parameters,
    forbid_allocation,
    peak_extra_memory,
    tiny_config,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from flint_kernels.formats import nvfp4
from flint_kernels.loading import load, load_tokenizer, synthetic, transfer
from flint_kernels.loading.export import save_bf16, save_modelopt, write_config
from flint_kernels.loading.names import hf_targets
from flint_kernels.loading.safetensors import INDEX_NAME, REMAP_BYTES
from flint_kernels.model.flint import Flint

CONFIG = tiny_config()
UP = "model.layers.1.mlp.experts.2.up_proj.weight"


@pytest.fixture(scope="module")
def nvfp4_model() -> Flint:
    return synthetic(CONFIG, "nvfp4", seed=5)


@pytest.fixture(scope="module")
def bf16_model() -> Flint:
    return synthetic(CONFIG, "bf16", seed=5)


@pytest.fixture
def modelopt(nvfp4_model: Flint, tmp_path: Path) -> Path:
    """A folder with one ModelOpt file."""
    save_modelopt(nvfp4_model, tmp_path / "modelopt")
    return tmp_path / "modelopt"


@pytest.fixture
def bf16(bf16_model: Flint, tmp_path: Path) -> Path:
    save_bf16(bf16_model, tmp_path / "bf16")
    return tmp_path / "bf16"


@pytest.fixture
def sharded(bf16_model: Flint, tmp_path: Path) -> Path:
    save_bf16(bf16_model, tmp_path / "sharded", max_shard_bytes=100_000)
    return tmp_path / "sharded"


def change(folder: Path, **tensors: Tensor | None) -> None:
    """Rewrites the one file of a folder with tensors replaced, or taken out where None."""
    path = folder / "model.safetensors"
    content: dict[str, Tensor | None] = {**load_file(path)}
    content.update(tensors)
    save_file({name: tensor for name, tensor in content.items() if tensor is not None}, path)


def refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The message with which `load` refuses a folder before it takes memory."""
    forbid_allocation(monkeypatch)
    with pytest.raises(ValueError) as caught:
        load(folder)
    assert folder.name in str(caught.value)
    return str(caught.value)


# --------------------------------------------------------------------------- what is loaded


def test_modelopt_is_loaded_to_the_bit(modelopt: Path, nvfp4_model: Flint) -> None:
    loaded = load(modelopt)
    assert loaded.weight_format == "nvfp4"
    assert_same_parameters(loaded, nvfp4_model)
    assert_same_parameters(load(modelopt / "model.safetensors"), nvfp4_model)


def test_bf16_is_loaded_to_the_bit(bf16: Path, bf16_model: Flint) -> None:
    loaded = load(bf16)
    assert loaded.weight_format == "bf16"
    assert_same_parameters(loaded, bf16_model)


def test_shards_are_loaded_to_the_bit(
    sharded: Path, bf16_model: Flint, nvfp4_model: Flint, tmp_path: Path
) -> None:
    assert len(list(sharded.glob("*.safetensors"))) > 3
    assert_same_parameters(load(sharded), bf16_model)
    save_modelopt(nvfp4_model, tmp_path / "m", max_shard_bytes=50_000)
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 3
    assert_same_parameters(load(tmp_path / "m"), nvfp4_model)


def test_names_are_those_of_the_specification(bf16: Path) -> None:
    """Written out, since saver and loader share one map and would share its faults."""
    layer = ["input_layernorm.weight", "post_attention_layernorm.weight"]
    layer += [f"self_attn.{x}_proj.weight" for x in "qkvo"]
    layer += ["self_attn.q_norm.weight", "self_attn.k_norm.weight", "self_attn.softmax_offset"]
    projections = [f"{part}_proj.weight" for part in ("gate", "up", "down")]
    dense = [f"mlp.{projection}" for projection in projections]
    moe = ["mlp.gate.weight", *(f"mlp.shared_expert.{projection}" for projection in projections)]
    moe += [f"mlp.experts.{e}.{projection}" for e in range(4) for projection in projections]
    names = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    for index in range(3):
        parts = layer + (dense if index == 0 else moe)
        names |= {f"model.layers.{index}.{part}" for part in parts}
    assert set(load_file(bf16 / "model.safetensors")) == names


def test_each_value_is_where_the_module_uses_it(bf16: Path) -> None:
    """Rows of the fused projections and experts, by hand."""
    tensors = load_file(bf16 / "model.safetensors")
    layer, prefix = load(bf16).layers[1], "model.layers.1."
    q, k, v = (tensors[f"{prefix}self_attn.{x}_proj.weight"] for x in "qkv")
    assert torch.equal(layer.self_attn.qkv_proj.weight, torch.cat((q, k, v)))
    shared = [tensors[f"{prefix}mlp.shared_expert.{x}_proj.weight"] for x in ("gate", "up")]
    assert torch.equal(layer.mlp.shared_expert.gate_up_proj.weight, torch.cat(shared))
    expert = [tensors[f"{prefix}mlp.experts.3.{x}_proj.weight"] for x in ("gate", "up")]
    assert torch.equal(layer.mlp.experts.w13[3], torch.cat(expert))
    down = tensors[f"{prefix}mlp.experts.3.down_proj.weight"]
    assert torch.equal(layer.mlp.experts.w2[3], down)
    assert torch.equal(layer.self_attn.sinks, tensors[f"{prefix}self_attn.softmax_offset"])


def test_Q2_each_shard_keeps_its_global_scale(modelopt: Path) -> None:
    """q/k/v with 1e-3, 2e-3, 4e-3; gate and up that differ; one expert 10 times the others."""
    prefix = "model.layers.1."
    scales = {
        f"{prefix}self_attn.{x}_proj": s for x, s in zip("qkv", (1e-3, 2e-3, 4e-3), strict=True)
    }
    for expert in range(4):
        for part, scale in (("gate", 1e-3), ("up", 3e-3), ("down", 2e-3)):
            factor = 10 if expert == 2 else 1
            scales[f"{prefix}mlp.experts.{expert}.{part}_proj"] = factor * scale
    change(
        modelopt,
        **{f"{name}.weight_scale_2": torch.tensor(scale) for name, scale in scales.items()},
    )
    loaded = load(modelopt)
    assert loaded.layers[1].self_attn.qkv_proj.weight_scale_2.tolist() == pytest.approx(
        [1e-3, 2e-3, 4e-3]
    )
    tensors, parameters = load_file(modelopt / "model.safetensors"), dict(loaded.named_parameters())
    for name, target in hf_targets(CONFIG).items():
        if f"{name}_scale" not in tensors:
            continue
        want = nvfp4.dequantize(tensors[name], tensors[f"{name}_scale"], tensors[f"{name}_scale_2"])
        got = nvfp4.dequantize(
            target.weight(parameters),
            target.weight_scale(parameters),
            target.weight_scale_2(parameters),
        )
        assert torch.equal(got, want), name


def test_global_scale_may_have_a_dimension(modelopt: Path, nvfp4_model: Flint) -> None:
    change(modelopt, **{f"{UP}_scale_2": nvfp4_model.layers[1].mlp.experts.w13_scale_2[2, 1:2]})
    assert_same_parameters(load(modelopt), nvfp4_model)


def test_fp32_norms_are_rounded_and_bf16_sinks_are_widened(bf16: Path) -> None:
    norm, sinks = torch.randn(64), torch.randn(4).bfloat16()
    change(
        bf16,
        **{"model.norm.weight": norm, "model.layers.0.self_attn.softmax_offset": sinks},
    )
    loaded = load(bf16)
    assert torch.equal(loaded.norm.weight, norm.bfloat16())
    assert torch.equal(loaded.layers[0].self_attn.sinks, sinks.float())


@pytest.mark.parametrize("weight_format", ["nvfp4", "bf16"])
def test_the_way_to_an_accelerator_gives_the_same_bits(
    weight_format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The staged path, taken on the CPU, in slices so small that every tensor has several."""

    class Staged(transfer.Transfer):
        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__(module)
            self._on_host = False

    monkeypatch.setattr("flint_kernels.loading.loader.Transfer", Staged)
    monkeypatch.setattr(transfer, "SLICE_BYTES", 1000)
    model = synthetic(CONFIG, weight_format, seed=6)
    (save_modelopt if weight_format == "nvfp4" else save_bf16)(model, tmp_path)
    assert_same_parameters(load(tmp_path), model)


def test_G5_peak_extra_memory_is_a_constant(bf16: Path, tmp_path: Path) -> None:
    config = tiny_config(
        hidden_size=512, moe_intermediate_size=512, num_experts=64, vocab_size=4096
    )
    save_bf16(synthetic(config, "bf16", max_positions=1), tmp_path / "big")
    size = (tmp_path / "big" / "model.safetensors").stat().st_size
    constant = REMAP_BYTES + (16 << 20)  # what is mapped in, and buffers of threads and allocator
    assert size > 2 * constant  # or a file that stays mapped in would pass
    extra = peak_extra_memory(bf16, tmp_path / "big")
    assert extra <= constant, f"{extra >> 20} MiB"


# --------------------------------------------------------------------------- what is refused


def test_Q1_scale_bytes_of_modelopt(
    modelopt: Path, nvfp4_model: Flint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0, 2^-9, 448, -0 and -1 are taken exactly; NaN is refused, naming the tensor."""
    scale = nvfp4_model.layers[1].mlp.experts.w13_scale[2, 64:].clone()
    finite = torch.tensor([0x00, 0x01, 0x7E, 0x80, 0xB8], dtype=torch.uint8)
    scale.view(torch.uint8).view(-1)[:5] = finite
    change(modelopt, **{f"{UP}_scale": scale})
    got = load(modelopt).layers[1].mlp.experts.w13_scale[2, 64:].float().view(-1)[:5]
    assert got.tolist() == [0.0, 2**-9, 448.0, 0.0, -1.0]
    assert bool(torch.signbit(got[3]))

    for byte in (0x7F, 0xFF):
        bad = scale.clone()
        bad.view(torch.uint8)[1, 2] = byte
        change(modelopt, **{f"{UP}_scale": bad})
        message = refused(modelopt, monkeypatch)
        assert f"tensor '{UP}_scale'" in message and f"{byte:#04x}" in message
        assert "[1, 2]" in message
        monkeypatch.undo()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_global_scale_that_no_quantiser_makes(
    value: float, modelopt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(modelopt, **{f"{UP}_scale_2": torch.tensor(value)})
    message = refused(modelopt, monkeypatch)
    assert f"tensor '{UP}_scale_2'" in message and f"got the global scale {value}" in message


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight", UP])
def test_values_that_are_no_numbers(name: str, bf16: Path) -> None:
    """Of BF16 linears too: nothing else looks at them."""
    shape = {"model.norm.weight": [64], UP: [64, 64]}.get(name, [CONFIG.vocab_size, 64])
    bad = torch.ones(shape).bfloat16()
    bad[..., -1] = float("nan")
    change(bf16, **{name: bad})
    with pytest.raises(ValueError, match=f"tensor '{name}': got nan at index .*want finite"):
        load(bf16)


@pytest.mark.parametrize(
    ("name", "tensor", "problem"),
    [
        (UP, None, "missing, want type U8, shape [64, 32]"),
        (f"{UP}_scale", None, "missing, want type F8_E4M3, shape [64, 4]"),
        (f"{UP}_scale_2", None, "missing, want type F32, shape [] or [1]"),
        (UP, torch.zeros(64, 64).bfloat16(), "got type BF16, want U8"),
        (f"{UP}_scale", torch.zeros(64, 4), "got type F32, want F8_E4M3"),
        (UP, torch.zeros(32, 64, dtype=torch.uint8), "got shape [32, 64], want [64, 32]"),
        ("model.norm.weight", torch.zeros(64).half(), "got type F16, want BF16 or F32"),
        ("model.norm.bias", torch.zeros(64), "want no tensor of that name in this config"),
        ("lm_head.input_scale", torch.zeros(()), "W4A16 only"),
        ("model.layers.9.mlp.gate.weight", torch.zeros(4, 64), "want no tensor of that name"),
    ],
)
def test_modelopt_tensors_that_do_not_fit(
    name: str,
    tensor: Tensor | None,
    problem: str,
    modelopt: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change(modelopt, **{name: tensor})
    message = refused(modelopt, monkeypatch)
    assert f"tensor '{name}'" in message and problem in message
    if tensor is not None:
        assert "model.safetensors" in message


def test_bf16_linears_must_be_bf16(bf16: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(bf16, **{"lm_head.weight": torch.zeros(128, 64).half()})
    message = refused(bf16, monkeypatch)
    assert "tensor 'lm_head.weight': got type F16, want BF16" in message


def test_widths_that_nvfp4_cannot_have_are_refused_in_time(
    modelopt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config(tiny_config(moe_intermediate_size=72), modelopt)
    forbid_allocation(monkeypatch)
    with pytest.raises(ValueError, match=r"experts\.0\.down_proj.*got 72; want a multiple of 16"):
        load(modelopt)


@pytest.mark.parametrize("cut", [0, 4, 100, 5_000, -1])
def test_cut_files_are_refused(cut: int, bf16: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = bf16 / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    assert "model.safetensors: got a damaged" in refused(bf16, monkeypatch)


def test_a_config_that_asks_for_millions_of_tensors(
    bf16: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config(
        tiny_config(
            num_experts=1 << 14, num_hidden_layers=300, layer_types=("full_attention",) * 300
        ),
        bf16,
    )
    assert "want at least 14" in refused(bf16, monkeypatch)  # 299 layers of 3 * 16384, and more


# --------------------------------------------------------------------------- the index


def edit_index(folder: Path, shard: object) -> str:
    """Makes the index name `shard` as the file of some tensor; returns the tensor."""
    path = folder / INDEX_NAME
    index = json.loads(path.read_text())
    name = next(iter(index["weight_map"]))
    index["weight_map"][name] = shard
    path.write_text(json.dumps(index))
    return name


@pytest.mark.parametrize(
    "shard",
    [
        "../outside.safetensors",
        "/etc/passwd",
        "/tmp/outside.safetensors",
        "sub/x.safetensors",
        "..\\outside.safetensors",
        "..",
        "",
        "config.json",
        None,
        7,
        ["model.safetensors"],
    ],
)
def test_an_index_cannot_lead_out_of_its_folder(
    shard: object, sharded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"x": torch.zeros(1)}, sharded.parent / "outside.safetensors")
    edit_index(sharded, shard)
    message = refused(sharded, monkeypatch)
    assert f"{shard!r}, want the plain name" in message


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', "[" * 100_000, "\xff"])
def test_an_index_that_is_none(text: str, sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (sharded / INDEX_NAME).write_bytes(text.encode("latin-1"))
    assert "weight_map" in refused(sharded, monkeypatch)


def test_an_index_that_names_a_tensor_twice(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (sharded / INDEX_NAME).read_text().replace('"model.norm.weight"', '"lm_head.weight"')
    (sharded / INDEX_NAME).write_text(text)
    assert "'lm_head.weight' twice" in refused(sharded, monkeypatch)


def test_a_missing_shard(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_allocation(monkeypatch)
    edit_index(sharded, "model-00099-of-00099.safetensors")
    with pytest.raises(FileNotFoundError, match=r"00099.*names it"):
        load(sharded)


def test_a_tensor_in_two_shards(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    tensors = load_file(first)
    name = next(iter(tensors))
    save_file(load_file(second) | {name: tensors[name]}, second)
    message = refused(sharded, monkeypatch)
    assert f"tensor '{name}': got it twice" in message
    assert first.name in message and second.name in message


def test_shards_without_an_index(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (sharded / INDEX_NAME).unlink()
    assert "shards with a model.safetensors.index.json" in refused(sharded, monkeypatch)


# --------------------------------------------------------------------------- tokenizer, savers


def test_load_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    Tokenizer(BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")])).save(str(tmp_path / "tokenizer.json"))
    for source in (tmp_path, tmp_path / "model.gguf"):
        assert load_tokenizer(source).encode("ab").ids == [2]
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="no tokenizer"):
        load_tokenizer(tmp_path)


def test_savers_convert_nothing(bf16_model: Flint, nvfp4_model: Flint, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got weight format 'bf16', want 'nvfp4'"):
        save_modelopt(bf16_model, tmp_path)
    with pytest.raises(ValueError, match="got weight format 'nvfp4', want 'bf16'"):
        save_bf16(nvfp4_model, tmp_path)
