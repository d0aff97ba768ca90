"""The whole model on a GPU: against the CPU and its FP32 forward, in graphs, and at full size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
import torch.nn.functional as F
from support import bits, captured

from flint_kernels.generation import SamplingParams, generate
from flint_kernels.loading import load, load_tokenizer, synthetic
from flint_kernels.model import DecodeBatch, Flint, FlintConfig

pytestmark = pytest.mark.gpu

FORMATS = ("nvfp4", "bf16")
CHECKPOINTS = ("flint-tiny", "flint-tiny-bf16")


def text_tokens(checkpoint: str, count: int) -> list[int]:
    """The start of this file, in the checkpoint's tokens."""
    ids: list[int] = load_tokenizer(checkpoint).encode(Path(__file__).read_text()).ids
    assert len(ids) >= count
    return ids[:count]


def kl(reference: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """KL(reference || logits) of each row, in nats."""
    p, q = (F.log_softmax(t.double().cpu(), dim=-1) for t in (reference, logits))
    return (p.exp() * (p - q)).sum(dim=-1)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_fp32_equals_the_cpu_s(weight_format: str) -> None:
    """No rounding on either side, so that a wrong rounding point cannot hide a wrong formula."""
    oracle = tiny.tiny_model(weight_format).oracle()
    twin = synthetic(tiny.CONFIG, weight_format, seed=7)
    on_gpu = twin.to("cuda").oracle()
    tokens = tiny.random_tokens(150)
    want = tiny.one_shot(oracle, tokens)
    for got in (
        tiny.one_shot(on_gpu, tokens.cuda()),
        tiny.chunked(on_gpu, tokens.cuda(), [1, 7, 60, 82]),
        tiny.token_by_token(on_gpu, tokens.cuda()),
    ):
        torch.testing.assert_close(got.cpu(), want, rtol=0, atol=1e-3)


def typical(divergence: torch.Tensor) -> torch.Tensor:
    """The mean without the greatest 5%.

    Where a router's choice falls otherwise, a row's divergence is a hundred times the others': the
    mean of so short a text is that of a few rows, and two sound implementations are 30% apart.
    `flint-kernels validate` compares means, of 50,000 tokens.
    """
    return divergence.sort().values[: divergence.numel() * 95 // 100].mean()


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_kl_to_fp32_is_no_worse_than_the_cpu_s(checkpoint: str) -> None:
    """Prefill and decode. Both round at the same points; 25% for where their sums happen to."""
    on_cpu, on_gpu = load(checkpoint, device="cpu"), load(checkpoint, device="cuda")
    on_cpu_fp32 = on_cpu.oracle()
    own, prefill, decode = [], [], []
    for tokens in torch.tensor(text_tokens(checkpoint, 1600)).split(400):
        oracle = tiny.one_shot(on_cpu_fp32, tokens)
        own.append(kl(oracle, tiny.one_shot(on_cpu, tokens)))  # decode has the same bits there
        prefill.append(kl(oracle, tiny.one_shot(on_gpu, tokens.cuda())))
        decode.append(kl(oracle, tiny.token_by_token(on_gpu, tokens.cuda())))
    for path in (prefill, decode):
        assert typical(torch.cat(path)) < 1.25 * typical(torch.cat(own))


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_greedy_text_equals_the_cpu_s_or_parts_at_a_near_tie(checkpoint: str) -> None:
    on_cpu, on_gpu = load(checkpoint, device="cpu"), load(checkpoint, device="cuda")
    params = SamplingParams(greedy=True, max_new_tokens=64)
    prompt = text_tokens(checkpoint, 60)
    texts = [generate(model, [prompt], params)[0].tokens for model in (on_cpu, on_gpu)]
    if texts[0] == texts[1]:
        return
    common = next(i for i, (a, b) in enumerate(zip(*texts, strict=True)) if a != b)
    tokens = torch.tensor(prompt + texts[0][:common])
    oracle = tiny.one_shot(on_cpu.oracle(), tokens)[-1]
    error = (tiny.one_shot(on_gpu, tokens.cuda())[-1].cpu() - oracle).abs().max()
    gap = (oracle[texts[0][common]] - oracle[texts[1][common]]).abs()
    assert gap < 2 * error


@pytest.mark.parametrize("weight_format", FORMATS)
@torch.inference_mode()
def test_a_captured_decode_step_equals_the_eager_one(weight_format: str) -> None:
    """One graph serves all steps: positions, slots and lengths are read when it is replayed."""
    model = synthetic(tiny.CONFIG, weight_format, seed=7, device="cuda")
    prompts = [tiny.random_tokens(40).cuda(), tiny.random_tokens(9, seed=1).cuda()]
    caches = [model.make_cache(max_requests=2) for _ in range(2)]
    for cache in caches:
        requests = [cache.add() for _ in prompts]
        model(torch.cat(prompts), cache.plan(requests, [len(p) for p in prompts]), cache)
    eager, replayed = caches
    ids = torch.tensor([3, 4], device="cuda")
    batch = DecodeBatch(*(field.clone() for field in replayed.plan_decode([0, 1])))
    eager_batch = eager.plan_decode([0, 1])
    graph, logits = captured(lambda: model(ids, batch, replayed))
    for step in range(50):
        want = model(ids, eager_batch, eager)
        graph.replay()
        assert torch.equal(bits(logits), bits(want)), step
        ids.copy_(want.argmax(dim=-1))
        eager_batch = eager.plan_decode([0, 1])
        for held, new in zip(batch, replayed.plan_decode([0, 1]), strict=True):
            held.copy_(new)


WARMED_UP = """
import sys, torch, flint_kernels
sys.path.insert(0, {tests!r})
import tiny
from flint_kernels.loading import synthetic
flint_kernels.warmup("cuda", tiny.CONFIG)
with torch.inference_mode():
    for weight_format in ("nvfp4", "bf16"):
        model = synthetic(tiny.CONFIG, weight_format, device="cuda")
        cache = model.make_cache(max_requests=40)
        requests = [cache.add() for _ in range(40)]
        for count in (1, 3, 40):
            for tokens in (1, 5, 9):
                ids = torch.zeros(count * tokens, dtype=torch.int64, device="cuda")
                plan = cache.plan(requests[:count], [tokens] * count)
                step = cache.plan_decode(requests[:count])
                torch.cuda.synchronize()
                with torch.cuda.graph(torch.cuda.CUDAGraph()):
                    model(ids, plan, cache)
                    model(ids[:count], step, cache)
print("captured")
"""


def test_C5_warmup_leaves_nothing_to_compile() -> None:
    """In a process of its own: nothing has run there before but the warmup."""
    script = WARMED_UP.format(tests=str(Path(tiny.__file__).parent))
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=900, check=False
    )
    assert result.stdout.strip() == "captured", result.stderr[-5_000:]


@pytest.mark.parametrize("weight_format", FORMATS)
@torch.inference_mode()
def test_the_full_size_produces_a_token(weight_format: str) -> None:
    """39.8B synthetic parameters: 22 GB as NVFP4, 80 GB as BF16."""
    torch.cuda.empty_cache()
    model = synthetic(FlintConfig.flint_40b(), weight_format, device="cuda", max_positions=4096)
    prompt = [7 + 31 * i % 150_000 for i in range(700)]
    params = SamplingParams(greedy=True, max_new_tokens=3)
    first = generate(model, [prompt, prompt[:5]], params)
    again = generate(model, [prompt, prompt[:5]], params)
    assert [len(c.tokens) for c in first] == [3, 3]
    assert [c.tokens for c in first] == [c.tokens for c in again]
    assert torch.cuda.max_memory_allocated() < 100 << 30
    del model
    torch.cuda.empty_cache()


def test_models_of_the_two_devices_share_their_weights() -> None:
    """`synthetic` draws by the device's own generator; `.to` is what moves a model."""
    moved = synthetic(tiny.CONFIG, "nvfp4", seed=7).to("cuda")
    assert isinstance(moved, Flint)
    for one, two in zip(moved.parameters(), tiny.tiny_model().parameters(), strict=True):
        assert torch.equal(bits(one.detach()).cpu(), bits(two.detach()))
