"""`flint-kernels convert` and the conversion between weight formats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
import torch
from loading_support import assert_same_parameters, tiny_config

from flint_kernels import cli, ops
from flint_kernels.formats.nvfp4 import dequantize
from flint_kernels.loading import load, load_tokenizer, synthetic
from flint_kernels.loading.convert import to_bf16, to_nvfp4
from flint_kernels.loading.export import save_gguf, save_modelopt
from flint_kernels.loading.source import packaged_folder


def convert(*arguments: str | Path) -> int:
    return cli.main(["convert", *map(str, arguments)])


def test_gguf_to_modelopt_and_back_loses_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    want = load("flint-tiny")
    assert convert("flint-tiny", tmp_path / "modelopt", "--to", "modelopt") == 0
    assert "nvfp4 weights as modelopt" in capsys.readouterr().out
    assert convert(tmp_path / "modelopt", tmp_path / "gguf", "--to", "gguf", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["path"] == str(tmp_path / "gguf" / "model.gguf")
    assert report["source_weights"] == report["weights"] == "nvfp4"
    assert report["bytes"] == sum(file.stat().st_size for file in (tmp_path / "gguf").iterdir())
    for name in ("modelopt", "gguf"):
        got = load(tmp_path / name)
        assert_same_parameters(got, want)
        assert got.config == want.config
        assert load_tokenizer(tmp_path / name).to_str() == load_tokenizer("flint-tiny").to_str()
    source = packaged_folder("flint-tiny")
    assert source is not None
    for name in ("generation_config.json", "config.json"):
        want_fields = json.loads((source / name).read_text("utf-8"))
        assert json.loads((tmp_path / "gguf" / name).read_text("utf-8")) == want_fields
    assert want_fields["model_type"] == "flint"  # by which other libraries know it


def test_rounding_has_to_be_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for source, to, lost in (
        ("flint-tiny-bf16", "gguf", "nearest of 15 values"),
        ("flint-tiny-bf16", "modelopt", "nearest of 15 values"),
        ("flint-tiny", "bf16", "rounded to BF16"),
    ):
        assert convert(source, tmp_path / "out", "--to", to) == 2
        error = capsys.readouterr().err
        assert f"--to {to}: got a checkpoint of" in error and lost in error and "--round" in error
    assert not (tmp_path / "out").exists()


def test_bf16_to_nvfp4_rounds_each_part_by_itself() -> None:
    model = synthetic(tiny.CONFIG, "bf16", seed=3)
    # A shard and an expert far larger than the others would take their scales, were they shared.
    attention, experts = model.layers[1].self_attn, model.layers[1].mlp.experts
    attention.qkv_proj.weight[:128] *= 64
    experts.w13[2, :32] *= 64
    packed = to_nvfp4(model)
    for linear, parts, held in (
        (attention.qkv_proj.weight, [128, 64, 64], packed.layers[1].self_attn.qkv_proj.operands()),
        (
            experts.w13[2],
            [32, 32],
            [getattr(packed.layers[1].mlp.experts, name)[2] for name in
             ("w13", "w13_scale", "w13_scale_2")],
        ),
        (packed_source := model.lm_head.weight, [len(packed_source)], packed.lm_head.operands()),
    ):  # fmt: skip
        split = [tensor.split(parts) for tensor in (linear, *held[:2])]
        assert len(set(held[2].tolist())) == len(parts)
        for part, codes, scale, scale_2 in zip(*split, held[2], strict=True):
            want = ops.nvfp4_quantize(part)
            assert torch.equal(codes, want[0]) and torch.equal(scale_2, want[2])
            assert torch.equal(scale.view(torch.uint8), want[1].view(torch.uint8))
            error = (dequantize(codes, scale, scale_2) - part.float()).norm() / part.float().norm()
            assert 0 < error < 0.2  # half a step of E2M1 is at most a sixth of a value, mostly less
    for name in ("embed_tokens.weight", "layers.1.mlp.gate.weight", "layers.0.self_attn.sinks"):
        assert torch.equal(packed.get_parameter(name), model.get_parameter(name))


def test_nvfp4_to_bf16_is_one_rounding_of_every_weight() -> None:
    packed = tiny.tiny_model("nvfp4")
    model = to_bf16(packed)
    experts = packed.layers[2].mlp.experts
    for expert in range(tiny.CONFIG.num_experts):
        want = dequantize(experts.w2[expert], experts.w2_scale[expert], experts.w2_scale_2[expert])
        assert torch.equal(model.layers[2].mlp.experts.w2[expert], want.bfloat16())
    qkv = packed.layers[0].self_attn.qkv_proj
    ends = [0, 128, 192, 256]
    for shard in range(3):
        rows = slice(ends[shard], ends[shard + 1])
        want = dequantize(qkv.weight[rows], qkv.weight_scale[rows], qkv.weight_scale_2[shard])
        assert torch.equal(model.layers[0].self_attn.qkv_proj.weight[rows], want.bfloat16())
    assert model.weight_format == "bf16" and model.config == packed.config


def test_a_model_in_the_format_already_is_refused() -> None:
    with pytest.raises(ValueError, match="got weight format 'nvfp4', want 'bf16'"):
        to_nvfp4(tiny.tiny_model("nvfp4"))
    with pytest.raises(ValueError, match="got weight format 'bf16', want 'nvfp4'"):
        to_bf16(tiny.tiny_model("bf16"))


def test_what_has_no_gguf_form_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A block scale with its sign set, and a width that is no multiple of 64; nothing is left."""
    signed = synthetic(tiny_config(), seed=1)
    signed.lm_head.weight_scale.view(torch.uint8)[0, 0] |= 0x80
    save_modelopt(signed, tmp_path / "signed")
    narrow = synthetic(tiny_config(moe_intermediate_size=48), seed=1)
    save_modelopt(narrow, tmp_path / "narrow")
    for name, message in (("signed", "sign"), ("narrow", "want a multiple of 64")):
        assert convert(tmp_path / name, tmp_path / "out", "--to", "gguf") == 2
        assert message in capsys.readouterr().err
        assert not list((tmp_path / "out").glob("*"))


def test_how_the_weights_were_packed_is_not_said_of_the_new_ones(tmp_path: Path) -> None:
    save_modelopt(synthetic(tiny_config(), seed=1), tmp_path / "in")
    path = tmp_path / "in" / "config.json"
    fields = json.loads(path.read_text("utf-8"))
    added = {"model_type": "flint", "quantization_config": {"quant_method": "modelopt"}}
    path.write_text(json.dumps(fields | added))
    assert convert(tmp_path / "in", tmp_path / "out", "--to", "gguf") == 0
    written = json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))
    assert written == fields | {"model_type": "flint"}


def test_a_folder_with_something_in_it_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kept").write_text("kept")
    for output, what in ((tmp_path, "is not empty"), (tmp_path / "kept", "is a file")):
        assert convert("flint-tiny", output, "--to", "modelopt") == 2
        assert f"output: got {output}, which {what}" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["kept"]


def test_writing_shows_its_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny.synthetic(tiny_config(), seed=1)
    save_gguf(model, tmp_path / "a" / "model.gguf", progress=True)
    assert "model.gguf: 100%" in capsys.readouterr().err
    save_modelopt(model, tmp_path / "b", progress=True, max_shard_bytes=20_000)
    assert "b: 100%" in capsys.readouterr().err
    to_bf16(model, progress=True)
    assert "to bf16: 100%" in capsys.readouterr().err
    save_modelopt(model, tmp_path / "c")
    assert capsys.readouterr().err == ""
