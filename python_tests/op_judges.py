"""What a call of each op must have done, in running error arithmetic: a judge for every op.

A judge takes a call's arguments as they were, what it returned and its arguments afterwards, and
yields what is wrong with them. It is written from docs/numerics.md and shares nothing with the
package but the names of the arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from running_error import (
    FUNCTION,
    INF,
    STEP,
    TINY,
    U32,
    Approx,
    dot,
    f64,
    failure,
    norm,
    rounded,
    silu,
    softmax_average,
)
from spec_float64 import nvfp4_values

Tensor = torch.Tensor
Bound = dict[str, Any]


@dataclass
class Call:
    """One call, all on the CPU."""

    name: str
    arguments: Bound
    results: tuple[Tensor, ...]
    after: Bound
    on_gpu: bool = False

    def __getattr__(self, argument: str) -> Any:
        return self.arguments[argument]


Judge = Callable[[Call], Iterator[str]]
JUDGES: dict[str, Judge] = {}


def judge(*names: str) -> Callable[[Judge], Judge]:
    def add(function: Judge) -> Judge:
        JUDGES.update(dict.fromkeys(names, function))
        return function

    return add


def problems(call: Call) -> list[str]:
    return [problem for problem in JUDGES[call.name](call) if problem]


# ------------------------------------------------------------------ norms, activation, products


@judge("rms_norm")
def _(c: Call) -> Iterator[str]:
    yield failure(c.results[0], rounded(norm(Approx.exact(c.x), c.weight, float(c.eps)), c.x.dtype))


def added(c: Call) -> Approx:
    return Approx.exact(c.x) + Approx.exact(c.residual)


@judge("fused_add_rms_norm")
def _(c: Call) -> Iterator[str]:
    yield failure(c.results[0], rounded(norm(added(c), c.weight, float(c.eps)), c.x.dtype))
    yield failure(c.results[1], rounded(added(c), c.x.dtype))


def gated(gate_up: Approx, dtype: torch.dtype) -> Approx:
    gate, up = gate_up.halves()
    return rounded(silu(gate) * up, dtype)


@judge("silu_and_mul")
def _(c: Call) -> Iterator[str]:
    yield failure(c.results[0], gated(Approx.exact(c.x), c.x.dtype))


def product(
    x: Approx, c: Call, weight: str, *index: int, shards: list[int] | None = None
) -> Approx:
    """x times the weight of that name, with its global scales; not rounded."""
    matrix = c.arguments[weight]
    if f"{weight}_scale" not in c.arguments:
        return dot(x, matrix[index] if index else matrix)
    scale, scale_2 = (c.arguments[f"{weight}_{part}"] for part in ("scale", "scale_2"))
    if index:
        matrix, scale, scale_2 = matrix[index], scale.view(torch.uint8)[index], scale_2[index]
    values = nvfp4_values(matrix, scale)
    # A block may be summed before its scale, at most 448, is taken.
    sums = dot(x, values, unit=512 * STEP)
    factors = scale_2.reshape(-1)
    if len(factors) > 1:
        assert shards is not None
        factors = factors.repeat_interleave(torch.tensor(shards))
    return sums * Approx.exact(factors)


def halves(c: Call, weight: str, dim: int = 0) -> list[int]:
    return [c.arguments[weight].shape[dim] // 2] * 2


@judge("nvfp4_linear", "bf16_linear")
def _(c: Call) -> Iterator[str]:
    sums = product(Approx.exact(c.x), c, "weight", shards=c.arguments.get("shard_sizes"))
    yield failure(c.results[0], rounded(sums, c.x.dtype))


@judge("nvfp4_lm_head", "bf16_lm_head")
def _(c: Call) -> Iterator[str]:
    assert c.results[0].dtype == torch.float32
    yield failure(c.results[0], product(Approx.exact(c.x), c, "weight"))


@judge("nvfp4_linear_silu_and_mul", "bf16_linear_silu_and_mul")
def _(c: Call) -> Iterator[str]:
    sums = product(Approx.exact(c.x), c, "weight", shards=halves(c, "weight"))
    yield failure(c.results[0], gated(rounded(sums, c.x.dtype), c.x.dtype))


# ------------------------------------------------------------------ q/k norm, RoPE, cache


def rotated(heads: Approx, c: Call) -> Approx:
    """Normed heads [M, H, D], turned; zeros where a row's position is outside the table."""
    if c.cos_sin is None:
        return heads
    inside = (c.positions >= 0) & (c.positions < c.cos_sin.shape[0])
    table = f64(c.cos_sin)[torch.where(inside, c.positions, 0).long()]
    cos, sin = (Approx.exact(part)[:, None, :] for part in table.chunk(2, -1))
    first, second = heads.halves()
    parts = first * cos + -(second * sin), second * cos + first * sin
    turned = (torch.cat([getattr(p, which) for p in parts], -1) for which in ("value", "error"))
    value, error = (torch.where(inside[:, None, None], t, 0.0) for t in turned)
    return rounded(Approx(value, error), c.k_cache.dtype)


def judged_qkv(c: Call, qkv: Approx, results: tuple[Tensor, ...]) -> Iterator[str]:
    """The rounded projections [M, N] -> q, perhaps k, and the caches."""
    _, _, kv_heads, dim = c.k_cache.shape
    rows = qkv.value.shape[0]
    heads = qkv.reshape(rows, qkv.value.shape[1] // dim, dim)
    queries = heads.value.shape[1] - 2 * kv_heads
    dtype = c.k_cache.dtype
    q = rotated(rounded(norm(heads[:, :queries], c.q_weight, float(c.eps)), dtype), c)
    k = rotated(rounded(norm(heads[:, queries:-kv_heads], c.k_weight, float(c.eps)), dtype), c)
    yield failure(results[0], q)
    if len(results) > 1:
        yield failure(results[1], k)
    yield from judged_cache(c, k, heads[:, -kv_heads:])


def judged_cache(c: Call, k: Approx, v: Approx) -> Iterator[str]:
    for name, new in (("k_cache", k), ("v_cache", v)):
        before, after = c.arguments[name], c.after[name]
        page = before.shape[1]
        untouched = torch.ones(before.shape[:2], dtype=torch.bool)
        for row, slot in enumerate(c.slot_mapping.tolist()):
            if slot < 0:
                continue
            untouched[slot // page, slot % page] = False
            problem = failure(after[slot // page, slot % page], new[row])
            yield problem and f"{name} in slot {slot}: {problem}"
        kept, now = (t.flatten(2)[untouched].contiguous() for t in (before, after))
        if not torch.equal(kept.view(torch.uint8), now.view(torch.uint8)):
            yield f"{name}: a slot that no row names was written"


@judge("qk_norm_rope_kv_write")
def _(c: Call) -> Iterator[str]:
    yield from judged_qkv(c, Approx.exact(c.qkv), c.results)


@judge("nvfp4_qkv_norm_rope_kv_write", "bf16_qkv_norm_rope_kv_write")
def _(c: Call) -> Iterator[str]:
    kv = c.k_cache.shape[2] * c.k_cache.shape[3]
    shards = [c.weight.shape[0] - 2 * kv, kv, kv]
    sums = product(Approx.exact(c.x), c, "weight", shards=shards)
    yield from judged_qkv(c, rounded(sums, c.x.dtype), c.results)


@judge("kv_cache_write")
def _(c: Call) -> Iterator[str]:
    yield from judged_cache(c, Approx.exact(c.k), Approx.exact(c.v))


# ------------------------------------------------------------------ router, experts


def judged_choice(
    low: Tensor, high: Tensor, c: Call, weights: Tensor, ids: Tensor, renormalize: bool
) -> Iterator[str]:
    """Logits [M, E] known to lie in [low, high], NaN among them: ids by falling logit, and weights.

    Where low is high it is an order by value, then by index, NaN first and -0 as +0.
    """
    experts, top_k = low.shape[1], ids.shape[1]
    for row, chosen in enumerate(ids.tolist()):
        if len(set(chosen)) < top_k or not all(0 <= e < experts for e in chosen):
            yield f"row {row}: ids {chosen}, want {top_k} distinct ones below {experts}"
            continue
        rank = [(INF if math.isnan(h) else min(h, 1e300)) for h in high[row].tolist()]
        floor = [(INF if math.isnan(h) else min(h, 1e300)) for h in low[row].tolist()]
        rest = [e for e in range(experts) if e not in chosen]
        for place, e in enumerate(chosen):
            for other in chosen[place + 1 :] + rest:
                if rank[e] < floor[other] or (
                    other < e and rank[e] == floor[e] == rank[other] == floor[other]
                ):
                    yield f"row {row}: expert {e} is ranked before {other}"
        yield judged_scores(low[row], high[row], chosen, weights[row], c, renormalize)


def judged_scores(
    low: Tensor, high: Tensor, chosen: list[int], weights: Tensor, c: Call, renormalize: bool
) -> str:
    logits = (low + high) / 2
    logits = torch.where(low == high, low, logits)[chosen]
    score = 1 / (1 + torch.exp(-logits))
    slack = (high - low)[chosen].nan_to_num(nan=0.0)
    error = score * torch.expm1(slack.clamp_max(700)) + FUNCTION * score
    # The sigmoid of what is below -87 may be 0.
    error = error + torch.where(score < 2.0**-125, score, 0.0)
    if renormalize:
        total, off = score.sum() + 1e-20, error.sum() + len(chosen) * U32 * score.sum()
        share = score / total
        error = (error + share * off) / (total - off).clamp_min(0) + FUNCTION * share
        score = share
    if bool(logits.isnan().any()) and renormalize:  # a chosen NaN makes all of its row's NaN
        return "" if bool(weights.isnan().all()) else f"weights {weights.tolist()}, want NaN"
    dtype = c.arguments.get("logits", c.arguments.get("x")).dtype
    return failure(weights, rounded(Approx(score, error.nan_to_num(nan=INF)), dtype))


@judge("router_topk")
def _(c: Call) -> Iterator[str]:
    logits = f64(c.logits)
    yield from judged_choice(logits, logits, c, *c.results, c.renormalize)


@judge("fused_add_rms_norm_router_topk")
def _(c: Call) -> Iterator[str]:
    normed, residual, weights, ids = c.results
    yield failure(normed, rounded(norm(added(c), c.weight, float(c.eps)), c.x.dtype))
    yield failure(residual, rounded(added(c), c.x.dtype))
    # The choice is held to the op's own normed rows: a logit in between may be ranked either way.
    logits = rounded(dot(Approx.exact(normed), c.router_weight), c.x.dtype)
    finite = (logits.value.isfinite() & logits.error.isfinite()).all(1)
    low, high = logits.value - logits.error, logits.value + logits.error
    if c.x.dtype == torch.bfloat16:  # what lies there, rounded
        sums = dot(Approx.exact(normed), c.router_weight)
        low, high = (f64((sums.value + sign * sums.error).to(torch.bfloat16)) for sign in (-1, 1))
    for row in range(ids.shape[0]):
        chosen = ids[row].tolist()
        if len(set(chosen)) < len(chosen) or not all(0 <= e < low.shape[1] for e in chosen):
            yield f"row {row}: ids {chosen}, want distinct ones below {low.shape[1]}"
    if bool(finite.any()):
        yield from judged_choice(low[finite], high[finite], c, weights[finite], ids[finite], True)


def expert_acts(x: Approx, ids: Tensor, c: Call) -> Approx:
    """[M, top_k, I]: the experts' activations of every entry; 0 where it is skipped."""
    rows = []
    for row, chosen in enumerate(ids.tolist()):
        for expert in chosen:
            width = c.w13.shape[1] // 2
            if expert < 0:
                zeros = torch.zeros(width, dtype=torch.float64)
                rows.append(Approx(zeros, zeros))
                continue
            sums = product(x[row : row + 1], c, "w13", expert, shards=[width, width])
            rows.append(gated(sums, c.results[0].dtype)[0])
    return stacked(rows, (*ids.shape, c.w13.shape[1] // 2))


def stacked(rows: list[Approx], shape: tuple[int, ...]) -> Approx:
    if not rows:
        return Approx.exact(torch.zeros(shape))
    parts = (torch.stack([getattr(r, which) for r in rows]) for which in ("value", "error"))
    return Approx(*(part.reshape(shape) for part in parts))


def combined(acts: Approx, c: Call, dtype: torch.dtype) -> Approx:
    """[M, top_k, I] through the experts' second projections, weighted, summed, rounded."""
    hidden, rows = c.w2.shape[1], []
    for row, chosen in enumerate(c.topk_ids.tolist()):
        total = Approx.exact(torch.zeros(hidden))
        for place, expert in enumerate(chosen):
            if expert >= 0:
                y = rounded(product(acts[row, place : place + 1], c, "w2", expert), dtype)[0]
                total = total + y * Approx.exact(c.topk_weights[row, place].expand(hidden))
        rows.append(rounded(total, dtype))
    return stacked(rows, (c.topk_ids.shape[0], hidden))


@judge("nvfp4_routed_experts", "bf16_routed_experts")
def _(c: Call) -> Iterator[str]:
    routed = combined(expert_acts(Approx.exact(c.x), c.topk_ids, c), c, c.x.dtype)
    if c.shared_output is not None:
        routed = rounded(routed + Approx.exact(c.shared_output), c.x.dtype)
    yield failure(c.results[0], routed)


@judge("nvfp4_moe_gate_up", "bf16_moe_gate_up")
def _(c: Call) -> Iterator[str]:
    x = Approx.exact(c.x)
    yield failure(c.results[0], expert_acts(x, c.topk_ids, c))
    sums = product(x, c, "shared_w13", shards=halves(c, "shared_w13"))
    yield failure(c.results[1], gated(rounded(sums, c.x.dtype), c.x.dtype))


@judge("nvfp4_moe_down", "bf16_moe_down")
def _(c: Call) -> Iterator[str]:
    dtype = c.routed_act.dtype
    routed = combined(Approx.exact(c.routed_act), c, dtype)
    shared = rounded(product(Approx.exact(c.shared_act), c, "shared_w2"), dtype)
    yield failure(c.results[0], rounded(routed + shared, dtype))


# ------------------------------------------------------------------ attention


def attended(q: Tensor, k: Tensor, v: Tensor, c: Call) -> Approx:
    """One query [Hq, D] over exactly its keys [L, Hkv, D]."""
    heads, dim = q.shape
    group = heads // k.shape[1]
    if k.shape[0] == 0:
        return Approx.exact(torch.zeros(heads, dim))
    scale = dim**-0.5 if c.scale is None else c.scale
    rows = [dot(Approx.exact(q[h : h + 1]), k[:, h // group]) for h in range(heads)]
    logits = stacked([row[0] for row in rows], (heads, k.shape[0])) * Approx.exact(
        torch.tensor(scale, dtype=torch.float32)
    )
    values = v.transpose(0, 1).repeat_interleave(group, dim=0)
    return softmax_average(logits, values, c.sinks, q.dtype)


def past(c: Call, row: int, first: int, last: int) -> list[Tensor]:
    page = c.k_cache.shape[1]
    at = torch.arange(first, last)
    pages = c.block_table[row, at // page].long()
    return [cache[pages, at % page] for cache in (c.k_cache, c.v_cache)]


@judge("attention_decode")
def _(c: Call) -> Iterator[str]:
    for row, length in enumerate(c.seq_lens.tolist()):
        first = max(0, length - c.window) if c.window else 0
        problem = failure(c.results[0][row], attended(c.q[row], *past(c, row, first, length), c))
        yield problem and f"row {row}: {problem}"


@judge("attention_prefill")
def _(c: Call) -> Iterator[str]:
    bounds = c.cu_seqlens.tolist()
    for request in range(len(bounds) - 1):
        context = 0 if c.context_lens is None else int(c.context_lens[request])
        for row in range(bounds[request], bounds[request + 1]):
            position = context + row - bounds[request]
            first = max(0, position - c.window + 1) if c.window else 0
            new = slice(bounds[request] + max(0, first - context), row + 1)
            k, v = c.k[new], c.v[new]
            if first < context:
                old = past(c, request, first, context)
                k, v = (torch.cat(pair) for pair in zip(old, (k, v), strict=True))
            want = attended(c.q[row], k, v, c)
            if c.on_gpu:
                want = Approx(want.value, torch.where(beside(c, request), INF, want.error))
            problem = failure(c.results[0][row], want)
            yield problem and f"row {row}: {problem}"


def beside(c: Call, request: int) -> Tensor:
    """[Hq, D]: whether any V that a row of the request sees is not finite, which on a GPU may reach
    all of its rows."""
    begin, end = c.cu_seqlens.tolist()[request : request + 2]
    context = 0 if c.context_lens is None else int(c.context_lens[request])
    first = max(0, context - c.window + 1) if c.window else 0
    values = [c.v[begin:end]]
    if first < context:
        values.append(past(c, request, first, context)[1])
    some = (~torch.cat(values).isfinite()).any(0)
    return some.repeat_interleave(c.q.shape[1] // some.shape[0], dim=0)


# ------------------------------------------------------------------ sampling


@judge("sample")
def _(c: Call) -> Iterator[str]:
    for row, token in enumerate(c.results[0].tolist()):
        allowed = tokens(c, row)
        if token not in allowed:
            yield f"row {row}: token {token}, want one of {sorted(allowed)[:8]}"


@judge("decode_advance")
def _(c: Call) -> Iterator[str]:
    """Row by row in Python's integers, of which an int32 keeps the low bits."""
    names = ("input_ids", "positions", "slots", "window_slots", "seq_lens", "offsets")
    for row, token in enumerate(c.tokens.tolist()):
        want = {name: int(c.arguments[name][row]) for name in names}
        history = c.history[row].tolist()
        if want["seq_lens"] > 0:
            place = want["positions"] + 1
            page, rest = divmod(place, c.page_size)
            for name, table in (("slots", c.block_table), ("window_slots", c.window_block_table)):
                if want[name] >= 0:
                    slot = int(table[row, page]) * c.page_size + rest
                    want[name] = (slot + 2**31) % 2**32 - 2**31
            history[place % len(history)] = token
            want |= {"input_ids": max(token, 0), "positions": place}
            want |= {"seq_lens": place + 1, "offsets": place + 1}
        for name, value in want.items():
            if int(c.after[name][row]) != value:
                yield f"row {row}: {name} is {int(c.after[name][row])}, want {value}"
        if c.after["history"][row].tolist() != history:
            yield f"row {row}: history is {c.after['history'][row].tolist()}, want {history}"


def tokens(c: Call, row: int) -> set[int]:
    """The token of the row's random number; both neighbours where float64 does not tell."""
    readable = [
        -INF if math.isnan(x) else min(x, 3.4028234663852886e38) for x in c.logits[row].tolist()
    ]
    ranked = sorted(
        (t for t, x in enumerate(readable) if x > -INF), key=lambda t: (-readable[t], t)
    )
    temperature = float(c.temperature[row])
    if temperature == 0:
        return {ranked[0]}
    top_k = int(c.top_k[row])
    ranked = ranked[: top_k or None]
    top = readable[ranked[0]]
    chances = [math.exp(max((readable[t] - top) / temperature, -800.0)) for t in ranked]
    total, slack = math.fsum(chances), 1e-12
    allowed: set[int] = set()
    target = uniform(int(c.seed[row]), int(c.offset[row]))
    for nudge in (-slack, slack):  # of the end of top-p, then of the number itself
        before, kept = 0.0, []
        for token, chance in zip(ranked, chances, strict=True):
            if kept and not before < float(c.top_p[row]) + nudge:
                break
            kept.append((token, before))
            before += chance / total
        for offset in (-slack, slack):
            at = target * before + offset
            allowed.add(max((p for p in kept if p[1] <= max(at, 0.0)), key=lambda p: p[1])[0])
            # Of candidates without any weight the first at this place is meant, or the last.
            allowed.update(t for t, start in kept if abs(start - at) <= slack)
    return allowed


def uniform(seed: int, offset: int) -> float:
    """Philox4x32-10 in a loop over words."""
    mask = 0xFFFFFFFF
    key = [seed & mask, seed >> 32 & mask]
    words = [offset & mask, offset >> 32 & mask, 0, 0]
    for _ in range(10):
        a, b = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [(b >> 32) ^ words[1] ^ key[0], b & mask, (a >> 32) ^ words[3] ^ key[1], a & mask]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    return ((words[0] >> 5) * 2**26 + (words[1] >> 6)) / 2**53


# ------------------------------------------------------------------ NVFP4


@judge("nvfp4_quantize")
def _(c: Call) -> Iterator[str]:
    weight, scale, scale_2 = c.results
    x = f64(c.x)
    amax = x.abs().amax() if x.numel() else torch.zeros(())
    if c.global_scale is not None:
        if float(scale_2) != float(c.global_scale):
            yield f"weight_scale_2: got {float(scale_2)}, want {float(c.global_scale)}"
    elif float(amax) > 0:
        smallest = torch.tensor(TINY, dtype=torch.float64)  # a subnormal scale has too few bits
        exact = torch.maximum(amax / 2688, smallest)
        want = Approx(exact, FUNCTION * exact)
        yield failure(scale_2, want)
    if bool((scale.view(torch.uint8) & 0x7F == 0x7F).any()):
        yield "weight_scale: got NaN"
    if c.global_scale is not None:
        return  # what does not fit it is clipped
    got = nvfp4_values(weight, scale) * f64(scale_2)
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // 16, 16)
    largest = blocks.abs().amax(-1, keepdim=True)
    # Half a step between 4 and 6 of the block's scale, which is itself off by 2^-4 of itself, or by
    # half of E4M3's smallest step.
    slack = largest / 6 * (1 + 2 * 2.0**-4) + 6 * (2.0**-10 * f64(scale_2) + STEP * 2688)
    off = (got.reshape(blocks.shape) - blocks).abs()
    if not bool((off <= slack).all()):
        yield f"values are off by up to {float((off - slack).max()):.3g} more than a step"


@judge("nvfp4_dequantize")
def _(c: Call) -> Iterator[str]:
    value = Approx.exact(nvfp4_values(c.weight, c.weight_scale))
    if c.weight_scale_2 is not None:
        value = value * Approx.exact(c.weight_scale_2.reshape(()))
        yield failure(c.results[0], rounded(value, c.dtype))
    else:  # exact in every dtype
        yield failure(c.results[0], value)


def shuffled(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """GGUF super-blocks [..., n * 36] to codes and scale bytes, a value at a time."""
    parts = blocks.reshape(*blocks.shape[:-1], blocks.shape[-1] // 36, 36).long()
    scales, codes = parts[..., :4], parts[..., 4:].reshape(*parts.shape[:-1], 4, 8)
    values = torch.cat([codes % 16, codes // 16], dim=-1).flatten(-3)
    pairs = values.reshape(*values.shape[:-1], values.shape[-1] // 2, 2)
    packed = (pairs[..., 0] + 16 * pairs[..., 1]).to(torch.uint8)
    read = scales % 128
    return packed, torch.where(read == 127, 0, read).flatten(-2).to(torch.uint8)


@judge("gguf_to_modelopt")
def _(c: Call) -> Iterator[str]:
    weight, scale = shuffled(c.blocks)
    if not torch.equal(c.results[0], weight):
        yield "weight: not the codes in order"
    if not torch.equal(c.results[1].view(torch.uint8), scale):
        yield "weight_scale: not the scales as ggml reads them"


@judge("modelopt_to_gguf")
def _(c: Call) -> Iterator[str]:
    weight, scale = shuffled(c.results[0])
    if not torch.equal(weight, c.weight):
        yield "the codes do not come back"
    if not torch.equal(scale, c.weight_scale.view(torch.uint8) & 0x7F):
        yield "the scales do not come back"
