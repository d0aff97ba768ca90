"""One target under atheris, a coverage-guided fuzzer.

    python fuzz/fuzz.py TARGET -runs=100000 CORPUS

What follows the target goes to libFuzzer. A finding ends the run and leaves its input as a file;
put it, mended, into fuzz/inputs/TARGET.
"""

from __future__ import annotations

import os
import sys

import atheris

with atheris.instrument_imports(include=["flint_kernels", "json", "targets"]):
    import targets
from json_mutator import mutated

JSON = ("config", "checkpoint", "index", "tokenizer")

# Of all that an input may ask for, so that a claim of terabytes fails here and not the machine.
RSS_LIMIT_MB = 4096


def main() -> None:
    name, *rest = sys.argv[1:]
    target = targets.TARGETS[name]

    def once(data: bytes) -> None:
        targets.within_memory(target, data)

    defaults = [f"-rss_limit_mb={RSS_LIMIT_MB}", "-timeout=20", "-max_len=65536"]
    options = {}
    if name in JSON:
        options["custom_mutator"] = lambda data, most, seed: mutated(
            data, most, seed, atheris.Mutate
        )
    atheris.Setup([sys.argv[0], *defaults, *rest], once, **options)
    atheris.Fuzz()


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
