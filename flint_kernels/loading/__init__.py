"""Checkpoints to modules and back: GGUF, safetensors, and synthetic weights."""

from flint_kernels.loading.loader import load, load_tokenizer
from flint_kernels.loading.synthetic import synthetic

__all__ = ["load", "load_tokenizer", "synthetic"]
