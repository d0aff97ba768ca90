"""Draws docs/images/layer.svg: the seven kernels of a Mixture-of-Experts layer at decode.

    python docs/draw_layer.py

The bytes are counted from the config of the 39.8B model, NVFP4 weights, one request.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from flint_kernels.model.config import FlintConfig

PATH = Path(__file__).parent / "images" / "layer.svg"

WIDTH, TOP = 900, 92
BOX_X, BOX_WIDTH, BOX_HEIGHT, GAP = 112, 540, 58, 34
RESIDUAL_X = 56
CACHE_X, CACHE_WIDTH = 706, 172

# An opaque card, so that the picture reads the same on a light page and on a dark one.
STYLE = """
  text { font-family: Helvetica, Arial, 'DejaVu Sans', sans-serif; fill: #1f2328; }
  .title { font-size: 17px; font-weight: bold; }
  .note { font-size: 12px; fill: #57606a; }
  .op { font-family: Menlo, Consolas, 'DejaVu Sans Mono', monospace; font-size: 13px;
        font-weight: bold; }
  .body { font-size: 12.5px; }
  .number { font-size: 14px; font-weight: bold; fill: #ffffff; }
  .bytes { font-size: 12px; fill: #7a4100; }
  .card { fill: #ffffff; stroke: #d0d7de; }
  .box { fill: #f6f8fa; stroke: #8c959f; }
  .pill { fill: #fff1e0; stroke: #e0a96d; }
  .disc { fill: #0b57a4; }
  .cache { fill: #e6f4ea; stroke: #5a9a6e; }
  .flow { stroke: #57606a; stroke-width: 1.5; fill: none; }
  .residual { stroke: #0b57a4; stroke-width: 4; fill: none; }
  .join { stroke: #0b57a4; stroke-width: 1.5; fill: none; }
  .kv { stroke: #5a9a6e; stroke-width: 1.5; fill: none; }
"""


@dataclass(frozen=True)
class Kernel:
    op: str
    does: str
    weight_bytes: int
    passes_on: str


def nvfp4_bytes(rows: int, columns: int) -> int:
    """Half a byte a code, and one scale byte for 16 codes."""
    return rows * columns // 2 + rows * columns // 16


def kernels(config: FlintConfig) -> list[Kernel]:
    hidden, heads, dim = config.hidden_size, config.num_attention_heads, config.head_dim
    top_k, experts = config.num_experts_per_tok, config.num_experts
    inner, shared = config.moe_intermediate_size, config.shared_expert_intermediate_size
    return [
        Kernel(
            "fused_add_rms_norm",
            "adds the residual, norms the sum",
            hidden * 2,
            f"x [M, {hidden}]",
        ),
        Kernel(
            "nvfp4_qkv_norm_rope_kv_write",
            "q, k, v projections; q/k norm; RoPE; writes K and V",
            nvfp4_bytes(sum(config.qkv_sizes), hidden),
            f"q [M, {heads}, {dim}]",
        ),
        Kernel(
            "attention_decode",
            "paged keys and values, window, sinks",
            0,
            f"[M, {heads * dim}]",
        ),
        Kernel(
            "nvfp4_linear",
            "output projection",
            nvfp4_bytes(hidden, heads * dim),
            f"[M, {hidden}]",
        ),
        Kernel(
            "fused_add_rms_norm_router_topk",
            f"adds the residual, norms; router; top {top_k} of {experts} experts",
            experts * hidden * 2,
            f"x [M, {hidden}], {top_k} expert ids and weights a token",
        ),
        Kernel(
            "nvfp4_moe_gate_up",
            f"gate, up and SiLU of {top_k} experts and of the shared expert",
            nvfp4_bytes(2 * (top_k * inner + shared), hidden),
            f"[M, {top_k}, {inner}] and [M, {shared}]",
        ),
        Kernel(
            "nvfp4_moe_down",
            "their down projections, weighted sum, shared expert added",
            nvfp4_bytes(hidden, top_k * inner + shared),
            f"[M, {hidden}], to the next layer's first kernel",
        ),
    ]


def amount(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.0f} KB"


def text(x: float, y: float, css: str, content: str, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" class="{css}" text-anchor="{anchor}">{escape(content)}</text>'


def line(css: str, path: str, marker: str = "") -> str:
    end = f' marker-end="url(#{marker})"' if marker else ""
    return f'<path class="{css}" d="{path}"{end}/>'


def box_top(index: int) -> int:
    return TOP + index * (BOX_HEIGHT + GAP)


def draw_kernel(index: int, kernel: Kernel, last: bool) -> list[str]:
    y = box_top(index)
    parts = [
        f'<rect class="box" x="{BOX_X}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6"/>',
        f'<circle class="disc" cx="{BOX_X + 26}" cy="{y + BOX_HEIGHT / 2}" r="14"/>',
        text(BOX_X + 26, y + BOX_HEIGHT / 2 + 5, "number", str(index + 1), "middle"),
        text(BOX_X + 52, y + 24, "op", kernel.op),
        text(BOX_X + 52, y + 44, "body", kernel.does),
    ]
    if kernel.weight_bytes:
        x = BOX_X + BOX_WIDTH - 78
        parts += [
            f'<rect class="pill" x="{x}" y="{y + 17}" width="66" height="24" rx="12"/>',
            text(x + 33, y + 33, "bytes", amount(kernel.weight_bytes), "middle"),
        ]
    x, bottom = BOX_X + 200, y + BOX_HEIGHT
    length = GAP - 8 if not last else GAP - 6
    parts += [
        line("flow", f"M {x} {bottom} v {length}", "arrow"),
        text(x + 12, bottom + 21, "note", kernel.passes_on),
    ]
    return parts


def draw_residual(count: int) -> list[str]:
    start, end = TOP - 22, box_top(count - 1) + BOX_HEIGHT + GAP
    parts = [
        line("residual", f"M {RESIDUAL_X} {start} V {end}"),
        text(RESIDUAL_X, start - 8, "note", "residual", "middle"),
    ]
    for index in (0, 4):  # the two fused adds read it and write it back
        y = box_top(index) + BOX_HEIGHT / 2
        parts.append(line("join", f"M {RESIDUAL_X} {y - 8} H {BOX_X - 7}", "join-arrow"))
        parts.append(line("join", f"M {BOX_X} {y + 8} H {RESIDUAL_X + 9}", "join-arrow"))
    return parts


def draw_cache(config: FlintConfig) -> list[str]:
    top, bottom = box_top(1), box_top(2) + BOX_HEIGHT
    middle, right = (top + bottom) / 2, BOX_X + BOX_WIDTH
    token = 2 * config.num_key_value_heads * config.head_dim * 2
    centre = CACHE_X + CACHE_WIDTH / 2
    return [
        f'<rect class="cache" x="{CACHE_X}" y="{top}" width="{CACHE_WIDTH}" '
        f'height="{bottom - top}" rx="6"/>',
        text(centre, middle - 22, "op", "paged KV cache", "middle"),
        text(centre, middle, "body", f"{token} bytes a token", "middle"),
        text(centre, middle + 18, "body", "full layer: all tokens", "middle"),
        text(centre, middle + 36, "body", f"window layer: last {config.sliding_window}", "middle"),
        line("kv", f"M {right} {top + 22} H {CACHE_X - 7}", "kv-arrow"),
        text((right + CACHE_X) / 2, top + 15, "note", "write", "middle"),
        line("kv", f"M {CACHE_X} {bottom - 22} H {right + 7}", "kv-arrow"),
        text((right + CACHE_X) / 2, bottom - 29, "note", "read", "middle"),
    ]


def marker(name: str, colour: str) -> str:
    return (
        f'<marker id="{name}" viewBox="0 0 8 8" refX="2" refY="4" markerWidth="6" '
        f'markerHeight="6" orient="auto"><path d="M 0 0 L 8 4 L 0 8 z" fill="{colour}"/></marker>'
    )


def drawing() -> str:
    config = FlintConfig.flint_40b()
    rows = kernels(config)
    total = sum(kernel.weight_bytes for kernel in rows)
    height = box_top(len(rows) - 1) + BOX_HEIGHT + GAP + 44
    note = (
        f"M requests, one token each. Orange: weights read, {amount(total)} in all for one request."
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" role="img">',
        "<title>The seven kernels of a decode layer</title>",
        f"<style>{STYLE}</style>",
        "<defs>",
        marker("arrow", "#57606a"),
        marker("join-arrow", "#0b57a4"),
        marker("kv-arrow", "#5a9a6e"),
        "</defs>",
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        text(BOX_X, 34, "title", "One Mixture-of-Experts layer at decode, NVFP4: seven ops"),
        text(BOX_X, 54, "note", note),
    ]
    parts += draw_residual(len(rows))
    parts += draw_cache(config)
    for index, kernel in enumerate(rows):
        parts += draw_kernel(index, kernel, index == len(rows) - 1)
    dense = "5 fused_add_rms_norm, 6 nvfp4_linear_silu_and_mul, 7 nvfp4_linear"
    parts.append(text(BOX_X, height - 20, "note", f"A dense layer is seven ops too: {dense}."))
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(drawing(), encoding="utf-8")
