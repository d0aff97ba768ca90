"""What the fuzzer calls: each target takes bytes and lets through what must not happen.

A damaged or hostile file is a ValueError (or an OSError, a MemoryError that says what was needed),
before memory is taken in proportion to what it claims. Anything else that comes out of a target is
a finding: another exception, a crash, a hang, or more memory than `MOST_BYTES`.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from flint_kernels.formats.gguf import GGUFFile
from flint_kernels.loading import load, load_tokenizer, synthetic
from flint_kernels.loading.export import save_bf16, save_gguf, save_modelopt
from flint_kernels.loading.safetensors import INDEX_NAME, shard_files
from flint_kernels.loading.tokenizer import parse
from flint_kernels.model.config import FULL, SLIDING, FlintConfig

INPUTS = Path(__file__).parent / "inputs"
MOST_BYTES = 512 << 20
"""More than an execution may add to the process's memory."""

# Two layers of every kind, as small as the formats let them be.
CONFIG = FlintConfig(
    num_hidden_layers=2,
    hidden_size=64,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=64,
    vocab_size=8,
    max_position_embeddings=16,
    intermediate_size=64,
    num_experts=2,
    num_experts_per_tok=1,
    moe_intermediate_size=64,
    shared_expert_intermediate_size=64,
    layer_types=(SLIDING, FULL),
    sliding_window=4,
    no_rope_layer_indices=(1,),
    mlp_only_layers=(0,),
)
REFUSED = (ValueError, OSError)


@cache
def folder() -> Path:
    """Where files are written that have to be files: in memory, where there is such a place."""
    place = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="flint-fuzz-", dir=place if place.is_dir() else None))


def written(name: str, data: bytes) -> Path:
    path = folder() / str(os.getpid()) / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return path


def gguf(data: bytes) -> None:
    """The container alone: the header, and every tensor that it describes."""
    try:
        with GGUFFile(written("x.gguf", data)) as file:
            for name, tensor in file.tensors.items():
                assert file.raw(name).numel() == tensor.n_bytes
                repr((name, tensor))
    except REFUSED:
        return


def gguf_model(data: bytes) -> None:
    """The loader, down to the module's parameters: matching, repack, checks of values."""
    try:
        load(written("m.gguf", data), config=CONFIG, progress=False)
    except REFUSED:
        return


def safetensors_model(data: bytes) -> None:
    """BF16 and ModelOpt NVFP4, whichever the file says that it is."""
    try:
        load(written("m.safetensors", data), config=CONFIG, progress=False)
    except REFUSED:
        return


def config(data: bytes) -> None:
    """config.json; a good one comes back from what it is written as."""
    try:
        read = FlintConfig.from_json_file(written("config.json", data))
    except REFUSED:
        return
    assert FlintConfig.from_dict(read.to_dict()) == read


def checkpoint(data: bytes) -> None:
    """Any config.json beside good weights: what it claims must be held against them."""
    path = written("checkpoint.gguf", _saved(save_gguf, "nvfp4", "gguf", "m.gguf"))
    written("config.json", data)
    try:
        load(path, progress=False)
    except (*REFUSED, MemoryError):
        return


def index(data: bytes) -> None:
    """The index of shards: whatever it names is directly in its folder."""
    path = written(INDEX_NAME, data)
    try:
        files = shard_files(path.parent)
    except REFUSED:
        return
    assert all(file.parent == path.parent for file in files)


def tokenizer(data: bytes) -> None:
    """tokenizer.json; a good one encodes and decodes within bounds."""
    try:
        read = parse(data)
        ids = read.encode("def f(x):\n    return x").ids
        assert len(ids) < 10_000
        read.decode(ids[:100])
    except REFUSED:
        return


TARGETS: dict[str, Callable[[bytes], None]] = {
    function.__name__: function
    for function in (gguf, gguf_model, safetensors_model, config, checkpoint, index, tokenizer)
}

# ------------------------------------------------------------------ where the fuzzer starts


def seeds(target: str) -> Iterator[tuple[str, bytes]]:
    """Name and content of good inputs of a target, and of those that were findings once."""
    yield from _SEEDS[target]()
    for path in sorted((INPUTS / target).glob("*")):
        yield path.name, path.read_bytes()


@cache
def _saved(save: Callable[..., None], weight_format: str, name: str, file: str) -> bytes:
    path = folder() / f"seed-{name}"
    path.mkdir(exist_ok=True)
    where = path / file if file.endswith(".gguf") else path
    save(synthetic(CONFIG, weight_format, seed=1), where)
    return (path / file).read_bytes()


def _gguf_seeds() -> Iterator[tuple[str, bytes]]:
    yield "model.gguf", _saved(save_gguf, "nvfp4", "gguf", "m.gguf")


def _safetensors_seeds() -> Iterator[tuple[str, bytes]]:
    for save, weight_format in ((save_bf16, "bf16"), (save_modelopt, "nvfp4")):
        content = _saved(save, weight_format, weight_format, "model.safetensors")
        yield f"{weight_format}.safetensors", content


def _config_seeds() -> Iterator[tuple[str, bytes]]:
    for name, shape in (("tiny", CONFIG), ("flint", FlintConfig.flint_40b())):
        yield f"{name}.json", json.dumps(shape.to_dict()).encode()


def _index_seeds() -> Iterator[tuple[str, bytes]]:
    yield "good.json", b'{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'
    yield "outside.json", b'{"weight_map": {"a": "../other.safetensors"}}'


def _tokenizer_seeds() -> Iterator[tuple[str, bytes]]:
    plain = load_tokenizer("flint-tiny")
    content = json.loads(plain.to_str())
    # 300 entries and the merges among them: a mutation should meet more than a vocabulary.
    vocabulary = {k: v for k, v in content["model"]["vocab"].items() if v < 300}
    merges = content["model"]["merges"]
    content["model"]["vocab"] = vocabulary
    content["model"]["merges"] = [
        pair for pair in merges if all(p in vocabulary for p in (*pair, "".join(pair)))
    ]
    yield "byte-level.json", json.dumps(content).encode()
    for kind in ("WordLevel", "WordPiece", "Unigram"):
        model: dict[str, object] = {"type": kind, "vocab": {"<unk>": 0, "def": 1, "x": 2}}
        if kind == "Unigram":
            model |= {"vocab": [["<unk>", 0.0], ["d", -1.0]], "unk_id": 0, "byte_fallback": False}
        else:
            model |= {"unk_token": "<unk>", "max_input_chars_per_word": 100}
            model |= {"continuing_subword_prefix": "##"} if kind == "WordPiece" else {}
        yield f"{kind}.json", json.dumps({**_PARTS, "model": model}).encode()


_PARTS = {
    "version": "1.0",
    "truncation": {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0},
    "padding": {"strategy": {"Fixed": 40}, "direction": "Right", "pad_to_multiple_of": None,
                "pad_id": 0, "pad_type_id": 0, "pad_token": "<unk>"},
    "added_tokens": [{"id": 0, "content": "<unk>", "single_word": False, "lstrip": False,
                      "rstrip": False, "normalized": False, "special": True}],
    "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Lowercase"},
                   {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"}]},
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Whitespace"},
                      {"type": "Digits", "individual_digits": True},
                      {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always",
                       "split": True}]},
    "post_processor": {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A",
                       "type_id": 0}}], "pair": [], "special_tokens": {}},
    "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
}  # fmt: skip

_SEEDS: dict[str, Callable[[], Iterator[tuple[str, bytes]]]] = {
    "gguf": _gguf_seeds,
    "gguf_model": _gguf_seeds,
    "safetensors_model": _safetensors_seeds,
    "config": _config_seeds,
    "checkpoint": _config_seeds,
    "index": _index_seeds,
    "tokenizer": _tokenizer_seeds,
}


# ------------------------------------------------------------------ memory


def resident_peak() -> int:
    """The most host memory that this process has had, since `forget_peak`; bytes."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    assert found
    return int(found[1]) << 10


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def within_memory(target: Callable[[bytes], None], data: bytes) -> None:
    """Runs a target; AssertionError where it took more than `MOST_BYTES`."""
    forget_peak()
    before = resident_peak()
    target(data)
    grown = resident_peak() - before
    assert grown < MOST_BYTES, f"{target.__name__} took {grown} bytes for {len(data)} bytes"
