"""Holds the documents to the code: examples run, links and names exist, tables are up to date."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

from flint_kernels import cli, ops
from flint_kernels.ops import REGISTRY

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
CODE_FOLDERS = (".ci", "csrc", "docs", "flint_kernels", "fuzz", "microbench", "python_tests")
CODE_FILES = ("CONTRIBUTING.md", "Makefile", "README.md", "pyproject.toml", "requirements.txt")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def fences(path: Path, language: str) -> list[str]:
    """The contents of the fenced blocks of one language ("" for those without)."""
    text = path.read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [block for kind, block in blocks if kind == language]


def tree() -> Iterator[tuple[Path, str]]:
    """Every text file that belongs to the project."""
    paths = [ROOT / name for name in (*CODE_FILES, "setup.py")]
    for folder in CODE_FOLDERS:
        paths += sorted((ROOT / folder).rglob("*"))
    for path in paths:
        if path.is_file() and "__pycache__" not in path.parts:
            with contextlib.suppress(UnicodeDecodeError):
                yield path, path.read_text(encoding="utf-8")


EXAMPLES = [
    pytest.param(code, id=f"{name_of(path)}-{index}")
    for path in DOCUMENTS
    for index, code in enumerate(fences(path, "python"))
]


@pytest.mark.parametrize("code", EXAMPLES)
def test_every_example_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "example.py"
    script.write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script))


def test_the_readme_shows_an_engine_a_compiled_function_and_generation() -> None:
    text = "\n".join(fences(ROOT / "README.md", "python"))
    for part in ("attention_decode.out(", "torch.compile(fullgraph=True)", "generate(model"):
        assert part in text


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, anchor = target.partition("#")
        linked = path if not file else (path.parent / file).resolve()
        assert linked.exists(), f"{name_of(path)} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = [
                re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings
            ]
            assert anchor in anchors, f"{name_of(path)} links to {target}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_paths_in_code_spans_exist(path: Path) -> None:
    for span in re.findall(r"`([\w.]+(?:/[\w.]+)+/?)`", path.read_text(encoding="utf-8")):
        first = span.split("/")[0]
        if first in CODE_FOLDERS and not span.startswith("flint_kernels/lib/"):  # built, not kept
            assert (ROOT / span).exists(), f"{name_of(path)} names {span}"


def test_the_documents_of_the_ops_are_those_of_the_declarations() -> None:
    module = runpy.run_path(str(ROOT / "docs" / "generate_ops.py"))
    written = (ROOT / "docs" / "ops.md").read_text(encoding="utf-8")
    assert written == module["document"](), "run `make docs`"
    pages = module["pages"]()
    assert set(pages) == set((ROOT / "docs" / "ops").iterdir())
    for path, text in pages.items():
        assert path.read_text(encoding="utf-8") == text, "run `make docs`"
        assert fences(path, "python"), f"{name_of(path)}: want an example"
    described = re.findall(r"^### (\w+)$", "\n".join(pages.values()), re.MULTILINE)
    assert sorted(described) == sorted(REGISTRY)


def test_the_picture_is_up_to_date_and_names_ops() -> None:
    module = runpy.run_path(str(ROOT / "docs" / "draw_layer.py"))
    picture = (ROOT / "docs" / "images" / "layer.svg").read_text(encoding="utf-8")
    assert picture == module["drawing"](), "run `make docs`"
    named = re.findall(r'class="op"[^>]*>(\w+)</text>', picture)
    assert len(named) == 7
    assert set(named) <= set(REGISTRY)


def test_tables_are_those_of_the_result_rows() -> None:
    tables = runpy.run_path(str(ROOT / "microbench" / "tables.py"))
    for path in tables["documents"]():
        text = path.read_text(encoding="utf-8")
        assert text == tables["updated"](text), f"{name_of(path)}: run `make docs`"


def test_plots_are_those_of_the_result_rows() -> None:
    tables = runpy.run_path(str(ROOT / "microbench" / "tables.py"))
    for path, drawing in tables["drawings"]().items():
        written = path.read_text(encoding="utf-8") if path.exists() else None
        assert written == drawing, f"{name_of(path)}: run `make docs`"


def test_the_schema_promise_is_quoted_word_by_word() -> None:
    promise = " ".join((ops.__doc__ or "").split("The promise:")[1].split())
    for name in ("README.md", "docs/schema_promise.md"):
        text = (ROOT / name).read_text(encoding="utf-8").replace("> ", "")
        assert promise.lower() in " ".join(text.split()).lower(), name


def test_environment_variables_are_listed() -> None:
    pattern = re.compile(r"\bFLINT_KERNELS_[A-Z_]+\b")
    code = (".py", ".cpp", ".h", ".cu", ".cuh")
    used = {
        variable
        for path, text in tree()
        if path.suffix in code and path != Path(__file__)
        for variable in pattern.findall(text)
    }
    listed = set(pattern.findall((ROOT / "docs" / "environment.md").read_text(encoding="utf-8")))
    assert listed == used


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        named = set(re.findall(r"`make ([a-z-]+)", text)) | set(
            re.findall(r"^make ([a-z-]+)", text, re.M)
        )
        assert named <= targets, name_of(path)


def command_lines(program: str) -> Iterator[str]:
    """Lines of the documents' fenced blocks that call `program`, and code spans that do."""
    for path in DOCUMENTS:
        for block in fences(path, ""):
            yield from re.findall(rf"^{program} (.*)$", block, re.MULTILINE)
        yield from re.findall(rf"`{program} ([^`]*)`", path.read_text(encoding="utf-8"))


def test_commands_and_their_options_exist(capsys: pytest.CaptureFixture[str]) -> None:
    lines = list(command_lines("flint-kernels"))
    assert lines
    for line in lines:
        command = line.split()[0]
        assert command in cli.COMMANDS, f"flint-kernels {line}"
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        usage = capsys.readouterr().out
        for option in re.findall(r"(?<=\s)--[\w-]+", line):
            assert option in usage, f"flint-kernels {line}"


def test_modules_that_are_run_exist() -> None:
    for line in command_lines(r"python[\d.]* -m"):
        assert importlib.util.find_spec(line.split()[0]) is not None, line


def test_build_requirements_are_the_same_everywhere() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = re.search(r"^requires = \[(.*)\]$", pyproject, re.MULTILINE)
    assert listed
    wanted = " ".join(sorted(re.findall(r'"([^"]+)"', listed[1])))
    makefile = re.search(
        r"^BUILD_REQUIREMENTS := (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.M
    )
    readme = re.search(
        r'^pip install ("setuptools.*)$', (ROOT / "README.md").read_text("utf-8"), re.M
    )
    for found in (makefile, readme):
        assert found
        assert " ".join(sorted(found[1].replace('"', "").split())) == wanted


def test_no_registry_and_no_private_place_is_named() -> None:
    # Put together here, so that this file does not name them either.
    hosts = ["pypi" + ".org", "python" + "hosted.org", "pytorch" + ".org/whl", "npm" + "js.org",
             "debian" + ".org"]  # fmt: skip
    places = ["/" + place + "/" for place in ("work", "opt", "root", "home")]
    for path, text in tree():
        for word in hosts + places:
            assert word not in text, f"{name_of(path)} names {word}"


def test_every_op_is_documented_with_its_arguments() -> None:
    for name, declaration in REGISTRY.items():
        text = inspect.getdoc(declaration.infer) or ""
        for argument in declaration.parameters:
            assert re.search(rf"\b{argument}\b", text), f"{name}: the docstring omits {argument}"


def test_help_lists_every_command() -> None:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit):
        cli.main(["--help"])
    for command in cli.COMMANDS:
        assert command in out.getvalue()
