"""Calls that launch every kernel of the library, and every general body, once and at small sizes.

`make gpu-sanitize` runs this file under compute-sanitizer's memcheck, initcheck, synccheck and
racecheck, which find a fault whatever the result is; results are compared by the other files. The
last test, for a run without a sanitizer, holds the calls to the list of kernels that the build
wrote. LOW_LATENCY_DEVICE=cpu runs the calls against the CPU's bodies.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator

import op_samples
import pytest
import torch
from low_latency import BF16, CALLS, DEVICE, FAST_ROWS, ON_GPU, op_name, run, sample
from support import as_tuple
from test_contract_gpu import calls

from flint_kernels import ops
from flint_kernels.backends import cpu, gpu_general, native
from flint_kernels.ops import REGISTRY

pytestmark = pytest.mark.gpu

NAMES = sorted(REGISTRY)
# The model's own sizes have plans of their own; so have 1, a few and all of the fast rows.
SIZES = ("flint", "flint-tiny", "odd")
ROWS = (1, 2, 4, FAST_ROWS)
WIDTHS = (33, 128, 512, 2048, 4096, 8192)
CACHED_ROWS = (1, 5, 300)
HEADS = ((128, BF16), (64, BF16), (20, BF16), (7, torch.float32))


@pytest.fixture(autouse=True)
def _faults_belong_to_their_test() -> Iterator[None]:
    yield
    if ON_GPU:
        torch.cuda.synchronize()


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


def test_repack_aligned_and_not() -> None:
    blocks = op_samples.gguf_blocks(7, 320).to(DEVICE)
    off = torch.empty(blocks.numel() + 1, dtype=torch.uint8, device=DEVICE)[1:].view(blocks.shape)
    for source in (blocks, off.copy_(blocks)):
        weight, scale = ops.gguf_to_modelopt(source)
        assert torch.equal(ops.modelopt_to_gguf(weight, scale), blocks)


# Rows and experts for each of the plans by which experts are multiplied, by entries an expert: 1,
# 9, 18 and 60; and widths for each form of those for a few.
EXPERTS = ((9, 16), (9, 2), (9, 1), (30, 1))
EXPERT_WIDTHS = (256, 512, 1024, 2048)
# Rows for each of the plans of projections with so many features.
LINEAR_ROWS, FEATURES = (9, 128, 256), 132 * 128


def nvfp4(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    *lead, columns = shape
    codes = torch.full((*lead, columns // 2), 0x2A, dtype=torch.uint8, device=DEVICE)
    return codes, torch.ones(*lead, columns // 16, device=DEVICE).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("rows", LINEAR_ROWS)
def test_projections_of_many_tokens(rows: int) -> None:
    x, matrix = randn(rows, 256), nvfp4(FEATURES, 256)
    ops.nvfp4_linear(x, *matrix, torch.ones(1, device=DEVICE))
    ops.nvfp4_linear_silu_and_mul(x, *matrix, torch.ones(1, device=DEVICE))


@pytest.mark.parametrize("width", EXPERT_WIDTHS)
@pytest.mark.parametrize(("rows", "experts"), EXPERTS)
def test_experts_of_many_tokens(rows: int, experts: int, width: int) -> None:
    w13, w2 = nvfp4(experts, 2 * width, width), nvfp4(experts, width, width)
    logits = randn(rows, max(experts, 2))
    weights, ids = ops.router_topk(logits, 2)
    x, scales = randn(rows, width), torch.ones(experts, 2, device=DEVICE)
    ids.remainder_(experts)
    matrices = *w13, scales, *w2, scales[:, 0].contiguous()
    ops.nvfp4_routed_experts(x, weights, ids, *matrices, x, enable_pdl=True)


def test_a_choice_of_many_experts() -> None:
    ops.router_topk(randn(5, 700), 6)


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
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for name in NAMES:
            samples_of(name)
        for step, checkpoint in CALLS:
            for size in SIZES:
                test_decode_steps(step, checkpoint, size)
        for width, dtype in itertools.product(WIDTHS, (BF16, torch.float32)):
            test_rows_of_every_width(width, dtype)
        for rows, (dim, dtype) in itertools.product(CACHED_ROWS, HEADS):
            test_cache_writes(rows, dim, dtype)
        test_repack_aligned_and_not()
        for rows in LINEAR_ROWS:
            test_projections_of_many_tokens(rows)
        for (rows, experts), width in itertools.product(EXPERTS, EXPERT_WIDTHS):
            test_experts_of_many_tokens(rows, experts, width)
        test_a_choice_of_many_experts()
        torch.cuda.synchronize()
    launched = {plain_name(event.key) for event in profile.key_averages()}
    missing = {name for name in built if plain_name(name) not in launched}
    assert not missing


def plain_name(kernel: str) -> str:
    """Without namespaces and arguments, as the build's list and the profiler both have it."""
    kernel = re.sub(r"^void |flint::cuda::|\(anonymous namespace\)::", "", kernel)
    return re.sub(r"\(.*", "", kernel).replace(" ", "")
