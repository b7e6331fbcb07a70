"""Converts token ids between JSON and a packed array, piece by piece.

A million tokens take 4 MB in an array, but 36 MB as a list of Python integers. Other threads run between two pieces.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec
from kvrouter.runtime.errors import BadRequest, PromptTooLong

TokenId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]

_PIECE_BYTES = 64 << 10
_PIECE_TOKENS = 16 << 10
_LONG_ELEMENT = 64
"""Bytes. A token id has at most ten digits, so a longer element is certainly invalid."""
_DECODER = msgspec.json.Decoder(list[TokenId])
_INDEX = re.compile(r" - at `\$\[(\d+)\]")
_NO_TOKENIZER = "Send the prompt as a list of token ids; the gateway has no tokenizer."


def parse_token_ids(text: msgspec.Raw, *, limit: int) -> array[int]:
    """Parses a JSON array of token ids.

    Args:
        text: Well-formed JSON.
        limit: Maximum number of tokens; parsing stops beyond it.

    Raises:
        BadRequest: it is not an array, or an element is not a token id; the error has the element's index.
        PromptTooLong: there are more tokens than the limit.
    """
    tokens = array("I")
    with memoryview(text) as view:
        if bytes(view[:1]) != b"[":
            raise BadRequest("prompt: expected an array of token ids", field="prompt", advice=_NO_TOKENIZER)
        for piece in _pieces(view):
            try:
                tokens.extend(_DECODER.decode(piece))
            except (msgspec.DecodeError, RecursionError) as error:
                raise _not_a_token(str(error), len(tokens)) from None
            if len(tokens) > limit:
                raise PromptTooLong(_count(view), limit, field="prompt")
    return tokens


def encode_token_ids(tokens: Sequence[int]) -> msgspec.Raw:
    """Returns the JSON array of token ids."""
    text = bytearray(b"[")  # Grows in place: joining a list of pieces would need twice the memory.
    for start in range(0, len(tokens), _PIECE_TOKENS):
        text += b"," if start else b""
        text += msgspec.json.encode(list(tokens[start : start + _PIECE_TOKENS]))[1:-1]
    text += b"]"
    return msgspec.Raw(text)


def _pieces(view: memoryview) -> Iterator[bytes]:
    """Splits an array at commas into shorter arrays."""
    start, end, carried = 1, len(view) - 1, b""
    while start < end:
        text = bytes(view[start : min(start + _PIECE_BYTES, end)])
        cut = len(text) if start + len(text) == end else text.rfind(b",")
        if cut < 0:
            # White space, or an element that is too long: its beginning suffices for the decoder to refuse it.
            carried += text.strip()[:_LONG_ELEMENT]
            start += len(text)
            continue
        yield b"[" + carried + text[:cut] + b"]"
        start, carried = start + cut + 1, b""


def _count(view: memoryview) -> int:
    commas = (bytes(view[start : start + _PIECE_BYTES]).count(b",") for start in range(0, len(view), _PIECE_BYTES))
    return 1 + sum(commas)


def _not_a_token(error: str, before: int) -> BadRequest:
    found = _INDEX.search(error)
    if found is None:  # The cut was at a comma inside a string.
        return BadRequest("prompt: an element is not a token id", field="prompt", advice=_NO_TOKENIZER)
    field = f"prompt.{before + int(found[1])}"
    return BadRequest(f"{field}: {error[: found.start()]}", field=field, advice=_NO_TOKENIZER)
