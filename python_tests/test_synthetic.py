"""Synthetic weights behave like those of a trained model where kernels could tell."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from loading_support import assert_same_parameters, tiny_config

from flint_kernels.formats import nvfp4
from flint_kernels.loading import synthetic
from flint_kernels.loading.names import Kind, checkpoint_tensors
from flint_kernels.model import calls
from flint_kernels.model.config import FULL, SLIDING, FlintConfig
from flint_kernels.model.flint import Flint

TOKENS = 200

CONFIG = FlintConfig(
    num_hidden_layers=8,
    hidden_size=256,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=1024,
    max_position_embeddings=2048,
    intermediate_size=512,
    num_experts=32,
    num_experts_per_tok=4,
    moe_intermediate_size=64,
    shared_expert_intermediate_size=128,
    layer_types=tuple(FULL if layer % 4 == 3 else SLIDING for layer in range(8)),
    sliding_window=65,
    no_rope_layer_indices=(3, 7),
    mlp_only_layers=(0, 1),
)


class Observed:
    """One prefill of random tokens: logits, residual streams, and loads of the experts."""

    def __init__(self, model: Flint, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stream_rms: list[float] = []
        self.loads: list[torch.Tensor] = []
        add, route = calls.fused_add_rms_norm, calls.router_topk

        def observed_add(
            *arguments: object, **options: object
        ) -> tuple[torch.Tensor, torch.Tensor]:
            normed, residual = add(*arguments, **options)
            self.stream_rms.append(residual.float().square().mean().sqrt().item())
            return normed, residual

        def observed_route(*arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
            weights, ids = route(*arguments)
            self.loads.append(torch.bincount(ids.flatten(), minlength=CONFIG.num_experts))
            return weights, ids

        monkeypatch.setattr(calls, "fused_add_rms_norm", observed_add)
        monkeypatch.setattr(calls, "router_topk", observed_route)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(CONFIG.vocab_size, (TOKENS,), generator=generator)
        cache = model.make_cache(1, TOKENS)
        batch = cache.plan([cache.add()], [TOKENS])
        self.logits = model.logits(model.prefill(tokens, batch, cache))


@pytest.fixture(scope="module", params=["nvfp4", "bf16"])
def observed(request: pytest.FixtureRequest) -> Iterator[Observed]:
    model = synthetic(CONFIG, request.param, seed=1, max_positions=TOKENS)
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield Observed(model, monkeypatch)


def test_logits_have_a_deviation_of_about_3(observed: Observed) -> None:
    deviation = observed.logits.std(-1)
    assert bool(torch.isfinite(observed.logits).all())
    assert deviation.min().item() > 2 and deviation.max().item() < 4.5
    assert 2.7 < deviation.mean().item() < 3.3


def test_routing_is_spread(observed: Observed) -> None:
    assert len(observed.loads) == 6
    for load in observed.loads:
        share = load / load.sum()
        entropy = -(share * share.clamp_min(1e-9).log()).sum() / torch.tensor(len(load)).log()
        assert load.min() > 0
        assert entropy > 0.95


def test_the_residual_stream_stays_in_bounds(observed: Observed) -> None:
    rms = observed.stream_rms
    assert len(rms) == 2 * CONFIG.num_hidden_layers  # the last is the final norm's
    assert rms[0] >= 1 and rms[-1] < 2.5
    # The layers matter: together they add a good part of what the embedding brings.
    assert rms[-1] > 1.2
    assert all(later < 1.2 * earlier for earlier, later in pairwise(rms))


def test_packed_weights_have_the_deviation_of_the_bf16_ones() -> None:
    packed, plain = (synthetic(CONFIG, kind, max_positions=1) for kind in ("nvfp4", "bf16"))
    packed_parameters, parameters = dict(packed.named_parameters()), dict(plain.named_parameters())
    for tensor in checkpoint_tensors(CONFIG):
        target = tensor.target
        if target.kind is not Kind.LINEAR:
            continue
        scale_2 = target.weight_scale_2(packed_parameters)
        values = nvfp4.dequantize(
            target.weight(packed_parameters).contiguous(),
            target.weight_scale(packed_parameters).contiguous(),
            scale_2,
        )
        want = target.weight(parameters).float().std().item()
        # One tensor's global scale is drawn between sqrt(0.5) and sqrt(1.5) of the mean.
        assert 0.68 < values.std().item() / want < 1.26, tensor.hf
        assert values.mean().abs().item() < 0.05 * want, tensor.hf
        assert scale_2.unique().numel() == scale_2.numel()


def test_a_seed_makes_the_same_model_and_another_one_another() -> None:
    config = tiny_config()
    for weight_format in ("nvfp4", "bf16"):
        first = synthetic(config, weight_format, seed=7)
        assert_same_parameters(synthetic(config, weight_format, seed=7), first)
        other = dict(synthetic(config, weight_format, seed=8).named_parameters())
        for name, tensor in first.named_parameters():
            assert not torch.equal(tensor.view(torch.uint8), other[name].view(torch.uint8)), name


def test_no_block_scale_is_nan() -> None:
    model = synthetic(tiny_config(), "nvfp4")
    for name, tensor in model.named_parameters():
        if tensor.dtype == torch.float8_e4m3fn:
            nvfp4.check_modelopt_scales(tensor, name)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="weight_format: got 'fp8'"):
        synthetic(tiny_config(), "fp8")
