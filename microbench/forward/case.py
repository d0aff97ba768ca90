"""Cases of a forward, in vLLM's notation: `NAME=[N*]Q[@K]`, parts apart by commas.

Q new tokens of each of N requests, whose KV cache has K tokens after the step; no K: the Q alone.

    decode=1@100000         one token on top of 99,999
    decode8=8*1@100000      the same of eight requests at once
    prefill=8192            a fresh prompt
    chunk=8192@108192       8,192 tokens on top of 100,000
    mix=2048,32*1@8192      a fresh prompt beside 32 requests that decode
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_PART = re.compile(r"(?:(\d+)\*)?(\d+)(?:@(\d+))?")
_MOST_REQUESTS = 1024

DEFAULT = (
    "decode=1@4096",
    "decode=1@32768",
    "decode=1@100000",
    "decode=1@262144",
    "decode2=2*1@100000",
    "decode4=4*1@100000",
    "decode8=8*1@100000",
    "prefill=512",
    "prefill=2048",
    "prefill=8192",
    "chunk=8192@108192",
    "mix=2048,32*1@8192",
)


@dataclass(frozen=True)
class Request:
    """`new` tokens of a request in this step, `length` with what is cached already."""

    new: int
    length: int


@dataclass(frozen=True)
class Case:
    """A step: its requests, in order. `text` is the notation that it was read from."""

    text: str
    requests: tuple[Request, ...]

    @property
    def decodes(self) -> bool:
        """Whether each request has one new token, so that the decode path takes the step."""
        return all(request.new == 1 for request in self.requests)

    @property
    def tokens(self) -> int:
        return sum(request.new for request in self.requests)


def parse(text: str) -> Case:
    """Reads a case.

    Raises ValueError where it is not of that notation, or its numbers are out of range.
    """
    name, equals, parts = text.partition("=")
    if not name or not equals or not re.fullmatch(r"[\w-]+", name):
        raise _error(text, "NAME=[N*]Q[@K], parts apart by commas, such as decode8=8*1@100000")
    requests: list[Request] = []
    for part in parts.split(","):
        found = _PART.fullmatch(part.strip())
        if found is None:
            raise _error(text, f"parts of the form [N*]Q[@K]; {part!r} is none")
        count, new = int(found[1] or 1), int(found[2])
        length = int(found[3] or new)
        if new < 1 or length < new or count < 1:
            raise _error(
                text, f"N and Q of 1 or more and K of at least Q; in {part!r} they are not"
            )
        requests += [Request(new, length)] * count
        if len(requests) > _MOST_REQUESTS:
            raise _error(text, f"at most {_MOST_REQUESTS} requests")
    return Case(text, tuple(requests))


def _error(text: str, want: str) -> ValueError:
    return ValueError(f"case: got {text!r}; want {want}.")
