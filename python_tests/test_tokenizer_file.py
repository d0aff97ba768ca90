"""tokenizer.json from somewhere: what it may not do, and errors that are ValueErrors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flint_kernels.loading import load_tokenizer
from flint_kernels.loading.tokenizer import parse

BPE: dict[str, Any] = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}


def file(**parts: Any) -> bytes:
    content = {"version": "1.0", "added_tokens": [], "model": BPE, **parts}
    return json.dumps(content).encode()


def replace(content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": "a"}, "content": content}


def test_an_ordinary_one_is_the_package_s_own() -> None:
    tokenizer = parse(file())
    assert tokenizer.encode("ab").ids == [2]
    assert tokenizer.decode([0, 1]) == "a b"
    assert tokenizer.get_vocab_size() == 3


def test_padding_and_truncation_of_the_file_do_not_count() -> None:
    """A prompt is what the user wrote; and padding to a length would take any memory."""
    padding = {"strategy": {"Fixed": 10**12}, "direction": "Right", "pad_to_multiple_of": None,
               "pad_id": 0, "pad_type_id": 0, "pad_token": "a"}  # fmt: skip
    truncation = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    assert parse(file(padding=padding, truncation=truncation)).encode("abab").ids == [2, 2]


def test_replacements_that_multiply_a_text_are_refused() -> None:
    chain = [replace("aa")] * 40  # each twice as long: 2^40 times in the end
    for part, key in (("normalizer", "normalizers"), ("decoder", "decoders")):
        with pytest.raises(ValueError, match=f"its {part} may make a text more than 256 times"):
            parse(file(**{part: {"type": "Sequence", key: chain}}))
    nested = {"type": "Sequence", "normalizers": [replace("a" * 20), replace("a" * 20)]}
    with pytest.raises(ValueError, match="its normalizer"):
        parse(file(normalizer={"type": "Sequence", "normalizers": [nested]}))
    # What tokenizers of SentencePiece do is not refused.
    sentence_piece = [{"type": "Prepend", "prepend": "_"}, replace("b")]
    usual = {"type": "Sequence", "normalizers": sentence_piece}
    assert parse(file(normalizer=usual)).encode("a").tokens == ["b"]


def test_errors_of_the_package_are_value_errors() -> None:
    unigram = {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": None, "byte_fallback": False}
    tokenizer = parse(file(model=unigram))
    with pytest.raises(ValueError, match=r"got a text that it cannot encode: .*unk_id"):
        tokenizer.encode("z")
    with pytest.raises(ValueError, match="it cannot be read"):
        parse(file(model={"type": "BPE", "vocab": {"a": -1}, "merges": []}))
    with pytest.raises(TypeError):
        tokenizer.encode(3)  # a caller's mistake, and no text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "Expecting value"),
        (b"[]", "no 'model'"),
        (b"\xff", "utf-8"),
        (b'{"a":1,"a":2}', "'a' twice"),
    ],
)
def test_what_is_no_tokenizer(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ValueError, match=rf"tokenizer\.json: got a file .*{message}"):
        load_tokenizer(tmp_path)


def test_a_prefix_that_a_merge_has_not() -> None:
    """The package would cut into the middle of a character, and its message ends the process."""
    model = {**BPE, "continuing_subword_prefix": "##"}
    with pytest.raises(ValueError, match=r"merge \['a', 'b'\] has a second half without"):
        parse(file(model=model))
    with pytest.raises(ValueError, match="merge 'a b' has"):
        parse(file(model={**model, "merges": ["a b"]}))
    good = {"vocab": {"a": 0, "##b": 1, "ab": 2}, "merges": [["a", "##b"]]}
    assert parse(file(model={**model, **good})).encode("ab").ids == [2]
