"""Checkpoints to modules and back: GGUF, safetensors, and synthetic weights."""

from flint_kernels.loading.loader import load
from flint_kernels.loading.synthetic import synthetic
from flint_kernels.loading.tokenizer import load_tokenizer

__all__ = ["load", "load_tokenizer", "synthetic"]
