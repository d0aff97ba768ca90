"""The kernels for many tokens: against fp64, at real sizes, with all kinds of routing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import Bound, as_tuple, bits, call, captured, relative_error

from flint_kernels import ops
from flint_kernels.backends import cuda, gpu_general, native_many, native_router
from flint_kernels.ops import REGISTRY

pytestmark = pytest.mark.gpu

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
HIDDEN, WIDTH, EXPERTS, TOP_K = 512, 256, 64, 6
# A kernel's sums differ from the exact ones in the last places of fp32, so that now and then a
# rounding goes the other way; plain BF16 arithmetic has the same roundings.
ALLOWED = 1.1


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(BF16)


def weight(*shape: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """All codes and finite scales of either sign, none so large that others do not show."""
    *lead, columns = shape
    generator = torch.Generator("cuda").manual_seed(seed)
    codes, scales, signs = (
        torch.randint(low, high, (*lead, columns // step), generator=generator, device="cuda")
        for low, high, step in ((0, 256, 2), (0x00, 0x48, 16), (0, 2, 16))
    )
    return codes.to(torch.uint8), (scales + 0x80 * signs).to(torch.uint8).view(E4M3)


def expanded(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return ops.nvfp4_dequantize(codes, scales).double()


def taken(name: str, arguments: Bound) -> tuple[torch.Tensor, ...]:
    """By the kernels for many tokens, the same bits in five runs."""
    body: Callable[..., Any] = getattr(native_many, name)
    first = as_tuple(body(**arguments))
    assert first[0] is not NotImplemented
    for _ in range(4):
        again = as_tuple(body(**arguments))
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(first, again, strict=True))
    return first


@pytest.fixture(autouse=True, scope="module")
def _library() -> None:
    """Loaded, and with these kernels for this GPU."""
    assert cuda.why_not(torch.device("cuda")) is None
    assert native_many._runs_on(torch.cuda.current_device())


# ---------------------------------------------------------------------------------- projections


SHAPES = [
    (9, 128, 256, (128,)),
    (64, 1000, 512, (600, 400)),
    (129, 5120, 2048, (4096, 512, 512)),
    (300, 2048, 4096, (2048,)),
    (1025, 12288, 2048, (6144, 6144)),
    (8192, 2048, 6144, (2048,)),
]


def linear_arguments(rows: int, features: int, columns: int, shards: tuple[int, ...]) -> Bound:
    codes, scales = weight(features, columns)
    scale_2 = torch.tensor([1e-3 * 2**i for i in range(len(shards))], device="cuda")
    x = randn(rows, columns)
    return REGISTRY["nvfp4_linear"].bind((x, codes, scales, scale_2, list(shards)), {})


def exact_linear(a: Bound) -> torch.Tensor:
    scale = torch.cat(
        [s.expand(n) for s, n in zip(a["weight_scale_2"], a["shard_sizes"], strict=True)]
    )
    return a["x"].double() @ expanded(a["weight"], a["weight_scale"]).T * scale.double()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_projections(shape: tuple[int, int, int, tuple[int, ...]]) -> None:
    arguments = linear_arguments(*shape)
    (got,) = taken("nvfp4_linear", arguments)
    exact = exact_linear(arguments)
    assert relative_error(got, exact) <= ALLOWED * relative_error(exact.to(BF16), exact)


@pytest.mark.parametrize("rows", [9, 200, 3000])
def test_gated_projections(rows: int) -> None:
    arguments = linear_arguments(rows, 2 * 1032, 1024, (1032, 1032))
    del arguments["shard_sizes"]
    (got,) = taken("nvfp4_linear_silu_and_mul", arguments)
    exact = exact_linear({**arguments, "shard_sizes": [1032, 1032]}).to(BF16).double()
    gate, up = exact.chunk(2, dim=1)
    want = gate / (1 + torch.exp(-gate)) * up
    assert relative_error(got, want) <= ALLOWED * relative_error(want.to(BF16), want)


def test_gates_at_the_ends() -> None:
    """N6: -inf gives NaN as torch's division does, large gates pass, 0 and NaN stay."""
    codes = torch.full((512, 128), 0x22, dtype=torch.uint8, device="cuda")  # ones
    scales = torch.full((512, 16), 1.0, device="cuda").to(E4M3)
    x = torch.zeros(16, 256, dtype=BF16, device="cuda")
    gates = [-torch.inf, -100.0, -87.5, 0.0, torch.nan, 90.0]
    x[: len(gates), 0] = torch.tensor(gates, device="cuda")
    one = torch.ones(1, device="cuda")
    bound = REGISTRY["nvfp4_linear_silu_and_mul"].bind((x, codes, scales, one), {})
    act = taken("nvfp4_linear_silu_and_mul", bound)[0][: len(gates), 0].tolist()
    assert act[0] != act[0]
    assert act[4] != act[4]
    assert act[1] == 0
    assert act[2] == pytest.approx(8.7e-37 * 87.5, rel=0.02)
    assert act[3] == 0
    assert act[5] == 8096  # 8100, rounded


def test_a_token_s_bits_are_its_own() -> None:
    """Among 9 or 3,000 others, in tiles of any size, and beside rows of NaN."""
    arguments = linear_arguments(3000, 640, 512, (640,))
    (many,) = taken("nvfp4_linear", arguments)
    (few,) = taken("nvfp4_linear", {**arguments, "x": arguments["x"][:9]})
    assert torch.equal(bits(few), bits(many[:9]))
    broken = arguments["x"].clone()
    broken[1::3] = torch.nan
    (beside,) = taken("nvfp4_linear", {**arguments, "x": broken})
    for start in (0, 2):
        assert torch.equal(bits(beside[start::3]), bits(many[start::3]))
    assert beside[1::3].isnan().all()


def test_views_of_x() -> None:
    """Rows far apart; an odd address, which the copies of tiles cannot start from; one row again
    and again."""
    arguments = linear_arguments(40, 256, 512, (256,))
    (want,) = taken("nvfp4_linear", arguments)
    wide = torch.empty(40, 1000, dtype=BF16, device="cuda")
    for start in (8, 1):
        view = wide[:, start : start + 512]
        view.copy_(arguments["x"])
        (got,) = taken("nvfp4_linear", {**arguments, "x": view})
        assert torch.equal(bits(got), bits(want))
    (got,) = taken("nvfp4_linear", {**arguments, "x": arguments["x"][:1].expand(40, -1)})
    assert torch.equal(bits(got), bits(want[:1].expand(40, -1)))


def test_other_widths_are_handed_back_and_computed() -> None:
    arguments = linear_arguments(40, 256, 320, (256,))
    assert native_many.nvfp4_linear(**arguments) is NotImplemented
    exact = exact_linear(arguments)
    got = call("nvfp4_linear", arguments)[0]
    assert relative_error(got, exact) <= ALLOWED * relative_error(exact.to(BF16), exact)


# -------------------------------------------------------------------------------------- experts


def expert_arguments(rows: int, routing: str, hidden: int = HIDDEN, width: int = WIDTH) -> Bound:
    generator = torch.Generator("cuda").manual_seed(5)
    shape = (rows, TOP_K)
    if routing == "random":
        scores = torch.rand(rows, EXPERTS, generator=generator, device="cuda")
        ids = scores.topk(TOP_K, dim=1).indices
    elif routing == "one takes all":
        ids = torch.full(shape, 3, device="cuda")
    elif routing == "unequal":
        ids = (torch.rand(shape, generator=generator, device="cuda") ** 4 * EXPERTS).long()
    else:  # skipped and impossible ones among them
        ids = torch.randint(-2, EXPERTS + 2, shape, generator=generator, device="cuda")
    w13, w13_scale = weight(EXPERTS, 2 * width, hidden, seed=1)
    w2, w2_scale = weight(EXPERTS, hidden, width, seed=2)
    factors = 1.0 + torch.arange(2 * EXPERTS, device="cuda").reshape(EXPERTS, 2) % 5
    return REGISTRY["nvfp4_routed_experts"].bind(
        (
            randn(rows, hidden, seed=3),
            torch.rand(shape, generator=generator, device="cuda"),
            ids.int(),
            *(w13, w13_scale, 4e-3 * factors),
            *(w2, w2_scale, 4e-3 * factors[:, 0].contiguous()),
            randn(rows, hidden, seed=4),
        ),
        {},
    )


def experts_in_fp64(a: Bound, rounded: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """`rounded` is applied where the op rounds."""
    ids = a["topk_ids"]
    named = (ids >= 0) & (ids < EXPERTS)
    outputs = torch.zeros(*ids.shape, a["x"].shape[1], dtype=torch.float64, device="cuda")
    for expert in range(EXPERTS):
        row, choice = torch.nonzero(ids == expert, as_tuple=True)
        sums = a["x"][row].double() @ expanded(a["w13"][expert], a["w13_scale"][expert]).T
        gate, up = sums.chunk(2, dim=1)
        gate, up = gate * a["w13_scale_2"][expert, 0], up * a["w13_scale_2"][expert, 1]
        act = rounded(gate * torch.sigmoid(gate) * up)
        sums = act @ expanded(a["w2"][expert], a["w2_scale"][expert]).T
        outputs[row, choice] = rounded(sums * a["w2_scale_2"][expert])
    weights = torch.where(named, a["topk_weights"], 0.0).double()
    routed = rounded((outputs * weights[..., None]).sum(1))
    return routed if a["shared_output"] is None else rounded(routed + a["shared_output"].double())


def to_bf16(values: torch.Tensor) -> torch.Tensor:
    return values.to(BF16).double()


@pytest.mark.parametrize("routing", ["random", "one takes all", "unequal", "skipped"])
@pytest.mark.parametrize("rows", [9, 60, 300, 2048, 10_923, 65_536])
def test_experts(rows: int, routing: str) -> None:
    """Q5, Q6: error to fp64 as that of fp64 arithmetic rounded to BF16 at the same points."""
    arguments = expert_arguments(rows, routing)
    (got,) = taken("nvfp4_routed_experts", arguments)
    exact = experts_in_fp64(arguments, lambda values: values)
    plain = experts_in_fp64(arguments, to_bf16)
    assert relative_error(got, exact) <= ALLOWED * relative_error(plain, exact)


# Of each width that the kernels for a few tokens an expert have a form for, and one more.
WIDTHS = [(2048, 512), (1024, 2048), (256, 1024), (768, 256)]


@pytest.mark.parametrize("routing", ["random", "one takes all", "unequal", "skipped"])
@pytest.mark.parametrize("rows", [9, 40, 100, 250])
@pytest.mark.parametrize(("hidden", "width"), WIDTHS)
def test_experts_of_few_tokens_each(rows: int, routing: str, hidden: int, width: int) -> None:
    arguments = expert_arguments(rows, routing, hidden, width)
    (got,) = taken("nvfp4_routed_experts", arguments)
    exact = experts_in_fp64(arguments, lambda values: values)
    plain = experts_in_fp64(arguments, to_bf16)
    assert relative_error(got, exact) <= ALLOWED * relative_error(plain, exact)


@pytest.mark.parametrize("rows", [60, 2048])
def test_experts_without_a_shared_output(rows: int) -> None:
    arguments = {**expert_arguments(rows, "random"), "shared_output": None}
    (got,) = taken("nvfp4_routed_experts", arguments)
    exact = experts_in_fp64(arguments, lambda values: values)
    plain = experts_in_fp64(arguments, to_bf16)
    assert relative_error(got, exact) <= ALLOWED * relative_error(plain, exact)


@pytest.mark.parametrize("rows", [30, 60, 300, 2048])
def test_nan_rows_do_not_leak(rows: int) -> None:
    """Q4: in x, in the shared output, and in the weights of skipped entries."""
    arguments = expert_arguments(rows, "skipped")
    (want,) = taken("nvfp4_routed_experts", arguments)
    broken = {name: arguments[name].clone() for name in ("x", "shared_output", "topk_weights")}
    broken["x"][1::2] = broken["shared_output"][1::2] = torch.nan
    ids = arguments["topk_ids"]
    broken["topk_weights"][(ids < 0) | (ids >= EXPERTS)] = torch.nan
    (got,) = taken("nvfp4_routed_experts", {**arguments, **broken})
    assert torch.equal(bits(got[::2]), bits(want[::2]))


@pytest.mark.parametrize("rows", [30, 60, 300, 2048])
def test_a_graph_takes_other_routing(rows: int) -> None:
    """What the order of entries decides is decided on the device."""
    arguments = expert_arguments(rows, "random")
    other = expert_arguments(rows, "unequal")
    held = arguments["topk_ids"].clone()
    graph, (result,) = captured(
        lambda: call("nvfp4_routed_experts", {**arguments, "topk_ids": held})
    )
    for ids in (other["topk_ids"], arguments["topk_ids"]):
        held.copy_(ids)
        graph.replay()
        (want,) = taken("nvfp4_routed_experts", {**arguments, "topk_ids": ids})
        assert torch.equal(bits(result), bits(want))


@pytest.mark.parametrize("rows", [9, 300])
def test_the_two_steps_of_decode_at_more_rows(rows: int) -> None:
    """nvfp4_moe_gate_up and nvfp4_moe_down against the general bodies."""
    a = expert_arguments(rows, "skipped")
    shared = [(*weight(2 * WIDTH, HIDDEN, seed=6),), (*weight(HIDDEN, WIDTH, seed=7),)]
    one = torch.full((1,), 4e-3, device="cuda")
    gate_up = REGISTRY["nvfp4_moe_gate_up"].bind(
        (*(a[n] for n in ("x", "topk_ids", "w13", "w13_scale", "w13_scale_2")), *shared[0], one), {}
    )
    acts = taken("nvfp4_moe_gate_up", gate_up)
    general = gpu_general.nvfp4_moe_gate_up(**gate_up)
    for got, want in zip(acts, general, strict=True):
        assert relative_error(got, want) < 2**-8  # both rounded
    skipped = (a["topk_ids"] < 0) | (a["topk_ids"] >= EXPERTS)
    assert not acts[0][skipped].any()
    names = ("topk_weights", "topk_ids", "w2", "w2_scale", "w2_scale_2")
    down = REGISTRY["nvfp4_moe_down"].bind((*acts, *(a[n] for n in names), *shared[1], one), {})
    (got,) = taken("nvfp4_moe_down", down)
    assert relative_error(got, gpu_general.nvfp4_moe_down(**down)) < 2**-8


# --------------------------------------------------------------------------------------- router


@pytest.mark.parametrize("shape", [(1, 256, 6), (8192, 256, 6), (33, 7, 7), (65, 1000, 32)])
@pytest.mark.parametrize("renormalize", [True, False])
def test_choice_of_experts(shape: tuple[int, int, int], renormalize: bool) -> None:
    """T1, T2: as the general body, with many ties, infinities and NaN; a weight within an ulp."""
    rows, experts, top_k = shape
    logits = (randn(rows, experts) * 4).round() / 4
    logits[::3, ::5] = torch.tensor([torch.inf, -torch.inf], device="cuda").repeat(experts)[
        : len(range(0, experts, 5))
    ]
    logits[::7, 1] = torch.nan
    logits[-1] = torch.nan  # that of expert 0 has the largest key there is
    for view in (logits, logits.repeat(1, 2)[:, :experts]):
        bound = REGISTRY["router_topk"].bind((view, top_k, renormalize), {})
        weights, ids = as_tuple(native_router.router_topk(**bound))
        want_weights, want_ids = gpu_general.router_topk(**bound)
        assert torch.equal(ids, want_ids)
        torch.testing.assert_close(weights, want_weights, rtol=2**-7, atol=0, equal_nan=True)
