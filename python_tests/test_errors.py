"""Illegal arguments of every op: the message names op, argument, got and want; nothing is written.

A fault is made out of a legal call (`op_samples`): one argument is replaced. What can be said of
any tensor argument (dtype, rank, device) is tried on every one of them; sizes and values, which
differ from op to op, are listed.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_samples import BF16, SAMPLES, Call, int32, randn
from test_namespace import bits, clone, out_buffers

from flint_kernels import ops
from flint_kernels.ops import REGISTRY

NAMES = sorted(REGISTRY)
MAX32 = 2**31 - 1
FP32 = torch.float32


@functools.cache
def _richest(name: str) -> dict[str, Any]:
    bound = [REGISTRY[name].bind(*call) for call in SAMPLES[name]()]
    return max(bound, key=lambda b: sum(isinstance(v, torch.Tensor) for v in b.values()))


def legal(name: str) -> dict[str, Any]:
    """Fresh arguments, by name, as in the op's sample with the most tensors."""
    return {key: clone(value) for key, value in _richest(name).items()}


def split(name: str, arguments: dict[str, Any]) -> Call:
    """Arguments by name as the schema takes them: positional, then keyword-only."""
    kinds = inspect.signature(REGISTRY[name].infer).parameters
    keyword = {k for k, p in kinds.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    args = tuple(value for key, value in arguments.items() if key not in keyword)
    return args, {key: value for key, value in arguments.items() if key in keyword}


@functools.cache
def _called(name: str) -> None:
    """A legal call, so that a body which remembers such calls has one to mistake a fault for."""
    args, kwargs = split(name, legal(name))
    REGISTRY[name].packet.default(*args, **kwargs)


def tensors(name: str) -> list[str]:
    return [key for key, value in legal(name).items() if isinstance(value, torch.Tensor)]


def assert_refused(
    name: str, arguments: dict[str, Any], argument: str, error: type[Exception] | tuple = ValueError
) -> None:
    """Both variants refuse, say why, and have written nothing."""
    _called(name)
    message = rf"flint::{name}: argument '{argument}': got (?s:.+); want (?s:.+)\."
    before = {k: v.clone() for k, v in arguments.items() if isinstance(v, torch.Tensor)}
    args, kwargs = split(name, arguments)
    with pytest.raises(error, match=message):
        REGISTRY[name].packet.default(*args, **kwargs)
    outs = {}
    if REGISTRY[name].outputs:
        outs = out_buffers(name, split(name, legal(name)))
        with pytest.raises(error, match=message):
            REGISTRY[name].packet.out(*args, **kwargs, **outs)
    for key, value in before.items():
        assert torch.equal(bits(arguments[key]), bits(value)), f"{key} was written"
    for key, value in outs.items():
        untouched = torch.full(value.shape, 77, dtype=torch.float32).to(value.dtype)
        assert torch.equal(bits(value), bits(untouched)), f"{key} was written"


# ------------------------------------------------------------------ any tensor argument


EVERY_TENSOR = [(name, argument) for name in NAMES for argument in tensors(name)]
# Nothing of it is read: any dtype and any shape will do.
EVERY_READ_TENSOR = [pair for pair in EVERY_TENSOR if pair != ("kv_cache_write", "after")]


@pytest.mark.parametrize("name,argument", EVERY_READ_TENSOR)
def test_wrong_dtype(name: str, argument: str) -> None:
    arguments = legal(name)
    for dtype in (torch.float64, torch.float16, torch.bool):
        assert_refused(
            name, {**arguments, argument: arguments[argument].to(dtype)}, argument, TypeError
        )


# Arguments documented as [..., K] whose leading dimensions no other argument repeats.
ANY_LEADING = {(name, "x") for name in NAMES if "linear" in name or "lm_head" in name} | {
    ("rms_norm", "x"),
    ("silu_and_mul", "x"),
    ("nvfp4_quantize", "x"),
    ("gguf_to_modelopt", "blocks"),
}
# Documented as [] or [1].
SCALARS = {"weight_scale_2", "shared_w13_scale_2", "shared_w2_scale_2", "global_scale"}


@pytest.mark.parametrize("name,argument", EVERY_READ_TENSOR)
def test_wrong_rank(name: str, argument: str) -> None:
    """No dimension, and one more. Where two arguments disagree, either may be named."""
    arguments = legal(name)
    value = arguments[argument]
    if argument in SCALARS:
        wrong = [value.new_zeros(1, 1), value.new_zeros(7)]
    elif (name, argument) in ANY_LEADING:
        wrong = [value.new_zeros(())]
    else:
        wrong = [value.new_zeros(()), value.reshape(1, *value.shape)]
    for tensor in wrong:
        assert_refused(name, {**arguments, argument: tensor}, r"\w+")


@pytest.mark.parametrize("name,argument", EVERY_TENSOR)
def test_wrong_device(name: str, argument: str) -> None:
    arguments = legal(name)
    first = tensors(name)[0]
    if argument == first:
        return  # the one that fixes the device
    with torch._subclasses.FakeTensorMode():
        on_gpu = {
            key: torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
            if isinstance(value, torch.Tensor)
            else value
            for key, value in arguments.items()
        }
        stray = on_gpu[argument]
        on_gpu[argument] = torch.empty(stray.shape, dtype=stray.dtype, device="cpu")
        args, kwargs = split(name, on_gpu)
        message = rf"flint::{name}: argument '{argument}': got .*on cpu; want cuda.* Move it"
        with pytest.raises(ValueError, match=message):
            REGISTRY[name].packet.default(*args, **kwargs)


# ------------------------------------------------------------------ sizes, numbers, values

Change = Callable[[dict[str, Any]], Any]
FAULTS: list[tuple[str, str, str, Change]] = []


def fault(names: str, argument: str, what: str, change: Change) -> None:
    """In each op whose name matches: the argument becomes `change(all arguments)`.

    Where `change` gives a dictionary, it replaces several arguments, and `argument` is to blame.
    """
    found = [name for name in NAMES if re.fullmatch(names, name)]
    assert found, names
    FAULTS.extend((name, argument, what, change) for name in found)


def entry(argument: str, value: int, *index: int) -> Change:
    """A copy of an index tensor with one entry replaced."""

    def change(arguments: dict[str, Any]) -> torch.Tensor:
        wrong = arguments[argument].clone()
        wrong[index] = value
        return wrong

    return change


def number(value: Any) -> Change:
    return lambda _: value


def zeros(*shape: int, dtype: torch.dtype = BF16) -> Change:
    return lambda _: torch.zeros(*shape, dtype=dtype)


def narrower(argument: str, dim: int = -1) -> Change:
    """One less along a dimension."""
    return lambda a: a[argument].narrow(dim, 0, a[argument].shape[dim] - 1)


def together(*changes: tuple[str, Change]) -> Change:
    return lambda a: {argument: change(a) for argument, change in changes}


def fewer_rows(weight: str, dim: int = 0) -> Change:
    """An NVFP4 weight and its scales, one row less of both."""
    scale = f"{weight}_scale"
    return together((weight, narrower(weight, dim)), (scale, narrower(scale, dim)))


def a_token_on(arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Caches in one buffer, that of V a token further on than that of K."""
    blocks, page, heads, dim = arguments["k_cache"].shape
    both = torch.zeros(blocks, page + 1, heads, dim, dtype=BF16)
    return {"k_cache": both[:, :-1], "v_cache": both[:, 1:]}


def over_rows(cache: str, rows: str) -> Change:
    """`rows` become the first tokens of the cache."""
    return lambda a: {cache: a[cache], rows: a[cache][0, : a[rows].shape[0]]}


NORMED = r"rms_norm|fused_add.*|.*qk_norm_rope.*|.*qkv_norm_rope.*"
for eps in (0.0, -1e-6, float("nan"), float("inf")):
    fault(NORMED, "eps", f"{eps}", number(eps))
fault("rms_norm|fused_add_rms_norm", "weight", "narrower", narrower("weight"))
fault("fused_add.*", "residual", "fewer rows", narrower("residual", 0))
fault("silu_and_mul", "x", "odd width", narrower("x"))

NVFP4_LINEARS = "nvfp4_linear.*|nvfp4_lm_head|nvfp4_qkv.*"
fault(NVFP4_LINEARS, "x", "K no multiple of 16", narrower("x"))
fault(NVFP4_LINEARS + "|bf16_linear.*|bf16_lm_head|bf16_qkv.*", "weight", "another K",
      narrower("weight", 1))  # fmt: skip
fault(NVFP4_LINEARS, "weight_scale", "fewer rows", narrower("weight_scale", 0))
fault(NVFP4_LINEARS, "weight_scale_2", "four scales", zeros(4, dtype=FP32))
for sizes in ([1, 2, 3], [16, 8, 9], [33, -9, 8]):
    fault("nvfp4_linear", "shard_sizes", f"{sizes}", number(sizes))
fault("nvfp4_linear", "weight_scale_2", "sizes for two", number(torch.ones(2)))
fault("bf16_linear_silu_and_mul", "weight", "odd rows", narrower("weight", 0))
fault("nvfp4_linear_silu_and_mul", "weight", "odd rows", fewer_rows("weight"))
fault("bf16_qkv_norm_rope.*", "weight", "too few rows", narrower("weight", 0))
fault("nvfp4_qkv_norm_rope.*", "weight", "too few rows", fewer_rows("weight"))

CACHE_WRITES = ".*norm_rope_kv_write|kv_cache_write"
ROPE_WRITES = ".*norm_rope_kv_write"
for cache in ("k_cache", "v_cache"):
    others = CACHE_WRITES + "|attention.*"
    fault(others, cache, "last stride 2", lambda a, c=cache: torch.stack([a[c]] * 2, -1)[..., 0])
    fault(others, cache, "FP32 beside BF16", lambda a, c=cache: a[c].float())
fault(CACHE_WRITES + "|attention.*", "v_cache", "other pages", narrower("v_cache", 1))
fault(CACHE_WRITES + "|attention.*", "k_cache", "pages of no tokens",
      together(("k_cache", zeros(6, 0, 2, 32)), ("v_cache", zeros(6, 0, 2, 32))))  # fmt: skip
fault("qk_norm_rope.*", "qkv", "a column too few", narrower("qkv"))
fault("qk_norm_rope.*", "qkv", "no query heads", zeros(3, 4 * 32))
fault(ROPE_WRITES, "q_weight", "another head_dim", narrower("q_weight"))
fault(ROPE_WRITES, "k_weight", "another head_dim", narrower("k_weight"))
fault(ROPE_WRITES, "cos_sin", "another head_dim", zeros(16, 30, dtype=FP32))
fault(ROPE_WRITES, "positions", "fewer rows", narrower("positions"))
fault(CACHE_WRITES, "slot_mapping", "more than rows",
      lambda a: torch.arange(6, dtype=torch.int64))  # fmt: skip
for slot in (48, -2, MAX32):
    fault(CACHE_WRITES, "slot_mapping", f"{slot}", entry("slot_mapping", slot, 0))
fault(CACHE_WRITES, "slot_mapping", "one slot twice",
      lambda a: torch.full_like(a["slot_mapping"], 5))  # fmt: skip
fault(CACHE_WRITES, "v_cache", "is k_cache", lambda a: a["k_cache"])
fault(CACHE_WRITES, "v_cache", "k_cache, a token on", a_token_on)
for cache in ("k_cache", "v_cache"):
    fault(CACHE_WRITES, cache, "expanded", lambda a, c=cache: a[c][:1].expand(a[c].shape))
    fault(CACHE_WRITES, cache, "heads of one memory",
          lambda a, c=cache: a[c][:, :, :1].expand(a[c].shape))  # fmt: skip
fault("kv_cache_write", "k_cache", "holds k", over_rows("k_cache", "k"))
fault("kv_cache_write", "v_cache", "holds k", over_rows("v_cache", "k"))
for position in (-1, 16, MAX32):
    fault(ROPE_WRITES, "positions", f"{position}", entry("positions", position, 0))
fault("kv_cache_write", "k", "another head_dim",
      together(("k", narrower("k")), ("v", narrower("v"))))  # fmt: skip
fault("kv_cache_write", "v", "fewer rows", narrower("v", 0))

fault("decode_advance", "page_size", "0", number(0))
fault("decode_advance", "page_size", "2**31", number(1 << 31))
fault("decode_advance", "window_block_table", "another width", narrower("window_block_table", 1))
fault("decode_advance", "history", "no room", lambda a: a["history"][:, :0])
fault("decode_advance", "positions", "not the last", entry("positions", 3, 0))
fault("decode_advance", "seq_lens", "more than there is room for",
      together(("positions", number(int32(32, 0, 2))),
               ("seq_lens", number(int32(33, 0, 3)))))  # fmt: skip
fault("sample", "max_top_k", "-1", number(-1))
fault("sample", "top_k", "more than max_top_k",
      together(("max_top_k", number(20)), ("top_k", number(int32(21, 0, 1)))))  # fmt: skip
fault("sample", "top_k", "all, and max_top_k",
      together(("max_top_k", number(20)), ("top_k", number(int32(20, 0, 0)))))  # fmt: skip
fault("router_topk|.*router_topk", "top_k", "0", number(0))
fault("router_topk|.*router_topk", "top_k", "257", number(257))
fault("fused.*router_topk", "router_weight", "another width", narrower("router_weight", 1))
ROUTED = ".*_routed_experts|.*_moe_.*"
for expert in (4, 256, -2, MAX32):
    fault(ROUTED, "topk_ids", f"{expert}", entry("topk_ids", expert, 0, 1))
fault(ROUTED, "topk_ids", "fewer rows", narrower("topk_ids", 0))
fault(".*_routed_experts|.*_moe_down", "topk_weights", "fewer columns", narrower("topk_weights"))
fault(".*_routed_experts", "shared_output", "fewer columns", zeros(3, 3))
fault(".*_routed_experts|.*_moe_gate_up", "w13", "another K", narrower("w13", 2))
fault(".*_routed_experts|.*_moe_down", "w2", "another I", narrower("w2", 2))
fault("nvfp4_routed_experts|nvfp4_moe_gate_up", "w13_scale_2", "one an expert",
      zeros(4, dtype=FP32))  # fmt: skip
fault("nvfp4_routed_experts|nvfp4_moe_down", "w2_scale_2", "one for all", zeros(1, dtype=FP32))
fault("bf16_moe_gate_up", "w13", "odd rows", narrower("w13", 1))
fault("nvfp4_moe_gate_up", "w13", "odd rows", fewer_rows("w13", 1))
fault("nvfp4_moe_gate_up", "shared_w13", "odd rows", fewer_rows("shared_w13"))
fault("bf16_moe_gate_up", "shared_w13", "odd rows", narrower("shared_w13", 0))
fault(".*_moe_down", "shared_act", "another S", narrower("shared_act", 0))

for window in (-1, -513):
    fault("attention.*", "window", f"{window}", number(window))
for scale in (0.0, -0.1, float("nan"), float("inf")):
    fault("attention.*", "scale", f"{scale}", number(scale))
fault("attention.*", "sinks", "one too few", narrower("sinks"))
fault("attention_decode", "q", "heads that do not divide", zeros(3, 3, 32))
fault("attention_prefill", "q", "heads that do not divide", zeros(7, 3, 32))
fault("attention_decode", "q", "another head_dim", narrower("q"))
fault("attention.*", "block_table", "fewer requests", narrower("block_table", 0))
for page in (6, -1, MAX32):
    fault("attention.*", "block_table", f"{page}", entry("block_table", page, 2, 1))
for length in (-1, 33, MAX32):
    fault("attention_decode", "seq_lens", f"{length}", entry("seq_lens", length, 0))
    fault("attention_prefill", "context_lens", f"{length}", entry("context_lens", length, 0))
for offsets in ((0, 2, 1, 7), (1, 2, 2, 7), (0, 2, 2, 6), (0, 2, 2, 8), (0, -1, 2, 7)):
    wrong_offsets = int32(*offsets)
    fault("attention_prefill", "cu_seqlens", f"{offsets}", number(wrong_offsets))
fault("attention_prefill", "cu_seqlens", "none", number(int32()))
fault("attention_prefill", "max_query_len", "-1", number(-1))
fault("attention_prefill", "max_query_len", "below the longest", number(4))
for part in ("k_cache", "v_cache", "block_table", "context_lens"):
    fault("attention_prefill", part, "missing", number(None))
fault("attention_prefill", "v", "fewer rows", narrower("v", 0))

WITH_WORKSPACE = ".*_routed_experts|.*_moe_.*|attention.*|.*qkv_norm.*|fused.*router.*"
fault(WITH_WORKSPACE, "workspace", "too small", zeros(1, dtype=torch.uint8))
fault(WITH_WORKSPACE, "workspace", "strided", zeros(64, 2, dtype=torch.uint8))

for name, value in (("temperature", -1.0), ("top_p", 0.0), ("top_p", 1.5), ("top_k", -1)):
    fault("sample", name, f"{value}", entry(name, value, 1))  # type: ignore[arg-type]
for name in ("temperature", "top_k", "top_p", "seed", "offset"):
    fault("sample", name, "fewer rows", narrower(name, 0))
fault("sample", "logits", "no vocabulary", zeros(3, 0, dtype=FP32))
fault("sample", "logits", "no candidate", lambda a: torch.full_like(a["logits"], -torch.inf))

fault("nvfp4_quantize", "x", "K no multiple of 16", narrower("x"))
fault("nvfp4_dequantize", "weight", "K no multiple of 16", narrower("weight"))
fault("nvfp4_dequantize|modelopt_to_gguf", "weight_scale", "fewer groups",
      narrower("weight_scale"))  # fmt: skip
fault("modelopt_to_gguf", "weight", "K no multiple of 64", lambda a: a["weight"][..., :24])
fault("gguf_to_modelopt", "blocks", "part of a super-block", narrower("blocks"))


@pytest.mark.parametrize(
    "name,argument,what,change", FAULTS, ids=[f"{f[0]}-{f[1]} {f[2]}" for f in FAULTS]
)
def test_illegal_argument(name: str, argument: str, what: str, change: Change) -> None:
    arguments = legal(name)
    assert argument in arguments, what
    changed = change(arguments)
    arguments |= changed if isinstance(changed, dict) else {argument: changed}
    assert_refused(name, arguments, argument, (ValueError, TypeError))


def test_dequantize_refuses_other_dtypes() -> None:
    arguments = {**legal("nvfp4_dequantize"), "dtype": torch.float16}
    args, kwargs = split("nvfp4_dequantize", arguments)
    with pytest.raises(TypeError, match=r"nvfp4_dequantize.*'dtype'.*float16.*want torch.float32"):
        REGISTRY["nvfp4_dequantize"].packet.default(*args, **kwargs)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_quantize_refuses_what_nvfp4_cannot_hold(bad: float) -> None:
    x = randn(2, 32)
    x[1, 3] = bad
    with pytest.raises(ValueError, match=r"argument 'x': got NaN or infinity.*want finite"):
        ops.nvfp4_quantize(x)
    for scale in (0.0, -1.0, bad):
        with pytest.raises(ValueError, match=r"argument 'global_scale': got .*want finite"):
            ops.nvfp4_quantize(randn(2, 32), torch.tensor(scale))


def test_repacks_refuse_scales_without_a_counterpart() -> None:
    weight = torch.zeros(1, 32, dtype=torch.uint8)
    for byte in (0xB8, 0x7F, 0xFF):
        scale = torch.full((1, 4), byte, dtype=torch.uint8).view(torch.float8_e4m3fn)
        blocks = torch.full((1, 36), 77, dtype=torch.uint8)
        with pytest.raises(ValueError, match=rf"argument 'weight_scale': got byte {byte:#x}.*want"):
            ops.modelopt_to_gguf(weight, scale, out=blocks)
        assert blocks.unique().tolist() == [77]


def test_the_public_function_counts_its_out_buffers() -> None:
    x, weight = randn(2, 16), randn(16)
    with pytest.raises(ValueError, match=r"fused_add_rms_norm: argument 'out': got 1 .*want 2"):
        ops.fused_add_rms_norm(x, x, weight, out=(torch.empty_like(x),))


# ------------------------------------------------------------------ memory that is shared


WITH_OUT = [name for name in NAMES if REGISTRY[name].outputs]


def call_out(name: str, arguments: dict[str, Any], outs: dict[str, torch.Tensor]) -> None:
    args, kwargs = split(name, arguments)
    REGISTRY[name].packet.out(*args, **kwargs, **outs)


def in_one_buffer(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of two tensors, contiguous, the second of which begins in the last byte of the first.

    That byte is a whole element where the first's are larger.
    """
    size = max(a.element_size(), b.element_size())
    first = (a.nbytes - 1) // size * size
    memory = torch.zeros(first + b.nbytes + a.nbytes, dtype=torch.uint8)
    parts = [
        memory[at : at + t.nbytes].view(t.dtype).view(t.shape).copy_(t)
        for at, t in ((0, a), (first, b))
    ]
    return parts[0], parts[1]


@pytest.mark.parametrize(
    "name,one,two",
    [
        (name, one, two)
        for name in WITH_OUT
        for at, two in enumerate(REGISTRY[name].outputs)
        for one in REGISTRY[name].outputs[:at]
    ],
)
def test_output_buffers_that_overlap(name: str, one: str, two: str) -> None:
    arguments = legal(name)
    outs = out_buffers(name, split(name, arguments))
    outs[one], outs[two] = in_one_buffer(outs[one], outs[two])
    before = {key: value.clone() for key, value in {**arguments, **outs}.items()
              if isinstance(value, torch.Tensor)}  # fmt: skip
    with pytest.raises(ValueError, match=rf"{name}: argument '{two}': got memory that '{one}' has"):
        call_out(name, arguments, outs)
    for key, value in before.items():
        assert torch.equal(bits({**arguments, **outs}[key]), bits(value))


@pytest.mark.parametrize(
    "name,argument", [(name, argument) for name in WITH_OUT for argument in tensors(name)]
)
def test_an_output_buffer_that_overlaps_an_input(name: str, argument: str) -> None:
    arguments = legal(name)
    outs = out_buffers(name, split(name, arguments))
    out = REGISTRY[name].outputs[-1]
    arguments[argument], outs[out] = in_one_buffer(arguments[argument], outs[out])
    # A cache is written too: of two written arguments the later one is named.
    blamed, other = (argument, out) if argument in REGISTRY[name].mutates else (out, argument)
    message = rf"flint::{name}: argument '{blamed}': got memory that '{other}' has"
    with pytest.raises(ValueError, match=message):
        call_out(name, arguments, outs)


@pytest.mark.parametrize("name", WITH_OUT)
def test_an_output_buffer_whose_elements_are_one(name: str) -> None:
    arguments = legal(name)
    outs = out_buffers(name, split(name, arguments))
    out = REGISTRY[name].outputs[0]
    outs[out] = torch.zeros((), dtype=outs[out].dtype).expand(outs[out].shape)
    with pytest.raises(ValueError, match=rf"'{out}': got elements that share memory"):
        call_out(name, arguments, outs)


def test_an_output_buffer_may_be_an_input_itself_only_where_the_op_says_so() -> None:
    allowed = {name: REGISTRY[name].over for name in NAMES if REGISTRY[name].over}
    assert allowed == {
        "rms_norm": {"out": "x"},
        "fused_add_rms_norm": {"normed_out": "x", "residual_out": "residual"},
    }
    x, residual, weight = randn(3, 64), randn(3, 64, seed=1), randn(64, seed=2)
    with pytest.raises(ValueError, match=r"'residual_out': got memory that 'x' has"):
        ops.fused_add_rms_norm(x, residual, weight, out=(residual, x))
    memory = randn(4, 64)
    with pytest.raises(ValueError, match=r"'out': got memory that 'x' has"):
        ops.rms_norm(memory[:3], weight, out=memory[1:])
    square = randn(64, 64)
    with pytest.raises(ValueError, match=r"'out': got memory that 'x' has"):
        ops.bf16_linear(square, randn(64, 64, seed=1), out=square)


def test_output_buffers_may_interleave() -> None:
    """Columns of one buffer share no element, whether outputs or an input."""
    x, residual, weight = randn(3, 64), randn(3, 64, seed=1), randn(64, seed=2)
    memory = torch.zeros(3, 192, dtype=BF16)
    normed, carried, twin = memory.split(64, dim=1)
    twin.copy_(x)
    ops.fused_add_rms_norm(twin, residual, weight, out=(normed, carried))
    want = ops.fused_add_rms_norm(x, residual, weight)
    assert torch.equal(normed, want[0])
    assert torch.equal(carried, want[1])
    assert torch.equal(twin, x)


# ------------------------------------------------------------------ found by property tests


@pytest.mark.parametrize("name", NAMES)
def test_none_in_place_of_a_tensor(name: str) -> None:
    """The dispatcher takes None for any tensor; both variants name the argument."""
    required = REGISTRY[name].required
    assert required
    for argument in required[1:] if len(required) > 1 else ():
        assert_refused(name, {**legal(name), argument: None}, argument, TypeError)


def test_a_tensor_without_memory_beside_one_of_the_cpu() -> None:
    """Also where such a call has passed before: torch's C shim has no name for the meta device."""
    x, weight = randn(2, 4), randn(3, 4)
    ops.bf16_linear(x, weight)
    for _ in range(2):
        with pytest.raises(ValueError, match="'weight': got a tensor on meta; want cpu"):
            ops.bf16_linear(x, weight.to("meta"))


@pytest.mark.parametrize("eps", [0.0, -1.0, 1e-300, 1e300, float("inf"), float("nan")])
def test_an_epsilon_that_fp32_has_not(eps: float) -> None:
    """1e-300 is 0 to a body that computes in FP32, and a row of zeros would become NaN."""
    with pytest.raises(ValueError, match=r"rms_norm: argument 'eps': got .*want a value from"):
        ops.rms_norm(torch.zeros(2, 4, dtype=BF16), randn(4), eps)


def test_no_columns_at_all() -> None:
    """A last dimension of 0 is legal: `reshape(-1, 0)` would not be."""
    nothing = torch.zeros(3, 0, dtype=BF16)
    assert ops.silu_and_mul(nothing).shape == (3, 0)
    assert ops.bf16_linear(nothing, torch.zeros(2, 0, dtype=BF16)).tolist() == [[0.0, 0.0]] * 3


def test_a_skipped_entry_takes_no_scale() -> None:
    """Its activations are zeros, whatever the global scales of the experts are."""
    arguments = legal("nvfp4_moe_gate_up")
    arguments["topk_ids"].fill_(-1)
    arguments["w13_scale_2"].fill_(torch.nan)
    for dtype in (BF16, FP32):
        acts, _ = ops.nvfp4_moe_gate_up(**{**arguments, "x": arguments["x"].to(dtype)})
        assert not acts.any()
