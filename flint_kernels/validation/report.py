"""A validation as a table to read and as result rows to keep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flint_kernels.results import Row, row
from flint_kernels.validation.compare import Interval, Summary


def table(summaries: Mapping[str, Summary]) -> str:
    """Path by path, with 95% intervals where there are any; ends in a newline."""
    lines = [["path", "perplexity", "/ fp32", "mean KL to fp32", "max KL", "top-1 agreement"]]
    for path, summary in summaries.items():
        lines.append(
            [
                path,
                _with_interval(summary.ppl, ".4f"),
                _with_interval(summary.ppl_ratio, ".5f"),
                _with_interval(summary.kl_mean, ".3e"),
                f"{summary.kl_max:.3e}",
                _with_interval(summary.top1, ".4f"),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
    return "\n".join(padded) + "\n"


def result_rows(name: str, checkpoint: str, summaries: Mapping[str, Summary]) -> list[Row]:
    """Rows of bench `validate`: kl_mean, kl_max, top1 and ppl of each path.

    p20 and p80 are those of the bootstrap, `interval_95` is its 95% interval (one sequence has
    neither: the value itself, and null); the peer of a perplexity is that of the FP32 forward.

    Args:
        name: of the model, the first word of each case: "flint-tiny".
        checkpoint: "nvfp4" or "bf16".
    """
    rows = []
    for path, summary in summaries.items():
        case = f"{name} {path}"
        predictions = summary.sequences * summary.context
        size: dict[str, Any] = {"tokens": predictions, "context": summary.context}
        for metric, interval in (
            ("kl_mean", summary.kl_mean),
            ("top1", summary.top1),
            ("ppl", summary.ppl),
        ):
            entry = row("validate", case, metric, [interval.value], checkpoint=checkpoint, **size)
            entry["interval_95"] = None
            if interval.low is not None:
                entry["p20"], entry["p80"] = interval.p20, interval.p80
                entry["interval_95"] = [interval.low, interval.high]
            if metric == "ppl":
                entry["peer"], entry["peer_median"] = "fp32", summary.ppl_fp32.value
            rows.append(entry)
        rows.append(
            row("validate", case, "kl_max", [summary.kl_max], checkpoint=checkpoint, **size)
        )
    return rows


def _with_interval(interval: Interval, form: str) -> str:
    if interval.low is None:
        return f"{interval.value:{form}}"
    return f"{interval.value:{form}} [{interval.low:{form}}, {interval.high:{form}}]"
