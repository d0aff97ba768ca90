"""The ops of a decode layer on a GPU: accuracy, inputs at the limits, and rows that are their own.

Graphs, programmatic dependent launch and workspaces: test_low_latency_graphs_gpu.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import op_samples
import pytest
import torch
from low_latency import (
    ACTIVATIONS,
    BF16,
    BLOCKS,
    CALLS,
    CHECKPOINTS,
    DEVICE,
    E4M3,
    FAST_ROWS,
    MODELS,
    MOST_ROWS,
    ON_GPU,
    PAGE,
    POSITIONS,
    SIZES,
    Tensor,
    assert_no_worse,
    assert_routed,
    assert_same,
    filled_with_ones,
    nvfp4,
    of_rows,
    op_name,
    randn,
    random_bytes,
    reference,
    run,
    sample,
    to_bf16,
    twin,
    whole,
)
from support import Bound, as_tuple, bits

from flint_kernels import ops
from flint_kernels.ops import REGISTRY, VALUE_CHECKS_VARIABLE

pytestmark = pytest.mark.gpu

each_call = pytest.mark.parametrize("step, checkpoint", CALLS)
each_checkpoint = pytest.mark.parametrize("checkpoint", CHECKPOINTS)
each_model = pytest.mark.parametrize("size", MODELS)


@pytest.fixture(autouse=True)
def _errors_belong_to_their_test() -> Iterator[None]:
    yield
    if ON_GPU:
        torch.cuda.synchronize()


# ---------------------------------------------------------------------------------- accuracy


@pytest.mark.parametrize("size", SIZES)
@each_call
def test_no_further_from_fp32_than_plain_pytorch(step: str, checkpoint: str, size: str) -> None:
    """For every number of rows, those beyond the fast kernels' included."""
    name = op_name(step, checkpoint)
    arguments = whole(step, checkpoint, size)
    plain = reference(name, arguments, BF16)
    exact = reference(name, arguments, torch.float32)
    for rows in (*range(1, FAST_ROWS + 2), MOST_ROWS):
        part = of_rows(arguments, slice(rows))
        got = run(name, part)
        if step == "router":
            assert_routed(part, got)
        judged = 2 if step == "router" else len(got)
        for index in range(judged):
            assert_no_worse(got[index], plain[index][:rows], exact[index][:rows], (rows, index))


@each_checkpoint
def test_the_whole_vocabulary(checkpoint: str) -> None:
    rows, vocabulary, hidden = FAST_ROWS, 150_144 if ON_GPU else 1_024, SIZES["flint"].hidden
    x = randn(rows, hidden)
    if checkpoint == "nvfp4":
        weight = nvfp4(vocabulary, hidden)
        head = {"weight" + part: tensor for part, tensor in weight.items()}
        values = ops.nvfp4_dequantize(*weight.values(), torch.float32)
    else:
        head = {"weight": randn(vocabulary, hidden, seed=1, scale=hidden**-0.5)}
        values = head["weight"].float()
    [logits] = run(f"{checkpoint}_lm_head", {"x": x, **head})
    exact = torch.cat([x.double() @ part.double().T for part in values.split(20_000)], dim=1)
    assert logits.shape == (rows, vocabulary)
    assert float((logits - exact).norm() / exact.norm()) < 1e-5
    assert torch.equal(logits.argmax(1), exact.argmax(1))


@pytest.mark.parametrize(
    "shards",
    [[16, 8, 8], [5, 20, 7, 16], [1, 126, 1], [100, 0, 28], [40, 33], [17], [9, 8, 7, 6, 5]],
    ids=str,
)
@pytest.mark.parametrize("columns", [64, 96, 192, 1088])
def test_Q2_every_shard_has_its_own_global_scale(columns: int, shards: list[int]) -> None:
    weight = nvfp4(sum(shards), columns)
    weight["_scale_2"] = 1e-3 * 2.0 ** torch.arange(len(shards), device=DEVICE)
    for rows in (1, FAST_ROWS, MOST_ROWS):
        arguments = {
            "x": randn(rows, columns),
            **{"weight" + part: tensor for part, tensor in weight.items()},
            "shard_sizes": shards,
        }
        [got] = run("nvfp4_linear", arguments)
        [plain] = reference("nvfp4_linear", arguments, BF16)
        [exact] = reference("nvfp4_linear", arguments, torch.float32)
        for parts in zip(*(each.split(shards, 1) for each in (got, plain, exact)), strict=True):
            if parts[0].numel() > 0:
                assert_no_worse(*parts, (rows, shards))


@each_model
def test_Q2_scales_that_are_orders_apart(size: str) -> None:
    """q, k, v; gate and up; one expert ten times the others: each part by its own."""
    qkv = dict(sample("qkv", "nvfp4", size, 4))
    qkv["weight_scale_2"] = torch.tensor([1e-3, 2e-3, 4e-3], device=DEVICE)
    up = dict(sample("dense_gate_up", "nvfp4", size, 4))
    up["weight_scale_2"] = up["weight_scale_2"] * torch.tensor([1.0, 50.0], device=DEVICE)
    experts = dict(sample("gate_up", "nvfp4", size, 4))
    experts["w13_scale_2"] = experts["w13_scale_2"].clone()
    experts["w13_scale_2"][int(experts["topk_ids"][0, 1])] *= 10
    experts["shared_w13_scale_2"] = up["weight_scale_2"]
    down = dict(sample("down", "nvfp4", size, 4))
    down["w2_scale_2"] = down["w2_scale_2"].clone()
    down["w2_scale_2"][int(down["topk_ids"][0, 1])] *= 10
    for step, arguments in (
        ("qkv", qkv), ("dense_gate_up", up), ("gate_up", experts), ("down", down),
    ):  # fmt: skip
        name = op_name(step, "nvfp4")
        got, plain, exact = (
            run(name, arguments),
            reference(name, arguments, BF16),
            reference(name, arguments, torch.float32),
        )
        for index, parts in enumerate(zip(got, plain, exact, strict=True)):
            assert_no_worse(*parts, (step, index))
        if step in ("gate_up", "down"):  # a token's part is not lost beside a larger one's
            for row in range(4):
                assert_no_worse(got[0][row], plain[0][row], exact[0][row], (step, row))


@each_model
def test_one_scale_is_several_equal_ones(size: str) -> None:
    """Shapes [], [1] and one for each shard, wherever they may be given."""
    for step, name, several in (
        ("qkv", "weight_scale_2", 3),
        ("dense_gate_up", "weight_scale_2", 2),
        ("gate_up", "shared_w13_scale_2", 2),
        ("down", "shared_w2_scale_2", 1),
        ("o", "weight_scale_2", 1),
        ("head", "weight_scale_2", 1),
    ):
        for rows in (1, FAST_ROWS):
            arguments = dict(sample(step, "nvfp4", size, rows))
            found = []
            for shape in ((), (1,), (several,)):
                arguments[name] = torch.full(shape, 0.007, device=DEVICE)
                found.append(run(op_name(step, "nvfp4"), arguments))
            for other in found[1:]:
                assert_same(found[0], other, (step, rows))


# ---------------------------------------------------------------------------------- exact sums


def test_Q1_every_block_scale_is_taken_as_it_is() -> None:
    """A row for each finite byte, zeros, negatives, subnormals and 448 among them: the sums are
    exact in any order, so the results are those of fp64, rounded once."""
    scales = [byte for byte in range(256) if byte & 0x7F != 0x7F]
    columns = 64
    weight = random_bytes(len(scales), columns // 2)
    scale = torch.tensor(scales, dtype=torch.uint8, device=DEVICE)[:, None].expand(
        -1, columns // 16
    )
    scale = scale.contiguous().view(E4M3)
    values = ops.nvfp4_dequantize(weight, scale, None, torch.float32).double()
    for rows in range(1, FAST_ROWS + 1):
        x = torch.where(randn(rows, columns, seed=rows) < 0, -1.0, 1.0).to(BF16)
        for global_scale in (1.0, 2.0**-20, -4.0, 0.0):
            scale_2 = torch.tensor(global_scale, device=DEVICE)
            exact = x.double() @ values.T * global_scale
            got = ops.nvfp4_linear(x, weight, scale, scale_2)
            assert torch.equal(got.double(), to_bf16(exact)), (rows, global_scale)
            logits = ops.nvfp4_lm_head(x, weight, scale, scale_2)
            assert torch.equal(logits.double(), exact), (rows, global_scale)


@pytest.mark.parametrize("size", ["flint-tiny", "narrow", "odd"])
def test_Q1_scales_at_the_limits_in_every_op(size: str) -> None:
    """Any finite scale byte anywhere, so that sums are of values that are orders apart."""
    for step, checkpoint in CALLS:
        if checkpoint == "bf16":
            continue
        arguments = dict(sample(step, checkpoint, size, FAST_ROWS))
        for name, value in arguments.items():
            if name.endswith("_scale"):
                scales = random_bytes(*value.shape, high=0x7F, seed=3)
                signs = random_bytes(*value.shape, high=2, seed=4) << 7
                arguments[name] = (scales | signs).view(E4M3)
            elif name.endswith("_scale_2"):
                arguments[name] = value / 64
        name = op_name(step, checkpoint)
        got, plain, exact = (
            run(name, arguments),
            reference(name, arguments, BF16),
            reference(name, arguments, torch.float32),
        )
        for index, parts in enumerate(zip(got, plain, exact, strict=True)):
            assert_no_worse(*parts, (step, index))


def test_Q3_no_overflow_on_the_way() -> None:
    columns = 2048
    weight = torch.full((48, columns // 2), 0x77, dtype=torch.uint8, device=DEVICE)
    scale = torch.full((48, columns // 16), 0x38, dtype=torch.uint8, device=DEVICE).view(E4M3)
    scale_2 = torch.tensor(1e-3, device=DEVICE)
    for rows in (1, 3, FAST_ROWS):
        x = torch.full((rows, columns), 6.0, dtype=BF16, device=DEVICE)
        assert bool((ops.nvfp4_linear(x, weight, scale, scale_2) == 73.5).all())
        logits = ops.nvfp4_lm_head(x, weight, scale, scale_2)
        torch.testing.assert_close(logits, torch.full_like(logits, 73.728), rtol=1e-6, atol=0)
        [act] = run(
            "nvfp4_linear_silu_and_mul",
            {"x": x, "weight": weight, "weight_scale": scale, "weight_scale_2": scale_2},
        )
        assert bool((act == float(torch.tensor(73.5 * 73.5).to(BF16))).all())
        ids = torch.zeros(rows, 6, dtype=torch.int32, device=DEVICE)
        each = scale_2.expand(1, 2).contiguous()
        routed, shared = ops.nvfp4_moe_gate_up(
            x, ids, weight[None], scale.view(torch.uint8)[None].view(E4M3), each,
            weight, scale, scale_2,
        )  # fmt: skip
        # 73.728^2 is 5435.8, between 5408 and 5440 of BF16.
        assert bool((routed == 5440).all())
        assert torch.equal(shared, act)


@pytest.mark.parametrize("value", [0.0, 3e38, 1e-30, 1e-38, 1e-40])
@each_checkpoint
def test_activations_at_the_limits(checkpoint: str, value: float) -> None:
    """One element of x that is not 0, and weights up to 1: the product is exact, and where it is no
    number of BF16's range the reference says what it becomes. Nothing is flushed to 0."""
    rows, out, columns = FAST_ROWS, 40, 192
    x = torch.zeros(rows, columns, dtype=BF16, device=DEVICE)
    for row in range(rows):
        x[row, 23 * row] = value if row % 2 == 0 else -value
    codes = random_bytes(out, columns // 2) & 0xAA  # codes 0, 2, 8, 10: 0, 1, -0, -1
    scale = torch.full((out, columns // 16), 0x38, dtype=torch.uint8, device=DEVICE).view(E4M3)
    dense = ops.nvfp4_dequantize(codes, scale, None, BF16)
    arguments: Bound = {"x": x, "weight": dense}
    if checkpoint == "nvfp4":
        one = torch.tensor(1.0, device=DEVICE)
        arguments = {"x": x, "weight": codes, "weight_scale": scale, "weight_scale_2": one}
    want = x.double() @ dense.double().T
    [got] = run(f"{checkpoint}_linear", arguments)
    assert torch.equal(got.double(), to_bf16(want))
    [logits] = run(f"{checkpoint}_lm_head", arguments)
    assert torch.equal(logits.double(), want)
    [act] = run(f"{checkpoint}_linear_silu_and_mul", arguments)
    [plain] = reference(f"{checkpoint}_linear_silu_and_mul", arguments, BF16)
    torch.testing.assert_close(act, plain, rtol=2**-7, atol=2**-133, equal_nan=True)


@each_call
def test_rows_of_zeros(step: str, checkpoint: str) -> None:
    """Zeros give zeros, but for the residual, the router's choice and a norm of zeros."""
    arguments = dict(sample(step, checkpoint, "flint-tiny", 3))
    for name in ("x", "residual", "routed_act", "shared_act"):
        if name in arguments:
            arguments[name] = torch.zeros_like(arguments[name])
    got = run(op_name(step, checkpoint), arguments)
    if step == "router":
        assert got[3].tolist() == [[0, 1, 2, 3, 4, 5]] * 3
        assert torch.equal(got[2], torch.full_like(got[2], float(torch.tensor(1 / 6).to(BF16))))
        got = got[:2]
    assert not any(bool(output.any()) for output in got)


# ---------------------------------------------------------------------------------- the router


def logits_call(router: Tensor, rows: int, top_k: int = 6) -> Bound:
    """A call whose normed rows are x = +-1 to the bit, the residual 0."""
    x = torch.where(randn(rows, router.shape[1], seed=5) < 0, -1.0, 1.0).to(BF16)
    return {
        "x": x,
        "residual": torch.zeros_like(x),
        "weight": torch.ones(router.shape[1], dtype=BF16, device=DEVICE),
        "router_weight": router,
        "top_k": top_k,
    }


def assert_chosen(arguments: Bound, got: tuple[Tensor, ...]) -> None:
    """Exactly the ids by the rounded exact logits, ties to the lower index; NaN ranks first."""
    logits = (arguments["x"].double() @ arguments["router_weight"].double().T).to(BF16).double()
    ranked, ids = torch.sort(logits, dim=1, descending=True, stable=True)
    top_k = arguments["top_k"]
    assert torch.equal(got[0], arguments["x"])
    assert torch.equal(got[3].long(), ids[:, :top_k])
    scores = torch.sigmoid(ranked[:, :top_k])
    want = scores / (scores.sum(1, keepdim=True) + 1e-20)
    torch.testing.assert_close(got[2].double(), want, rtol=2**-8, atol=0, equal_nan=True)


@pytest.mark.parametrize("rows", [1, 3, FAST_ROWS, MOST_ROWS])
@pytest.mark.parametrize("experts, hidden", [(256, 2048), (16, 128), (7, 64), (300, 192)])
def test_T3_ties_below_the_resolution_of_bf16(experts: int, hidden: int, rows: int) -> None:
    """Weights are multiples of 2^-6 up to 1/2: sums are exact in any order, and many of them round
    to the same BF16 value."""
    steps = torch.randint(
        -32, 33, (experts, hidden), generator=torch.Generator().manual_seed(experts)
    )
    router = (steps / 64).to(BF16).to(DEVICE)
    arguments = logits_call(router, rows)
    exact = arguments["x"].double() @ router.double().T
    if experts == 256:  # else the test asks nothing
        assert to_bf16(exact)[0].unique().numel() < exact[0].unique().numel()
    got = run("fused_add_rms_norm_router_topk", arguments)
    assert_chosen(arguments, got)
    for row in range(min(rows, FAST_ROWS)):
        alone = run("fused_add_rms_norm_router_topk", of_rows(arguments, [row]))
        assert torch.equal(alone[3], got[3][[row]])


def test_T3_a_tie_of_two() -> None:
    router = torch.zeros(256, 2048, dtype=BF16, device=DEVICE)
    router[5, 0] = router[9, 0] = router[200, 0] = 1.0
    router[9, 1], router[200, 2] = 2.0**-10, -(2.0**-10)
    for rows in range(1, FAST_ROWS + 1):
        arguments = logits_call(router, rows)
        arguments["x"] = torch.ones_like(arguments["x"])
        ids = run("fused_add_rms_norm_router_topk", arguments)[3]
        assert ids.tolist() == [[5, 9, 200, 0, 1, 2]] * rows


@pytest.mark.parametrize("rows", [1, FAST_ROWS])
@pytest.mark.parametrize("logit", [0.0, 20.0, -20.0, -200.0])
def test_T2_equal_logits(rows: int, logit: float) -> None:
    router = torch.zeros(256, 2048, dtype=BF16, device=DEVICE)
    router[:, 7] = logit
    arguments = logits_call(router, rows)
    arguments["x"] = torch.ones_like(arguments["x"])
    _, _, chosen, ids = run("fused_add_rms_norm_router_topk", arguments)
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5]] * rows
    sixth = float(torch.tensor(1 / 6).to(BF16))  # of scores that underflow, 1e-20 is left: zeros
    assert torch.equal(chosen, torch.full_like(chosen, 0.0 if logit < -100 else sixth))


def test_T2_ranked_by_logit_where_every_score_is_one() -> None:
    router = torch.zeros(16, 128, dtype=BF16, device=DEVICE)
    router[:8, 0] = torch.arange(17, 25).to(BF16)
    arguments = logits_call(router, 2)
    arguments["x"] = torch.ones_like(arguments["x"])
    ids = run("fused_add_rms_norm_router_topk", arguments)[3]
    assert ids.tolist() == [[7, 6, 5, 4, 3, 2]] * 2


@pytest.mark.parametrize("rows", [4, FAST_ROWS])
def test_T1_rows_of_nan_and_of_infinities(rows: int) -> None:
    router = randn(256, 2048, scale=2048**-0.5)
    arguments = logits_call(router, rows)
    clean = run("fused_add_rms_norm_router_topk", arguments)
    arguments["x"] = arguments["x"].clone()
    arguments["x"][1] = torch.nan
    arguments["x"][2, 3], arguments["x"][2, 4] = torch.inf, -torch.inf
    got = run("fused_add_rms_norm_router_topk", arguments)
    for row in range(rows):
        if row in (1, 2):
            assert got[3][row].tolist() == [0, 1, 2, 3, 4, 5]
            assert bool(got[2][row].isnan().all())
        else:
            for one, two in zip(got, clean, strict=True):
                assert torch.equal(bits(one[row]), bits(two[row]))


@pytest.mark.parametrize("rows", [1, FAST_ROWS])
@pytest.mark.parametrize("nan", [False, True])
def test_T1_logits_of_infinity(rows: int, nan: bool) -> None:
    router = torch.zeros(256, 2048, dtype=BF16, device=DEVICE)
    router[:, 0] = torch.arange(256) % 5 / 4
    router[3, 1], router[7, 1], router[200, 1] = torch.inf, -torch.inf, torch.inf
    if nan:
        router[9, 1], router[9, 2] = torch.inf, -torch.inf
    arguments = logits_call(router, rows)
    arguments["x"] = torch.ones_like(arguments["x"])
    got = run("fused_add_rms_norm_router_topk", arguments)
    want = [9, 3, 200, 4, 14, 19] if nan else [3, 200, 4, 9, 14, 19]
    assert got[3].tolist() == [want] * rows
    assert bool(got[2].isnan().all()) == nan
    assert bool(got[2].isnan().any()) == nan


def test_a_norm_that_overflows_is_the_references() -> None:
    x = torch.zeros(3, 128, dtype=BF16, device=DEVICE)
    x[0, 5], x[1], x[2] = 3e38, 1e-30, 1e-40
    for name in ("fused_add_rms_norm", "fused_add_rms_norm_router_topk"):
        arguments = dict(
            sample("norm" if name == "fused_add_rms_norm" else "router", "bf16", "flint-tiny", 3)
        )
        arguments["x"], arguments["residual"] = x, torch.zeros_like(x)
        got, want = run(name, arguments), reference(name, arguments, BF16)
        for one, two in zip(got, want, strict=True):
            torch.testing.assert_close(one, two, rtol=2**-7, atol=2**-133, equal_nan=True)


# ---------------------------------------------------------------------------------- routing


def patterns(experts: int, top_k: int) -> dict[str, list[list[int]]]:
    """Choices of up to 8 tokens that a router could or could not make."""
    same = list(range(1, top_k + 1))
    apart = [[(row * top_k + i) % experts for i in range(top_k)] for row in range(FAST_ROWS)]
    twice = [same[:-1] + same[:1], same, [2] * top_k]
    skipped = [[-1, *same[1:]], same, [-1] * top_k, [*same[:-1], -1]]
    return {
        "all to the same": [same] * FAST_ROWS,
        "the same in another order": [same[i % top_k :] + same[: i % top_k] for i in range(5)],
        "all apart": apart,
        "one expert twice": twice,
        "one token alone": [same],
        "the last expert": [[experts - 1, *same[1:]]],
        "skipped": skipped,
        "one token alone, some skipped": [[-1, 3, -1, 3, 5, 5]],
        "one token alone, all skipped": [[-1] * top_k],
        "all to one": [[2] * top_k] * FAST_ROWS,
        "crowded": torch.randint(
            -1, 4, (FAST_ROWS, top_k), generator=torch.Generator().manual_seed(1)
        ).tolist(),
    }


def routed(step: str, checkpoint: str, size: str, choice: list[list[int]]) -> Bound:
    arguments = dict(sample(step, checkpoint, size, len(choice)))
    arguments["topk_ids"] = torch.tensor(choice, dtype=torch.int32, device=DEVICE)
    return arguments


@pytest.mark.parametrize("pattern", patterns(256, 6))
@each_model
@each_checkpoint
def test_Q5_any_routing(checkpoint: str, size: str, pattern: str) -> None:
    choice = patterns(SIZES[size].experts, 6)[pattern]
    for step in ("gate_up", "down"):
        name, arguments = op_name(step, checkpoint), routed(step, checkpoint, size, choice)
        got = run(name, arguments)
        plain, exact = (reference(name, arguments, dtype) for dtype in (BF16, torch.float32))
        for index, parts in enumerate(zip(got, plain, exact, strict=True)):
            assert_no_worse(*parts, (step, index))
        for row in range(len(choice)):  # and a token's bits do not hang on who else chose what
            if len(choice) == 1:
                continue
            rows = [row, (row + 1) % len(choice)]
            assert_same(run(name, of_rows(arguments, rows)), tuple(o[rows] for o in got), step)
        if step == "gate_up":
            skipped = arguments["topk_ids"] < 0
            assert not bool(got[0][skipped].any())


@each_checkpoint
def test_Q5_an_expert_named_twice_counts_twice(checkpoint: str) -> None:
    once = routed("down", checkpoint, "flint-tiny", [[3, -1, -1, -1, -1, -1]])
    twice = routed("down", checkpoint, "flint-tiny", [[3, 3, -1, -1, -1, -1]])
    for arguments in (once, twice):
        arguments["routed_act"] = arguments["routed_act"].clone()
        arguments["routed_act"][:, 1] = arguments["routed_act"][:, 0]
        arguments["shared_act"] = torch.zeros_like(arguments["shared_act"])
        arguments["topk_weights"] = torch.full_like(arguments["topk_weights"], 0.5)
    [one], [two] = (run(f"{checkpoint}_moe_down", arguments) for arguments in (once, twice))
    assert torch.equal(two, 2 * one)
    assert bool(one.any())


@each_checkpoint
@each_model
def test_Q5_skipped_entries_contribute_nothing_whatever_they_hold(
    checkpoint: str, size: str
) -> None:
    arguments = routed("down", checkpoint, size, [[-1, 1, 2, 3, 4, 5], [1, 2, -1, 3, 4, 5]])
    clean = run(f"{checkpoint}_moe_down", arguments)
    skipped = arguments["topk_ids"] < 0
    dirty = dict(arguments)
    for name, mask in (("routed_act", skipped[..., None]), ("topk_weights", skipped)):
        dirty[name] = arguments[name].masked_fill(mask, torch.nan)
    assert_same(run(f"{checkpoint}_moe_down", dirty), clean)


@pytest.mark.parametrize("step", ["gate_up", "down"])
@each_checkpoint
@each_model
def test_Q5_ids_outside_the_experts(
    checkpoint: str, size: str, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = SIZES[size].experts
    choice = [[0, experts, 1, 2, 3, 4], [2**31 - 1, -(2**31), -2, 5, 0, 1], [5, 4, 3, 2, 1, 0]]
    clean = [[e if 0 <= e < experts else -1 for e in row] for row in choice]
    name = op_name(step, checkpoint)
    if ON_GPU:  # skipped
        want = run(name, routed(step, checkpoint, size, clean))
        assert_same(run(name, routed(step, checkpoint, size, choice)), want)
    monkeypatch.setenv(VALUE_CHECKS_VARIABLE, "1")
    with pytest.raises(ValueError, match="topk_ids"):
        run(name, routed(step, checkpoint, size, choice))


# ---------------------------------------------------------------------------------- the cache


def qkv_call(checkpoint: str, rows: int, size: str = "flint") -> Bound:
    return dict(sample("qkv", checkpoint, size, rows))


def in_layout(layout: str, values: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Two caches of the shape of `values` that stand in memory as an engine's do."""
    blocks, page, heads, dim = values.shape
    pair = op_samples.caches(layout, blocks, page, heads, dim)
    base = {cache.untyped_storage().data_ptr(): cache for cache in pair}
    if len(base) == 2:
        return tuple(twin(cache).zero_() for cache in pair)  # type: ignore[return-value]
    storage = torch.zeros(2 * values.numel(), dtype=BF16, device=DEVICE)
    return tuple(storage.as_strided(c.size(), c.stride(), c.storage_offset()) for c in pair)  # type: ignore[return-value]


@pytest.mark.parametrize("layout", op_samples.LAYOUTS)
@each_model
@each_checkpoint
def test_R5_every_cache_layout(checkpoint: str, size: str, layout: str) -> None:
    """To the bit, in the slots of the call, and nothing elsewhere."""
    for rows in (1, 5, FAST_ROWS):
        arguments = qkv_call(checkpoint, rows, size)
        name = op_name("qkv", checkpoint)
        want = run(name, arguments)
        k_cache, v_cache = in_layout(layout, arguments["k_cache"], rows)
        arguments["k_cache"], arguments["v_cache"] = k_cache, v_cache
        q = REGISTRY[name].packet.default(**arguments)
        slots = arguments["slot_mapping"]
        found = [q]
        for cache in (k_cache, v_cache):
            lines = cache.reshape(BLOCKS * PAGE, -1)
            assert torch.equal(lines.any(1).nonzero().flatten(), slots.sort().values)
            found.append(cache[slots // PAGE, slots % PAGE])
        assert_same(tuple(found), want, (layout, rows))


@each_checkpoint
def test_a_layer_without_positions(checkpoint: str) -> None:
    for rows in (1, FAST_ROWS):
        arguments = {**qkv_call(checkpoint, rows), "cos_sin": None}
        name = op_name("qkv", checkpoint)
        got = run(name, arguments)
        plain, exact = (reference(name, arguments, dtype) for dtype in (BF16, torch.float32))
        for parts in zip(got, plain, exact, strict=True):
            assert_no_worse(*parts, rows)


def written(arguments: Bound) -> list[int]:
    """The slots in which something other than 0 stands, the same ones for K and V."""
    places = [
        arguments[cache].reshape(BLOCKS * PAGE, -1).isnan().any(1)
        | (arguments[cache].reshape(BLOCKS * PAGE, -1) != 0).any(1)
        for cache in ("k_cache", "v_cache")
    ]
    assert torch.equal(*places)
    return places[0].nonzero().flatten().tolist()


def with_empty_cache(arguments: Bound) -> Bound:
    return {
        k: torch.zeros_like(v) if k in ("k_cache", "v_cache") else v for k, v in arguments.items()
    }


@pytest.mark.parametrize("slots", [[5, -1, -1], [-1, 5, -1], [-1, -1, -1], [5], []], ids=str)
@each_checkpoint
def test_R3_R4_rows_without_a_slot_are_not_cached(checkpoint: str, slots: list[int]) -> None:
    """Neither slot -1 nor the rows beyond the last slot, whose positions are garbage."""
    name = op_name("qkv", checkpoint)
    arguments = with_empty_cache(qkv_call(checkpoint, 3))
    [q, *_] = run(name, arguments)
    arguments["slot_mapping"] = torch.tensor(slots, dtype=torch.int64, device=DEVICE)
    padding = [row for row in range(3) if row >= len(slots) or slots[row] < 0]
    garbage = [-5, 2**31 - 1, POSITIONS]
    arguments["positions"] = arguments["positions"].clone()
    for row in padding:
        arguments["positions"][row] = garbage[row]
    got = REGISTRY[name].packet.default(**arguments)
    assert written(arguments) == [slot for slot in slots if slot >= 0]
    for row in range(3):
        want = torch.zeros_like(q[row]) if row in padding else q[row]
        assert torch.equal(bits(got[row]), bits(want)), row


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@each_checkpoint
def test_R1_positions_and_slots_outside(
    checkpoint: str, index: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU such a row writes nothing and returns NaN, and its neighbours know nothing of it."""
    name = op_name("qkv", checkpoint)
    arguments = with_empty_cache(qkv_call(checkpoint, 8))
    good_positions, good_slots = [0, 1023, 7, 7, 7, 7, 9, 10], [0, 1, 2, 3, 4, 5, 6, 7]
    positions, slots = [0, 1023, -1, 1024, 2**31 - 1, 7, 9, 10], [0, 1, 2, 3, 4, 640, -2, 7]

    def with_places(positions: list[int], slots: list[int]) -> Bound:
        return {
            **with_empty_cache(arguments),
            "positions": torch.tensor(positions, dtype=index, device=DEVICE),
            "slot_mapping": torch.tensor(slots, dtype=index, device=DEVICE),
        }

    assert BLOCKS * PAGE == 640
    assert POSITIONS == 1024
    clean = REGISTRY[name].packet.default(**with_places(good_positions, good_slots))
    if ON_GPU:
        mine = with_places(positions, slots)
        got = REGISTRY[name].packet.default(**mine)
        assert written(mine) == [0, 1, 7]
        for row in range(8):
            if row in (0, 1, 7):
                assert torch.equal(bits(got[row]), bits(clean[row]))
            else:
                assert bool(got[row].isnan().all())
    monkeypatch.setenv(VALUE_CHECKS_VARIABLE, "1")
    for bad in (with_places(positions, good_slots), with_places(good_positions, slots)):
        with pytest.raises(ValueError, match=r"positions|slot_mapping"):
            REGISTRY[name].packet.default(**bad)


# ---------------------------------------------------------------------------------- rows, forms


@each_model
@each_call
def test_a_rows_bits_are_its_own(step: str, checkpoint: str, size: str) -> None:
    name, arguments = op_name(step, checkpoint), sample(step, checkpoint, size, FAST_ROWS)
    together = run(name, arguments)
    assert_same(run(name, arguments), together, "again")
    company = [[row, (row + 1) % FAST_ROWS] for row in range(FAST_ROWS)]
    # A lone token has kernels of its own for NVFP4, which sum in another order.
    alone = [] if checkpoint == "nvfp4" else [[row] for row in range(FAST_ROWS)]
    for rows in [*alone, *company, [2, 3, 4], [7, 5, 3, 1, 0]]:
        got = run(name, of_rows(arguments, rows))
        assert_same(got, tuple(output[rows] for output in together), rows)


@each_model
@each_call
def test_Q4_rows_of_nan_beside_real_rows(step: str, checkpoint: str, size: str) -> None:
    name, arguments = op_name(step, checkpoint), dict(sample(step, checkpoint, size, 8))
    real = [0, 2, 3, 5, 7]
    want = run(name, of_rows(arguments, real))
    for argument in ("x", "residual", "routed_act", "shared_act", "topk_weights"):
        if argument in arguments:
            arguments[argument] = arguments[argument].clone()
            arguments[argument][[1, 4, 6]] = torch.nan
    got = run(name, arguments)
    assert_same(tuple(output[real] for output in got), want)
    float_outputs = [output for output in got if output.is_floating_point()]
    assert bool(float_outputs[0][[1, 4, 6]].isnan().all())


@each_call
def test_out_variants_fill_the_given_buffers(step: str, checkpoint: str) -> None:
    name = op_name(step, checkpoint)
    for size in (*MODELS, "odd"):
        for rows in (1, FAST_ROWS, 9):
            arguments = sample(step, checkpoint, size, rows)
            assert_same(run(name, arguments, out=True), run(name, arguments), (size, rows))


@each_call
def test_out_variants_take_strided_buffers(step: str, checkpoint: str) -> None:
    name, arguments = op_name(step, checkpoint), sample(step, checkpoint, "flint-tiny", 3)
    if "k_cache" in arguments:
        arguments = {**arguments, "k_cache": twin(arguments["k_cache"])}
        arguments["v_cache"] = twin(arguments["v_cache"])
    want = as_tuple(REGISTRY[name].packet.default(**arguments))
    wide = [filled_with_ones((*t.shape[:-1], t.shape[-1] + 3), t.dtype) for t in want]
    views = [room[..., 1:-2] for room in wide]
    names = REGISTRY[name].outputs
    REGISTRY[name].packet.out(**arguments, **dict(zip(names, views, strict=True)))
    assert_same(tuple(views), want)
    for room in wide:
        edges = room[..., [0, -2, -1]].contiguous()
        assert torch.equal(bits(edges), bits(filled_with_ones(edges.shape, edges.dtype)))


@each_model
@each_call
def test_N1_N2_strided_and_misaligned_inputs(step: str, checkpoint: str, size: str) -> None:
    """A slice of a wider buffer, aligned and one element in, and a transposed tensor."""

    def wider(tensor: Tensor, left: int, right: int) -> Tensor:
        shape = (*tensor.shape[:-1], tensor.shape[-1] + left + right)
        room = filled_with_ones(shape, tensor.dtype)
        return room[..., left : shape[-1] - right].copy_(tensor)

    def transposed(tensor: Tensor) -> Tensor:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)

    name = op_name(step, checkpoint)
    for rows in (1, FAST_ROWS):
        arguments = sample(step, checkpoint, size, rows)
        want = run(name, arguments)
        inputs = {k: v for k, v in arguments.items() if k in ACTIVATIONS and "cache" not in k}
        for form in (lambda t: wider(t, 8, 8), transposed):
            views = {k: form(v) for k, v in inputs.items()}
            assert_same(run(name, {**arguments, **views}), want, rows)
        # Loads of another width may sum in another order.
        odd = {k: wider(v, 1, 2) for k, v in inputs.items()}
        moved = {
            k: wider(v.reshape(-1), 1, 0).view(v.shape)
            for k, v in arguments.items()
            if isinstance(v, torch.Tensor)
            and v.dtype in (BF16, torch.uint8)
            and k not in ACTIVATIONS
        }
        plain, exact = (reference(name, arguments, dtype) for dtype in (BF16, torch.float32))
        for views in (odd, moved):
            got = run(name, {**arguments, **views})
            if step == "router":
                assert_routed(arguments, got)
            for index in range(2 if step == "router" else len(got)):
                assert_no_worse(got[index], plain[index], exact[index], (rows, index))


def test_no_rows_and_then_some() -> None:
    for step, checkpoint in CALLS:
        name = op_name(step, checkpoint)
        arguments = whole(step, checkpoint, "flint-tiny")
        for output in run(name, of_rows(arguments, slice(0))):
            assert output.shape[0] == 0
        assert run(name, of_rows(arguments, slice(1)))[0].shape[0] == 1


def test_more_dimensions_than_two() -> None:
    for step, checkpoint in CALLS:
        if step in ("norm", "o", "dense_gate_up", "dense_down", "head"):
            name, arguments = op_name(step, checkpoint), sample(step, checkpoint, "flint-tiny", 6)
            want = run(name, arguments)
            deep = {
                k: v.view(2, 3, -1) if k in ("x", "residual") else v for k, v in arguments.items()
            }
            assert_same(run(name, deep), tuple(each.view(2, 3, -1) for each in want), step)
            vector = {k: v[0] if k in ("x", "residual") else v for k, v in arguments.items()}
            alone = run(name, of_rows(arguments, [0]))
            assert_same(run(name, vector), tuple(each[0] for each in alone), step)
