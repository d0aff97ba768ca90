"""Fast kernels for Recursive's Flint, as `torch.library` ops in the namespace `flint`.

`flint_kernels.ops` declares the ops; importing this package registers a body for each of them.
The module, the loaders and the generation loop are imported from their own subpackages:
`flint_kernels.model`, `flint_kernels.loading`, `flint_kernels.generation`.
"""

from flint_kernels import ops
from flint_kernels.backends import cpu as _cpu

__version__ = "0.1.0"
__all__ = ["__version__", "ops"]

_cpu.register()
