"""Text from a `Flint`: sampling settings, the batched loop, streaming of text."""

from flint_kernels.generation.generate import Completion, Generation, generate
from flint_kernels.generation.sampling import SamplingParams
from flint_kernels.generation.stream import TextStream, stream_text

__all__ = [
    "Completion",
    "Generation",
    "SamplingParams",
    "TextStream",
    "generate",
    "stream_text",
]
