"""Every fuzz target for a number of executions; what they were and what they found as result rows.

    python fuzz/campaign.py --executions 200000 --output docs/results/cpu/fuzz.json

The Python targets need atheris, the C++ one clang++ with libFuzzer (CLANGXX names it). A target
whose tool is missing is an error: a campaign that ran less than it says is none.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import targets

from flint_kernels import results

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build" / "fuzz"
SOURCES = ("fuzz/repack.cpp", "csrc/cpu/nvfp4_repack.cpp", "csrc/cpu/nvfp4_dequantize.cpp")
FLAGS = ("-std=c++20", "-O1", "-g", "-fsanitize=fuzzer,address,undefined",
         "-fno-sanitize-recover=all", "-Icsrc", "-pthread")  # fmt: skip


def python_command(target: str) -> list[str]:
    return [sys.executable, str(ROOT / "fuzz" / "fuzz.py"), target]


def repack_command() -> list[str]:
    binary = WORK / "repack-fuzzer"
    compiler = os.environ.get("CLANGXX", "clang++")
    subprocess.run([compiler, *FLAGS, *SOURCES, "-o", str(binary)], cwd=ROOT, check=True)
    return [str(binary), "-max_len=4096"]


def run(target: str, command: list[str], executions: int) -> tuple[int, int]:
    """Executions done, and findings: 0 or 1, for a finding ends the run."""
    corpus, found = WORK / target / "corpus", WORK / target / "found"
    for folder in (corpus, found):
        folder.mkdir(parents=True, exist_ok=True)
    for name, content in targets.seeds(target) if target in targets.TARGETS else ():
        (corpus / name).write_bytes(content)
    limits = [f"-runs={executions}", f"-artifact_prefix={found}/", "-print_final_stats=1"]
    log = WORK / target / "log"
    command = [*command, *limits, str(corpus)]
    with log.open("wb") as output:
        done = subprocess.run(command, stdout=output, stderr=output, check=False)
    text = log.read_text(encoding="utf-8", errors="replace")
    count = re.search(r"^stat::number_of_executed_units: (\d+)$", text, re.MULTILINE)
    if done.returncode or count is None:
        sys.stderr.write(f"{target}: a finding in {found}, or no run at all: see {log}\n")
        return int(count[1]) if count else 0, 1
    return int(count[1]), 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--executions", type=int, default=100_000, help="of each target")
    parser.add_argument("--output", required=True, help="the JSON file to be written")
    options = parser.parse_args(argv)
    WORK.mkdir(parents=True, exist_ok=True)
    commands = {target: python_command(target) for target in targets.TARGETS}
    commands["repack"] = repack_command()
    rows, findings = [], 0
    for target, command in commands.items():
        count, found = run(target, command, options.executions)
        findings += found
        rows.append(results.row("fuzz", target, "executions", [float(count)]))
        rows.append(results.row("fuzz", target, "findings", [float(found)]))
        sys.stdout.write(f"{target}: {count} executions, {found} findings\n")
        sys.stdout.flush()
    results.write(options.output, rows, results.describe("cpu"))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
