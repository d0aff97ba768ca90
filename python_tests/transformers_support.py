"""The packaged checkpoints as models of Transformers, loaded once, and prompts for them."""

from __future__ import annotations

import functools
import os

os.environ["HF_HUB_OFFLINE"] = "1"

from transformers import AutoModelForCausalLM, AutoTokenizer, BatchEncoding

from flint_kernels.generation import SamplingParams, generate
from flint_kernels.integrations.transformers import FlintForCausalLM
from flint_kernels.loading.source import packaged_folder

NAMES = ("flint-tiny", "flint-tiny-bf16")
# Of 10 to 228 tokens: less than flint-tiny's window of 65, and several times as much.
TEXTS = (
    "import os\n\ndef read(path):\n",
    "class Cache:\n    def __init__(self, size):\n        self.size = size\n",
    "values = [i * i for i in range(10) if i % 2]\n" * 12,
)


def folder(name: str) -> str:
    path = packaged_folder(name)
    assert path is not None
    return str(path)


@functools.cache
def model_of(name: str = "flint-tiny") -> FlintForCausalLM:
    return AutoModelForCausalLM.from_pretrained(folder(name))


@functools.cache
def tokenizer():
    return AutoTokenizer.from_pretrained(folder("flint-tiny"))


def batch(*texts: str) -> BatchEncoding:
    """input_ids and attention_mask, padded on the left."""
    return tokenizer()(list(texts), padding=True, return_tensors="pt")


def ids_of(text: str) -> list[int]:
    return tokenizer()(text)["input_ids"]


@functools.cache
def library_tokens(name: str, text: str, count: int, *, seed: int | None = None) -> list[int]:
    """What the library's own loop generates, greedily."""
    params = SamplingParams(greedy=True, max_new_tokens=count, seed=seed)
    [completion] = generate(model_of(name).model, [ids_of(text)], params)
    return completion.tokens
