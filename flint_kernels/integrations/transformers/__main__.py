"""The command `transformers`, in a process where Flint is registered.

    python -m flint_kernels.integrations.transformers serve flint-tiny

takes the arguments of `transformers` itself, which has no way to be told of another package. In
place of a path it takes the name of a packaged model.
"""

from __future__ import annotations

import sys

from transformers.cli.transformers import main

import flint_kernels.integrations.transformers  # noqa: F401  (registers)
from flint_kernels.loading.source import packaged_folder

if __name__ == "__main__":
    sys.argv[0] = "transformers"
    sys.argv[1:] = [str(packaged_folder(argument) or argument) for argument in sys.argv[1:]]
    main()
