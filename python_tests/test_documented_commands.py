"""Every command that README, CONTRIBUTING and docs name is run: here, or by the test named here.

Commands are the lines of fenced blocks without a language, and code spans, that `PROGRAMS`
takes for one. A command that no rule knows fails the test, and so does a rule that knows none.
"""

from __future__ import annotations

import importlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from flint_kernels import cli
from flint_kernels.loading.source import packaged_folder
from microbench import cpu

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = re.compile(
    r"(flint-kernels|make|pip|python[\d.]*) |docs/\S+\.sh( |$)|\.ci/\w+$|[A-Z_]{2,}=\S+ "
)

# Longer work than a test may do, made shorter; what a document says with a path is given one.
SHORTER = {
    "generate": ["--max-new-tokens", "4"],
    "validate": ["--tokens", "64", "--context", "32"],
    "bench": ["--repetitions", "1", "--tokens", "8"],
}

# What begins so is run by that test file, which has to have the text.
ELSEWHERE = {
    ".ci/run": (".ci/run", "make test"),  # it is what runs this
    "PYTHONPATH=": ("python_tests/test_compile.py", "build_load_layer.sh"),
    "docs/examples/build_load_layer.sh": ("python_tests/test_compile.py", "build_load_layer.sh"),
    "pip install dist/flint_kernels-*.whl": ("python_tests/test_wheel.py", '"pip", "install", '),
    "pip install 'vllm==0.33.*'": ("Makefile", "'vllm==0.33.*'"),  # `make vllm-test`
    "python docs/examples/": ("python_tests/test_compile.py", 'run_example("export_layer.py"'),
    "python docs/generate_ops.py": ("python_tests/test_docs.py", '"generate_ops.py"'),
    "python docs/generate_architectures.py": (
        "python_tests/test_architectures.py", "generate_architectures.py"),
    "python docs/generate_faults.py": ("python_tests/test_fault_cases.py", "generate_faults.py"),
    "python -m microbench.tables": ("python_tests/test_docs.py", '"tables.py"'),
    "python -m microbench.linear_plans": ("python_tests/test_linear_plans.py", ".header("),
    "python3.13 -m flint_kernels.flint_tiny.corpus": (
        "python_tests/test_flint_tiny_training.py", "corpus.build("),
    "python -m flint_kernels.flint_tiny.train": (
        "python_tests/test_flint_tiny_training.py", "train.run("),
    "python -m flint_kernels.flint_tiny.export": (
        "python_tests/test_flint_tiny_training.py", "export.export("),
    "python -m flint_kernels.integrations.transformers serve": (
        "python_tests/test_transformers_serve.py", '"flint_kernels.integrations.transformers"'),
}  # fmt: skip


def commands() -> list[str]:
    found: dict[str, None] = {}
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        lines = [line for kind, block in blocks if not kind for line in block.splitlines()]
        prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
        spans = re.findall(r"`([^`]+)`", prose)
        for line in lines + spans:
            command = " ".join(line.split(" #")[0].split())
            if PROGRAMS.match(command):
                found[command] = None
    return list(found)


COMMANDS = commands()


def of(program: str) -> list[str]:
    chosen = [command for command in COMMANDS if command.startswith(program + " ")]
    return [command for command in chosen if not elsewhere(command)]


def elsewhere(command: str) -> list[str]:
    return [start for start in ELSEWHERE if command.startswith(start)]


def test_every_command_has_a_test() -> None:
    known = {*of("flint-kernels"), *of("make"), *of("pip")}
    unknown = [command for command in COMMANDS if command not in known and not elsewhere(command)]
    assert unknown == [], "a test has to run them, and ELSEWHERE to name it"
    for start, (file, text) in ELSEWHERE.items():
        assert any(command.startswith(start) for command in COMMANDS), f"no document has {start}"
        assert text in (ROOT / file).read_text(encoding="utf-8"), f"{file} does not run {start}"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with what the commands name, in which they run in the order of the documents."""
    for name, kind in {"path/to": "flint-tiny", "path/to/bf16": "flint-tiny-bf16"}.items():
        source = packaged_folder(kind)
        assert source is not None
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        for file in source.iterdir():
            target = "flint-nvfp4.gguf" if file.suffix == ".gguf" else file.name
            (tmp_path / name / target).symlink_to(file)
    (tmp_path / "path/to/checkpoint").symlink_to(tmp_path / "path/to/bf16")
    (tmp_path / "text.txt").write_text("import os\n\ndef read(path):\n    return path\n" * 20)
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    return tmp_path


def stub_of_a_run(*arguments: str) -> str:
    if arguments[0] == "-c":
        return "0.1"
    speed = {"first_token_seconds": 0.1, "tokens_per_second": 100.0}
    return json.dumps({"tokens": [1] * 8, **speed})


def test_flint_kernels(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr(cpu, "python", stub_of_a_run)
    for command in of("flint-kernels"):
        name, *arguments = shlex.split(command)[1:]
        status = cli.main([name, *arguments, *SHORTER.get(name, [])])
        captured = capsys.readouterr()
        assert status == 0 and captured.out, f"{command}: {captured.err}"


def test_make() -> None:
    """A dry run: the targets, their variables and all that they need are there."""
    for command in of("make"):
        words = [word for word in shlex.split(command) if not word.startswith("VENV=")]
        run([*words, "--dry-run", "VENV=", f"PYTHON={sys.executable}"])


def test_pip() -> None:
    """A dry run without an index: the package as it is, and that its extras are there."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    options = ["--dry-run", "--no-index", "--no-deps", "--quiet", "--disable-pip-version-check"]
    for command in of("pip"):
        words = shlex.split(command)
        assert words[:2] == ["pip", "install"]
        for extra in re.findall(r"\[(\w+)\]", command):
            assert re.search(rf"^{extra} = \[", text, re.MULTILINE), command
        run([sys.executable, "-m", *words, *options])


def run(command: list[str]) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"


def test_the_options_of_long_work_exist(capsys: pytest.CaptureFixture[str]) -> None:
    """flint-tiny's training takes a GPU and hours; its parts are run small elsewhere."""
    for command in COMMANDS:
        if "flint_kernels.flint_tiny." not in command:
            continue
        words = shlex.split(command)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
            patch.setattr(sys, "argv", [words[2], "--help"])
            importlib.import_module(words[2]).main()
        usage = capsys.readouterr().out
        assert all(word in usage for word in words if word.startswith("--")), command
