"""Writes the tables and plots of the documents from the rows under docs/results.

    python -m microbench.tables

A table stands in a Markdown file between `<!-- table: NAME -->` and `<!-- end of table -->`, and
`TABLES` names the function that makes it. A figure that is not in a row is not in a table. A plot
is a file of docs/images, there only where rows are, and the table of the same rows shows it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from microbench import forward_tables, plots, roofline
from microbench.cases import sweep
from microbench.plots import number

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
TRAINING_LOG = ROOT / "flint_kernels" / "flint_tiny" / "checkpoint" / "training_log.json"

REGION = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
NOT_MEASURED = "*Not measured in this version.*"

Row = dict[str, Any]

GPU = "h200"
KERNELS_PLOT = ROOT / "docs" / "images" / f"kernels_{GPU}.svg"
FORWARD_PLOT = ROOT / "docs" / "images" / f"forward_{GPU}.svg"
ABLATION_PLOT = ROOT / "docs" / "images" / f"ablation_{GPU}.svg"
ROOFLINE_PLOT = ROOT / "docs" / "images" / f"roofline_{GPU}.svg"
ROOF = "roof"  # the bench of the measured ceilings
LAYERS = "moe_layer_chain"  # the bench of all layers behind each other
# What the plot and the README show of the kernels; the table has all.
SHOWN_ROWS = ("M=1", "M=8192")
HEADLINES = {
    "rms_norm": ("M=1", "M=1 pdl", "M=8192"),
    "fused_add_rms_norm": ("M=1", "M=1 pdl", "M=8192"),
    "silu_and_mul": ("M=8192 D=6144",),
    "qk_norm_rope_kv_write": ("M=1", "M=1 pdl", "M=8192"),
}

# What the page of a family of ops shows: result file, bench, and the beginnings of the cases.
FAMILIES = {
    "norm": (
        ("kernels", "rms_norm", ("M=1 pdl", "M=8 pdl", "M=8192")),
        ("kernels", "fused_add_rms_norm", ("M=1 pdl", "M=8 pdl", "M=8192")),
        ("kernels", "silu_and_mul", ("M=1 D=6144 pdl", "M=8192")),
    ),
    "kv_write": (("kernels", "qk_norm_rope_kv_write", ("M=1 pdl", "M=8 pdl", "M=8192")),),
    "attention": (
        ("attention", "attention_decode", ("*pdl",)),
        ("attention", "attention_prefill", ("*",)),
    ),
    "linear": (
        *(("decode_kernels", bench, ("M=1 pdl", "M=8 pdl")) for bench in
          ("ll_o", "ll_dense_gate_up", "ll_dense_down", "lm_head")),
        ("prefill_kernels", "linear", ("M=256", "M=8192")),
    ),
    "experts": tuple(("prefill_kernels", bench, ("*",)) for bench in
                     ("experts_gate_up", "experts_down", "experts_around", "moe_layer")),
    "low_latency": tuple(("decode_kernels", bench, ("M=1 pdl", "M=8 pdl")) for bench in
                         ("ll_norm", "ll_qkv", "ll_router", "ll_gate_up", "ll_down")),
}  # fmt: skip

FORWARD_HEADLINES = ("decode=1@4096", "decode=1@100000", "decode8=8*1@100000", "prefill=8192")

CHECKPOINTS = {"nvfp4": "NVFP4", "bf16": "BF16"}
# File and bodies. The plain ones set the yardstick; there decode equals prefill, and one path does.
VALIDATED = {
    "cpu": {"validate": "C++", "validate_reference": "PyTorch (the yardstick)"},
    GPU: {"validate": "GPU"},
}
TRAINED = {
    "fp32_master": "FP32 weights of the BF16 stage",
    "bf16": "BF16, as shipped",
    "nvfp4_without_distillation": "the BF16 model rounded to NVFP4",
    "nvfp4": "NVFP4 after distillation, as shipped",
}


def documents() -> list[Path]:
    """The files that may hold tables."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def updated(text: str) -> str:
    """`text` with every table made anew; KeyError for a name that `TABLES` does not have."""
    return REGION.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}\n{match[3]}", text)


def read(gpu: str, name: str) -> tuple[dict[str, Any], list[Row]]:
    """meta and rows of docs/results/<gpu>/<name>.json; empty where there is no such file."""
    path = RESULTS / gpu / f"{name}.json"
    if not path.is_file():
        return {}, []
    content = json.loads(path.read_text(encoding="utf-8"))
    return content["meta"], content["rows"]


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def conditions(meta: dict[str, Any]) -> str:
    """Where and when the rows above were measured, as a paragraph."""
    where = [f"{meta['gpu'] or meta['cpu']}"]
    if meta["threads"] and not meta["gpu"]:
        where.append(f"{meta['threads']} threads")
    versions = ("driver", "cuda", "python", "torch", "triton", "text")
    where += [f"{name} {meta[name]}" for name in versions if meta.get(name)]
    return f"\n\nMeasured {meta['date']} on {', '.join(where)}; commit {meta['commit'][:12]}."


def figure(row: Row) -> str:
    return f"{number(row['median'])} ({number(row['p20'])} to {number(row['p80'])})"


def cpu() -> str:
    """Import, first token and decode speed on the CPU path."""
    meta: dict[str, Any] = {}
    lines = []
    for name in ("import", "generate"):
        found, rows = read("cpu", name)
        meta = meta or found
        for row in rows:
            what = {
                "s": "`import flint_kernels` beyond torch, seconds",
                "first_token_s": f"{row['case']}: first token after loading, seconds",
                "tok/s": f"{row['case']}: decode, tokens/s",
            }[row["metric"]]
            lines.append([what, CHECKPOINTS.get(row["checkpoint"], ""), figure(row)])
    if not lines:
        return NOT_MEASURED
    head = ["on the CPU path", "checkpoint", "median (20th to 80th percentile)"]
    return markdown(head, lines) + conditions(meta)


def generate(machine: str) -> str:
    """Greedy decoding of one request: Transformers' generate() beside the library's own loop."""
    meta, rows = read(machine, "generate")
    lines = []
    for row in rows:
        if row["metric"] != "tok/s" or not row["peer"]:
            continue
        same = (row["case"], row["checkpoint"], "first_token_s")
        [first] = [r for r in rows if (r["case"], r["checkpoint"], r["metric"]) == same]
        lines.append(
            [
                row["case"].split()[0],
                CHECKPOINTS[row["checkpoint"]],
                number(1000 * first["median"]),
                number(1000 * first["peer_median"]),
                figure(row),
                number(row["peer_median"]),
                f"{row['median'] / row['peer_median']:.2f}",
            ]
        )
    head = [
        "model", "checkpoint", "first token, ms", "the library's",
        "tokens/s (20th to 80th percentile)", "the library's", "times as fast",
    ]  # fmt: skip
    return markdown(head, lines) + conditions(meta) if lines else NOT_MEASURED


def validate(machine: str) -> str:
    """Perplexity and distance from the FP32 forward, a line for each path and checkpoint."""
    meta: dict[str, Any] = {}
    cells: dict[tuple[str, str, str], dict[str, Row]] = {}
    for name, bodies in VALIDATED[machine].items():
        found, rows = read(machine, name)
        meta = meta or found
        for row in rows:
            line = cells.setdefault((row["case"], CHECKPOINTS[row["checkpoint"]], bodies), {})
            line[row["metric"]] = row
    if not cells:
        return NOT_MEASURED
    metrics = ("ppl", "kl_mean", "kl_max", "top1")
    lines = [
        [*names, *(significant(row.get(metric)) for metric in metrics)]
        for names, row in cells.items()
    ]
    head = ["case", "checkpoint", "bodies", "perplexity", "mean KL to FP32", "max KL", "top-1"]
    return markdown(head, lines) + conditions(meta)


def kernel_rows(file: str = "kernels") -> tuple[dict[str, Any], list[Row]]:
    """meta and rows of the kernels' times."""
    meta, rows = read(GPU, file)
    return meta, [row for row in rows if row["bench"] != ROOF]


def kernels() -> str:
    """Every kernel and case beside its floor and its best peer, after the plot."""
    meta, rows = kernel_rows()
    if not rows:
        return NOT_MEASURED
    parts = [] if not plotted(rows) else [f"![{kernels_title(meta)}](images/{KERNELS_PLOT.name})"]
    return "\n\n".join([*parts, kernel_table(rows)]) + conditions(meta)


def kernel_headlines() -> str:
    meta, rows = kernel_rows()
    shown = [row for row in rows if row["case"] in HEADLINES.get(row["bench"], ())]
    return kernel_table(shown) + conditions(meta) if shown else NOT_MEASURED


def kernel_table(rows: Iterable[Row]) -> str:
    lines = []
    for row in rows:
        median, floor, peer = row["median"], row["floor"], row["peer_median"]
        lines.append(
            [
                f"`{row['bench']}`",
                " ".join([row["case"], CHECKPOINTS.get(row["checkpoint"], "")]).strip(),
                figure(row),
                number(floor) if floor else "",
                f"{100 * floor / median:.0f}%" if floor else "",
                f"{row['peer']}: {number(peer)}" if peer else "none ran",
                f"{peer / median:.2f}" if peer else "",
            ]
        )
    head = [
        "op",
        "case",
        "µs (20th to 80th percentile)",
        "floor, µs",
        "of the roof",
        "best peer, µs",
    ]
    return markdown([*head, "times as fast"], lines)


def family(name: str) -> str:
    """What the kernels of a family of ops cost; the runs that said so are below."""
    shown: list[Row] = []
    runs: dict[str, list[str]] = {}
    for file, bench, patterns in FAMILIES[name]:
        meta, rows = read(GPU, file)
        found = [row for row in rows if row["bench"] == bench and chosen(row["case"], patterns)]
        shown += found
        if found and bench not in runs.setdefault(conditions(meta).strip(), []):
            runs[conditions(meta).strip()].append(bench)
    if not shown:
        return NOT_MEASURED
    of = [f"{', '.join(f'`{bench}`' for bench in benches)}: {run}" for run, benches in runs.items()]
    return "\n\n".join([kernel_table(shown), *(of if len(of) > 1 else runs)])


def chosen(case: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern of shell wildcards matches the case; one without "pdl" is of plain ones."""
    return any(
        fnmatchcase(case, pattern) or ((case + " ").startswith(pattern + " ") and "pdl" not in case)
        for pattern in patterns
    )


def decode_kernels(checkpoint: str) -> str:
    """The kernels of a decode layer and the head, with the weights of one checkpoint."""
    meta, rows = kernel_rows("decode_kernels")
    shown = [
        row
        for row in rows
        if row["checkpoint"] == checkpoint and not row["bench"].startswith(LAYERS)
    ]
    # The table is of one checkpoint: it need not stand in every line.
    lines = [{**row, "checkpoint": ""} for row in shown]
    return kernel_table(lines) + conditions(meta) if lines else NOT_MEASURED


def attention_prefill() -> str:
    """Prefill attention beside its best peer."""
    meta, rows = kernel_rows("attention")
    return products(meta, [row for row in rows if row["bench"] == "attention_prefill"])


def prefill_kernels() -> str:
    """Projections and experts of many tokens, and where they stand under the roof."""
    table = products(*kernel_rows("prefill_kernels"))
    if prefill_roofline() is None:
        return table
    return f"![{ROOFLINE}](images/{ROOFLINE_PLOT.name})\n\n{table}"


def sweep_table() -> str:
    """Times of each op by the number of tokens, and where they are uneven."""
    meta, rows = kernel_rows("sweep")
    if not rows:
        return NOT_MEASURED
    series: dict[str, dict[int, str]] = {}
    for row in rows:
        name, tokens = row["case"].rsplit(" M=", 1)
        series.setdefault(name, {})[int(tokens)] = number(row["median"])
    tokens_of = sorted({tokens for times in series.values() for tokens in times})
    lines = [
        [f"`{name}`", *(times.get(tokens, "") for tokens in tokens_of)]
        for name, times in series.items()
    ]
    uneven = [f"- {line}" for line in sweep.unevenness(rows)] or ["- nowhere"]
    found = "\n".join(["Where time falls with more tokens, or more than doubles:", "", *uneven])
    table = markdown(["op", *(f"{tokens:,}" for tokens in tokens_of)], lines)
    return f"{table}\n\n{found}{conditions(meta)}"


def scratch() -> str:
    """The memory that a forward has in use at its peak."""
    meta, rows = read(GPU, "scratch")
    if not rows:
        return NOT_MEASURED
    lines = [
        [row["case"], CHECKPOINTS[row["checkpoint"]], f"{row['median'] / 2**20:,.0f}"]
        for row in rows
    ]
    return markdown(["forward", "checkpoint", "MiB"], lines) + conditions(meta)


def products(meta: dict[str, Any], rows: Iterable[Row]) -> str:
    lines = [
        [
            f"`{row['bench']}`",
            row["case"],
            figure(row),
            f"{row['flop'] / row['median'] / 1e6:.0f}" if row["flop"] else "",
            f"{100 * row['floor'] / row['median']:.0f}%",
            f"{row['peer']}: {number(row['peer_median'])}" if row["peer"] else "",
            f"{row['peer_median'] / row['median']:.2f}" if row["peer"] else "",
        ]
        for row in rows
    ]
    head = ["op", "case", "µs (20th to 80th percentile)", "TFLOP/s", "of the roof", "best peer, µs"]
    if not lines:
        return NOT_MEASURED
    return markdown([*head, "times as fast"], lines) + conditions(meta)


ROOFLINE = "Kernels of many tokens under the roof of the machine"


def prefill_roofline() -> str | None:
    """Where the kernels of many tokens stand under the ceilings of the same run; None without."""
    meta, all_rows = read(GPU, "prefill_kernels")
    ceilings = {
        metric: max((r["median"] for r in all_rows if r["bench"] == ROOF and r["metric"] == metric),
                    default=0.0)
        for metric in ("GB/s", "TFLOP/s")
    }  # fmt: skip
    rows = roofline.drawable([row for row in all_rows if row["bench"] != ROOF])
    if not rows or not all(ceilings.values()):
        return None
    title = f"Kernels of many tokens on one {meta['gpu']}, under its roof"
    return roofline.chart(title, rows, ceilings["GB/s"] * 1e3, ceilings["TFLOP/s"] * 1e6)


def attention() -> str:
    """Decode attention beside the floor of its bytes and its best peer."""
    meta, rows = kernel_rows("attention")
    rows = [row for row in rows if row["bench"] == "attention_decode"]
    return kernel_table(rows) + conditions(meta) if rows else NOT_MEASURED


def layer_chain() -> str:
    """All layers of a decode step behind each other, with PDL and without."""
    meta, rows = kernel_rows("decode_kernels")
    lines = []
    for row in rows:
        if row["bench"] != LAYERS:
            continue
        size = dict(part.split("=") for part in row["case"].split() if "=" in part)
        lines.append(
            [
                CHECKPOINTS[row["checkpoint"]],
                size["M"],
                "no" if row["case"].endswith(" plain") else "yes",
                figure(row),
                number(row["floor"]),
                f"{100 * row['floor'] / row['median']:.0f}%",
                number(row["median"] / int(size["layers"])),
            ]
        )
    head = ["checkpoint", "M", "PDL", "µs (20th to 80th percentile)", "floor, µs", "of the roof"]
    return markdown([*head, "a layer, µs"], lines) + conditions(meta) if lines else NOT_MEASURED


def roof() -> str:
    """The measured ceilings that floors are counted from."""
    meta, rows = read(GPU, "kernels")
    lines = [[row["case"], row["metric"], figure(row)] for row in rows if row["bench"] == ROOF]
    if not lines:
        return NOT_MEASURED
    head = ["measured", "unit", "median (20th to 80th percentile)"]
    return markdown(head, lines) + conditions(meta)


def plotted(rows: Iterable[Row]) -> list[Row]:
    return [
        row
        for row in rows
        if row["peer"]
        and row["metric"] == "us"
        and row["case"].split()[0] in SHOWN_ROWS
        and row["case"].split()[-1] not in ("hot", "chain")
    ]


def kernels_title(meta: dict[str, Any]) -> str:
    return f"Kernels on one {meta['gpu']}, time relative to the best peer"


def drawings() -> dict[Path, str | None]:
    """What each plot's file has to hold; None where there are no rows, and no file is to be."""
    meta, rows = kernel_rows()
    shown = plotted(rows)
    found = {KERNELS_PLOT: plots.chart(kernels_title(meta), shown) if shown else None}
    of_forward, forwards = read(GPU, "forward")
    found[FORWARD_PLOT] = forward_tables.forward_plot(forwards, of_forward.get("gpu", "")) or None
    of_ablation, ablated = read(GPU, "ablation")
    found[ABLATION_PLOT] = forward_tables.ablation_plot(ablated, of_ablation.get("gpu", "")) or None
    found[ROOFLINE_PLOT] = prefill_roofline()
    return found


def of_file(
    name: str, head: Sequence[str], lines: Callable[[Sequence[Row]], list[list[str]]]
) -> str:
    """A table of one result file of the GPU."""
    meta, rows = read(GPU, name)
    found = lines(rows)
    return markdown(head, found) + conditions(meta) if found else NOT_MEASURED


def forward() -> str:
    table = of_file("forward", forward_tables.FORWARD_HEAD, forward_tables.forward_lines)
    return pictured(FORWARD_PLOT, "Time of a forward", table)


def ablation() -> str:
    table = of_file("ablation", forward_tables.ABLATION_HEAD, forward_tables.ablation_lines)
    stacks = forward_tables.stock_stacks(read(GPU, "ablation")[1])
    return pictured(ABLATION_PLOT, "The ablation", table) + (f"\n\n{stacks}" if stacks else "")


def forward_headlines() -> str:
    """Forwards and tokens that the README shows."""
    meta, rows = read(GPU, "forward")
    shown = [row for row in rows if row["case"].split(" ")[0] in FORWARD_HEADLINES]
    lines = [[*line[:5], line[6]] for line in forward_tables.forward_lines(shown)]
    of_tokens, tokens = read(GPU, "token")
    tokens = [row for row in tokens if row["case"] in FORWARD_HEADLINES]
    lines += [["a token end to end, " + line[0], *line[1:5], ""] for line in
              forward_tables.token_lines(tokens)]  # fmt: skip
    if not lines:
        return NOT_MEASURED
    head = [*forward_tables.FORWARD_HEAD[:5], "kernels"]
    measured = conditions(meta or of_tokens)
    if meta and tokens and of_tokens != meta:
        measured += f"\n\nTokens end to end: {conditions(of_tokens).strip()}"
    return markdown(head, lines) + measured


def ablation_picture() -> str:
    drawn = drawings().get(ABLATION_PLOT)
    return f"![The ablation](docs/images/{ABLATION_PLOT.name})" if drawn else NOT_MEASURED


def pictured(path: Path, title: str, table: str) -> str:
    drawn = drawings().get(path)
    return f"![{title}](images/{path.name})\n\n{table}" if drawn else table


def forward_kernels(case: str, checkpoint: str) -> str:
    return of_file(
        "forward_kernels",
        forward_tables.KERNELS_HEAD,
        lambda rows: forward_tables.kernel_lines(rows, case, checkpoint),
    )


def significant(row: Row | None) -> str:
    return "" if row is None else f"{row['median']:.4g}"


def training() -> str:
    """flint-tiny's held-out loss while it was trained, and the final figures."""
    if not TRAINING_LOG.is_file():
        return NOT_MEASURED
    log = json.loads(TRAINING_LOG.read_text(encoding="utf-8"))
    lines = []
    for stage, title in (("training", "BF16"), ("distillation", "NVFP4, BF16 as teacher")):
        for point in thinned(log[stage], 8):
            lines.append(
                [
                    title,
                    str(point["step"]),
                    f"{point['tokens'] / 1e6:.1f} M",
                    f"{point['validation_loss']:.4f}",
                    f"{point['held_out_loss']:.4f}",
                ]
            )
    head = ["stage", "step", "tokens", "validation loss", "held-out loss"]
    final = log["final"]
    perplexities = [
        [title, *(f"{final[name][part]['perplexity']:.3f}" for part in ("validation", "held_out"))]
        for name, title in TRAINED.items()
    ]
    ratio = final["nvfp4_over_bf16_held_out_perplexity"]
    return "\n\n".join(
        [
            markdown(head, lines),
            markdown(["weights", "validation perplexity", "held-out perplexity"], perplexities),
            f"The held-out perplexity of NVFP4 is {ratio:.4f} times that of BF16. "
            f"({log['parameters']:,} parameters; {log['corpus']['source']}; {log['device']}, "
            f"torch {log['torch']}, {log['date'][:10]}, {log['total_seconds']:.0f} s in all.)",
        ]
    )


def thinned(points: list[Row], count: int) -> list[Row]:
    """At most `count` of the points, the first and the last among them."""
    if len(points) <= count:
        return points
    steps = [index * (len(points) - 1) // (count - 1) for index in range(count)]
    return [points[step] for step in steps]


def wheel() -> str:
    """How large the wheel is, and what takes the room."""
    meta, rows = read("cpu", "wheel")
    if not rows:
        return NOT_MEASURED
    lines = [[row["case"], f"{row['median']:.1f}"] for row in rows]
    built = f"Built {meta['date']} with {meta['compiler']}"
    if meta["cuda_compiler"]:
        built += f" and nvcc, {meta['cuda_compiler']}"
    return markdown(["", "MB"], lines) + f"\n\n{built}; commit {meta['commit'][:12]}."


def wheel_tests() -> str:
    """Where an installed wheel was tested last, far from the tree, and how many tests passed."""
    lines = []
    for machine in ("cpu", GPU):
        meta, rows = read(machine, "wheel_tests")
        for case in dict.fromkeys(row["case"] for row in rows):
            counts = {row["metric"]: row["median"] for row in rows if row["case"] == case}
            numbers = [f"{counts[metric]:,.0f}" for metric in ("tests", "failures")]
            run = f"{meta['date']}, {meta['commit'][:12]}"
            lines.append([case, meta["gpu"] or "the CPU", *numbers, run])
    head = ["", "on", "tests passed", "failures", "run, commit"]
    return markdown(head, lines) if lines else NOT_MEASURED


TABLES: dict[str, Callable[[], str]] = {
    "ablation": ablation,
    "long-run": partial(
        of_file, "long_run", forward_tables.LONG_RUN_HEAD, forward_tables.long_run_lines
    ),
    "ablation-picture": ablation_picture,
    "forward": forward,
    "forward-headlines": forward_headlines,
    **{
        f"forward-kernels-{checkpoint}-{case.partition('=')[0]}": partial(
            forward_kernels, case, checkpoint
        )
        for checkpoint in CHECKPOINTS
        for case in forward_tables.KERNELS_OF
    },
    "load": partial(of_file, "load", ("", "unit", "figure"), forward_tables.load_lines),
    "memory": partial(
        of_file, "validate_full", forward_tables.MEMORY_HEAD, forward_tables.memory_lines
    ),
    "token": partial(of_file, "token", forward_tables.TOKEN_HEAD, forward_tables.token_lines),
    "validate-full": partial(
        of_file, "validate_full", forward_tables.VALIDATION_HEAD, forward_tables.validation_lines
    ),
    "attention": attention,
    "attention-prefill": attention_prefill,
    "cpu": cpu,
    **{f"decode-kernels-{name}": partial(decode_kernels, name) for name in CHECKPOINTS},
    "generate-gpu": partial(generate, GPU),
    **{f"op-{name}": partial(family, name) for name in FAMILIES},
    "kernel-headlines": kernel_headlines,
    "kernels": kernels,
    "layer-chain": layer_chain,
    "prefill-kernels": prefill_kernels,
    "roof": roof,
    "scratch": scratch,
    "sweep": sweep_table,
    "training": training,
    "validate": partial(validate, "cpu"),
    "validate-gpu": partial(validate, GPU),
    "wheel": wheel,
    "wheel-tests": wheel_tests,
}


def main() -> None:
    for path, drawing in drawings().items():
        if drawing is None:
            path.unlink(missing_ok=True)
        else:
            path.write_text(drawing, encoding="utf-8")
    for path in documents():
        text = path.read_text(encoding="utf-8")
        path.write_text(updated(text), encoding="utf-8")


if __name__ == "__main__":
    main()
