"""NVFP4 in plain PyTorch, against ml_dtypes (values, rounding) and the gguf package (layout)."""

from __future__ import annotations

from types import SimpleNamespace

import gguf
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flint_kernels.backends import gpu_general, native_cuda
from flint_kernels.formats import nvfp4

E4M3_BYTES = torch.arange(256, dtype=torch.uint8)
FINITE_SCALES = E4M3_BYTES[(E4M3_BYTES & 0x7F) != 0x7F]


def e2m1_values() -> np.ndarray:
    """The 16 values, from ml_dtypes."""
    codes = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn)
    return np.asarray(codes, dtype=np.float64)


def random_modelopt(
    *shape: int, seed: int = 0, signed: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes and random finite scales of a tensor of `shape` [..., N, K]."""
    generator = torch.Generator().manual_seed(seed)
    *lead, k = shape
    weight = torch.randint(256, (*lead, k // 2), dtype=torch.uint8, generator=generator)
    scales = FINITE_SCALES if signed else FINITE_SCALES[FINITE_SCALES < 0x80]
    pick = torch.randint(len(scales), (*lead, k // 16), generator=generator)
    return weight, scales[pick].view(torch.float8_e4m3fn)


def oracle_values(weight: torch.Tensor, scale: torch.Tensor) -> np.ndarray:
    """e2m1 * e4m3 in fp64, by ml_dtypes and numpy alone."""
    raw = weight.numpy()
    codes = np.stack([raw & 15, raw >> 4], axis=-1).reshape(*raw.shape[:-1], -1)
    scales = scale.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return np.asarray(e2m1_values()[codes] * np.repeat(scales, 16, axis=-1))


# ------------------------------------------------------------------------- dequantise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dequantize_is_exact_for_every_code_and_scale(dtype: torch.dtype) -> None:
    # One row a scale byte; the row holds the 16 codes.
    row = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=torch.uint8)
    weight = row.repeat(256, 1)
    scale = E4M3_BYTES.view(torch.float8_e4m3fn)[:, None]
    got = nvfp4.dequantize(weight, scale, dtype=dtype)
    assert got.dtype == dtype
    want = oracle_values(weight, scale)
    np.testing.assert_array_equal(got.double().numpy(), want)  # NaN rows are NaN in both
    assert np.isnan(want).sum() == 2 * 16


def test_global_scale_is_applied_once_in_fp32_to_the_exact_product() -> None:
    weight, scale = random_modelopt(5, 64)
    scale_2 = torch.tensor(1.2345e-3)
    exact = oracle_values(weight, scale)
    want = torch.from_numpy((exact.astype(np.float32) * scale_2.numpy()).astype(np.float32))
    assert torch.equal(nvfp4.dequantize(weight, scale, scale_2), want)
    assert torch.equal(nvfp4.dequantize(weight, scale, scale_2, torch.bfloat16), want.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_tensors_in_slices_equal_small_ones(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, scale = random_modelopt(3, 10, 96)
    scale_2 = torch.tensor([1e-3, 2e-3, 40.0])
    whole = nvfp4.dequantize(weight, scale, scale_2, dtype)
    for index in range(3):
        one = nvfp4.dequantize(weight[index], scale[index], scale_2[index], dtype)
        assert torch.equal(whole[index], one)
    # 4 rows a slice: slices straddle the leading index.
    monkeypatch.setattr(nvfp4, "_DEQUANT_SLICE_CPU", 4 * 96)
    assert torch.equal(nvfp4.dequantize(weight, scale, scale_2, dtype), whole)
    one_value = nvfp4.dequantize(weight, scale, scale_2[0], dtype)
    assert torch.equal(one_value[0], whole[0])


def test_dequantize_takes_views_and_writes_into_out() -> None:
    weight, scale = random_modelopt(8, 128)
    want = nvfp4.dequantize(weight, scale)
    assert torch.equal(nvfp4.dequantize(weight[::2, :32], scale[::2, :4]), want[::2, :64])
    out = torch.full((8, 128), float("nan"))
    assert nvfp4.dequantize(weight, scale, out=out) is out
    assert torch.equal(out, want)
    assert nvfp4.dequantize(weight[:0], scale[:0]).shape == (0, 128)
    with pytest.raises(ValueError, match=r"out: got torch\.float32 \[128, 8\].*want a contiguous"):
        nvfp4.dequantize(weight, scale, out=torch.empty(128, 8))


def test_a_fake_tensor_mode_leaves_no_fake_table_behind() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    nvfp4._pair_luts.clear()
    with FakeTensorMode():
        fake = nvfp4.dequantize(
            torch.empty(2, 8, dtype=torch.uint8), torch.empty(2, 1, dtype=torch.float8_e4m3fn)
        )
    assert fake.shape == (2, 16)
    weight, scale = random_modelopt(2, 16)
    np.testing.assert_array_equal(
        nvfp4.dequantize(weight, scale).numpy(), oracle_values(weight, scale)
    )


def test_dequantize_names_what_is_wrong() -> None:
    weight, scale = random_modelopt(4, 64)
    with pytest.raises(ValueError, match=r"weight: got torch\.int8 .*want uint8"):
        nvfp4.dequantize(weight.view(torch.int8), scale)
    with pytest.raises(ValueError, match=r"weight_scale: got torch\.uint8, want torch\.float8"):
        nvfp4.dequantize(weight, scale.view(torch.uint8))
    with pytest.raises(ValueError, match=r"weight_scale: got \[4, 32\] and \[4, 3\]"):
        nvfp4.dequantize(weight, scale[:, :3])
    with pytest.raises(ValueError, match=r"dtype: got torch\.int32"):
        nvfp4.dequantize(weight, scale, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"weight_scale_2: got shape \[2\], want one value"):
        nvfp4.dequantize(weight, scale, torch.ones(2))


# ------------------------------------------------------------------------- quantise


def oracle_quantize(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """The documented recipe in numpy, the roundings by ml_dtypes; codes [..., K], one a byte."""
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], -1, 16)
    amax = np.abs(blocks).max(axis=-1)
    scale_2 = np.float32(amax.max() / np.float32(6 * 448))
    scale = np.minimum(amax / np.float32(6) / scale_2, np.float32(448))
    scale = scale.astype(ml_dtypes.float8_e4m3fn)
    step = (scale.astype(np.float32) * scale_2)[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(step > 0, np.abs(blocks) / step, np.float32(0))
    ratio = np.copysign(np.minimum(ratio, np.float32(6)), blocks)
    codes = ratio.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    return codes.reshape(x.shape), scale.view(np.uint8), scale_2


def unpack(weight: torch.Tensor) -> np.ndarray:
    raw = weight.numpy()
    return np.stack([raw & 15, raw >> 4], axis=-1).reshape(*raw.shape[:-1], -1)


@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_quantize_equals_the_recipe_with_ml_dtypes_roundings(spread: float) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 256, generator=generator)
    # Blocks of very different size: some scales are subnormal, some zero.
    x *= torch.exp(spread * torch.randn(32, 16, generator=generator)).repeat_interleave(16, 1)
    weight, scale, scale_2 = nvfp4.quantize(x)
    codes, scale_bytes, want_2 = oracle_quantize(x.numpy())
    assert scale_2.shape == ()
    assert float(scale_2) == want_2
    np.testing.assert_array_equal(scale.view(torch.uint8).numpy(), scale_bytes)
    np.testing.assert_array_equal(unpack(weight), codes)


def test_quantize_rounds_ties_to_the_even_code() -> None:
    # With a block maximum of 6 and a global scale of 1 the step is 1: x is on E2M1's own scale.
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    below = [float(np.nextafter(np.float32(tie), np.float32(0))) for tie in ties]
    x = torch.tensor([[*ties, 6.0, 0.0, *below], [*(-t for t in ties), 6.0, -0.0, *ties]])
    weight, scale, _ = nvfp4.quantize(x, global_scale=1.0)
    assert scale.float().tolist() == [[1.0], [1.0]]
    np.testing.assert_array_equal(
        unpack(weight),
        [
            [0, 2, 2, 4, 4, 6, 6, 7, 0, 0, 1, 2, 3, 4, 5, 6],
            [8, 10, 10, 12, 12, 14, 14, 7, 8, 0, 2, 2, 4, 4, 6, 6],
        ],
    )


def test_quantize_zeros_and_blocks_far_below_the_maximum() -> None:
    weight, scale, scale_2 = nvfp4.quantize(torch.zeros(2, 32))
    assert (float(scale_2), int(weight.max()), float(scale.float().max())) == (1.0, 0, 0.0)
    x = torch.zeros(1, 48)
    x[0, 0], x[0, 16:32] = 1.0, -1e-9
    values = nvfp4.dequantize(*nvfp4.quantize(x))
    assert values[0, 0] == pytest.approx(1.0, rel=1e-6)
    assert torch.count_nonzero(values) == 1


@pytest.mark.parametrize("magnitude", [1e-42, 1e-30, 1.0, 1e30, torch.finfo(torch.float32).max])
def test_quantize_holds_every_magnitude_of_fp32(magnitude: float) -> None:
    x = torch.full((1, 16), magnitude)
    values = nvfp4.dequantize(*nvfp4.quantize(x))
    if magnitude > 1e-38:  # below that the global scale is at its floor, and values round to zero
        assert torch.allclose(values.double(), x.double(), rtol=1e-6, atol=0)
    else:
        assert torch.equal(values, torch.zeros(1, 16))


def test_quantize_with_given_global_scales() -> None:
    x = torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(2))
    scale_2 = torch.tensor([1e-3, 2e-3, 4e-3])
    weight, scale, kept = nvfp4.quantize(x, scale_2)
    assert torch.equal(kept, scale_2)
    for index in range(3):
        one = nvfp4.quantize(x[index], scale_2[index])
        assert torch.equal(weight[index], one[0])
        assert torch.equal(scale[index].view(torch.uint8), one[1].view(torch.uint8))
    # A global scale far too small saturates: 6 * 448 times it, never NaN.
    values = nvfp4.dequantize(*nvfp4.quantize(torch.full((1, 16), -8.0), 1e-3))
    assert torch.equal(values, torch.full((1, 16), 1e-3) * -2688)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_quantize_errs_by_half_a_step_at_most(seed: int, dtype: torch.dtype) -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed)).to(dtype)
    weight, scale, scale_2 = nvfp4.quantize(x)
    blocks = x.double().view(4, 4, 16)
    step = (scale.double() * scale_2.double()).unsqueeze(-1)
    ratio = (nvfp4.dequantize(weight, scale, scale_2).double().view_as(blocks) - blocks) / step
    # Half of E2M1's spacing: 0.25 below 2, 0.5 below 4, 1 up to 6; an E4M3 scale rounded down (by
    # 1/16 at most) leaves values up to 6 * 17/16, which saturate within that. Subnormal block
    # scales do not occur: the smallest block maximum is within 2^6 of the tensor's.
    size = (blocks / step).abs()
    bound = torch.where(size < 2, 0.25, torch.where(size < 4, 0.5, 1.0))
    assert bool((ratio.abs() <= bound * (1 + 1e-6)).all())


def test_quantize_refuses_what_it_cannot_hold() -> None:
    for bad in (float("nan"), float("inf"), -float("inf")):
        x = torch.zeros(2, 32)
        x[1, 3] = bad
        with pytest.raises(ValueError, match="x: got NaN or infinity"):
            nvfp4.quantize(x)
    with pytest.raises(ValueError, match="x: got K = 24, want a multiple of 16; pad"):
        nvfp4.quantize(torch.zeros(2, 24))
    with pytest.raises(ValueError, match=r"x: got torch\.int64"):
        nvfp4.quantize(torch.zeros(2, 32, dtype=torch.int64))
    for scale in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="global_scale: got a value that is zero, negative"):
            nvfp4.quantize(torch.ones(2, 32), scale)
    with pytest.raises(ValueError, match=r"global_scale: got shape \[2\]"):
        nvfp4.quantize(torch.ones(3, 2, 32), torch.ones(2))


# ------------------------------------------------------------------------- the two layouts


def test_G1_worked_example() -> None:
    gguf_codes = bytes.fromhex("8091a2b3c4d5e6f7")
    blocks = torch.tensor([[*bytes([0x38] * 4), *gguf_codes * 4]], dtype=torch.uint8)
    before = blocks.clone()
    weight, scale = nvfp4.gguf_to_modelopt(blocks)
    assert bytes(weight[0].tolist()) == bytes.fromhex("1032547698badcfe") * 4
    assert scale.float().tolist() == [[1.0] * 4]
    assert torch.equal(nvfp4.modelopt_to_gguf(weight, scale), blocks)
    assert torch.equal(blocks, before)


def test_Q1_scale_bytes_in_modelopt_tensors() -> None:
    for byte, value in [(0x00, 0.0), (0x01, 2.0**-9), (0x7E, 448.0), (0x80, -0.0), (0xB8, -1.0)]:
        scale = torch.tensor([[byte]], dtype=torch.uint8).view(torch.float8_e4m3fn)
        nvfp4.check_modelopt_scales(scale)
        weight = torch.full((1, 8), 0x22, dtype=torch.uint8)  # ones
        assert nvfp4.dequantize(weight, scale).tolist() == [[value] * 16]
    for byte in (0x7F, 0xFF):
        scale = torch.zeros(3, 5, dtype=torch.uint8)
        scale[1, 2] = byte
        with pytest.raises(ValueError, match=rf"gate: got NaN \(byte {byte:#04x}\).*\[1, 2\]"):
            nvfp4.check_modelopt_scales(scale.view(torch.float8_e4m3fn), "gate")
    with pytest.raises(ValueError, match=r"weight_scale: got torch\.uint8"):
        nvfp4.check_modelopt_scales(torch.zeros(1, 1, dtype=torch.uint8))


def test_Q1_scale_bytes_in_gguf_blocks() -> None:
    blocks = torch.zeros(2, 36, dtype=torch.uint8)
    blocks[0, :4] = torch.tensor([0x00, 0x01, 0x7E, 0x7F])
    blocks[1, :4] = torch.tensor([0x80, 0xB8, 0x38, 0x08])
    _, scale = nvfp4.gguf_to_modelopt(blocks)
    assert scale.float().tolist() == [[0.0, 2.0**-9, 448.0, 0.0], [0.0, 1.0, 1.0, 2.0**-6]]
    wide = torch.zeros(2, 3, 5 * 36, dtype=torch.uint8)
    wide[1, 2, 4 * 36 + 3] = 0xFF
    with pytest.raises(ValueError, match=r"up: got scale byte 0xff in row \[1, 2\], super-block 4"):
        nvfp4.gguf_to_modelopt(wide, name="up")


@pytest.mark.parametrize("shape", [(1, 64), (7, 192), (3, 5, 128)])
def test_layouts_hold_the_values_of_the_gguf_decoder(shape: tuple[int, ...]) -> None:
    weight, scale = random_modelopt(*shape, signed=False)
    blocks = nvfp4.modelopt_to_gguf(weight, scale)
    values = nvfp4.dequantize(weight, scale)
    decoded = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType.NVFP4)
    np.testing.assert_array_equal(decoded, values.numpy())
    # And from bytes that are anyone's: any scale but 0xFF, sign bits and 0x7F included.
    generator = torch.Generator().manual_seed(3)
    blocks = torch.randint(256, blocks.shape, dtype=torch.uint8, generator=generator)
    blocks.view(-1, 36)[:, :4].clamp_(max=0xFE)
    got = nvfp4.dequantize(*nvfp4.gguf_to_modelopt(blocks))
    unsigned = blocks.clone()  # gguf 0.19 does not mask the sign bit, ggml does
    unsigned.view(-1, 36)[:, :4] &= 0x7F
    decoded = gguf.quants.dequantize(unsigned.numpy(), gguf.GGMLQuantizationType.NVFP4)
    np.testing.assert_array_equal(got.numpy(), decoded)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 4))
def test_repack_is_lossless_both_ways(seed: int, rows: int, superblocks: int) -> None:
    weight, scale = random_modelopt(rows, superblocks * 64, seed=seed, signed=False)
    blocks = nvfp4.modelopt_to_gguf(weight, scale)
    weight_back, scale_back = nvfp4.gguf_to_modelopt(blocks)
    assert torch.equal(weight_back, weight)
    assert torch.equal(scale_back.view(torch.uint8), scale.view(torch.uint8))


def test_repack_in_slices_and_into_out(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, scale = random_modelopt(5, 7 * 64, signed=False)
    blocks = nvfp4.modelopt_to_gguf(weight, scale)
    monkeypatch.setattr(nvfp4, "_REPACK_SLICE", 4)  # 35 super-blocks: eight slices and a rest
    out = torch.zeros_like(blocks)
    assert nvfp4.modelopt_to_gguf(weight, scale, out=out) is out
    assert torch.equal(out, blocks)
    pair = (torch.zeros_like(weight), torch.zeros_like(scale))
    got = nvfp4.gguf_to_modelopt(blocks, out=pair)
    assert [got[0].data_ptr(), got[1].data_ptr()] == [pair[0].data_ptr(), pair[1].data_ptr()]
    assert torch.equal(pair[0], weight)
    assert torch.equal(pair[1].view(torch.uint8), scale.view(torch.uint8))
    blocks[4, 5 * 36 + 2] = 0xFF
    with pytest.raises(ValueError, match=r"row \[4\], super-block 5, block 2"):
        nvfp4.gguf_to_modelopt(blocks)
    with pytest.raises(ValueError, match=r"out\[1\]: got .*want a contiguous torch\.float8_e4m3fn"):
        nvfp4.gguf_to_modelopt(blocks, out=(pair[0], pair[1][:, ::2]))
    with pytest.raises(ValueError, match="out: got"):
        nvfp4.modelopt_to_gguf(weight, scale, out=out[1:])


def test_modelopt_scales_without_a_gguf_form() -> None:
    weight, scale = random_modelopt(3, 128, signed=False)
    scale_bytes = scale.view(torch.uint8)
    scale_bytes[1, 6] = 0x80  # -0: its values are zeros, so it may become +0
    blocks = nvfp4.modelopt_to_gguf(weight, scale)
    back = nvfp4.dequantize(*nvfp4.gguf_to_modelopt(blocks))
    assert bool((back == nvfp4.dequantize(weight, scale)).all())
    for byte, what in [(0x7F, "a NaN"), (0xFF, "a NaN"), (0xB8, "a negative scale"), (0x81, "a n")]:
        scale_bytes[2, 5] = byte
        with pytest.raises(ValueError, match=rf"down: got byte {byte:#04x} at .*\[2, 5\], {what}"):
            nvfp4.modelopt_to_gguf(weight, scale, name="down")
    # The remedy that the message gives keeps the values.
    scale_bytes[2, 5] = 0xB8
    want = nvfp4.dequantize(weight, scale)
    weight[2, 40:48] ^= 0x88
    scale_bytes[2, 5] &= 0x7F
    blocks = nvfp4.modelopt_to_gguf(weight, scale)
    assert bool((nvfp4.dequantize(*nvfp4.gguf_to_modelopt(blocks)) == want).all())


def test_repack_names_what_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"q: got torch\.uint8 \[4, 37\], want uint8 \[\.\.\., N,"):
        nvfp4.gguf_to_modelopt(torch.zeros(4, 37, dtype=torch.uint8), name="q")
    with pytest.raises(ValueError, match=r"blocks: got torch\.float32"):
        nvfp4.gguf_to_modelopt(torch.zeros(4, 36))
    weight, scale = random_modelopt(2, 80)
    with pytest.raises(ValueError, match="weight: got K = 80, want a multiple of 64"):
        nvfp4.modelopt_to_gguf(weight, scale)


def test_errors_of_the_ops_name_op_and_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    """Called as ops, the conversions raise what every other op does; the GPU's bodies too.

    For the native one a stand-in reports the first scale as the kernels would.
    """

    def kernel(*arguments: torch.Tensor) -> None:
        arguments[-1].zero_()

    kernels = SimpleNamespace(gguf_to_modelopt_cuda_out=kernel, modelopt_to_gguf_cuda_out=kernel)
    monkeypatch.setattr(native_cuda, "_native", kernels)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    x = torch.ones(2, 32)
    nan = torch.full_like(x, torch.nan)
    with pytest.raises(ValueError, match=r"^flint::nvfp4_quantize: argument 'x': got NaN .*want"):
        torch.ops.flint.nvfp4_quantize(nan)
    want = "^flint::nvfp4_quantize: argument 'global_scale': got .*want"
    with pytest.raises(ValueError, match=want):
        torch.ops.flint.nvfp4_quantize(x, torch.tensor(0.0))

    blocks = torch.full((1, 36), 0xFF, dtype=torch.uint8)
    want = "^flint::gguf_to_modelopt: argument 'blocks': got scale byte 0xff .*want"
    for repack in (
        torch.ops.flint.gguf_to_modelopt,
        gpu_general.gguf_to_modelopt,
        native_cuda.gguf_to_modelopt,
    ):
        with pytest.raises(ValueError, match=want):
            repack(blocks)

    weight = torch.zeros(1, 32, dtype=torch.uint8)
    scale = torch.full((1, 4), -1.0).to(torch.float8_e4m3fn)
    want = "^flint::modelopt_to_gguf: argument 'weight_scale': got .*want"
    for pack in (
        torch.ops.flint.modelopt_to_gguf,
        gpu_general.modelopt_to_gguf,
        native_cuda.modelopt_to_gguf,
    ):
        with pytest.raises(ValueError, match=want):
            pack(weight, scale)
