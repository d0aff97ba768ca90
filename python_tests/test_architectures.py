"""Holds docs/architectures.md and the built library to each other.

The table is read as a reader reads it, and the library as it lies on the disk: no GPU is needed.
"""

from __future__ import annotations

import re
import runpy
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest
from test_cuda_build import cuobjdump, fat_binary_entries, number

from flint_kernels.backends import (
    native,
    native_attention,
    native_cpu,
    native_cuda,
    native_decode,
    native_many,
    native_prefill,
    native_router,
    native_sampling,
)
from flint_kernels.ops import REGISTRY

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "architectures.md"

Kernels = dict[str, set[str]]  # architecture -> kernels


def tables() -> list[list[dict[str, str]]]:
    """Each table of the document as rows, cells by column name without their markup."""
    found = []
    text = DOCUMENT.read_text(encoding="utf-8")
    for block in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        head, _, *lines = (
            [cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()
        )
        found.append([dict(zip(head, map(plain, line), strict=True)) for line in lines])
    return found


def plain(cell: str) -> str:
    return re.sub(r"\[(.*?)\]\(.*?\)", r"\1", cell).replace("`", "").replace("**", "")


ARCHITECTURES, OPS = tables()
PROMISED = [row["architecture"] for row in ARCHITECTURES]
LIMITED = {  # kernels for some calls alone
    "few": native_decode,
    "many": native_many,
    "heads": native_attention,
    "chunks": native_prefill,
    "topk": native_router,
    "best": native_sampling,
}


def sources_by_architecture() -> dict[str, set[str]]:
    """The sources whose kernels the table promises, per architecture."""
    return {
        name: {s for row in OPS if row[name] != "-" for s in row["CUDA kernels in"].split(", ")}
        for name in PROMISED
    }


def kernels_of_source(source: str) -> set[str]:
    """The names of a source's kernels, read from its text."""
    text = (ROOT / source).read_text(encoding="utf-8")
    pattern = r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\))?\s*(\w+)\("
    names = set(re.findall(pattern, text))
    assert len(names) == text.count("__global__"), source
    return names


def missing_kernels(found: Kernels) -> Kernels:
    """What the table promises and is not in `found`; names there may be mangled."""
    return {
        architecture: missing
        for architecture, sources in sources_by_architecture().items()
        if (
            missing := {
                f"{source}: {kernel}"
                for source in sources
                for kernel in kernels_of_source(source)
                if not any(is_of(name, source, kernel) for name in found.get(architecture, ()))
            }
        )
    }


def is_of(name: str, source: str, kernel: str) -> bool:
    """Whether `name` is `kernel` of `source`: as the JSON has it, or as the binary does."""
    if ": " in name:
        return name.split("<", maxsplit=1)[0] == f"{source}: {kernel}"
    # Mangled: each name has its length ahead, and an anonymous namespace is named after its file.
    file = Path(source).name.replace(".", "_")
    elsewhere = "_GLOBAL__N_" in name and f"{len(file)}_{file}" not in name
    return not elsewhere and f"{len(kernel)}{kernel}" in name


def has_cuda_kernels() -> bool:
    """False where the library was built without nvcc, and then it has to say so."""
    info = native.build_info()
    assert info["built"] is True, info["reason"]
    return bool(info["cuda_architectures"])


def test_the_document_is_up_to_date() -> None:
    module = runpy.run_path(str(ROOT / "docs" / "generate_architectures.py"))
    written = DOCUMENT.read_text(encoding="utf-8")
    assert written == module["document"](), "run `make docs`"


def test_every_op_has_a_row_and_its_bodies() -> None:
    assert [row["op"] for row in OPS] == list(REGISTRY)
    for row in OPS:
        name = row["op"]
        assert row["CPU, PyTorch"] == "yes"
        assert set(REGISTRY[name].bodies) >= {"CPU", "CUDA"}
        assert row["CPU, C++"] == "yes" or name not in native_cpu.NAMES
        kernels = {architecture: row[architecture] for architecture in PROMISED}
        if hasattr(native_cuda, name):
            assert set(kernels.values()) == {"yes"}, name
        else:
            for word, module in LIMITED.items():
                found = {one for one, cell in kernels.items() if word in cell.split(", ")}
                assert found == set(module.ARCHITECTURES if hasattr(module, name) else ()), name
        assert set(kernels.values()) <= {"yes", *LIMITED, "few, many", "-"}
        assert (row["CUDA kernels in"] == "-") == (set(kernels.values()) == {"-"}), name


def test_it_says_what_was_never_run() -> None:
    states = {row["architecture"]: row["state"] for row in ARCHITECTURES}
    assert states.pop("sm_90a") == "run, on an H200"
    assert set(states.values()) == {"compiled, never run"}


def test_C11_what_the_build_says_holds_every_promised_architecture() -> None:
    """The JSON beside the library; without nvcc, that it says that it has no GPU kernels."""
    info = native.build_info()
    if not has_cuda_kernels():
        assert info["cuda_why_not"]
        assert info["cuda_kernels"] == []
        assert info["cuda_compiler"] is None
        assert not [op for op in info["ops"] if "cuda" in op]
        assert info["cuda_why_not"] in str(native.cuda_why_not((9, 0)))
        return
    assert set(PROMISED) <= set(info["cuda_architectures"])
    found: Kernels = defaultdict(set)
    for kernel in info["cuda_kernels"]:
        found[f"sm_{kernel['architecture']}"].add(f"{kernel['source']}: {kernel['kernel']}")
    assert missing_kernels(found) == {}


def test_C11_the_binary_holds_every_promised_architecture() -> None:
    """Its fat binaries, read here; without nvcc, that there are none."""
    entries = fat_binary_entries(native.LIBRARY_PATH)
    if not has_cuda_kernels():
        assert entries == []
        return
    pieces = [architecture for _, architecture in entries]
    for architecture, sources in sources_by_architecture().items():
        assert pieces.count(number(architecture)) >= len(sources), architecture


def test_C11_the_binary_holds_every_promised_kernel() -> None:
    """By name, where there is a cuobjdump: the Triton package brings one."""
    tool = cuobjdump()
    if not has_cuda_kernels() or tool is None:
        return  # the two tests above hold what can be seen without it
    listed = subprocess.run(
        [tool, "-symbols", str(native.LIBRARY_PATH)], capture_output=True, text=True, check=True
    ).stdout
    found: Kernels = defaultdict(set)
    architecture = ""
    for line in listed.splitlines():
        if line.startswith("arch = "):
            architecture = line.removeprefix("arch = ").strip()
        elif "STO_ENTRY" in line:
            found[architecture].add(line.split()[-1])
    assert missing_kernels(found) == {}


@pytest.mark.parametrize("architecture", PROMISED)
def test_a_missing_kernel_is_noticed(architecture: str) -> None:
    """That the tests above can fail: all but one kernel of one architecture."""
    promised = sources_by_architecture()
    every = {
        f"{source}: {kernel}<1>"
        for source in set().union(*promised.values())
        for kernel in kernels_of_source(source)
    }
    assert missing_kernels(dict.fromkeys(PROMISED, every)) == {}
    lost = min(name for name in every if name.split(":")[0] in promised[architecture])
    assert missing_kernels({**dict.fromkeys(PROMISED, every), architecture: every - {lost}}) == {
        architecture: {lost.removesuffix("<1>")}
    }
    without = {name: every for name in PROMISED if name != architecture}
    assert set(missing_kernels(without)) == {architecture}
