"""The block of docs/engines.md against the module: the same layer, on a cache of another layout."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from flint_kernels.model import Launch
from flint_kernels.model.flint import Layer

PAGE = Path(__file__).parents[1] / "docs" / "engines.md"
LENGTHS, TOKENS, PAGE_SIZE = [40, 3], 3, 16


@pytest.fixture(scope="module")
def block(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    [code] = re.findall(
        r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE
    )
    imported = [
        alias.name if isinstance(node, ast.Import) else node.module
        for node in ast.walk(ast.parse(code))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    ]
    assert {name for name in imported if "flint" in name} == {"flint_kernels"}
    assert "from flint_kernels import ops" in code
    script = tmp_path_factory.mktemp("block") / "block.py"
    script.write_text(code, encoding="utf-8")
    return runpy.run_path(str(script))


def weights(layer: Layer, cos_sin: Tensor, block: dict[str, Any]) -> Any:
    """The module's tensors as the block names them."""
    attention, mlp = layer.self_attn, layer.mlp
    experts, shared = mlp.experts, mlp.shared_expert
    return block["Layer"](
        input_norm=layer.input_layernorm.weight,
        qkv=attention.qkv_proj.operands(),
        q_norm=attention.q_norm.weight,
        k_norm=attention.k_norm.weight,
        cos_sin=cos_sin if attention.rope else None,
        sinks=attention.sinks,
        window=attention.window,
        o=attention.o_proj.operands(),
        post_norm=layer.post_attention_layernorm.weight,
        router=mlp.gate.weight,
        w13=(experts.w13, experts.w13_scale, experts.w13_scale_2),
        w2=(experts.w2, experts.w2_scale, experts.w2_scale_2),
        shared_w13=shared.gate_up_proj.operands(),
        shared_w2=shared.down_proj.operands(),
    )


@pytest.mark.parametrize("index", [1, 2, 3])  # a full layer, a window layer, a full one with RoPE
def test_the_block_computes_what_the_module_does(index: int, block: dict[str, Any]) -> None:
    model = tiny.tiny_model()
    layer, config = model.layers[index], model.config
    hidden, k = config.hidden_size, config.num_experts_per_tok
    engine = weights(layer, model.cos_sin, block)
    cache = model.make_cache(2, tokens=256)
    requests = [cache.add() for _ in LENGTHS]
    heads, width = config.num_key_value_heads, config.head_dim
    kv = torch.zeros(16, 2, PAGE_SIZE, heads, width, dtype=torch.bfloat16)
    table = torch.randperm(16, generator=torch.Generator().manual_seed(1)).view(2, 8).int()
    generator = torch.Generator().manual_seed(2)
    buffers = {
        "normed": (hidden,), "residual": (hidden,), "o": (hidden,), "weights": (k,), "ids": (k,),
        "q": (config.num_attention_heads, width), "mixed": (config.num_attention_heads, width),
        "routed": (k, config.moe_intermediate_size),
        "shared": (config.shared_expert_intermediate_size,),
    }  # fmt: skip
    dtypes = {"weights": torch.float32, "ids": torch.int32}
    b = {
        name: torch.empty(2, *shape, dtype=dtypes.get(name, torch.bfloat16))
        for name, shape in buffers.items()
    } | {"workspace": cache.workspace}

    def step(context: list[int], new: list[int]) -> Any:
        places = [(r, p) for r, c in enumerate(context) for p in range(c, c + new[r])]
        slots = [int(table[r, p // PAGE_SIZE]) * PAGE_SIZE + p % PAGE_SIZE for r, p in places]
        positions, ends = [p for _, p in places], torch.tensor(context) + torch.tensor(new)
        starts = torch.tensor([0, *new]).cumsum(0)
        fields = (positions, slots, table, ends, context, starts)
        return block["Step"](*(torch.as_tensor(f).int() for f in fields), max(new))

    context = [0] * len(LENGTHS)
    for new in [LENGTHS] + [[1] * len(LENGTHS)] * TOKENS:
        x, residual = torch.randn(2, sum(new), hidden, generator=generator).bfloat16()
        if new == LENGTHS:
            planned = cache.plan(requests, new)
            want = layer.prefill(x, residual, model.cos_sin, planned, cache)
            got = block["prefill"](engine, x, residual, step(context, new), kv, cache.workspace, k)
        else:
            decoded = cache.plan_decode(requests)
            launch = Launch(cache.workspace)
            want = layer.decode(x, residual, model.cos_sin, decoded, cache, launch)
            got = block["decode"](engine, x.clone(), residual.clone(), step(context, new), kv, b, k)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
        assert want[0].any()
        context = [c + n for c, n in zip(context, new, strict=True)]
