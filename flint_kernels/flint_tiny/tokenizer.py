"""The byte-level BPE tokenizer of flint-tiny: exactly 2,048 entries, any UTF-8 text round-trips."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY_SIZE = 2048
END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0

# A chat as one document, each message a paragraph of it: the model has seen source files and no
# conversations, so no mark of a role would mean anything to it.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n\n{% endfor %}"


def train_tokenizer(texts: Iterator[str], vocabulary_size: int = VOCABULARY_SIZE) -> Tokenizer:
    """Train byte-level BPE on `texts`; the result has exactly `vocabulary_size` entries.

    The 256 byte symbols are always in the vocabulary, so no text is out of reach, and
    `<|endoftext|>` is entry 0. Raises ValueError when the texts hold too few distinct pairs to
    fill the vocabulary.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocabulary_size:
        raise ValueError(
            f"texts: they yield a vocabulary of {tokenizer.get_vocab_size()} entries, wanted "
            f"{vocabulary_size}; pass more text or a smaller vocabulary_size"
        )
    return tokenizer


def tokenizer_config() -> dict[str, object]:
    """The tokenizer_config.json that makes transformers load a plain fast tokenizer.

    Padding goes before a text, where a text that is to be continued needs it, and has no token of
    its own: what pads is masked.
    """
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "padding_side": "left",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 262144,
    }


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into `folder`, which must exist."""
    tokenizer.save(str(folder / "tokenizer.json"))
    text = json.dumps(tokenizer_config(), indent=2)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
