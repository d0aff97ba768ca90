"""Calls that launch every kernel of the library, and every general body, once and at small sizes.

`make gpu-sanitize` runs this file under compute-sanitizer's memcheck, initcheck, synccheck and
racecheck, which find a fault whatever the result is; results are compared by the other files. The
last test, for a run without a sanitizer, holds the calls to the list of kernels that the build
wrote. LOW_LATENCY_DEVICE=cpu runs the calls against the CPU's bodies.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import op_samples
import pytest
import torch
from attention_case import Case
from low_latency import (
    BF16,
    CALLS,
    DEVICE,
    FAST_ROWS,
    MOST_ROWS,
    ON_GPU,
    nvfp4,
    op_name,
    run,
    sample,
)
from prefill_case import PrefillCase
from support import as_tuple
from test_contract_gpu import calls

from flint_kernels import ops
from flint_kernels.backends import cpu, gpu_general, native, native_many
from flint_kernels.ops import REGISTRY

pytestmark = pytest.mark.gpu

NAMES = sorted(REGISTRY)
# The model's own sizes have plans of their own; so have 1, a few and all of the fast rows.
SIZES = ("flint", "flint-tiny", "odd")
# And what has more goes to the kernels for many.
ROWS = (1, 2, 4, FAST_ROWS, MOST_ROWS)
WIDTHS = (33, 128, 512, 2048, 4096, 8192)
CACHED_ROWS = (1, 5, 300)
# Ways to cut a product: each tile, whole and in shares of columns.
PRODUCT_PLANS = tuple((tile, shares) for tile in (64, 128, 256) for shares in (1, 3))
# By entries an expert, of each way to multiply experts: 4, 9, 23, 45 and 150. The first two have a
# form for each width; the last ones are ordered by three kernels.
EXPERT_TOKENS = (5, 12, 30, 60, 200)
EXPERT_SIZES = ((512, 256), (2048, 1024), (256, 512), (1024, 2048))
# One request in few splits, eight in more than there are multiprocessors; a cluster's windows.
LENGTHS = ([300], [2100] * 8, [0, 1, 130])
WINDOWS = (0, 16, 513, 2000)
HEADS = ((128, BF16), (64, BF16), (20, BF16), (7, torch.float32))


@pytest.fixture(autouse=True)
def _faults_belong_to_their_test() -> Iterator[None]:
    yield
    if ON_GPU:
        torch.cuda.synchronize()


@pytest.fixture(autouse=True)
def _inputs_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Element by element before a product of torch's: initcheck says of it what is there that
    nobody wrote. cuBLAS's kernels read padding too, which says nothing."""
    product = torch.mm

    def read_first(one: torch.Tensor, two: torch.Tensor, **kwargs: object) -> torch.Tensor:
        for tensor in (one, two):
            tensor.ne(0)
        return product(one, two, **kwargs)

    monkeypatch.setattr(torch, "mm", read_first)


def samples_of(name: str, body: Callable[..., object] | None = None) -> None:
    for args, kwargs in calls(name):
        bound = REGISTRY[name].bind(args, kwargs)
        results = body(**bound) if body else REGISTRY[name].packet.default(**bound)
        assert all(result.device.type == DEVICE for result in as_tuple(results))


@pytest.mark.parametrize("name", NAMES)
def test_samples_by_the_registered_body(name: str) -> None:
    samples_of(name)


@pytest.mark.parametrize("name", NAMES)
def test_samples_by_the_general_body(name: str) -> None:
    samples_of(name, gpu_general.general_body(name) if ON_GPU else cpu.reference_body(name))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("step", "checkpoint"), CALLS)
def test_decode_steps(step: str, checkpoint: str, size: str) -> None:
    for rows in ROWS:
        for enable_pdl in (False, True):
            arguments = sample(step, checkpoint, size, rows)
            assert run(op_name(step, checkpoint), arguments, enable_pdl=enable_pdl)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> torch.Tensor:
    return op_samples.randn(*shape, seed=seed, dtype=dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_of_every_width(width: int, dtype: torch.dtype) -> None:
    for rows in (1, 3, 300):
        x, weight = randn(rows, width, dtype=dtype), randn(width, seed=1, dtype=dtype)
        ops.rms_norm(x, weight)
        ops.fused_add_rms_norm(x, x.clone(), weight, enable_pdl=True)
        if width % 2 == 0:
            ops.silu_and_mul(x)
        ops.rms_norm(x[:, 1:], weight[1:])  # two bytes off


@pytest.mark.parametrize("rows", CACHED_ROWS)
@pytest.mark.parametrize(("dim", "dtype"), HEADS)
def test_cache_writes(rows: int, dim: int, dtype: torch.dtype) -> None:
    heads, page = 2, 16
    shape = -(-rows // page) + 1, page, heads, dim
    slots = torch.arange(rows, device=DEVICE)
    table = op_samples.table(rows, dim).to(DEVICE) if dim % 2 == 0 else None
    for layout in op_samples.LAYOUTS:
        cache = [op.to(DEVICE, dtype) for op in op_samples.caches(layout, *shape)]
        norms = randn(dim, seed=3, dtype=dtype), randn(dim, seed=4, dtype=dtype)
        qkv = randn(rows, 8 * heads * dim, dtype=dtype)
        ops.qk_norm_rope_kv_write(qkv, *norms, table, slots, slots, *cache)
        k, v = (randn(rows, heads, dim, seed=s, dtype=dtype) for s in (5, 6))
        ops.kv_cache_write(k, v, slots, *cache)


def test_a_projection_of_one_token_of_the_hidden_size() -> None:
    """Which has a kernel of its own that no step of decoding asks for."""
    ops.nvfp4_linear(randn(1, 2048), *nvfp4(64, 2048, scales=(1,)).values())


@pytest.mark.parametrize("plan", PRODUCT_PLANS, ids=str)
def test_projections_of_many_tokens(plan: tuple[int, int]) -> None:
    columns, rows = 768, 2048
    x = randn(300, columns)
    for scales in ((2,), (1,)):
        weight = nvfp4(rows, columns, scales=scales).values()
        shards = [rows // scales[0]] * scales[0]
        ops.nvfp4_linear(x, *weight, shards, enable_pdl=True)
        if ON_GPU:
            native_many.linear(x, *weight, shards, native_many.ROUNDED, True, plan=plan)
    weight = nvfp4(rows, columns, scales=(2,)).values()
    ops.nvfp4_linear_silu_and_mul(x, *weight)
    if ON_GPU:
        native_many.linear(x, *weight, [rows // 2] * 2, native_many.SILU_AND_MUL, plan=plan)


@pytest.mark.parametrize(("hidden", "width"), EXPERT_SIZES)
@pytest.mark.parametrize("tokens", EXPERT_TOKENS)
def test_experts_of_many_tokens(tokens: int, hidden: int, width: int) -> None:
    experts, top_k = 8, 6
    ids = torch.argsort(randn(tokens, experts).float(), dim=1)[:, :top_k].to(torch.int32)
    ids[1, :2] = -1
    weights = torch.full((tokens, top_k), 1 / top_k, device=DEVICE)
    w13 = nvfp4(experts, 2 * width, hidden, scales=(experts, 2)).values()
    w2 = nvfp4(experts, hidden, width, scales=(experts,)).values()
    x = randn(tokens, hidden)
    for shared in (None, x):
        ops.nvfp4_routed_experts(x, weights, ids, *w13, *w2, shared)
    own13, own2 = nvfp4(2 * width, hidden, scales=(2,)), nvfp4(hidden, width)
    routed, shared = ops.nvfp4_moe_gate_up(x, ids, *w13, *own13.values())
    ops.nvfp4_moe_down(routed, shared, weights, ids, *w2, *own2.values())
    w13, w2 = randn(experts, 2 * width, hidden), randn(experts, hidden, width)
    ops.bf16_routed_experts(x, weights, ids, w13, w2, x)
    routed, shared = ops.bf16_moe_gate_up(x, ids, w13, w13[0])
    ops.bf16_moe_down(routed, shared, weights, ids, w2, w2[0])


@pytest.mark.parametrize("experts", [7, 256, 1000])
def test_choice_of_experts(experts: int) -> None:
    for rows in (1, 9):
        logits = randn(rows, experts)
        logits[-1] = torch.nan
        assert ops.router_topk(logits, 6)[1][-1].tolist() == list(range(6))


@pytest.mark.parametrize("window", WINDOWS)
def test_decode_attention(window: int) -> None:
    for lengths in LENGTHS:
        for layout in ("hnd", "interleaved"):
            case = Case(lengths, DEVICE, window=window, layout=layout)
            for enable_pdl in (False, True):
                assert bool(case.run(enable_pdl=enable_pdl).isfinite().all())


@pytest.mark.parametrize("window", [0, 40])
def test_prefill_attention(window: int) -> None:
    for requests in ([(0, 70)], [(50, 3), (0, 0), (97, 30)]):
        for layout in ("hnd", "interleaved"):
            case = PrefillCase(requests, DEVICE, window=window, layout=layout)
            for enable_pdl in (False, True):
                assert bool(case.run(enable_pdl=enable_pdl).isfinite().all())


def test_repack_aligned_and_not() -> None:
    blocks = op_samples.gguf_blocks(7, 320).to(DEVICE)
    off = torch.empty(blocks.numel() + 1, dtype=torch.uint8, device=DEVICE)[1:].view(blocks.shape)
    for source in (blocks, off.copy_(blocks)):
        weight, scale = ops.gguf_to_modelopt(source)
        assert torch.equal(ops.modelopt_to_gguf(weight, scale), blocks)


def test_unsanitized_the_calls_here_launch_every_kernel() -> None:
    """By torch's profiler, which a sanitizer does not run beside: left out there, by its name."""
    if not ON_GPU:
        return
    capability = "{}{}".format(*torch.cuda.get_device_capability())
    built = {
        kernel["kernel"]
        for kernel in native.build_info()["cuda_kernels"]
        if kernel["architecture"].rstrip("af") == capability
    }
    launched: set[str] = set()
    missing = built
    # Beside other processes torch's profiler loses launches, of whole pieces too: but hardly twice.
    for _ in range(3):
        for part in parts():
            launched |= launched_by(part)
        missing = {name for name in built if plain_name(name) not in launched}
        if not missing:
            break
    assert not missing


def launched_by(part: Callable[[], object]) -> set[str]:
    """The kernels of one piece. One at a time: of ten thousand launches the first are lost."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        part()
        torch.cuda.synchronize()
    return {plain_name(event.key) for event in profile.key_averages()}


def parts() -> Iterator[Callable[[], object]]:
    """The calls of all tests, in pieces."""
    for first in range(0, len(NAMES), 8):
        yield lambda first=first: [samples_of(name) for name in NAMES[first : first + 8]]
    for step, checkpoint in CALLS:
        yield lambda step=step, checkpoint=checkpoint: [
            test_decode_steps(step, checkpoint, size) for size in SIZES
        ]
    yield lambda: [test_rows_of_every_width(width, BF16) for width in WIDTHS]
    yield lambda: [test_rows_of_every_width(width, torch.float32) for width in WIDTHS]
    for rows in CACHED_ROWS:
        yield lambda rows=rows: [test_cache_writes(rows, dim, dtype) for dim, dtype in HEADS]
    yield test_a_projection_of_one_token_of_the_hidden_size
    yield lambda: [test_projections_of_many_tokens(plan) for plan in PRODUCT_PLANS]
    for hidden, width in EXPERT_SIZES:
        yield lambda hidden=hidden, width=width: [
            test_experts_of_many_tokens(tokens, hidden, width) for tokens in EXPERT_TOKENS
        ]
    yield lambda: [test_choice_of_experts(experts) for experts in (7, 1000)]
    for window in WINDOWS:
        yield lambda window=window: test_decode_attention(window)
    yield lambda: [test_prefill_attention(window) for window in (0, 40)]
    yield test_repack_aligned_and_not


def plain_name(kernel: str) -> str:
    """Without namespaces and arguments, as the build's list and the profiler both have it."""
    kernel = re.sub(r"^void |flint::cuda::|\(anonymous namespace\)::", "", kernel)
    return re.sub(r"\(.*", "", kernel).replace(" ", "")
