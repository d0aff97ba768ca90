"""The torch parts of the general GPU bodies, on CPU tensors; `interpreted.py` has the kernels."""

from __future__ import annotations

import builtins
import sys
from typing import Any

import op_samples
import pytest
import torch
from op_samples import BF16, int32, randn

from flint_kernels.backends import cpu, gpu_general
from flint_kernels.backends.triton import launch
from flint_kernels.ops import REGISTRY
from flint_kernels.reference.sampling import uniform


def general(name: str, *args: Any, **kwargs: Any) -> Any:
    return gpu_general.general_body(name)(**REGISTRY[name].bind(args, kwargs))


def reference(name: str, *args: Any, **kwargs: Any) -> Any:
    return cpu.reference_body(name)(**REGISTRY[name].bind(args, kwargs))


def as_tuple(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def test_every_op_has_a_body_for_the_gpu() -> None:
    assert all("CUDA" in declaration.bodies for declaration in REGISTRY.values())
    assert all(callable(gpu_general.general_body(name)) for name in REGISTRY)


EXACT = (
    "fused_add_rms_norm",
    "gguf_to_modelopt",
    "modelopt_to_gguf",
    "nvfp4_quantize",
    "rms_norm",
    "sample",
)


@pytest.mark.parametrize("name", EXACT)
def test_equal_to_the_reference_bit_for_bit(name: str) -> None:
    for args, kwargs in op_samples.SAMPLES[name]():
        got, want = general(name, *args, **kwargs), reference(name, *args, **kwargs)
        for one, two in zip(as_tuple(got), as_tuple(want), strict=True):
            assert one.shape == two.shape
            assert one.dtype == two.dtype
            assert torch.equal(bits(one), bits(two))


@pytest.mark.parametrize("name", ["bf16_linear", "bf16_lm_head", "silu_and_mul", "router_topk"])
def test_equal_to_the_reference_but_for_the_last_bit(name: str) -> None:
    """Sums in another order, and exponentials of another vector width."""
    for args, kwargs in op_samples.SAMPLES[name]():
        got, want = general(name, *args, **kwargs), reference(name, *args, **kwargs)
        for one, two in zip(as_tuple(got), as_tuple(want), strict=True):
            if one.is_floating_point():
                torch.testing.assert_close(one, two, rtol=2**-7, atol=1e-6)
            else:
                assert torch.equal(one, two)


def test_T1_T2_router() -> None:
    logits = randn(6, 256)
    logits[1] = torch.nan
    logits[2, 10:20], logits[2, 30:40], logits[2, 50] = torch.inf, -torch.inf, torch.nan
    logits[3] = 1.0
    logits[4] = torch.arange(256.0).remainder(8) + 17
    logits[5] = -0.0
    logits[5, 1::2] = 0.0
    logits[5, 9] = -torch.nan
    for logits_of in (logits, logits.float(), -logits):
        weights, ids = general("router_topk", logits_of, 6)
        want_weights, want_ids = reference("router_topk", logits_of, 6)
        assert torch.equal(ids, want_ids)
        torch.testing.assert_close(weights, want_weights, rtol=2**-7, atol=0, equal_nan=True)
    ids = general("router_topk", logits, 6)[1]
    assert ids[3].tolist() == list(range(6))
    assert ids[4].tolist() == [7, 15, 23, 31, 39, 47]
    assert ids[5].tolist() == [9, 0, 1, 2, 3, 4]
    assert all(len(set(row)) == 6 for row in ids.tolist())


# ---------------------------------------------------------------------------------------- sampling


def test_uniform_numbers_are_the_reference_s() -> None:
    generator = op_samples.rng(1)
    seeds = torch.randint(-(2**62), 2**62, (64,), generator=generator)
    offsets = torch.randint(0, 2**40, (64,), generator=generator)
    seeds[:3], offsets[:3] = torch.tensor([0, -1, 2**63 - 1]), torch.tensor([0, 2**63 - 1, -1])
    want = [uniform(s, o) for s, o in zip(seeds.tolist(), offsets.tolist(), strict=True)]
    assert gpu_general._uniform(seeds, offsets).tolist() == want


@pytest.mark.parametrize("count", [1, 511, 512, 513, 3000])
def test_running_sums(count: int) -> None:
    rows = torch.rand(3, count, dtype=torch.float64, generator=op_samples.rng(1))
    for some in (rows, rows[:1], rows[:0]):
        got = gpu_general._running_sums(some)
        torch.testing.assert_close(got, some.cumsum(dim=1), rtol=1e-14, atol=0)


@pytest.mark.parametrize("spread", [0.0, 0.5, 4.0])
def test_tokens_are_the_reference_s(spread: float) -> None:
    """Ties in plenty, NaN and infinities, all settings: 512 draws for each spread."""
    rows, vocabulary = 512, 1000
    generator = op_samples.rng(2)
    logits = torch.randn(rows, vocabulary, generator=generator) * spread
    logits[:200] = (logits[:200] * 4).round() / 4
    logits[0, 5], logits[1, 7], logits[2, :990], logits[3, 4:6] = (
        torch.nan, torch.inf, -torch.inf, -0.0,
    )  # fmt: skip
    choose = lambda *values: torch.tensor(values)[  # noqa: E731
        torch.randint(0, len(values), (rows,), generator=generator)
    ]
    arguments = (
        logits,
        choose(0.0, 0.3, 1.0, 2.0),
        choose(0, 1, 5, 20, 5000).to(torch.int32),
        choose(0.05, 0.5, 0.95, 1.0),
        torch.arange(rows),
        torch.full((rows,), 77),
    )
    assert torch.equal(general("sample", *arguments), reference("sample", *arguments))


def test_rows_without_a_choice_and_bad_settings_give_minus_one() -> None:
    logits = torch.zeros(7, 5)
    logits[0] = torch.nan
    logits[1] = -torch.inf
    temperature = torch.tensor([1.0, 1.0, -1.0, torch.nan, 1.0, 1.0, 0.0])
    top_k, top_p = int32(0, 0, 0, 0, -1, 0, 0), torch.tensor([1.0, 1, 1, 1, 1, 1.5, 1])
    seeds = torch.zeros(7, dtype=torch.int64)
    tokens = general("sample", logits, temperature, top_k, top_p, seeds, seeds)
    assert tokens.tolist() == [-1, -1, -1, -1, -1, -1, 0]


# ----------------------------------------------------------------------- formats and their outcomes


def test_G1_repack_while_nothing_can_be_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a capture bad scales are taken as ggml reads them; otherwise they are an error."""
    codes = bytes.fromhex("8091a2b3c4d5e6f7") * 4
    blocks = torch.tensor(list(bytes([0x7F, 0xB8, 0xFF, 0x01]) + codes), dtype=torch.uint8)[None]
    with pytest.raises(ValueError, match="0xff"):
        general("gguf_to_modelopt", blocks)
    monkeypatch.setattr(gpu_general, "_capturing", lambda _: True)
    weight, scale = general("gguf_to_modelopt", blocks)
    assert bytes(weight[0, :8].tolist()).hex() == "1032547698badcfe"
    assert scale.view(torch.uint8)[0].tolist() == [0x00, 0x38, 0x00, 0x01]
    negative = torch.tensor([[0x00, 0xB8, 0x7F, 0x01]], dtype=torch.uint8)
    back = general("modelopt_to_gguf", weight, negative.view(torch.float8_e4m3fn))
    assert back[0, :4].tolist() == [0x00, 0x38, 0x7F, 0x01]
    assert torch.equal(back[0, 4:], blocks[0, 4:])
    for name in ("gguf_to_modelopt", "modelopt_to_gguf"):
        for args, kwargs in op_samples.SAMPLES[name]():
            got, want = general(name, *args, **kwargs), reference(name, *args, **kwargs)
            for one, two in zip(as_tuple(got), as_tuple(want), strict=True):
                assert torch.equal(bits(one), bits(two))


def test_values_that_nvfp4_cannot_hold_do_not_raise() -> None:
    """To raise, they would have to be read back from the device."""
    x = randn(2, 32)
    x[1, 3] = torch.nan
    weight, scale, scale_2 = general("nvfp4_quantize", x)
    assert weight.shape == (2, 16)
    assert scale.shape == (2, 2)
    assert scale_2.shape == ()


# -------------------------------------------------------------------------------- Triton and errors


def test_C9_a_missing_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.startswith("flint_kernels.backends.triton.")]:
        monkeypatch.delitem(sys.modules, name)
    plain = builtins.__import__

    def without_triton(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".", maxsplit=1)[0] == "triton":
            raise ModuleNotFoundError("No module named 'triton'", name="triton")
        return plain(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_triton)
    with pytest.raises(RuntimeError, match=r"triton: got no such package.*pip install triton"):
        general("nvfp4_dequantize", *op_samples.quantized(2, 32))


def test_C5_a_capture_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []

    def some_kernel() -> None: ...

    class Kernel:
        do_not_specialize = ("rows",)
        fn = some_kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda **arguments: launched.append((grid, arguments))

    class Tensor(torch.Tensor):
        device = torch.device("cuda", 0)

    kernel = Kernel()
    arguments = {"x": Tensor(torch.ones(16)), "rows": 3, "BLOCK": 16}
    capturing = True
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(RuntimeError, match=r"some_kernel: .*warm up first"):
        launch.launch(kernel, 4, arguments)
    assert not launched
    capturing = False
    launch.launch(kernel, 4, arguments)
    capturing = True
    launch.launch(kernel, 5, {**arguments, "rows": 7})  # another number of rows: the same kernel
    assert [grid for grid, _ in launched] == [(4,), (5,)]
    with pytest.raises(RuntimeError, match="warm up first"):
        launch.launch(kernel, 4, {**arguments, "x": Tensor(torch.ones(16, dtype=BF16))})


def test_warmup_covers_each_kind_of_layer() -> None:
    from flint_kernels.backends.warmup import _one_layer_of_each_kind
    from flint_kernels.model import FlintConfig

    config = FlintConfig.flint_40b()
    small = _one_layer_of_each_kind(config)

    def kinds(c: FlintConfig) -> set[tuple[int, bool, bool]]:
        return {(c.window(i), c.has_rope(i), c.is_dense(i)) for i in range(c.num_hidden_layers)}

    assert kinds(small) == kinds(config)
    assert small.num_hidden_layers == len(kinds(config))
    assert small.parameter_count() < config.parameter_count() / 50
