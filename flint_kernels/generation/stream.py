"""Text of a growing list of tokens, piece by piece and never half a character."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Incremental detokenisation: the pieces joined are the text of all tokens decoded at once.

    A byte-level token may end inside a character, which decodes to U+FFFD until the rest is there;
    so a trailing U+FFFD is held back. A decoder may also look at the token before (a leading
    space, say): so the tokens of the last complete piece are decoded again with the next one.

    Args:
        tokenizer: a `tokenizers.Tokenizer`.
        skip_special_tokens: leave tokens such as <|endoftext|> out of the text.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._context: list[int] = []  # the last complete piece, already shown
        self._pending: list[int] = []  # tokens since
        self._shown = 0  # characters of the text of context and pending that were given out

    def push(self, token: int) -> str:
        """Takes one token; returns the text that is now certain, often empty."""
        self._pending.append(token)
        text = self._decode(self._context + self._pending)
        piece = self._take(text.rstrip(_REPLACEMENT))
        if not text.endswith(_REPLACEMENT):
            self._context, self._pending = self._pending, []
            self._shown = len(self._decode(self._context))
        return piece

    def finish(self) -> str:
        """What was held back, once no token follows: bytes that are no text show as U+FFFD."""
        piece = self._take(self._decode(self._context + self._pending))
        self._context, self._pending, self._shown = [], [], 0
        return piece

    def _take(self, certain: str) -> str:
        piece = certain[self._shown :]
        self._shown += len(piece)
        return piece

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=self._skip)


def stream_text(
    tokens: Iterable[int], tokenizer: Tokenizer, *, skip_special_tokens: bool = True
) -> Iterator[str]:
    """The non-empty pieces of the text of `tokens`, each as soon as it is certain."""
    stream = TextStream(tokenizer, skip_special_tokens=skip_special_tokens)
    for token in tokens:
        if piece := stream.push(token):
            yield piece
    if piece := stream.finish():
        yield piece
