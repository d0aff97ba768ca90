"""torch.compile and torch.export of the module: what is in the graphs, and how many there are."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tiny
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from flint_kernels.model import Batch, Flint, FlintConfig, PagedKVCache, mark_any_size

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
PAGES = 157  # of the full layer's pool; the window layer's ring has 8 x 3
MOST = 8  # requests at once
CONTEXTS = (1, 17, 40, 200)

Step = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    """Each test compiles anew, so that it sees its graphs and none of another test's."""
    torch.compiler.reset()
    counters.clear()
    with torch._inductor.config.patch(force_disable_caches=True):
        yield


def two_layers() -> Flint:
    """A dense window layer with RoPE and a full MoE layer without."""
    fields = tiny.CONFIG.to_dict() | {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "no_rope_layer_indices": [1],
    }
    return tiny.synthetic(FlintConfig.from_dict(fields), seed=2)


def make_cache(model: Flint) -> PagedKVCache:
    return model.make_cache(MOST, tokens=PAGES * 16)


def tensors(cache: PagedKVCache) -> list[Tensor]:
    return [tensor for layer in cache.layers for tensor in layer]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.Graph]:
    """Graphs as they are after Inductor's last pass over them."""
    from torch._inductor import compile_fx

    seen: list[torch.fx.Graph] = []
    passes = compile_fx._recursive_post_grad_passes

    def record(module: torch.fx.GraphModule, *args: object, **kwargs: object) -> None:
        passes(module, *args, **kwargs)
        seen.append(module.graph)

    monkeypatch.setattr(compile_fx, "_recursive_post_grad_passes", record)
    return seen


def calls(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function"]


def flint_ops(graph: torch.fx.Graph) -> list[str]:
    names = (str(node.target) for node in calls(graph))
    return [name.split(".")[1] for name in names if name.startswith("flint.")]


def cache_copies(graph: torch.fx.Graph) -> list[str]:
    """The nodes that make a tensor of a cache's size."""
    return [str(node.format_node()) for node in calls(graph) if _has_a_cache_s_size(node)]


def _has_a_cache_s_size(node: torch.fx.Node) -> bool:
    if node.target is torch.ops.aten.copy_.default and node.args[0] is node.args[1]:
        return False  # what is left of an in-place write; Inductor generates nothing for it
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dim() == 4 and value.shape[0] in (PAGES, MOST * 3)


def equal_bits(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def all_sizes(step: Step, cache: PagedKVCache) -> list[Tensor]:
    """1 to 8 requests: for each of four lengths a prefill of that many tokens, and a decode step
    behind a context of them; last a prefill of a decode row and a prompt; all logits."""
    logits = []

    def run(ids: Tensor, batch: Batch) -> None:
        mark_any_size(ids, batch)
        with torch.inference_mode():
            logits.append(step(ids, batch, cache))

    for length in CONTEXTS:
        for count in range(1, MOST + 1):
            requests = [cache.add() for _ in range(count)]
            ids = tiny.random_tokens(count * length, seed=count).to(torch.int32)
            batch = cache.plan(requests, [length] * count)
            run(ids, batch._replace(max_query_len=max(CONTEXTS)))
            run(ids[:count].clone(), cache.plan_decode(requests))
            for request in requests[1:]:
                cache.release(request)
            if length != CONTEXTS[-1] or count != MOST:
                cache.release(requests[0])
    batch = cache.plan([requests[0], cache.add()], [1, 16])
    run(tiny.random_tokens(17).to(torch.int32), batch._replace(max_query_len=max(CONTEXTS)))
    return logits


def test_one_graph_for_eight_batch_sizes_and_four_lengths(graphs: list[torch.fx.Graph]) -> None:
    """Zero breaks and zero recompiles, of decode and of prefill, a single request and a single row
    among them. Eager's bits, a cache that keeps its memory and is nowhere copied; and decode runs
    the seven ops of the low-latency path."""
    model = two_layers()
    compiled = torch.compile(model, dynamic=True)  # not fullgraph: breaks are counted
    eager_cache, cache = make_cache(model), make_cache(model)
    pointers = [tensor.data_ptr() for tensor in tensors(cache)]
    want = all_sizes(model, eager_cache)
    got = all_sizes(compiled, cache)
    assert len(got) == 2 * len(CONTEXTS) * MOST + 1
    assert equal_bits(got, want)
    assert equal_bits(tensors(cache), tensors(eager_cache))
    assert all(tensor.any() for tensor in tensors(cache))
    assert [tensor.data_ptr() for tensor in tensors(cache)] == pointers

    assert counters["graph_break"] == {}
    assert counters["stats"]["unique_graphs"] == len(graphs) == 2
    prefill, decode = graphs
    assert cache_copies(prefill) == cache_copies(decode) == []
    assert "attention_prefill" in flint_ops(prefill)
    assert flint_ops(decode) == [
        "rms_norm", "nvfp4_qkv_norm_rope_kv_write", "attention_decode", "nvfp4_linear",
        "fused_add_rms_norm", "nvfp4_linear_silu_and_mul", "nvfp4_linear",
        "fused_add_rms_norm", "nvfp4_qkv_norm_rope_kv_write", "attention_decode", "nvfp4_linear",
        "fused_add_rms_norm_router_topk", "nvfp4_moe_gate_up", "nvfp4_moe_down",
        "fused_add_rms_norm", "nvfp4_lm_head",
    ]  # fmt: skip


def run_example(name: str, *arguments: str | Path) -> list[str]:
    """The lines that a script of docs/examples prints, run by itself."""
    command = [sys.executable, EXAMPLES / name, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The package of `export_layer.py`, and what the layer itself gives."""
    path = tmp_path_factory.mktemp("package") / "layer.pt2"
    return path, run_example("export_layer.py", path)


def test_a_packaged_layer_runs_where_only_the_ops_are_imported(
    package: tuple[Path, list[str]],
) -> None:
    """For 1, 2 and 8 requests, of which the package was made with 2."""
    path, want = package
    assert len(want) == 3
    script = str(EXAMPLES / "load_layer.py")
    code = f"import runpy, sys; runpy.run_path({script!r}, run_name='__main__'); "
    code += "print(*(name for name in sys.modules if name.startswith('flint_kernels.')))"
    output = subprocess.check_output([sys.executable, "-c", code, path], text=True)
    *lines, modules = output.splitlines()
    assert lines == want
    assert "flint_kernels.ops" in modules
    assert "flint_kernels.model" not in modules and "flint_kernels.loading" not in modules


@pytest.mark.slow
def test_a_packaged_layer_runs_from_cpp(package: tuple[Path, list[str]], tmp_path: Path) -> None:
    path, want = package
    loader = tmp_path / "load_layer"
    subprocess.run([EXAMPLES / "build_load_layer.sh", loader, sys.executable], check=True)
    modules = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [loader, path],
        env={**os.environ, "PYTHONPATH": modules},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == want
