"""Token ids as JSON arrays."""

from __future__ import annotations

import re
import struct

from kvrouter.core.interface import NotATokenId, TokenBuffer
from kvrouter.core.reference.hashing import le32

_SPACE = rb"[ \t\n\r]*"
_BEGIN = re.compile(_SPACE + rb"\[" + _SPACE)
_EMPTY = re.compile(rb"\]" + _SPACE + rb"\Z")
_ELEMENT = re.compile(_SPACE + rb"(0|[1-9][0-9]{0,9})" + _SPACE + rb"(,|\]" + _SPACE + rb"\Z)")
_LARGEST = (1 << 32) - 1


def tokens_from_json(text: bytes | bytearray | memoryview, limit: int) -> bytes:
    """Reads a JSON array of token ids.

    Args:
        text: The array, or a buffer with it.
        limit: Number of tokens after which one more is read, and the rest is ignored.

    Returns:
        The token ids, packed as little-endian u32.

    Raises:
        NotATokenId: it is not an array, or an element is not an integer from 0 to 2^32 - 1; with the element's index.
    """
    text = bytes(text)
    begin = _BEGIN.match(text)
    if begin is None:
        raise NotATokenId(0)
    at = begin.end()
    if _EMPTY.match(text, at):
        return b""
    tokens: list[int] = []
    while len(tokens) <= limit:
        found = _ELEMENT.match(text, at)
        if found is None or int(found[1]) > _LARGEST:
            raise NotATokenId(len(tokens))
        tokens.append(int(found[1]))
        at = found.end()
        if found[2] != b",":
            break
    return struct.pack(f"<{len(tokens)}I", *tokens)


def tokens_to_json(tokens: TokenBuffer) -> bytes:
    """Writes token ids as a JSON array without white space.

    Raises:
        ValueError: the bytes are not a whole number of tokens.
        OverflowError: a token id is outside u32.
        TypeError: the tokens are no integers.
    """
    packed = le32(tokens)
    return b"[%b]" % b",".join(b"%d" % token for (token,) in struct.iter_unpack("<I", packed))
