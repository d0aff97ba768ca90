"""The kernels for many tokens: against fp64, at real sizes, with all kinds of routing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
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


PLANS = [(tokens, shares) for tokens in (64, 128, 256) for shares in (1, 2, 3, 6, 8)]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("rows", [9, 200, 600])
@pytest.mark.parametrize("output", [native_many.ROUNDED, native_many.SILU_AND_MUL])
def test_every_plan_of_a_projection(plan: tuple[int, int], rows: int, output: int) -> None:
    """Tiles of each size, whole or in shares of columns; 1,032 features end within a tile."""
    a = linear_arguments(rows, 2 * 1032, 2304, (1032, 1032))
    operands = (a["x"], a["weight"], a["weight_scale"], a["weight_scale_2"], a["shard_sizes"])
    got = native_many.linear(*operands, output, plan=plan)
    assert got is not NotImplemented
    for _ in range(4):
        assert torch.equal(bits(native_many.linear(*operands, output, plan=plan)), bits(got))
    exact = exact_linear(a)
    if output == native_many.SILU_AND_MUL:
        gate, up = exact.to(BF16).double().chunk(2, dim=1)
        exact = gate / (1 + torch.exp(-gate)) * up
    assert relative_error(got, exact) <= ALLOWED * relative_error(exact.to(BF16), exact)


def test_a_plan_that_there_is_not_is_handed_back() -> None:
    a = linear_arguments(9, 128, 512, (128,))
    operands = (a["x"], a["weight"], a["weight_scale"], a["weight_scale_2"], a["shard_sizes"])
    for plan in ((32, 1), (64, 0), (64, 3), (64, 9)):
        assert native_many.linear(*operands, native_many.ROUNDED, plan=plan) is NotImplemented


@pytest.mark.parametrize("plan", PLANS[:5], ids=str)
def test_a_token_s_bits_are_its_own(plan: tuple[int, int]) -> None:
    """Among 9 or 3,000 others, in tiles of any size, and beside rows of NaN; with the same number
    of shares."""
    a = linear_arguments(3000, 640, 2048, (640,))
    operands = (a["weight"], a["weight_scale"], a["weight_scale_2"], a["shard_sizes"])

    def product(x: torch.Tensor, tokens: int) -> torch.Tensor:
        out = native_many.linear(x, *operands, native_many.ROUNDED, plan=(tokens, plan[1]))
        assert out is not NotImplemented
        return out

    many = product(a["x"], 256)
    for tokens in (64, 128, 256):
        assert torch.equal(bits(product(a["x"][:9], tokens)), bits(many[:9]))
    broken = a["x"].clone()
    broken[1::3] = torch.nan
    beside = product(broken, plan[0])
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


CHECKPOINTS = ("nvfp4", "bf16")


def expert_arguments(
    rows: int, routing: str, hidden: int = HIDDEN, width: int = WIDTH, checkpoint: str = "nvfp4"
) -> Bound:
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
    x = randn(rows, hidden, seed=3), torch.rand(shape, generator=generator, device="cuda")
    shared = randn(rows, hidden, seed=4)
    if checkpoint == "bf16":
        w13 = randn(EXPERTS, 2 * width, hidden, seed=1) * hidden**-0.5
        w2 = randn(EXPERTS, hidden, width, seed=2) * width**-0.5
        return REGISTRY["bf16_routed_experts"].bind((*x, ids.int(), w13, w2, shared), {})
    w13, w13_scale = weight(EXPERTS, 2 * width, hidden, seed=1)
    w2, w2_scale = weight(EXPERTS, hidden, width, seed=2)
    factors = 1.0 + torch.arange(2 * EXPERTS, device="cuda").reshape(EXPERTS, 2) % 5
    return REGISTRY["nvfp4_routed_experts"].bind(
        (
            *x,
            ids.int(),
            *(w13, w13_scale, 4e-3 * factors),
            *(w2, w2_scale, 4e-3 * factors[:, 0].contiguous()),
            shared,
        ),
        {},
    )


def values(a: Bound, name: str, expert: int) -> torch.Tensor:
    """The weight of an expert in FP64, without global scales."""
    scales = a.get(f"{name}_scale")
    weight = a[name][expert]
    return weight.double() if scales is None else expanded(weight, scales[expert])


def global_scales(a: Bound, name: str, expert: int) -> torch.Tensor:
    scales = a.get(f"{name}_scale_2")
    return torch.ones(2, device="cuda") if scales is None else scales[expert]


def experts_in_fp64(a: Bound, rounded: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """`rounded` is applied where the op rounds."""
    ids = a["topk_ids"]
    named = (ids >= 0) & (ids < EXPERTS)
    outputs = torch.zeros(*ids.shape, a["x"].shape[1], dtype=torch.float64, device="cuda")
    for expert in range(EXPERTS):
        row, choice = torch.nonzero(ids == expert, as_tuple=True)
        sums = a["x"][row].double() @ values(a, "w13", expert).T
        gate, up = sums.chunk(2, dim=1)
        of_gate, of_up = global_scales(a, "w13", expert)
        gate, up = gate * of_gate, up * of_up
        act = rounded(gate * torch.sigmoid(gate) * up)
        sums = act @ values(a, "w2", expert).T
        outputs[row, choice] = rounded(sums * global_scales(a, "w2", expert).flatten()[0])
    weights = torch.where(named, a["topk_weights"], 0.0).double()
    routed = rounded((outputs * weights[..., None]).sum(1))
    return routed if a["shared_output"] is None else rounded(routed + a["shared_output"].double())


def to_bf16(values: torch.Tensor) -> torch.Tensor:
    return values.to(BF16).double()


@pytest.mark.parametrize("routing", ["random", "one takes all", "unequal", "skipped"])
@pytest.mark.parametrize("rows", [9, 60, 300, 2048, 10_923, 65_536])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_experts(rows: int, routing: str, checkpoint: str) -> None:
    """Q5, Q6: error to fp64 as that of fp64 arithmetic rounded to BF16 at the same points."""
    arguments = expert_arguments(rows, routing, checkpoint=checkpoint)
    (got,) = taken(f"{checkpoint}_routed_experts", arguments)
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


# At most as many rows of weights as the CTAs of a GPU have together (product_gather.cuh), and more.
@pytest.mark.parametrize(("hidden", "width"), [(64, 64), (192, 320), (64, 8768)])
@pytest.mark.parametrize("rows", [100, 3000])
def test_bf16_experts_of_other_widths(rows: int, hidden: int, width: int) -> None:
    arguments = expert_arguments(rows, "unequal", hidden, width, "bf16")
    (got,) = taken("bf16_routed_experts", arguments)
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
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_nan_rows_do_not_leak(rows: int, checkpoint: str) -> None:
    """Q4: in x, in the shared output, and in the weights of skipped entries."""
    name = f"{checkpoint}_routed_experts"
    arguments = expert_arguments(rows, "skipped", checkpoint=checkpoint)
    (want,) = taken(name, arguments)
    broken = {name: arguments[name].clone() for name in ("x", "shared_output", "topk_weights")}
    broken["x"][1::2] = broken["shared_output"][1::2] = torch.nan
    ids = arguments["topk_ids"]
    broken["topk_weights"][(ids < 0) | (ids >= EXPERTS)] = torch.nan
    (got,) = taken(name, {**arguments, **broken})
    assert torch.equal(bits(got[::2]), bits(want[::2]))


@pytest.mark.parametrize("rows", [30, 60, 300, 2048])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_a_graph_takes_other_routing(rows: int, checkpoint: str) -> None:
    """What the order of entries decides is decided on the device."""
    name = f"{checkpoint}_routed_experts"
    arguments = expert_arguments(rows, "random", checkpoint=checkpoint)
    other = expert_arguments(rows, "unequal", checkpoint=checkpoint)
    held = arguments["topk_ids"].clone()
    graph, (result,) = captured(lambda: call(name, {**arguments, "topk_ids": held}))
    for ids in (other["topk_ids"], arguments["topk_ids"]):
        held.copy_(ids)
        graph.replay()
        (want,) = taken(name, {**arguments, "topk_ids": ids})
        assert torch.equal(bits(result), bits(want))


@pytest.mark.parametrize("rows", [9, 300, 3000])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_the_two_steps_of_decode_at_more_rows(rows: int, checkpoint: str) -> None:
    """moe_gate_up and moe_down against the general bodies."""
    a = expert_arguments(rows, "skipped", checkpoint=checkpoint)
    if checkpoint == "nvfp4":
        one = torch.full((1,), 4e-3, device="cuda")
        of_shared = [
            (*weight(2 * WIDTH, HIDDEN, seed=6), one),
            (*weight(HIDDEN, WIDTH, seed=7), one),
        ]
    else:
        of_shared = [
            (randn(2 * WIDTH, HIDDEN, seed=6) * HIDDEN**-0.5,),
            (randn(HIDDEN, WIDTH, seed=7) * WIDTH**-0.5,),
        ]
    names = [n for n in a if n in ("x", "topk_ids") or n.startswith("w13")]
    name = f"{checkpoint}_moe_gate_up"
    gate_up = REGISTRY[name].bind(
        (a["x"], a["topk_ids"], *(a[n] for n in names if n.startswith("w13")), *of_shared[0]), {}
    )
    acts = taken(name, gate_up)
    general = getattr(gpu_general, name)(**gate_up)
    for got, want in zip(acts, general, strict=True):
        assert relative_error(got, want) < 2**-8  # both rounded
    skipped = (a["topk_ids"] < 0) | (a["topk_ids"] >= EXPERTS)
    assert not acts[0][skipped].any()
    name = f"{checkpoint}_moe_down"
    names = ["topk_weights", "topk_ids", *(n for n in a if n.startswith("w2"))]
    down = REGISTRY[name].bind((*acts, *(a[n] for n in names), *of_shared[1]), {})
    (got,) = taken(name, down)
    assert relative_error(got, getattr(gpu_general, name)(**down)) < 2**-8


BRINGS_ROWS = """
import sys
sys.path[:0] = {paths!r}
import torch
import test_many_gpu as t
from flint_kernels.backends import cuda, native_many as many
assert cuda.why_not(torch.device("cuda")) is None
for rows in (1800, 8192):
    for routing in ("random", "one takes all", "unequal", "skipped"):
        a = t.expert_arguments(rows, routing, 512, 768)
        shape = t.EXPERTS, 512, 768
        given = dict(x=a["x"], w13=a["w13"], scale=a["w13_scale"], scale_2=a["w13_scale_2"])
        acts = []
        for gathers in (False, *[True] * 5):
            act = torch.zeros(a["topk_ids"].numel(), 768, dtype=t.BF16, device="cuda")
            assert many.experts(
                many.ORDER | many.GATHER_TOKENS | many.GATE_UP | many.ACT_BY_ENTRY,
                a["topk_ids"], shape, bf16=False, enable_pdl=False, gathers=gathers, act=act,
                **given,
            )
            acts.append(act)
        assert all(torch.equal(t.bits(act), t.bits(acts[0])) for act in acts[1:]), (rows, routing)
print("the same")
"""


def test_gate_up_that_brings_rows_together_itself() -> None:
    """The same bits as with rows that another kernel has brought together. In a process of its own,
    which ends if its CTAs wait for each other."""
    tests = Path(__file__).parent
    script = BRINGS_ROWS.format(paths=[str(tests), str(tests.parent)])
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.stdout.strip() == "the same", result.stderr[-3000:]


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
