"""Token ids as JSON arrays."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Sequence

from kvrouter.core.interface import NotATokenId, TokenBuffer
from kvrouter.core.reference.hashing import le32

_SPACE = rb"[ \t\n\r]*"
_BEGIN = re.compile(_SPACE + rb"\[" + _SPACE)
_EMPTY = re.compile(rb"\]" + _SPACE + rb"\Z")
_ELEMENT = re.compile(_SPACE + rb"(0|[1-9][0-9]{0,9})" + _SPACE + rb"(,|\]" + _SPACE + rb"\Z)")
_LARGEST = (1 << 32) - 1
_WHITE = b" \t\n\r"
_NAME = re.compile(_SPACE + rb'"([^"\\]*)(["\\])')
_COLON = re.compile(_SPACE + rb":" + _SPACE)
_NESTED = re.compile(rb"\[" + _SPACE + rb'["\[]')
_ARRAY = re.compile(rb"[^\]]*\]")
_STRING = re.compile(rb'"(?:\\.|[^"])*+"?', re.DOTALL)
_COMMA = re.compile(_SPACE + rb",")


_MAX_DEPTH = 1000
_MAX_SPLIT_DEPTH = 100
_MAX_FIELDS = 65_536
_DEPTH_MARKS = re.compile(rb'"(?:\\.|[^"\\])*"|[\[\]{}]', re.DOTALL)
_SHOWN_CHARACTERS = 64
_FIELD = re.compile(r'[{,\s]*(?P<name>"(?:\\.|[^"\\])*")\s*:\s*')
_ESCAPE = re.compile(r"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(?P<half>u[dD][89a-fA-F])|.)")


class _Flaw(Exception):
    pass


def json_flaw(text: bytes | bytearray | memoryview) -> str:
    """Describes why a valid JSON text cannot be passed on: two parsers may read two values of a field given twice.

    An invalid text is not described.

    Returns:
        What is wrong: an object has a field twice, or more than 65,536 fields, or it is nested more than 1,000 deep.
        Empty if nothing is.
    """
    try:
        _decoded(bytes(text), _MAX_DEPTH)
    except _Flaw as flaw:
        return str(flaw)
    except (ValueError, RecursionError):
        return ""
    return ""


def split_json(text: bytes | bytearray | memoryview, fields: Sequence[str]) -> tuple[bytes, list[bytes], bool] | None:
    """Takes the values of fields out of a JSON object.

    The object is checked as by ``json_flaw``, and as by a parser that skips these values: UTF-8 is not checked.

    Returns:
        The object with null in the place of these values; the values, empty for a field that is missing; and whether
        ``"data:`` is anywhere in the object. None if it is no object, is invalid, has a flaw, or is nested more than
        100 deep.
    """
    try:
        shown, decoded = _decoded(bytes(text), _MAX_SPLIT_DEPTH)
    except (_Flaw, ValueError):
        return None
    if not isinstance(decoded, dict):
        return None
    values, rest, last, at = dict.fromkeys(fields, ""), "", 0, 0
    while found := _FIELD.match(shown, at):
        _, at = _READER.raw_decode(shown, found.end())
        name = _READER.decode(found["name"])
        if name in values:
            values[name] = shown[found.end() : at]
            rest, last = f"{rest}{shown[last : found.end()]}null", at
    encoded = [each.encode(errors="surrogateescape") for each in (rest + shown[last:], *values.values())]
    return encoded[0], encoded[1:], '"data:' in shown


def _decoded(text: bytes, max_depth: int) -> tuple[str, object]:
    """Returns a text as it is, and decoded.

    Raises:
        _Flaw: it has a flaw, or is nested too deeply.
        ValueError: it is invalid.
    """
    depth = 0
    for mark in _DEPTH_MARKS.finditer(text):
        depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(mark[0], 0)
        if depth > max_depth:
            raise _Flaw(f"nested more than {max_depth} deep")
    shown = text.decode(errors="surrogateescape")
    decoded = _READER.decode(shown)
    if any(escape["half"] for escape in _ESCAPE.finditer(shown)):
        raise ValueError("half of a pair")
    return shown, decoded


def _checked(fields: list[tuple[str, object]]) -> dict[str, object]:
    if len(fields) > _MAX_FIELDS:
        raise _Flaw(f"an object has more than {_MAX_FIELDS} fields")
    seen: dict[str, object] = {}
    for name, value in fields:
        if name in seen:
            raise _Flaw(f'an object has the field "{name[:_SHOWN_CHARACTERS]}" twice')
        seen[name] = value
    return seen


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is no JSON")


_READER = json.JSONDecoder(object_pairs_hook=_checked, parse_int=str, parse_float=str, parse_constant=_refuse)


def find_json_value(text: bytes | bytearray | memoryview, field: str) -> tuple[int, int] | None:
    """Finds the value of a field in a JSON object: the last one, if there are several.

    Nothing is validated, and an array ends at its first ``]`` unless it begins with a text or an array. If the value is
    valid, and the object is valid with ``[]`` in its place, then the text was valid.

    Returns:
        Start and end of the value. None if there is none, or if a name is written with an escape, which may be that of
        the field.
    """
    text = bytes(text)
    at = len(text) - len(text.lstrip(_WHITE))
    if text[at : at + 1] != b"{":
        return None
    at += 1
    found: tuple[int, int] | None = None
    while True:
        name = _NAME.match(text, at)
        if name is None:
            return None if text[at:].lstrip(_WHITE)[:1] == b'"' else found
        if name[2] != b'"':
            return None
        colon = _COLON.match(text, name.end())
        if colon is None:
            return found
        start = colon.end()
        if name[1] == field.encode() and text[start : start + 1] == b"[" and not _NESTED.match(text, start):
            array = _ARRAY.match(text, start)
            if array is None:
                return None
            at = array.end()
        else:
            at = _end_of_value(text, start)
        if name[1] == field.encode():
            found = start, at
        comma = _COMMA.match(text, at)
        if comma is None:
            return found
        at = comma.end()


def _end_of_value(text: bytes, at: int) -> int:
    depth = 0
    while at < len(text):
        byte = text[at : at + 1]
        if byte == b'"':
            string = _STRING.match(text, at)
            at = string.end() if string is not None else len(text)
            continue
        if depth == 0 and byte in (b",", b"]", b"}"):
            return at
        depth += (byte in (b"[", b"{")) - (byte in (b"]", b"}"))
        at += 1
    return at


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
