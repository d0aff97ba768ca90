"""What the plug-in registers where, with stand-ins for vLLM; test_vllm.py has vLLM itself."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from flint_kernels.integrations import vllm as plugin

MODEL = "flint_kernels.integrations.vllm.model:FlintForCausalLM"
MAKEFILE = Path(__file__).parents[1] / "Makefile"


@pytest.mark.parametrize(
    "cuda, capability, replaced",
    [
        (True, (9, 0), True),
        (True, (10, 0), False),  # vLLM's own kernels are for it
        (True, (8, 0), False),
        (True, None, False),  # no driver
        (False, (9, 0), False),  # another maker's numbers
    ],
)
def test_vllm_s_own_model_is_replaced_on_hopper_alone(
    cuda: bool, capability: tuple[int, int] | None, replaced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    models: dict[str, str] = {}
    backends: dict[str, str] = {}

    def register_backend(name: str, path: str) -> None:
        assert name not in backends  # which vLLM refuses
        backends[name] = path

    platform = SimpleNamespace(
        is_cuda=lambda: cuda,
        get_device_capability=lambda: capability and SimpleNamespace(major=capability[0]),
    )
    stand_ins = {
        "vllm": {"ModelRegistry": SimpleNamespace(register_model=models.__setitem__)},
        "vllm.platforms": {"current_platform": platform},
        "vllm.v1.attention.backends.registry": {
            "AttentionBackendEnum": SimpleNamespace(__members__=backends),
            "register_backend": register_backend,
        },
    }
    for name, attributes in stand_ins.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    for _ in range(2):  # vLLM may load a plug-in more than once in a process
        plugin.register()
    names = {plugin.ARCHITECTURE} | ({plugin.REPLACED} if replaced else set())
    assert models == dict.fromkeys(names, MODEL)
    assert backends == {plugin.BACKEND: "flint_kernels.integrations.vllm.attention.FlintBackend"}


def test_the_version_is_the_one_that_the_documents_name() -> None:
    [version] = re.findall(r"vllm==([\d.]+)\.\*", MAKEFILE.read_text("utf-8"))
    page = (MAKEFILE.parent / "docs" / "vllm.md").read_text("utf-8")
    assert f"vLLM {version} has a Flint" in page and f"vllm=={version}.*" in page
