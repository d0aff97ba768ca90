"""The command `flint-kernels`.

A subcommand is a module of this package with `add_parser(subparsers)`, which defines its arguments
and sets `run` as its default, and `run(arguments) -> int`, the exit status. It imports what it
needs inside `run`. Even `--help` takes the seconds that importing torch does: this module is in a
package that registers the ops.

Exit status: 0; 1 where a benchmark failed; 2 where the arguments, or the files that they name, are
at fault, with one line on stderr; 130 after Ctrl-C. Anything else is a fault of ours and shows its
traceback.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

import torch

COMMANDS = ("generate", "validate", "convert", "bench", "info")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns the exit status; SystemExit is argparse's."""
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        return 130


def _run(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="flint-kernels", description="Runs Flint models with the flint:: ops."
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        importlib.import_module(f"{__name__}.{command}").add_parser(subparsers)
    parsed = parser.parse_args(arguments)
    try:
        status: int = parsed.run(parsed)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader (head, say) has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    # What our checks raise of arguments and files; and a model too large for the device. No
    # TypeError: a value of a wrong type in a file is a ValueError here.
    except (ValueError, OSError, MemoryError, torch.OutOfMemoryError) as error:
        sys.stderr.write(f"flint-kernels {parsed.command}: error: {error}\n")
        return 2
    return status
