"""`python -m flint_kernels.cli`, where the command itself is not on the path."""

import sys

from flint_kernels.cli import main

sys.exit(main())
