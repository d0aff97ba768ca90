"""Every op on a GPU: against the CPU reference, under graph capture, and at real sizes.

Each test of all ops runs twice: with the bodies as they are registered, and with the general ones
alone, which is what a GPU has that the native library was not built for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import op_samples
import pytest
import torch
from op_samples import BF16, int32, randn
from support import Bound, as_tuple, bits, call, captured, on_gpu, relative_error, tensors

from flint_kernels import ops
from flint_kernels.backends import cpu, gpu_general
from flint_kernels.ops import REGISTRY
from flint_kernels.reference import attention as reference_attention

pytestmark = pytest.mark.gpu

NAMES = sorted(REGISTRY)
FORMATS = ("gguf_to_modelopt", "modelopt_to_gguf")  # no activations: FP32 is no other case
Run = Callable[[str, Bound], tuple[torch.Tensor, ...]]


def general(name: str, arguments: Bound) -> tuple[torch.Tensor, ...]:
    return as_tuple(gpu_general.general_body(name)(**arguments))


@pytest.fixture(params=["registered", "general"])
def run(request: pytest.FixtureRequest) -> Run:
    return call if request.param == "registered" else general


def bound_samples(name: str) -> list[Bound]:
    return [REGISTRY[name].bind(args, kwargs) for args, kwargs in op_samples.SAMPLES[name]()]


def assert_close(got: torch.Tensor, want: torch.Tensor, rtol: float, largest: float) -> None:
    """Floats within rtol, or within `largest` of the largest value; everything else equal."""
    got = got.cpu()
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    if not want.is_floating_point() or want.dtype.itemsize == 1:
        assert torch.equal(bits(got), bits(want))
        return
    scale = float(want.nan_to_num(0.0).abs().max()) if want.numel() else 0.0
    torch.testing.assert_close(got, want, rtol=rtol, atol=largest * scale, equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
def test_samples_in_bf16(name: str, run: Run) -> None:
    """An ulp (2^-7 of a value at most) for a sum that rounds to the other side; where it is rounded
    again on the way, that ulp is one of a term and stays below 2^-7 of the largest value."""
    for arguments in bound_samples(name):
        mine = on_gpu(arguments)
        got = run(name, mine)
        want = as_tuple(cpu.reference_body(name)(**arguments))
        for one, two in zip(got, want, strict=True):
            assert one.is_cuda
            assert_close(one, two, 2**-7, 2**-7)
        for argument, value in tensors(mine).items():  # caches are written, nothing else
            assert_close(value, arguments[argument], 2**-7, 2**-7)


@pytest.mark.parametrize("name", [n for n in NAMES if n not in FORMATS])
def test_samples_in_fp32(name: str, run: Run) -> None:
    """No rounding: only the order of sums and the exponential differ. TF32 would show (2^-11)."""
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        for arguments in bound_samples(name):
            mine = on_gpu(arguments, torch.float32)
            got = run(name, mine)
            plain = {k: v.cpu() if isinstance(v, torch.Tensor) else v
                     for k, v in on_gpu(arguments, torch.float32).items()}  # fmt: skip
            want = as_tuple(cpu.reference_body(name)(**plain))
            for one, two in zip(got, want, strict=True):
                assert_close(one, two, 1e-5, 1e-5)
            for argument, value in tensors(mine).items():
                assert_close(value, plain[argument], 1e-5, 1e-5)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


# ------------------------------------------------------------------------------------ graph capture


def turned(name: str, value: torch.Tensor) -> torch.Tensor:
    """Other values of the same kind: the tensor's own, one place on (a super-block of GGUF)."""
    raw = value.view(torch.uint8) if value.dtype.itemsize == 1 else value
    places = 36 if name == "gguf_to_modelopt" else 1
    rolled = raw.reshape(-1).roll(places).reshape(raw.shape)
    return rolled.view(value.dtype)


@pytest.mark.parametrize("name", NAMES)
def test_capture_and_replay_with_changed_inputs(name: str, run: Run) -> None:
    arguments = on_gpu(bound_samples(name)[0])
    first = {key: value.clone() for key, value in tensors(arguments).items()}
    second = {key: turned(name, value) for key, value in first.items()}

    def fill(values: dict[str, torch.Tensor]) -> None:
        for key, value in values.items():
            arguments[key].copy_(value)

    graph, held = captured(lambda: run(name, arguments))
    for values in (second, first, second):
        fill(values)
        want = [result.clone() for result in run(name, arguments)]
        written = {key: value.clone() for key, value in tensors(arguments).items()}
        fill(values)
        graph.replay()
        torch.cuda.synchronize()
        for one, two in zip(held, want, strict=True):
            assert torch.equal(bits(one), bits(two))
        for key, value in tensors(arguments).items():
            assert torch.equal(bits(value), bits(written[key]))


def test_C5_a_capture_that_would_compile_says_so() -> None:
    q = torch.zeros(1, 1, 23, device="cuda", dtype=BF16)
    cache = torch.zeros(1, 16, 1, 23, device="cuda", dtype=BF16)
    table, length = (torch.ones(shape, dtype=torch.int32, device="cuda") for shape in ((1, 1), 1))
    torch.cuda.synchronize()
    with (
        pytest.raises(RuntimeError, match="warm up first"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        gpu_general.attention_decode(q, cache, cache, table, length, None, 0, None)
    torch.cuda.synchronize()
    assert torch.ones(2, device="cuda").sum() == 2  # the device still works


# ---------------------------------------------------------------------- real sizes, each run alike


def twice(function: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The result, which must have the same bits in ten runs."""
    first = function()
    for _ in range(9):
        assert torch.equal(bits(function()), bits(first))
    return first


def gpu_randn(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device="cuda") * scale).to(BF16)


def gpu_nvfp4(*shape: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return ops.nvfp4_quantize(gpu_randn(*shape, seed=seed, scale=0.05))


@pytest.mark.parametrize("rows", [1, 8, 33, 200, 8192])
def test_projections_at_real_sizes(rows: int) -> None:
    """Error to fp64 no larger than torch's own with BF16 in and out (2% for the luck of ties)."""
    x = gpu_randn(rows, 2048)
    weight, scale, scale_2 = gpu_nvfp4(5120, 2048)
    plain = ops.nvfp4_dequantize(weight, scale, None, BF16)
    exact = x.double() @ plain.double().T
    rounded = exact.to(BF16)  # what the best possible BF16 result is
    got = twice(lambda: ops.bf16_linear(x, plain))
    assert relative_error(got, exact) <= 1.02 * relative_error(rounded, exact)
    got = twice(lambda: ops.nvfp4_linear(x, weight, scale, scale_2))
    exact = exact * scale_2.double()
    assert relative_error(got, exact) <= 1.02 * relative_error(exact.to(BF16), exact)
    for logits in (
        twice(lambda: ops.nvfp4_lm_head(x, weight, scale, scale_2)),
        twice(lambda: ops.bf16_lm_head(x, plain)) * scale_2,
    ):
        assert relative_error(logits, exact) < 1e-5  # a tensor core truncates its sums


@pytest.mark.parametrize("rows", [1, 8, 60, 2048, 10_923])
def test_Q6_experts_at_real_sizes(rows: int) -> None:
    """Against the same arithmetic in fp32 and fp64 without rounding on the way."""
    hidden, width, experts = 512, 256, 64
    w13, w13_scale, one = gpu_nvfp4(experts, 2 * width, hidden)
    w2, w2_scale, two = gpu_nvfp4(experts, hidden, width, seed=1)
    factors = 1 + torch.arange(2 * experts, device="cuda").reshape(experts, 2) % 5
    w13_scale_2, w2_scale_2 = one * factors, two * factors[:, 0].contiguous()
    x, shared = gpu_randn(rows, hidden), gpu_randn(rows, hidden, seed=3)
    weights, ids = ops.router_topk(gpu_randn(rows, experts, seed=4), 6)
    assert all(len(set(row)) == 6 for row in ids[:100].tolist())
    assert int(ids.min()) >= 0
    assert int(ids.max()) < experts

    up = ops.nvfp4_dequantize(w13, w13_scale)
    down = ops.nvfp4_dequantize(w2, w2_scale)
    want = torch.zeros(rows, hidden, dtype=torch.float64, device="cuda")
    for expert in range(experts):
        row, choice = torch.nonzero(ids == expert, as_tuple=True)
        sums = x[row].double() @ up[expert].double().T
        gate, linear = (sums * w13_scale_2[expert].double().repeat_interleave(width)).chunk(2, 1)
        act = gate * torch.sigmoid(gate) * linear
        y = act @ down[expert].double().T * w2_scale_2[expert].double()
        want.index_add_(0, row, y * weights[row, choice, None].double())
    want += shared.double()
    arguments = (x, weights, ids, w13, w13_scale, w13_scale_2, w2, w2_scale, w2_scale_2, shared)
    got = twice(lambda: ops.nvfp4_routed_experts(*arguments))
    # Three roundings of activations, each 2^-9 or less of a value, and the one of the output.
    assert relative_error(got, want) < 2**-8

    plain = [ops.nvfp4_dequantize(*pair, None, BF16) for pair in ((w13, w13_scale), (w2, w2_scale))]
    got = twice(lambda: ops.bf16_routed_experts(x, weights, ids, *plain, shared))
    bound = REGISTRY["bf16_routed_experts"].bind((x, weights, ids, *plain, shared), {})
    exact = general("bf16_routed_experts", {
        **bound, "x": x.float(), "shared_output": shared.float(),
    })[0]  # fmt: skip
    assert relative_error(got, exact) < 2**-8


def paged_past(*lengths: int, kv_heads: int = 4, dim: int = 128) -> tuple[torch.Tensor, ...]:
    """Caches [pages, 16, Hkv, D], a shuffled table and the lengths, on the GPU."""
    width = max(1, -(-max(lengths) // 16))
    pages = width * len(lengths)
    k, v = (gpu_randn(pages, kv_heads, 16, dim, seed=s).permute(0, 2, 1, 3) for s in (1, 2))
    table = torch.randperm(pages, generator=op_samples.rng(3)).to(torch.int32)
    return k, v, table.reshape(len(lengths), width).cuda(), int32(*lengths).cuda()


def reference_on_gpu(name: str, *args: Any) -> torch.Tensor:
    """The oracle, on the GPU in FP32."""
    bound = REGISTRY[name].bind(args, {})
    return getattr(reference_attention, name)(**on_gpu(bound, torch.float32))


@pytest.mark.parametrize("window", [0, 513])
def test_decode_at_real_lengths(window: int) -> None:
    past = paged_past(100_000, 17, 0, 8_192)
    q, sinks = gpu_randn(4, 32, 128), torch.randn(32, device="cuda")
    got = twice(lambda: ops.attention_decode(q, *past, sinks, window))
    want = reference_on_gpu("attention_decode", q, *past, sinks, window)
    assert relative_error(got[:2], want[:2]) < 2**-8
    assert not got[2].any()
    assert relative_error(got[3], want[3]) < 2**-8
    for row in (0, 1, 3):  # a request's bits are its own
        one = slice(row, row + 1)
        alone = ops.attention_decode(q[one], *past[:2], *(t[one] for t in past[2:]), sinks, window)
        assert torch.equal(bits(alone), bits(got[one]))


@pytest.mark.parametrize("window", [0, 513])
def test_prefill_at_real_lengths(window: int) -> None:
    past = paged_past(3_000, 0, 700)
    q, k, v = gpu_randn(2_080, 32, 128), *(gpu_randn(2_080, 4, 128, seed=s) for s in (5, 6))
    sinks = torch.randn(32, device="cuda")
    arguments = q, k, v, int32(0, 1_024, 2_047, 2_080).cuda(), *past, sinks, window
    got = twice(lambda: ops.attention_prefill(*arguments))
    assert relative_error(got, reference_on_gpu("attention_prefill", *arguments)) < 2**-8
    bounded = ops.attention_prefill(*arguments, None, 1_024)
    assert torch.equal(bits(bounded), bits(got))


def test_A7_chunks_equal_one_shot() -> None:
    """A full layer's cache, filled by chunks of 1, 7, 512 and 580, against one chunk of 1,100."""
    q, k, v = (
        gpu_randn(1_100, 8, 64),
        gpu_randn(1_100, 2, 64, seed=1),
        gpu_randn(1_100, 2, 64, seed=2),
    )
    k_cache, v_cache = (torch.zeros(69, 16, 2, 64, dtype=BF16, device="cuda") for _ in range(2))
    table = torch.arange(69, dtype=torch.int32, device="cuda")[None]
    for window in (0, 513):
        want = ops.attention_prefill(q, k, v, int32(0, 1_100).cuda(), window=window)
        parts, done = [], 0
        for count in (1, 7, 512, 580):
            rows = slice(done, done + count)
            part = (q[rows], k[rows], v[rows], int32(0, count).cuda())
            past = (k_cache, v_cache, table, int32(done).cuda())
            parts.append(ops.attention_prefill(*part, *past, None, window))
            slots = torch.arange(done, done + count, device="cuda")
            ops.kv_cache_write(k[rows], v[rows], slots, k_cache, v_cache)
            done += count
        assert relative_error(torch.cat(parts), want) < 2**-8


def test_A8_a_cache_of_more_than_2_to_the_31_elements() -> None:
    blocks = (1 << 31) // (16 * 4 * 128) + 3
    k, v = (torch.zeros(blocks, 16, 4, 128, dtype=BF16, device="cuda") for _ in range(2))
    rows = gpu_randn(20, 4, 128), gpu_randn(20, 4, 128, seed=1)
    slots = torch.arange(20, device="cuda") + (blocks - 2) * 16
    ops.kv_cache_write(*rows, slots, k, v)
    table, length = int32(blocks - 2, blocks - 1)[None].cuda(), int32(20).cuda()
    q = gpu_randn(1, 32, 128, seed=2)
    got = ops.attention_decode(q, k, v, table, length)
    chunk = torch.zeros(1, 4, 128, dtype=BF16, device="cuda")
    offsets = int32(0, 1).cuda()
    behind = ops.attention_prefill(q, chunk, chunk, offsets, k, v, table, length)
    small = [torch.cat([part, part.new_zeros(12, 4, 128)]).view(2, 16, 4, 128) for part in rows]
    table = int32(0, 1)[None].cuda()
    assert torch.equal(bits(got), bits(ops.attention_decode(q, *small, table, length)))
    want = ops.attention_prefill(q, chunk, chunk, offsets, *small, table, length)
    assert torch.equal(bits(behind), bits(want))


def test_A5_A6_broken_values_do_not_fault() -> None:
    k, v, table, lengths = paged_past(40, 40, 40, 40, 40)
    q = gpu_randn(5, 32, 128)
    want = ops.attention_decode(q, k, v, table, lengths)
    table, lengths = table.clone(), lengths.clone()
    lengths[0], lengths[1] = -5, 2**31 - 1
    table[2, 1], table[3, 0] = -1, 2**31 - 1
    got = ops.attention_decode(q, k, v, table, lengths)
    assert bool(got[:4].isnan().all())
    assert torch.equal(bits(got[4]), bits(want[4]))
    rows = gpu_randn(5, 32, 128), gpu_randn(5, 4, 128, seed=5), gpu_randn(5, 4, 128, seed=6)
    got = ops.attention_prefill(*rows, int32(0, 1, 2, 3, 4, 5).cuda(), k, v, table, lengths)
    assert bool(got[:4].isnan().all())
    assert bool(got[4].isfinite().all())
    got = ops.attention_prefill(*rows, int32(-7, 3, 1, 2**31 - 1).cuda())
    assert bool(got.isnan().all())


def test_R3_R4_broken_slots_and_positions_do_not_fault(run: Run) -> None:
    dim, rows = 64, 512
    qkv = gpu_randn(rows, 6 * dim)
    norms = torch.ones(dim, dtype=BF16, device="cuda"), torch.ones(dim, dtype=BF16, device="cuda")
    table = op_samples.table(1024, dim).cuda()
    positions = torch.arange(rows, device="cuda", dtype=torch.int32)
    positions[500:] = 2**31 - 1
    slots = torch.arange(509, device="cuda", dtype=torch.int32)
    slots[3], slots[4] = 10_000, -1
    cache = [torch.zeros(40, 16, 1, dim, dtype=BF16, device="cuda") for _ in range(2)]
    arguments = REGISTRY["qk_norm_rope_kv_write"].bind(
        (qkv, *norms, table, positions, slots, *cache), {}
    )
    q, k = run("qk_norm_rope_kv_write", arguments)
    broken = torch.zeros(rows, dtype=torch.bool, device="cuda")
    broken[3] = broken[500:509] = True
    assert torch.equal(q.isnan().flatten(1).all(1), broken)
    assert torch.equal(k.isnan().flatten(1).any(1), broken)
    assert not q[509:].any()  # padding with a position outside the table
    written = cache[0].reshape(-1, dim).abs().amax(1) > 0
    want = torch.zeros_like(written)
    want[:500] = True
    want[3] = want[4] = False
    assert torch.equal(written, want)


def test_Q5_ids_outside_the_experts_are_skipped(run: Run) -> None:
    for rows in (3, 200):
        x = gpu_randn(rows, 64)
        w13, w2 = gpu_randn(4, 64, 64, seed=1, scale=0.1), gpu_randn(4, 64, 32, seed=2, scale=0.1)
        ids = (torch.arange(rows * 3, device="cuda", dtype=torch.int32) % 4).reshape(rows, 3)
        ids[0], ids[1, 0], ids[1, 1] = -1, 2**31 - 1, -(2**31)
        weights = torch.full((rows, 3), 0.5, device="cuda")
        clean = torch.where((ids < 0) | (ids > 3), -1, ids)
        name = "bf16_routed_experts"
        got = run(name, REGISTRY[name].bind((x, weights, ids, w13, w2), {}))[0]
        want = run(name, REGISTRY[name].bind((x, weights, clean, w13, w2), {}))[0]
        assert torch.equal(bits(got), bits(want))
        assert not got[0].any()


def test_sampled_tokens_equal_the_cpu_s() -> None:
    rows, vocabulary = 64, 150_144
    generator = op_samples.rng(5)
    logits = torch.randn(rows, vocabulary, generator=generator) * 3
    logits[:20] = (logits[:20] * 2).round() / 2  # ties
    choose = lambda *values: torch.tensor(values)[  # noqa: E731
        torch.randint(0, len(values), (rows,), generator=generator)
    ]
    arguments = [
        logits,
        choose(0.0, 0.7, 1.0),
        choose(0, 1, 20, 1000).to(torch.int32),
        choose(0.5, 0.95, 1.0),
        torch.arange(rows),
        torch.full((rows,), 3),
    ]
    on_device = [argument.cuda() for argument in arguments]
    got = twice(lambda: ops.sample(*on_device))
    assert torch.equal(got.cpu(), ops.sample(*arguments))
    for row in range(0, rows, 16):  # a row alone is scanned in an order of its own
        alone = [argument[row : row + 1] for argument in on_device]
        assert torch.equal(twice(lambda args=alone: ops.sample(*args)), got[row : row + 1])


def test_T1_T2_router_equals_the_cpu_s(run: Run) -> None:
    logits = randn(10_923, 256)
    logits[1] = torch.nan
    logits[2, 10:20], logits[2, 30:40], logits[2, 50] = torch.inf, -torch.inf, torch.nan
    logits[3] = 1.0
    logits[4], logits[4, 1::2] = -0.0, 0.0
    for values in (logits, logits.float()):
        arguments = REGISTRY["router_topk"].bind((values, 6), {})
        weights, ids = run("router_topk", on_gpu(arguments))
        want_weights, want_ids = cpu.reference_body("router_topk")(**arguments)
        assert torch.equal(ids.cpu(), want_ids)
        torch.testing.assert_close(weights.cpu(), want_weights, rtol=2**-7, atol=0, equal_nan=True)


def test_a_window_beyond_int32_is_none(run: Run) -> None:
    k, v = (randn(4, 16, 2, 32, seed=s) for s in (1, 2))
    past = k, v, int32(2, 1)[None], int32(20)
    chunk = randn(3, 8, 32, seed=3), randn(3, 2, 32, seed=4), randn(3, 2, 32, seed=5), int32(0, 3)
    for window in (2**31 - 2, 2**31 - 1, 2**31, 2**63 - 1):
        for name, args in (
            ("attention_decode", (randn(1, 8, 32), *past, None)),
            ("attention_prefill", (*chunk, *past, None)),
        ):
            bound = (REGISTRY[name].bind((*args, given), {}) for given in (0, window))
            results = [as_tuple(run(name, on_gpu(arguments))) for arguments in bound]
            assert torch.equal(bits(results[0][0]), bits(results[1][0])), (name, window)


@pytest.mark.parametrize("hidden", [0, 32])
def test_experts_without_columns(run: Run, hidden: int) -> None:
    """Of the tokens or of the experts; and no entries at all."""
    for entries in (0, 2):
        ids = torch.zeros(3, entries, dtype=torch.int32)
        weights = (randn(2, 2 * (32 - hidden), hidden), randn(2, hidden, 32 - hidden))
        args = randn(3, hidden), torch.ones(3, entries), ids, *weights, None
        (out,) = run("bf16_routed_experts", on_gpu(REGISTRY["bf16_routed_experts"].bind(args, {})))
        assert out.shape == (3, hidden) and not out.any()
