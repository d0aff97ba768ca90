"""What a file from somewhere cannot do: run code, read outside its folder. And what we depend on.

That it cannot take memory without bound: test_memory.py, test_tokenizer_file.py, and `make fuzz`.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flint_kernels.loading import load, load_tokenizer
from flint_kernels.loading.source import packaged_folder
from flint_kernels.model import FlintConfig

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", "flint_kernels", "fuzz", "microbench", "python_tests")

# Modules whose loading runs what is in the file; and calls that run text, or unpickle.
UNPICKLING = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
RUNNING = {"eval", "exec", "__import__"}
UNPICKLING_CALLS = {
    ("torch", "load"), ("np", "load"), ("numpy", "load"), ("yaml", "load"),
    ("yaml", "unsafe_load"), ("jit", "load"),
}  # fmt: skip
SAFE = {("allow_pickle", False), ("weights_only", True)}


def sources() -> Iterator[Path]:
    yield ROOT / "setup.py"
    for folder in FOLDERS:
        yield from sorted((ROOT / folder).rglob("*.py"))


def dangerous(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in UNPICKLING:
                    yield f"line {node.lineno}: import {alias.name}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in UNPICKLING:
            yield f"line {node.lineno}: from {node.module}"
        elif isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Name) and called.id in RUNNING:
                yield f"line {node.lineno}: {called.id}()"
            if isinstance(called, ast.Attribute):
                holder = called.value
                owner = getattr(holder, "id", getattr(holder, "attr", ""))
                safe = {(k.arg, getattr(k.value, "value", None)) for k in node.keywords} & SAFE
                if (owner, called.attr) in UNPICKLING_CALLS and not safe:
                    yield f"line {node.lineno}: {owner}.{called.attr}()"


@pytest.mark.parametrize("path", list(sources()), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_no_pickle_and_no_code_out_of_text(path: Path) -> None:
    assert not list(dangerous(ast.parse(path.read_text(encoding="utf-8"))))


def test_what_is_dangerous_is_found() -> None:
    text = "import pickle\nfrom dill import loads\ntorch.load(x)\neval('1')\nnp.load(y)"
    assert len(list(dangerous(ast.parse(text)))) == 5
    fine = "json.load(z)\nnp.load(y, allow_pickle=False)\ntorch.load(x, weights_only=True)"
    assert not list(dangerous(ast.parse(fine)))


def test_no_pickle_is_loaded_while_a_checkpoint_is() -> None:
    """An audit hook sees every unpickling, of whatever package."""
    script = (
        "import sys\n"
        "import flint_kernels.loading as loading\n"
        "seen = []\n"
        "sys.addaudithook(lambda event, _: seen.append(event) if 'pickle' in event else None)\n"
        "for name in ('flint-tiny', 'flint-tiny-bf16'):\n"
        "    loading.load(name); loading.load_tokenizer(name)\n"
        "print(seen)"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "[]\n"


# ------------------------------------------------------------------ a hostile config.json

PAYLOADS = (
    {"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}},
    {"_target_": "os.system", "trust_remote_code": True},
    {"torch_dtype": "__import__('os').system('touch hacked')"},
    {"architectures": ["../../evil.Model"], "_name_or_path": "/etc"},
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The packaged checkpoint with a module beside it that leaves a trace where it is imported."""
    source = packaged_folder("flint-tiny")
    assert source
    target = tmp_path / "checkpoint"
    shutil.copytree(source, target)
    (target / "evil.py").write_text("open('hacked', 'w')\nclass Config: pass\nclass Model: pass\n")
    return target


@pytest.mark.parametrize("payload", PAYLOADS, ids=lambda payload: next(iter(payload)))
def test_a_config_cannot_name_code(
    payload: dict[str, object], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **payload}
    path.write_text(json.dumps(config))
    modules = set(sys.modules)
    model = load(folder, max_positions=8)
    load_tokenizer(folder)
    assert model.config == FlintConfig.from_dict(config)
    assert "evil" not in set(sys.modules) - modules
    assert not (folder / "hacked").exists()


def test_only_files_of_the_folder_are_opened(folder: Path) -> None:
    """Of what is opened while it is loaded, nothing lies elsewhere but what Python itself reads."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key in ("weights", "vocab_file", "tokenizer_file", "_name_or_path", "quantization_config"):
        config[key] = "../outside"
    path.write_text(json.dumps(config))
    (folder.parent / "outside").write_text("secret")
    script = (
        "import sys, flint_kernels.loading as loading\n"
        "loading.load('flint-tiny'); loading.load_tokenizer('flint-tiny')\n"
        "opened = []\n"
        "sys.addaudithook(lambda e, a: opened.append(str(a[0])) if e == 'open' else None)\n"
        "loading.load(sys.argv[1]); loading.load_tokenizer(sys.argv[1])\n"
        "print('\\n'.join(opened))"
    )
    command = [sys.executable, "-c", script, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    # A number is a descriptor: of a file that was opened before, under its name.
    opened = {Path(line) for line in done.stdout.splitlines() if not line.isdigit()}
    assert folder / "config.json" in opened
    system = ("/proc/", "/sys/", "/dev/")
    elsewhere = [p for p in opened if folder not in p.parents and not str(p).startswith(system)]
    assert not elsewhere


# ------------------------------------------------------------------ dependencies


def listed() -> dict[str, list[str]]:
    """Requirements of pyproject.toml by table: those of the package under "", then the extras."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r"^dependencies = \[(.*?)^\]", text, re.M | re.S)
    assert found
    tables = {"": found[1]}
    extras = text.split("[project.optional-dependencies]")[1].split("\n[")[0]
    for name, body in re.findall(r"^(\w+) = \[(.*?)\]$", extras, re.M | re.S):
        tables[name] = body
    return {name: re.findall(r'"([^"]+)"', body) for name, body in tables.items()}


def test_dependencies_of_the_package_have_a_lower_bound_and_a_reason() -> None:
    """The lower bound is what the package needs; an upper one only with a known reason. All reasons
    are in docs/faults.md."""
    reasons = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    for table, requirements in listed().items():
        for requirement in requirements:
            name = re.split(r"[\[<>=!~ ]", requirement)[0]
            assert f"`{name}`" in reasons, f"{requirement}: no reason in docs/faults.md"
            if table in ("", "transformers", "serve"):
                assert ">=" in requirement, f"{requirement}: got no lower bound"
