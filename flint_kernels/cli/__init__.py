"""The command `flint-kernels`.

A subcommand is a module of this package with `add_parser(subparsers)`, which defines its arguments
and sets `run` as its default, and `run(arguments) -> int`, the exit status. It imports what is slow
inside `run`, so that `--help` is quick.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

COMMANDS = ("generate", "validate", "info")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand; errors that its arguments caused go to stderr without a traceback."""
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
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError) as error:
        sys.stderr.write(f"flint-kernels {parsed.command}: error: {error}\n")
        return 1
    return status
