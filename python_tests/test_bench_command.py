"""`flint-kernels bench`: what runs where, and a run beside a stored one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from flint_kernels import cli, results
from flint_kernels.backends import cuda
from flint_kernels.cli import bench
from microbench import compare, cpu, kernels, timer


def row(case: str, values: list[float], metric: str = "us") -> results.Row:
    return results.row("op", case, metric, values)


@pytest.fixture
def _cpu_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process is started: an import takes a second, and a generation makes 100 tokens/s."""

    def python(*arguments: str) -> str:
        if arguments[0] == "-c":
            return "1.0"
        count = int(arguments[arguments.index("--max-new-tokens") + 1])
        speed = {"first_token_seconds": 0.5, "tokens_per_second": 100.0}
        return json.dumps({"tokens": [1] * count, **speed})

    monkeypatch.setattr(cpu, "python", python)


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    status = cli.main(["bench", "--device", "cpu", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_faster_and_slower_are_beyond_the_spread_of_both() -> None:
    stored = [row("a", [1.0, 1.1, 1.2]), row("b", [1.0, 1.1, 1.2]), row("c", [1.0, 1.1, 1.2]),
              row("s", [90.0, 100.0, 110.0], "tok/s"), row("t", [1.0], "GB/s")]  # fmt: skip
    now = [row("c", [2.0, 2.1, 2.2]), row("a", [1.05, 1.15, 1.3]), row("b", [0.5, 0.55, 0.6]),
           row("s", [200.0], "tok/s"), row("t", [0.5], "GB/s"), row("new", [1.0])]  # fmt: skip
    found = compare.compare(now, stored)
    verdicts = {each.now["case"]: each.verdict for each in found}
    assert verdicts == {"c": "slower", "a": "same", "b": "faster", "s": "faster", "t": "slower"}
    ratios = [each.ratio for each in found]
    assert ratios == pytest.approx([1.1 / 2.1, 1.1 / 1.15, 2.0, 2.0, 0.5])
    assert compare.lines(found)[0][:3] == ("op", "c", "us")


@pytest.mark.usefixtures("_cpu_runs")
def test_the_cpu_s_benchmarks_beside_a_stored_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, _ = run(capsys, "--repetitions", 2, "--tokens", 8, "--output", tmp_path)
    assert status == 0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["generate.json", "import.json"]
    stored = json.loads((tmp_path / "generate.json").read_text())
    assert stored["meta"]["torch"] == torch.__version__ and len(stored["rows"]) == 4
    for entry in stored["rows"]:
        for name in ("median", "p20", "p80"):
            entry[name] *= 2
    (tmp_path / "generate.json").write_text(json.dumps(stored))
    status, out, _ = run(capsys, "--repetitions", 2, "--tokens", 8, "--compare", tmp_path)
    assert status == 0
    assert "5 rows compared, 0 without a stored one" in out
    assert out.count("slower") == 2 and out.count("faster") == 2  # half the speed, half the wait
    only = ("--only", "import", "--repetitions", 1, "--compare", tmp_path / "generate.json")
    status, out, _ = run(capsys, *only, "--json")
    report = json.loads(out)
    assert [entry["bench"] for entry in report["rows"]] == ["import"]
    assert report["comparisons"] == report["failures"] == []


@pytest.mark.usefixtures("_cpu_runs")
@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--only", "nothing"], "--only: got 'nothing'; want one of import, nvfp4, bf16"),
        (["--compare", "nowhere"], "--compare: got nowhere, where there is no result file"),
        (["--compare", "file.json"], "--compare: got file.json, which is no result file"),
    ],
)
def test_what_is_wrong_is_said_before_the_work(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file.json").write_text('{"rows": [{"bench": "op"}]}')
    status, out, error = run(capsys, *arguments)
    assert status == 2 and out == ""
    assert message in error


def test_an_installation_without_the_benchmarks_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "_TREE", tmp_path)
    status, _, error = run(capsys)
    assert status == 2
    assert f"got an installation in {tmp_path} without the benchmarks; want the source" in error


def test_on_a_gpu_it_runs_the_kernels_and_reports_failures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def measured(names: Any, rounds: Any) -> Any:
        asked.append((list(names), rounds))
        return {"kernels": [row("M=1", [2.0])]}, ["op M=8: it broke"]

    monkeypatch.setattr("flint_kernels.cli.device.choose_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(cuda, "why_not", lambda _: None)
    monkeypatch.setattr(results, "describe", lambda _: {"gpu": "one"})
    monkeypatch.setattr(kernels, "run", measured)
    monkeypatch.setattr(timer, "Timer", lambda rounds: rounds)
    status = cli.main(["bench", "--only", "rms_norm", "--repetitions", "5"])
    captured = capsys.readouterr()
    assert status == 1
    assert asked == [(["rms_norm"], 5)]
    assert "FAILED op M=8: it broke" in captured.err
    assert "best peer" in captured.out and "M=1" in captured.out

    monkeypatch.setattr(cuda, "why_not", lambda _: "It has none.")
    assert cli.main(["bench"]) == 2
    assert "got a GPU without kernels of this project to time. It has none." in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("count", [0, -2])
def test_fewer_than_one_repetition_are_an_error(
    capsys: pytest.CaptureFixture[str], count: int
) -> None:
    assert cli.main(["bench", "--only", "import", f"--repetitions={count}"]) != 0
    assert f"--repetitions: got {count}, want at least 1" in capsys.readouterr().err
