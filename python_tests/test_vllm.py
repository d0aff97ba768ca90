"""The plug-in for vLLM, against vLLM itself on the CPU: as far as that goes without a GPU.

`make vllm-test` runs it in an environment of its own: vLLM 0.33 pins torch and Transformers. Its
CUDA build finds no device here, so the CPU platform is put in place; the runner and kernels do
not run. What does: registration, the config, construction on the meta device, the names of all
weights, loading, and steps through vLLM's own forward context, metadata and cache specifications.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from flint_kernels.integrations import vllm as plugin
from flint_kernels.loading import load
from flint_kernels.loading.export import save_bf16, save_gguf, save_modelopt
from flint_kernels.loading.source import packaged_folder

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module", autouse=True)
def _cpu_platform() -> Iterator[None]:
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()
    yield


@pytest.fixture(scope="module", autouse=True)
def _registered(_cpu_platform: None) -> None:
    plugin.register()
    plugin.register()  # vLLM may load a plug-in more than once


@pytest.fixture(scope="module")
def _distributed(_registered: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    store = tmp_path_factory.mktemp("store") / "store"
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
        initialize_model_parallel(1, 1)
        yield
        cleanup_dist_env_and_memory()


def vllm_config(folder: Path, **changes: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    arguments = {
        "model": str(folder),
        "hf_overrides": {"architectures": [plugin.ARCHITECTURE]},
        "dtype": "bfloat16",
        "max_model_len": 512,
        "enforce_eager": True,
        "block_size": 16,
        **changes,
    }
    return EngineArgs(**arguments).create_engine_config()


def build(config: Any, device: str = "cpu") -> Any:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import get_model_architecture, initialize_model

    model_class, architecture = get_model_architecture(config.model_config)
    assert architecture == plugin.ARCHITECTURE
    config.compilation_config.static_forward_context.clear()
    with torch.device(device), set_current_vllm_config(config):
        return initialize_model(config, model_class=model_class)


def folder_of(name: str) -> Path:
    folder = packaged_folder(name)
    assert folder is not None
    return folder


def test_vllm_is_the_version_that_this_was_written_for() -> None:
    assert importlib.metadata.version("vllm").startswith("0.33.")


def test_vllm_finds_the_entry_point_and_registers_by_it(tmp_path: Path) -> None:
    """In a process of its own, away from the source tree, as vLLM's own processes do."""
    code = (
        "from vllm.plugins import load_general_plugins as f; f(); from vllm import ModelRegistry; "
    )
    code += f"m = ModelRegistry.models; print(m[{plugin.ARCHITECTURE!r}].module_name, "
    code += f"m[{plugin.REPLACED!r}].module_name)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    ours, own = done.stdout.splitlines()[-1].split()
    assert ours == "flint_kernels.integrations.vllm.model"
    assert own.startswith("vllm.")  # no Hopper here: vLLM's own model keeps its name


def test_on_hopper_it_takes_the_place_of_vllm_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import ModelRegistry
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    before = dict(ModelRegistry.models)
    kind = type(current_platform)
    monkeypatch.setattr(kind, "is_cuda", lambda self: True)
    try:
        for capability, taken in ((DeviceCapability(9, 0), True), (DeviceCapability(10, 0), False)):
            ModelRegistry.models.update(before)
            monkeypatch.setattr(
                kind, "get_device_capability", lambda *_, found=capability, **__: found
            )
            plugin.register()
            module = ModelRegistry.models[plugin.REPLACED].module_name
            assert module.startswith("flint_kernels.") == taken
    finally:
        ModelRegistry.models.update(before)


@pytest.mark.usefixtures("_distributed")
@pytest.mark.parametrize("name", ["flint-tiny", "flint-tiny-bf16"])
def test_it_is_built_on_the_meta_device_and_names_every_weight(name: str) -> None:
    from vllm.model_executor.models.interfaces_base import is_text_generation_model
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    config = vllm_config(folder_of(name))
    model = build(config, "meta")
    assert is_text_generation_model(model)
    want = load(name)
    parameters = dict(model.named_parameters())
    assert all(parameter.is_meta for parameter in parameters.values())
    assert {key.removeprefix("model."): value.shape for key, value in parameters.items()} == {
        key: value.shape for key, value in want.named_parameters()
    }
    contexts = config.compilation_config.static_forward_context
    assert len(contexts) == want.config.num_hidden_layers
    for layer, cache in enumerate(model.caches):
        spec = cache.get_kv_cache_spec(config)
        window = want.config.window(layer)
        assert isinstance(spec, SlidingWindowSpec if window else FullAttentionSpec)
        assert getattr(spec, "sliding_window", None) in (window, None)
        assert spec.block_size % 16 == 0


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """flint-tiny in each of the three forms, with the tokenizer beside it."""
    root = tmp_path_factory.mktemp("checkpoints")
    savers = {
        "gguf": lambda folder: save_gguf(load("flint-tiny"), folder / "model.gguf"),
        "modelopt": lambda folder: save_modelopt(load("flint-tiny"), folder),
        "bf16": lambda folder: save_bf16(load("flint-tiny-bf16"), folder),
    }
    for name, save in savers.items():
        save(root / name)
        for file in ("config.json", "tokenizer.json"):
            shutil.copy(folder_of("flint-tiny") / file, root / name / file)
    return {name: root / name for name in savers}


@pytest.mark.usefixtures("_distributed")
@pytest.mark.parametrize("form", ["gguf", "modelopt", "bf16"])
def test_steps_give_this_library_s_own_logits(form: str, folders: dict[str, Path]) -> None:
    """A profiling run, a prefill, a mixed step and decode steps, padded ones too, on a cache in
    vLLM's form; every step's logits are to the bit those of `Flint` on its own cache."""
    from vllm.forward_context import set_forward_context
    from vllm.v1.attention.backend import CommonAttentionMetadata

    config = vllm_config(folders[form])
    model = build(config)
    assert model.load_weights(iter(())) == {name for name, _ in model.named_parameters()}
    own = load(folders[form])
    for (name, got), want in zip(model.model.named_parameters(), own.parameters(), strict=True):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), name

    page, pages, width = 16, 64, 32
    kv_heads, head_dim = own.config.num_key_value_heads, own.config.head_dim
    tables = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).view(2, width).int()
    builders = {}
    for cache in model.caches:
        cache.kv_cache = torch.zeros(pages, kv_heads, page, 2 * head_dim, dtype=torch.bfloat16)
        builder = cache.get_attn_backend().get_builder_cls()
        spec = cache.get_kv_cache_spec(config)
        builders[cache.layer_name] = builder(spec, [cache.layer_name], config, torch.device("cpu"))
    held = own.make_cache(2, tokens=2 * 512)
    requests = [held.add(), held.add()]

    def run(ids: torch.Tensor, new: list[int], padding: int) -> torch.Tensor:
        """vLLM's step of `new` tokens a request; a decode step pads requests, another one rows."""
        lengths = [held.length(request) for request in requests]
        context = [length - count for length, count in zip(lengths, new, strict=True)]
        decode = max(new) == 1
        positions = torch.cat([torch.arange(c, c + n) for c, n in zip(context, new, strict=True)])
        rows = [r for r, n in enumerate(new) for _ in range(n)]
        slots = tables[rows, positions // page].long() * page + positions % page
        pad = torch.zeros(padding, dtype=torch.int64)
        zeros = [0] * padding if decode else []
        starts = torch.tensor([0, *new]).cumsum(0).tolist()
        if decode:
            starts += [starts[-1] + 1 + index for index in range(padding)]
        common = CommonAttentionMetadata(
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            query_start_loc_cpu=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor([*lengths, *zeros], dtype=torch.int32),
            num_reqs=len(new) + len(zeros),
            num_actual_tokens=len(positions) + len(zeros),
            max_query_len=max(new),
            max_seq_len=max(lengths),
            block_table_tensor=torch.cat([tables, tables[:1].expand(len(zeros), -1)]),
            slot_mapping=torch.cat([slots, pad - 1]),
        )
        metadata = {name: builder.build(0, common) for name, builder in builders.items()}
        padded = torch.cat([ids, pad])
        with set_forward_context(metadata, config, num_tokens=len(padded)):
            hidden = model(padded, torch.cat([positions, pad]))
        assert hidden.shape == (len(padded), own.config.hidden_size)
        return model.compute_logits(hidden[: len(ids)])

    with torch.inference_mode():
        with set_forward_context(None, config, num_tokens=30):
            assert (
                model(torch.zeros(30, dtype=torch.int64), torch.zeros(30).long()).isfinite().all()
            )
        tokens = tiny.random_tokens(400, seed=3)
        done = 0
        for new, padding in (([100, 7], 0), ([1, 20], 5), ([1, 1], 0), ([1, 1], 6), ([30, 1], 0)):
            ids = tokens[done : done + sum(new)]
            done += sum(new)
            if max(new) == 1:
                want = own.logits(own.decode(ids, held.plan_decode(requests), held))
            else:
                want = own.logits(own.prefill(ids, held.plan(requests, new), held))
            assert torch.equal(run(ids, new, padding), want)


@pytest.mark.usefixtures("_distributed")
def test_what_is_not_served_is_an_error(tmp_path: Path) -> None:
    from flint_kernels.integrations.vllm.model import check

    config = vllm_config(folder_of("flint-tiny"))
    check(config)
    for owner, name, value, message in (
        (config.parallel_config, "tensor_parallel_size", 2, "tensor_parallel_size: got 2; want 1"),
        (config.model_config, "dtype", torch.float16, "dtype: got torch.float16; want"),
        (config.cache_config, "cache_dtype", "fp8", "kv_cache_dtype: got 'fp8'; want 'auto'"),
        (config.model_config, "model", "someone/flint", "model: got 'someone/flint', which is no"),
    ):
        before = getattr(owner, name)
        object.__setattr__(owner, name, value)
        with pytest.raises(ValueError, match=message):
            check(config)
        object.__setattr__(owner, name, before)


def test_the_config_is_read_by_vllm(tmp_path: Path) -> None:
    config = vllm_config(folder_of("flint-tiny"))
    text = json.loads((folder_of("flint-tiny") / "config.json").read_text("utf-8"))
    assert config.model_config.hf_config.model_type == "flint"
    assert config.model_config.hf_config.num_experts == text["num_experts"]
