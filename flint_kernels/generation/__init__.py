"""Text from a `Flint`: sampling settings, the batched loop, CUDA graphs, streaming of text."""

from flint_kernels.generation.generate import Completion, Generation, generate
from flint_kernels.generation.graph import Decoded, GraphDecoder
from flint_kernels.generation.loop import DecodeLoop
from flint_kernels.generation.sampling import SamplingParams
from flint_kernels.generation.stream import TextStream, stream_text

__all__ = [
    "Completion",
    "DecodeLoop",
    "Decoded",
    "Generation",
    "GraphDecoder",
    "SamplingParams",
    "TextStream",
    "generate",
    "stream_text",
]
