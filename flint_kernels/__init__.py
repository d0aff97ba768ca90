"""Fast kernels for Recursive's Flint, as `torch.library` ops in the namespace `flint`.

`flint_kernels.ops` declares the ops; importing this package registers a body for each of them.
`warmup` compiles what compiles at run time. The module, the loaders and the generation loop are
imported from their own subpackages: `flint_kernels.model`, `flint_kernels.loading`,
`flint_kernels.generation`.
"""

from typing import TYPE_CHECKING, Any

from flint_kernels import ops
from flint_kernels.backends import cpu as _cpu
from flint_kernels.backends import cuda as _cuda
from flint_kernels.backends import gpu_general as _gpu_general

if TYPE_CHECKING:
    from flint_kernels.backends.warmup import warmup

__version__ = "0.1.0"
__all__ = ["__version__", "ops", "warmup"]

_cpu.register()
_cuda.register()
# Last of the GPU's: it takes the ops that are left.
_gpu_general.register()


def __getattr__(name: str) -> Any:
    # It needs the module and the loaders, which few who import the ops do.
    if name == "warmup":
        from flint_kernels.backends.warmup import warmup

        return warmup
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
