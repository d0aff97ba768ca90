"""How far a checkpoint, as the ops compute it, is from the FP32 forward of the same weights."""

from flint_kernels.validation.compare import (
    Comparison,
    Interval,
    compare_hidden,
    summarize,
    validate,
)
from flint_kernels.validation.report import result_rows, table
from flint_kernels.validation.text import held_out_documents, sequences

__all__ = [
    "Comparison",
    "Interval",
    "compare_hidden",
    "held_out_documents",
    "result_rows",
    "sequences",
    "summarize",
    "table",
    "validate",
]
