"""Says what a wheel holds and how large it is.

    python -m microbench.wheel dist/flint_kernels-0.1.0-py3-none-linux_x86_64.whl

With --output it writes the sizes as result rows. A wheel without the C++ library is an error: it
would install, and be slow, wherever it is taken.
"""

from __future__ import annotations

import argparse
import json
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flint_kernels import results

LIBRARY = "flint_kernels/lib/libflint_kernels.so"
CHECKPOINTS = "flint_kernels/flint_tiny/checkpoint/"


def sizes(wheel: Path) -> dict[str, float]:
    """MB (10^6 bytes) of the file, of all that it installs, and of the two large parts of that."""
    with zipfile.ZipFile(wheel) as archive:
        files = {info.filename: info.file_size for info in archive.infolist()}
    installed = {
        "installed": sum(files.values()),
        "the library": files[LIBRARY],
        "flint-tiny": sum(size for name, size in files.items() if name.startswith(CHECKPOINTS)),
    }
    return {
        name: size / 1e6 for name, size in ({"wheel": wheel.stat().st_size} | installed).items()
    }


def build_info(wheel: Path) -> dict[str, Any]:
    """What the build wrote beside the library (`flint_kernels.backends.native.build_info`)."""
    with zipfile.ZipFile(wheel) as archive:
        info: dict[str, Any] = json.loads(
            archive.read(Path(LIBRARY).with_suffix(".json").as_posix())
        )
    return info


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--output", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    info = build_info(options.wheel)
    if not info["built"]:
        print(f"{options.wheel} has no C++ library: {info['reason']}", file=sys.stderr)
        return 1
    found = sizes(options.wheel)
    parts = ", ".join(f"{name} {size:.1f} MB" for name, size in found.items())
    code = ", ".join(info["cuda_architectures"]) or f"no GPU ({info['cuda_why_not']})"
    print(f"{options.wheel}: {parts}; kernels for {code}; torch >= {info['torch_minimum']}")
    if options.output:
        rows = [results.row("wheel", name, "MB", [size]) for name, size in found.items()]
        meta = results.describe("cpu")
        meta |= {"compiler": info["compiler"], "cuda_compiler": info["cuda_compiler"] or ""}
        results.write(options.output, rows, meta)
    return 0


if __name__ == "__main__":
    sys.exit(main())
