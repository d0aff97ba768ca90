"""`flint-kernels info`: what is installed here, and which body each op has."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

PACKAGES = ("triton", "safetensors", "tokenizers", "gguf")


def add_parser(subparsers: Any) -> None:
    """Defines the arguments of `info`."""
    parser = subparsers.add_parser(
        "info",
        help="show versions, devices and bodies of the ops",
        description="Shows what is installed here: versions, devices, the native library, "
        "environment variables, and which bodies each op has.",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object in place of text")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Writes the report to stdout. Returns 0."""
    report = collect()
    text = json.dumps(report, indent=1) + "\n" if arguments.json else _text(report)
    sys.stdout.write(text)
    return 0


def collect() -> dict[str, Any]:
    """The report: versions, devices, native (build and state), environment, ops -> bodies."""
    import torch

    import flint_kernels
    from flint_kernels import results
    from flint_kernels.backends import cuda, native
    from flint_kernels.ops import REGISTRY, VALUE_CHECKS_VARIABLE

    why_not = native.why_not()
    gpus = [
        {
            "name": torch.cuda.get_device_name(index),
            "capability": "{}.{}".format(*torch.cuda.get_device_capability(index)),
            "kernels_why_not": cuda.why_not(torch.device("cuda", index)),
        }
        for index in range(torch.cuda.device_count())
    ]
    meta = results.describe("cpu")
    return {
        "versions": {
            "flint_kernels": flint_kernels.__version__,
            "commit": meta["commit"],
            "python": meta["python"],
            "torch": torch.__version__,
            "cuda": torch.version.cuda or "",
            "driver": results.driver_version() if gpus else "",
            **{name: results.package_version(name) for name in PACKAGES},
        },
        "devices": {"cpu": meta["cpu"], "threads": meta["threads"], "gpus": gpus},
        "native": {"loaded": why_not is None, "why_not": why_not, "build": native.build_info()},
        "environment": {
            name: os.environ.get(name) for name in (VALUE_CHECKS_VARIABLE, native.DISABLE_VARIABLE)
        },
        "ops": {name: sorted(REGISTRY[name].bodies) for name in sorted(REGISTRY)},
    }


def _text(report: dict[str, Any]) -> str:
    versions = [f"{name} {version or '-'}" for name, version in report["versions"].items()]
    devices = report["devices"]
    gpus = [f"{gpu['name']} (compute capability {gpu['capability']})" for gpu in devices["gpus"]]
    native = [report["native"]["why_not"] or "loaded"]
    for gpu in devices["gpus"]:
        native.append(f"{gpu['name']}: {gpu['kernels_why_not'] or 'its kernels are in use'}")
    environment = [
        f"{name}={value}" if value is not None else f"{name} is not set"
        for name, value in report["environment"].items()
    ]
    width = max(map(len, report["ops"]))
    ops = [f"{name:{width}}  {', '.join(bodies)}" for name, bodies in report["ops"].items()]
    sections = {
        "versions": versions,
        "devices": [f"{devices['cpu']}, {devices['threads']} threads", *gpus],
        "native library": native,
        "environment": environment,
        "ops and their bodies": ops,
    }
    return "".join(
        f"{title}\n" + "".join(f"  {line}\n" for line in lines) for title, lines in sections.items()
    )
