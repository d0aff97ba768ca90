"""One wheel for every Python 3 and torch: its tag, its contents, and that it runs from anywhere.

The wheel is made of the library that is built already; test_native_library.py builds one.
"""

from __future__ import annotations

import email
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from flint_kernels import results
from flint_kernels.backends import native
from microbench import wheel as report

ROOT = Path(__file__).parents[1]
SUBPACKAGES = sorted(
    path.parent.relative_to(ROOT).as_posix()
    for path in (ROOT / "flint_kernels").rglob("__init__.py")
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = tmp_path_factory.mktemp("tree")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    without = shutil.ignore_patterns("lib", "__pycache__")
    shutil.copytree(ROOT / "flint_kernels", tree / "flint_kernels", ignore=without)
    setup(tree, "build_py")
    [built] = (tree / "build").glob("lib*")
    shutil.copytree(native.LIBRARY_PATH.parent, built / "flint_kernels" / "lib")
    setup(tree, "bdist_wheel", "--skip-build")
    [path] = (tree / "dist").glob("*.whl")
    return path


def setup(tree: Path, *command: str) -> None:
    done = subprocess.run(
        [sys.executable, "setup.py", *command],
        cwd=tree,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pip has put it: an environment of nothing else."""
    folder = tmp_path_factory.mktemp("site")
    options = ["--no-deps", "--no-index", "--quiet", "--disable-pip-version-check"]
    pip = [sys.executable, "-m", "pip", "install", *options, "--target", folder, wheel]
    subprocess.run(pip, check=True)
    return folder


def test_the_tag_and_the_metadata(wheel: Path, unpacked: Path) -> None:
    machine = os.uname().machine
    assert wheel.name.endswith(f"-py3-none-linux_{machine}.whl")
    [folder] = unpacked.glob("*.dist-info")
    tags = email.message_from_string((folder / "WHEEL").read_text("utf-8"))
    assert tags.get_all("Tag") == [f"py3-none-linux_{machine}"]
    metadata = email.message_from_string((folder / "METADATA").read_text("utf-8"))
    assert metadata["Requires-Python"] == ">=3.10"
    required = [name for name in metadata.get_all("Requires-Dist") or [] if "extra" not in name]
    assert sorted(required) == [
        "numpy>=1.26", "safetensors>=0.6.2", "tokenizers>=0.20", "torch>=2.11", "tqdm>=4.66",
    ]  # fmt: skip
    entry_points = (folder / "entry_points.txt").read_text("utf-8")
    assert "flint-kernels = flint_kernels.cli:main" in entry_points


def test_the_contents(wheel: Path, unpacked: Path) -> None:
    """All subpackages, the library and the checkpoints; no tests, sources or documents."""
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"flint_kernels"}
    assert {f"{package}/__init__.py" for package in SUBPACKAGES} <= set(names)
    assert "flint_kernels/py.typed" in names
    assert not [name for name in names if "__pycache__" in name or name.endswith((".cpp", ".o"))]
    library = unpacked / report.LIBRARY
    assert library.read_bytes() == native.LIBRARY_PATH.read_bytes()
    for kind in ("nvfp4", "bf16"):
        assert f"flint_kernels/flint_tiny/checkpoint/{kind}/tokenizer.json" in names


def test_it_runs_where_it_is_unpacked(unpacked: Path, tmp_path: Path) -> None:
    """In a process that sees the wheel alone, with the C++ library."""
    command = ["-m", "flint_kernels.cli", "generate", "flint-tiny", "--greedy", "--max-new-tokens",
               "4", "--json"]  # fmt: skip
    code = "import flint_kernels as f; from flint_kernels.backends import native as n; "
    code += "print(f.__file__, n.why_not())"
    environment = {**os.environ, "PYTHONPATH": str(unpacked)}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("-c", code).split() == [str(unpacked / "flint_kernels" / "__init__.py"), "None"]
    assert len(json.loads(run(*command))["tokens"]) == 4


def test_what_is_said_of_a_wheel(
    wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "wheel.json"
    assert report.main([str(wheel), "--output", str(output)]) == 0
    assert "torch >= 2.11" in capsys.readouterr().out
    rows = {row["case"]: row["median"] for row in json.loads(output.read_text())["rows"]}
    assert rows["wheel"] == wheel.stat().st_size / 1e6 < rows["installed"]
    assert rows["the library"] + rows["flint-tiny"] < rows["installed"]
    assert json.loads(output.read_text())["meta"].keys() > results.describe("cpu").keys()


def test_a_wheel_without_the_library_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "none.whl"
    with zipfile.ZipFile(path, "w") as archive:
        info = {"built": False, "reason": "no C++ compiler was found"}
        archive.writestr("flint_kernels/lib/libflint_kernels.json", json.dumps(info))
    assert report.main([str(path)]) == 1
    assert "has no C++ library: no C++ compiler was found" in capsys.readouterr().err
