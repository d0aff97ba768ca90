"""NVFP4 GGUF files: what is loaded, and that everything wrong is refused in time."""

from __future__ import annotations

import json
import math
import re
import struct
import warnings
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from loading_support import (
    TYPE_IDS,
    RawTensor,
    assert_same_parameters,
    bool_array,
    edited,
    forbid_allocation,
    peak_extra_memory,
    raw_tensors,
    tiny_config,
    write_gguf,
)

from flint_kernels.formats import nvfp4
from flint_kernels.loading import load, synthetic, transfer
from flint_kernels.loading.export import save_bf16, save_gguf, write_config
from flint_kernels.loading.loader import load_into
from flint_kernels.loading.names import checkpoint_tensors, gguf_to_hf
from flint_kernels.model.config import FlintConfig
from flint_kernels.model.flint import Flint

CONFIG = tiny_config()
NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def model() -> Flint:
    return synthetic(CONFIG, "nvfp4", seed=3)


@pytest.fixture(scope="module")
def good(model: Flint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    save_gguf(model, path)
    return path


@pytest.fixture
def tensors(good: Path) -> list[RawTensor]:
    return raw_tensors(good)


def refused(
    path: Path, monkeypatch: pytest.MonkeyPatch, config: FlintConfig | None = CONFIG
) -> str:
    """The message with which `load` refuses a file before it takes memory."""
    forbid_allocation(monkeypatch)
    with pytest.raises(ValueError) as caught:
        load(path, config=config)
    message = str(caught.value)
    assert path.name in message
    return message


# --------------------------------------------------------------------------- what is loaded


def test_what_was_saved_is_loaded_to_the_bit(model: Flint, good: Path) -> None:
    assert_same_parameters(load(good), model)
    assert_same_parameters(load(good.parent), model)


def test_a_model_that_is_there_already_is_filled(model: Flint, good: Path) -> None:
    other = Flint(model.config, "nvfp4")
    pointers = [parameter.data_ptr() for parameter in other.parameters()]
    load_into(other, good)
    assert_same_parameters(other, model)
    assert [parameter.data_ptr() for parameter in other.parameters()] == pointers
    with pytest.raises(ValueError, match="which has nvfp4 weights; want bf16, the model's"):
        load_into(Flint(model.config, "bf16"), good)


def test_names_are_those_of_the_specification() -> None:
    names = gguf_to_hf(CONFIG)
    assert names["token_embd.weight"] == "model.embed_tokens.weight"
    assert names["output_norm.weight"] == "model.norm.weight"
    assert names["output.weight"] == "lm_head.weight"
    assert names["blk.2.attn_norm.weight"] == "model.layers.2.input_layernorm.weight"
    assert names["blk.2.ffn_norm.weight"] == "model.layers.2.post_attention_layernorm.weight"
    assert names["blk.2.attn_q.weight"] == "model.layers.2.self_attn.q_proj.weight"
    assert names["blk.2.attn_output.weight"] == "model.layers.2.self_attn.o_proj.weight"
    assert names["blk.2.attn_k_norm.weight"] == "model.layers.2.self_attn.k_norm.weight"
    assert names["blk.2.attn_sinks.weight"] == "model.layers.2.self_attn.softmax_offset"
    assert names["blk.2.ffn_gate_inp.weight"] == "model.layers.2.mlp.gate.weight"
    assert names["blk.2.ffn_up_exps.weight"] == "model.layers.2.mlp.experts.{e}.up_proj.weight"
    assert (
        names["blk.2.ffn_down_shexp.weight"] == "model.layers.2.mlp.shared_expert.down_proj.weight"
    )
    assert names["blk.0.ffn_gate.weight"] == "model.layers.0.mlp.gate_proj.weight"
    assert "blk.0.ffn_gate_inp.weight" not in names


@pytest.mark.parametrize("weight_format", ["nvfp4", "bf16"])
@pytest.mark.parametrize("config", [CONFIG, FlintConfig.flint_40b()], ids=["tiny", "40b"])
def test_names_fill_every_value_of_the_module(config: FlintConfig, weight_format: str) -> None:
    parameters = dict(Flint(config, weight_format, "meta", 1).named_parameters())
    filled = dict.fromkeys(parameters, 0)
    for tensor in checkpoint_tensors(config):
        for path, view in tensor.target.views(parameters, weight_format).items():
            filled[path] += view.numel()
    assert filled == {path: parameter.numel() for path, parameter in parameters.items()}
    values = sum(math.prod(tensor.target.shape) for tensor in checkpoint_tensors(config))
    assert values == config.parameter_count()


@pytest.mark.parametrize("weight_format", ["nvfp4", "bf16"])
def test_no_value_of_the_module_has_two_names(weight_format: str) -> None:
    """Beside the count above: views that overlapped would leave others out."""
    model = Flint(CONFIG, weight_format, "cpu", 1)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for parameter in parameters.values():
        parameter.view(torch.uint8).zero_()
    for tensor in checkpoint_tensors(CONFIG):
        for path, view in tensor.target.views(parameters, weight_format).items():
            assert not bool(view.float().any()), f"{tensor.hf}: {path}"
            view.copy_(torch.ones_like(view, dtype=torch.float32))
    assert all(bool((parameter.float() == 1).all()) for parameter in parameters.values())


def test_values_are_those_that_the_gguf_package_decodes(good: Path) -> None:
    """Each shard and expert by its own global scale (case Q2), against an independent decoder."""
    model = load(good)
    parameters = dict(model.named_parameters())
    read = {tensor.name: tensor for tensor in gguf.GGUFReader(good).tensors}
    checked = 0
    for name, tensor in read.items():
        if tensor.tensor_type != gguf.GGMLQuantizationType.NVFP4:
            continue
        scale = read[name.removesuffix("weight") + "scale"].data
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        want = values * torch.from_numpy(scale.copy()).reshape(-1, *[1] * (values.dim() - 1))
        target = next(t.target for t in checkpoint_tensors(CONFIG) if t.gguf == name)
        got = nvfp4.dequantize(
            target.weight(parameters).contiguous(),
            target.weight_scale(parameters).contiguous(),
            target.weight_scale_2(parameters),
        )
        assert torch.equal(got, want.view(got.shape)), name
        checked += 1
    # Four projections of attention a layer, three of a dense MLP, six of an MoE, and the head.
    assert checked == 3 * 4 + 3 + 2 * 6 + 1


def test_global_scales_of_shards_and_experts_differ(model: Flint) -> None:
    """Otherwise the test above could not see one scale used for all."""
    scales = {n: p for n, p in model.named_parameters() if n.endswith("_scale_2")}
    for name, scale in scales.items():
        assert scale.unique().numel() == scale.numel(), name


def test_norms_router_and_embedding_are_rounded_to_bf16_and_sinks_stay(
    tensors: list[RawTensor], tmp_path: Path, model: Flint
) -> None:
    plain = ("token_embd.weight", "blk.1.attn_norm.weight", "blk.1.ffn_gate_inp.weight")
    values = {}
    for name in (*plain, "blk.1.attn_sinks.weight"):

        def to_f32(tensor: RawTensor) -> RawTensor:
            value = torch.randn(tensor.shape)
            values[tensor.name] = value
            return replace(tensor, type_id=TYPE_IDS["F32"], data=value.numpy().tobytes())

        tensors = edited(tensors, name, to_f32)
    path = tmp_path / "f32.gguf"
    write_gguf(path, tensors)
    loaded = load(path, config=CONFIG)
    assert torch.equal(loaded.embed_tokens.weight, values[plain[0]].bfloat16())
    layer = loaded.layers[1]
    assert torch.equal(layer.input_layernorm.weight, values[plain[1]].bfloat16())
    assert torch.equal(layer.mlp.gate.weight, values[plain[2]].bfloat16())
    assert torch.equal(layer.self_attn.sinks, values["blk.1.attn_sinks.weight"])


def test_scale_companion_may_be_a_scalar(
    tensors: list[RawTensor], tmp_path: Path, model: Flint
) -> None:
    path = tmp_path / "scalar.gguf"
    write_gguf(path, edited(tensors, "output.scale", lambda tensor: replace(tensor, shape=())))
    assert_same_parameters(load(path, config=CONFIG), model)


class Staged(transfer.Transfer):
    """Takes the way to an accelerator, on the CPU."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self._on_host = False


def test_the_way_to_an_accelerator_gives_the_same_bits(
    good: Path, model: Flint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The staged path, taken on the CPU, in slices so small that every tensor has several."""
    monkeypatch.setattr("flint_kernels.loading.loader.Transfer", Staged)
    monkeypatch.setattr(transfer, "SLICE_BYTES", 1000)
    assert_same_parameters(load(good), model)


def test_progress_is_shown_when_asked(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load(good, progress=True)
    captured = capsys.readouterr()
    assert "model.gguf" in captured.err and "100%" in captured.err and not captured.out
    load(good)  # stderr is no terminal here
    assert capsys.readouterr().err == ""


# --------------------------------------------------------------------------- which files


def test_config_comes_from_beside_the_file_or_is_given(
    tensors: list[RawTensor], tmp_path: Path, model: Flint
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, tensors)
    with pytest.raises(FileNotFoundError, match=r"config\.json.*or pass config="):
        load(path)
    assert_same_parameters(load(path, config=CONFIG), model)
    write_config(CONFIG, tmp_path)
    assert_same_parameters(load(path), model)


def test_several_gguf_files_in_a_folder_are_refused(
    tensors: list[RawTensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_allocation(monkeypatch)
    for name in ("a.gguf", "b.gguf"):
        write_gguf(tmp_path / name, tensors)
    with pytest.raises(ValueError, match=r"2 files \(a.gguf, b.gguf\), want one .gguf file"):
        load(tmp_path, config=CONFIG)


def test_gguf_beside_safetensors_is_refused(good: Path, tmp_path: Path) -> None:
    save_bf16(synthetic(CONFIG, "bf16"), tmp_path)
    (tmp_path / "model.gguf").write_bytes(good.read_bytes())
    with pytest.raises(ValueError, match=r"model\.gguf beside safetensors.*name the \.gguf"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "error", "match"),
    [
        ("nothing.gguf", FileNotFoundError, "where there is nothing"),
        ("flint-huge", FileNotFoundError, "'flint-tiny'"),
        ("", FileNotFoundError, "no weights"),
        ("model.bin", ValueError, "want a .gguf or .safetensors file"),
    ],
)
def test_sources_that_are_none(
    name: str, error: type[Exception], match: str, tmp_path: Path
) -> None:
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(error, match=match):
        load(tmp_path / name, config=CONFIG)


# --------------------------------------------------------------------------- cases G and Q


def test_G2_cut_files_are_refused_before_memory_is_taken(
    good: Path, tensors: list[RawTensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = good.read_bytes()
    header = len(data) - sum(-(-len(tensor.data) // 32) * 32 for tensor in tensors)
    cuts = {0, 3, 4, 8, 16, 24, 40, header // 2, header - 40, header}
    starts = [header]
    for tensor in tensors[:-1]:
        starts.append(starts[-1] + -(-len(tensor.data) // 32) * 32)
        cuts |= {starts[-1], starts[-1] + 1}
    for start, tensor in zip(starts, tensors, strict=True):
        cuts.add(start + len(tensor.data) // 2)
    path = tmp_path / "cut.gguf"
    forbid_allocation(monkeypatch)
    for cut in sorted(cuts):
        path.write_bytes(data[:cut])
        with pytest.raises(ValueError, match=r"cut short|room|damaged") as caught:
            load(path, config=CONFIG)
        assert re.search("header|metadata key|tensor", str(caught.value)), cut


def test_G3_a_byte_swapped_file_is_refused(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytearray(good.read_bytes())
    data[4:8] = data[4:8][::-1]
    path = tmp_path / "big.gguf"
    path.write_bytes(data)
    assert "big-endian" in refused(path, monkeypatch)


def test_G4_loads_without_write_permission_and_without_a_warning(
    good: Path, tmp_path: Path, model: Flint
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(good.read_bytes())
    path.chmod(0o444)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_parameters(load(path, config=CONFIG), model)


def test_G5_peak_extra_memory_is_a_tensor_and_a_constant(good: Path, tmp_path: Path) -> None:
    config = tiny_config(
        hidden_size=512, moe_intermediate_size=512, num_experts=64, vocab_size=4096
    )
    path = tmp_path / "big.gguf"
    save_gguf(synthetic(config, "nvfp4", max_positions=1), path)
    largest = max(len(tensor.data) for tensor in raw_tensors(path))
    constant = 12 << 20  # buffers of the repack (4 MiB), of threads, of the allocator
    assert path.stat().st_size > 2 * (largest + constant)  # or reading it whole would pass
    extra = peak_extra_memory(good, path)
    assert extra <= largest + constant, f"{extra >> 20} MiB, largest tensor {largest >> 20} MiB"


def test_G6_another_type_where_nvfp4_belongs(
    tensors: list[RawTensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "blk.1.ffn_up_exps.weight"
    q4_k = RawTensor(name, TYPE_IDS["Q4_K"], (4, 64, 256), bytes(4 * 64 * 144))
    path = tmp_path / "q4_k.gguf"
    write_gguf(path, edited(tensors, name, lambda tensor: q4_k))
    message = refused(path, monkeypatch)
    assert f"tensor '{name}': got type Q4_K, want NVFP4" in message
    assert "got shape [4, 64, 256], want [4, 64, 64]" in message


def test_G6_nvfp4_where_a_plain_type_belongs(
    tensors: list[RawTensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "blk.1.attn_norm.weight"
    packed = RawTensor(name, TYPE_IDS["NVFP4"], (64,), bytes(36))
    path = tmp_path / "norm.gguf"
    write_gguf(path, edited(tensors, name, lambda tensor: packed))
    message = refused(path, monkeypatch)
    assert f"tensor '{name}': got type NVFP4, want F32 or BF16" in message


def test_G6_an_unknown_type(
    tensors: list[RawTensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "type99.gguf"
    write_gguf(path, edited(tensors, "output.weight", lambda tensor: replace(tensor, type_id=99)))
    message = refused(path, monkeypatch)
    assert "'output.weight'" in message and "type 99" in message


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("blk.1.attn_q.weight", "want type NVFP4, shape [128, 64]"),
        ("blk.2.attn_sinks.weight", "want type F32 or BF16, shape [4]"),
        ("blk.0.ffn_down.scale", "want type F32, shape [1] or []"),
        ("blk.1.ffn_gate_exps.scale", "want type F32, shape [4]"),
    ],
)
def test_G6_a_missing_tensor(
    name: str,
    wanted: str,
    tensors: list[RawTensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "missing.gguf"
    write_gguf(path, edited(tensors, name, lambda tensor: None))
    message = refused(path, monkeypatch)
    assert f"tensor '{name}': missing, {wanted}" in message and "1 tensor does not fit" in message


def test_G6_a_tensor_named_twice(
    tensors: list[RawTensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "twice.gguf"
    write_gguf(path, [*tensors, tensors[3]])
    message = refused(path, monkeypatch)
    assert repr(tensors[3].name) in message and "twice" in message


@pytest.mark.parametrize("name", ["blk.7.attn_q.weight", "rope_freqs.weight", "output.input_scale"])
def test_an_unexpected_tensor(
    name: str, tensors: list[RawTensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "more.gguf"
    write_gguf(path, [*tensors, RawTensor(name, TYPE_IDS["F32"], (2,), bytes(8))])
    message = refused(path, monkeypatch)
    assert f"tensor '{name}': got F32 [2], want no tensor of that name" in message
    assert ("W4A16" in message) == name.endswith("input_scale")


def test_G6_fp4_activations(
    tensors: list[RawTensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Flint
) -> None:
    key = "general.tensor_extra.prec_a4"
    path = tmp_path / "a4.gguf"
    write_gguf(path, tensors, [(key, bool_array(False, False))])
    assert_same_parameters(load(path, config=CONFIG), model)
    for value in (bool_array(False, True), struct.pack("<IB", 7, 1)):
        write_gguf(path, tensors, [(key, value)])
        message = refused(path, monkeypatch)
        assert key in message and "W4A16" in message


def test_all_problems_are_counted_and_ten_are_named(
    tensors: list[RawTensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "half.gguf"
    write_gguf(path, tensors[12:])
    lines = refused(path, monkeypatch).splitlines()
    assert "12 tensors do not fit" in lines[0] and len(lines) == 12
    for line, tensor in zip(lines[1:11], tensors[:10], strict=True):
        assert repr(tensor.name) in line
    assert lines[11].strip() == "... and 2 more"


def test_a_config_of_another_model_is_refused(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = refused(good, monkeypatch, tiny_config(hidden_size=128))
    assert "is config.json that of this checkpoint?" in message


def test_Q1_scale_bytes_of_gguf(tensors: list[RawTensor], tmp_path: Path) -> None:
    """7F is zero and B8 is 1.0 (its bit 7 means nothing); FF is an error that names the tensor."""
    name = "blk.0.attn_v.weight"

    def with_scales(*scales: int) -> list[RawTensor]:
        def edit(tensor: RawTensor) -> RawTensor:
            blocks = np.frombuffer(tensor.data, np.uint8).reshape(-1, 36).copy()
            blocks[0, :4], blocks[1, :4] = scales[:4], scales[4:]
            return replace(tensor, data=blocks.tobytes())

        return edited(tensors, name, edit)

    path = tmp_path / "scales.gguf"
    write_gguf(path, with_scales(0x00, 0x01, 0x7E, 0x7F, 0x80, 0xB8, 0x38, 0x38))
    qkv = load(path, config=CONFIG).layers[0].self_attn.qkv_proj
    first_of_v = CONFIG.qkv_sizes[0] + CONFIG.qkv_sizes[1]
    assert qkv.weight_scale[first_of_v].float().tolist() == [0.0, 2**-9, 448.0, 0.0]
    assert qkv.weight_scale[first_of_v + 1].float().tolist() == [0.0, 1.0, 1.0, 1.0]

    write_gguf(path, with_scales(0x38, 0x38, 0xFF, 0x38, 0x38, 0x38, 0x38, 0x38))
    with pytest.raises(ValueError, match=f"scales.gguf: tensor '{name}'.*0xff"):
        load(path, config=CONFIG)


def test_Q1_a_bad_scale_of_an_expert_is_found(tensors: list[RawTensor], tmp_path: Path) -> None:
    name = "blk.2.ffn_down_exps.weight"

    def edit(tensor: RawTensor) -> RawTensor:
        blocks = np.frombuffer(tensor.data, np.uint8).reshape(4, -1, 36).copy()
        blocks[2, 5, 1] = 0xFF
        return replace(tensor, data=blocks.tobytes())

    path = tmp_path / "expert.gguf"
    write_gguf(path, edited(tensors, name, edit))
    with pytest.raises(ValueError, match=f"tensor '{name}', expert 2.*0xff"):
        load(path, config=CONFIG)


@pytest.mark.parametrize("value", [NAN, INF, 0.0, -0.5])
def test_a_global_scale_that_no_quantiser_makes(
    value: float, tensors: list[RawTensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "scale.gguf"
    data = struct.pack("<f", value)
    write_gguf(path, edited(tensors, "output.scale", lambda tensor: replace(tensor, data=data)))
    message = refused(path, monkeypatch)
    assert "tensor 'output.scale'" in message and f"got the global scale {value}" in message


def with_value(tensors: list[RawTensor], name: str, value: float) -> list[RawTensor]:
    """`value` in place of the tensor's last one; the tensor becomes F32."""

    def edit(tensor: RawTensor) -> RawTensor:
        values = torch.ones(tensor.shape)
        values.view(-1)[-1] = value
        return replace(tensor, type_id=TYPE_IDS["F32"], data=values.numpy().tobytes())

    return edited(tensors, name, edit)


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("output_norm.weight", NAN),
        ("blk.1.attn_q_norm.weight", -INF),
        ("blk.1.ffn_gate_inp.weight", INF),
        ("blk.1.ffn_gate_inp.weight", 3.4e38),  # infinite in BF16
        ("token_embd.weight", NAN),
        ("blk.1.attn_sinks.weight", NAN),
        ("blk.1.attn_sinks.weight", INF),
    ],
)
def test_values_that_are_no_numbers(
    name: str,
    value: float,
    staged: bool,
    tensors: list[RawTensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if staged:
        monkeypatch.setattr("flint_kernels.loading.loader.Transfer", Staged)
    path = tmp_path / "bad.gguf"
    write_gguf(path, with_value(tensors, name, value))
    seen = torch.tensor(value).bfloat16().item()
    with pytest.raises(ValueError, match=f"bad.gguf: tensor '{name}': got {seen} at index .*want"):
        load(path, config=CONFIG)


def test_a_sink_of_minus_infinity_is_no_sink(tensors: list[RawTensor], tmp_path: Path) -> None:
    path = tmp_path / "sink.gguf"
    write_gguf(path, with_value(tensors, "blk.1.attn_sinks.weight", -INF))
    assert load(path, config=CONFIG).layers[1].self_attn.sinks[-1] == -INF


# --------------------------------------------------------------------------- the saver


def test_save_gguf_says_what_it_cannot_do(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with pytest.raises(ValueError, match="got weight format 'bf16', want 'nvfp4'"):
        save_gguf(synthetic(CONFIG, "bf16"), path)
    narrow = synthetic(tiny_config(shared_expert_intermediate_size=32), "nvfp4")
    with pytest.raises(ValueError, match=r"got 32 input features in .*shared_expert\.down_proj"):
        save_gguf(narrow, path)
    negative = synthetic(CONFIG, "nvfp4")
    negative.lm_head.weight_scale.view(torch.uint8)[3, 1] = 0xB8
    with pytest.raises(ValueError, match=r"output\.weight.*negative scale"):
        save_gguf(negative, path)
    assert list(tmp_path.iterdir()) == []


def test_save_gguf_writes_a_config_that_is_read_back(good: Path) -> None:
    fields = json.loads((good.parent / "config.json").read_text())
    assert FlintConfig.from_dict(fields) == CONFIG
