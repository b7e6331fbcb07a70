"""A tokenizer that needs no files: bytes, and words that stand for the other token ids.

Ids below 256 are the bytes of UTF-8. A larger id is the word `` t<id>``, so that generated text that a client
sends back has the token ids that were generated.
"""

from __future__ import annotations

import codecs
import re

_BYTES = 256
_WORD = re.compile(r" t([1-9][0-9]{2,9})(?![0-9])")


def encode(text: str) -> list[int]:
    """Returns the token ids of a text."""
    token_ids: list[int] = []
    at = 0
    for word in _WORD.finditer(text):
        number = int(word[1])
        if not _BYTES <= number < 1 << 32:
            continue
        token_ids += text[at : word.start()].encode()
        token_ids.append(number)
        at = word.end()
    token_ids += text[at:].encode()
    return token_ids


class Decoder:
    """Decodes the tokens of one sequence one by one."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Returns the text that is complete with this token, and was not before."""
        if token_id < _BYTES:
            return self._utf8.decode(bytes([token_id]))
        return f"{self.finish()} t{token_id}"

    def finish(self) -> str:
        """Returns the rest: a replacement character if the last character is incomplete."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest


def decode(token_ids: list[int]) -> str:
    """Returns the text of token ids."""
    decoder = Decoder()
    return "".join(map(decoder.push, token_ids)) + decoder.finish()
