"""Next-token distributions of a path against those of the FP32 forward.

Hidden states of a few sequences are kept; logits exist for a slice of rows at a time, so that
memory does not grow with the text, nor with the vocabulary times the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from flint_kernels.model.flint import Flint
from flint_kernels.validation.paths import PATHS, prefill

# Of one float64 [rows, vocabulary]; half a dozen of that size live at once.
SLICE_BYTES = 32 << 20
RESAMPLES = 2000
BOOTSTRAP_SEED = 0

Progress = Callable[[int], object]


@dataclass(frozen=True)
class Comparison:
    """What was seen at each predicted token, float64 [sequences, context] each, on the CPU."""

    nll: Tensor
    """-log p(next token) by the path."""
    nll_fp32: Tensor
    """The same by the FP32 forward."""
    kl: Tensor
    """KL(fp32 || path) of the next-token distributions, in nats."""
    agree: Tensor
    """1 where both have the same most likely token, else 0."""


@dataclass(frozen=True)
class Interval:
    """A figure and its bootstrap distribution, which one sequence does not have: all None."""

    value: float
    low: float | None = None
    """2.5th percentile."""
    high: float | None = None
    """97.5th percentile."""
    p20: float | None = None
    p80: float | None = None


@dataclass(frozen=True)
class Summary:
    """The figures of one path over a text."""

    sequences: int
    context: int
    ppl: Interval
    ppl_fp32: Interval
    ppl_ratio: Interval
    """ppl / ppl_fp32, from the same resamples: the text's own spread cancels."""
    kl_mean: Interval
    kl_max: float
    top1: Interval


def validate(
    model: Flint,
    tokens: Tensor,
    *,
    paths: Sequence[str] = ("prefill", "decode"),
    batch: int = 8,
    progress: Progress | None = None,
) -> dict[str, Comparison]:
    """Runs each path and the FP32 forward (`model.oracle()`, its prefill) over all sequences.

    Args:
        model: the checkpoint, on any device.
        tokens: [sequences, context + 1] int64, as `text.sequences` cuts them.
        paths: of "prefill" and "decode".
        batch: sequences that go through together.
        progress: is told the number of sequences done, once for each path.

    Returns: path -> what was seen.

    Raises:
        ValueError: an unknown path; ids outside the vocabulary; `tokens` or `batch` of a wrong
            form; a context longer than the model's max_positions; logits that are NaN or infinite.
    """
    _check(model, tokens, paths, batch)
    oracle = model.oracle()
    parts: dict[str, list[Comparison]] = {path: [] for path in paths}
    with torch.inference_mode():
        for some in tokens.to(model.device).split(batch):
            inputs, targets = some[:, :-1], some[:, 1:]
            reference = prefill(oracle, inputs)
            for path in paths:
                hidden = PATHS[path](model, inputs)
                parts[path].append(compare_hidden(model, reference, hidden, targets))
                if progress is not None:
                    progress(len(some))
    joined = {path: _join(found) for path, found in parts.items()}
    for path, comparison in joined.items():
        _check_numbers(path, comparison)
    return joined


def compare_hidden(model: Flint, reference: Tensor, hidden: Tensor, targets: Tensor) -> Comparison:
    """Compares the distributions that two sets of final hidden states lead to.

    Args:
        model: its head makes the logits, without rounding from FP32 states.
        reference: [B, T, H] float32, of the FP32 forward.
        hidden: [B, T, H] in the compute dtype, of the path.
        targets: [B, T] the tokens that came next.
    """
    shape = targets.shape
    reference, hidden, targets = reference.flatten(0, 1), hidden.flatten(0, 1), targets.flatten()
    rows = max(1, SLICE_BYTES // (8 * model.config.vocab_size))
    parts = []
    for start in range(0, len(targets), rows):
        part = slice(start, start + rows)
        expected = model.logits(reference[part]).double().log_softmax(-1)
        got = model.logits(hidden[part]).double().log_softmax(-1)
        parts.append(_compare_log_probabilities(expected, got, targets[part]))
    return Comparison(*(torch.cat(column).view(shape) for column in zip(*parts, strict=True)))


def _compare_log_probabilities(expected: Tensor, got: Tensor, targets: Tensor) -> list[Tensor]:
    """The four fields of `Comparison` for [rows, vocabulary] log probabilities."""
    column = targets[:, None]
    agree = expected.argmax(-1) == got.argmax(-1)
    values = [
        -got.gather(1, column).squeeze(1),
        -expected.gather(1, column).squeeze(1),
        (expected.exp() * (expected - got)).sum(-1),
        agree.double(),
    ]
    return [value.cpu() for value in values]


def summarize(comparison: Comparison, resamples: int = RESAMPLES) -> Summary:
    """Figures with paired bootstrap intervals.

    Whole sequences are drawn, since neighbouring tokens are alike; path and FP32 forward share each
    draw. The greatest KL has no interval: a bootstrap says nothing of a maximum. Nor has anything
    where there is one sequence: all draws of it are equal, which would look like certainty.
    """
    of_token = (comparison.nll, comparison.nll_fp32, comparison.kl, comparison.agree)
    of_sequence = torch.stack([values.mean(1) for values in of_token])
    count = of_sequence.shape[1]
    generator = torch.Generator().manual_seed(BOOTSTRAP_SEED)
    draws = (torch.randint(count, (count,), generator=generator) for _ in range(resamples))
    resampled = torch.stack([of_sequence[:, draw].mean(1) for draw in draws], dim=1)
    nll, nll_fp32, kl, agree = resampled
    mean_nll, mean_nll_fp32, mean_kl, mean_agree = of_sequence.mean(1)
    interval = _interval if count > 1 else _no_interval
    return Summary(
        sequences=count,
        context=comparison.nll.shape[1],
        ppl=interval(mean_nll.exp(), nll.exp()),
        ppl_fp32=interval(mean_nll_fp32.exp(), nll_fp32.exp()),
        ppl_ratio=interval((mean_nll - mean_nll_fp32).exp(), (nll - nll_fp32).exp()),
        kl_mean=interval(mean_kl, kl),
        kl_max=comparison.kl.max().item(),
        top1=interval(mean_agree, agree),
    )


def _interval(value: Tensor, resampled: Tensor) -> Interval:
    quantiles = torch.tensor([0.025, 0.975, 0.2, 0.8], dtype=resampled.dtype)
    low, high, p20, p80 = resampled.quantile(quantiles).tolist()
    return Interval(value.item(), low, high, p20, p80)


def _no_interval(value: Tensor, _: Tensor) -> Interval:
    return Interval(value.item())


def _join(parts: list[Comparison]) -> Comparison:
    names = [field.name for field in fields(Comparison)]
    return Comparison(*(torch.cat([getattr(part, name) for part in parts]) for name in names))


def _check_numbers(path: str, comparison: Comparison) -> None:
    for name, values in (("the FP32 forward", comparison.nll_fp32), (path, comparison.kl)):
        bad = int((~values.isfinite()).sum())
        if bad:
            raise ValueError(
                f"model: got logits that are NaN or infinite from {name} at {bad} of "
                f"{values.numel()} tokens, want numbers; are the weights sound?"
            )


def _check(model: Flint, tokens: Tensor, paths: Sequence[str], batch: int) -> None:
    for path in paths:
        if path not in PATHS:
            raise ValueError(f"paths: got {path!r}, want some of {', '.join(PATHS)}")
    if batch < 1:
        raise ValueError(f"batch: got {batch}, want 1 or more")
    if tokens.dim() != 2 or tokens.shape[0] < 1 or tokens.shape[1] < 2:
        raise ValueError(
            f"tokens: got shape {list(tokens.shape)}, want [sequences, context + 1]; "
            "validation.sequences makes them"
        )
    if tokens.shape[1] - 1 > model.max_positions:
        raise ValueError(
            f"tokens: got a context of {tokens.shape[1] - 1}, want at most {model.max_positions}, "
            "the model's max_positions; load it with more, or use shorter sequences"
        )
    low, high = (int(value) for value in tokens.aminmax())
    if low < 0 or high >= model.config.vocab_size:
        raise ValueError(
            f"tokens: got ids from {low} to {high}, want 0 to {model.config.vocab_size - 1}; is "
            "the tokenizer that of this checkpoint?"
        )
