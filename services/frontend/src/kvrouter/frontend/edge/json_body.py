"""Decodes JSON bodies of the HTTP API into typed structures, and reports the first error with the field's path."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any, TypeAlias, TypeVar

import msgspec
from kvrouter.core import find_json_value, json_flaw
from kvrouter.v1.errors import BadRequest

T = TypeVar("T")
Place: TypeAlias = "str | tuple[Place, str | int]"
"""A field of a body: its path, or the place that has it and its name there. Only an error makes a path of places."""

MAX_FIELDS_BYTES = 256 << 10
"""Maximum size of a body without its prompt, because the decoded Python objects take many times its size."""

MAX_STRUCTURE = 1_000_000
"""Maximum number of brackets and commas of a chat, because an object takes a hundred times their size in memory."""
MAX_PARTS = 65_536
"""Maximum number of messages, items and tools of a chat, and of the parts of messages."""
_COUNTED_BYTES = 256 << 10
"""Bytes in which brackets and commas are counted before another thread may have the GIL: some 0.2 ms."""
_MAX_TEXT = 512
_AT = re.compile(r" - at `\$(?P<path>[^`]*)`$")
_MISSING = re.compile(r"missing required field `(?P<name>.*)`$", re.DOTALL)
_UNKNOWN = re.compile(r"contains unknown field `(?P<name>.*)`$", re.DOTALL)
_IS_MISSING = "missing"
_CORRECT = "Correct the field, or leave it out."


def decode_json(
    decoder: msgspec.json.Decoder[T],
    body: bytes | bytearray,
    advice: Callable[[str], str] = lambda _: _CORRECT,
    *,
    is_checked: bool = False,
) -> T:
    """Decodes a body.

    Args:
        decoder: Decoder of the structure the body must have.
        body: UTF-8.
        advice: Returns the advice for an invalid field, by its path; the path is empty if the whole body is invalid.
        is_checked: Whether another call with this body checks that no field is there twice.

    Raises:
        BadRequest: it is not JSON, or a field is missing, unknown, out of range or there twice; the error names the
            field.
    """
    try:
        decoded = decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _invalid(error, advice) from None
    except msgspec.DecodeError as error:
        raise BadRequest(f"body: {error}"[:_MAX_TEXT], advice="Send one JSON object.") from None
    except UnicodeDecodeError:
        raise BadRequest("body: expected UTF-8", advice="Encode the body as UTF-8.") from None
    except RecursionError:
        raise BadRequest("body: nested too deeply", advice="Send one JSON object without deep nesting.") from None
    # The engine that gets the body may read another one of two values than is read here.
    if not is_checked and (flaw := json_flaw(body)):
        raise BadRequest(f"body: {flaw}"[:_MAX_TEXT], advice="Send each field of an object once.")
    return decoded


def without_prompt(body: bytes | bytearray) -> tuple[bytes | bytearray, memoryview | None]:
    """Returns a body with an empty list in the place of its prompt, and a view of the prompt; None if it has none.

    The decoder takes twenty times as long to skip a list of token ids as it takes to cut the list out.
    """
    found = find_json_value(body, "prompt") if b'"prompt"' in body else None
    if found is None:
        return body, None
    start, end = found
    view = memoryview(body)
    return b"".join((view[:start], b"[]", view[end:])), view[start:end]


def check_structure(encoded: bytes | bytearray, field: str = "messages") -> None:
    """Checks that decoding a chat, or a part of it, takes a bounded amount of memory. ``field`` is that of its prompt.

    Raises:
        BadRequest: it has too many brackets and commas.
    """
    if len(encoded) <= MAX_STRUCTURE:
        return
    found = 0
    for start in range(0, len(encoded), _COUNTED_BYTES):
        part = encoded[start : start + _COUNTED_BYTES]
        found += part.count(b"{") + part.count(b"[") + part.count(b",")
    if found > MAX_STRUCTURE:
        message = f"body: more than {MAX_STRUCTURE} brackets and commas"
        raise BadRequest(message, field=field, advice="Send a shorter chat.")


def check_parts(listed: Sized, field: str, contents: Iterable[object] = ()) -> None:
    """Checks the number of messages, items or tools, with the parts of their contents, before they are translated.

    Raises:
        BadRequest: there are too many.
    """
    found = len(listed) + sum(len(content) for content in contents if isinstance(content, list))
    if found > MAX_PARTS:
        raise invalid(field, f"expected at most {MAX_PARTS} with all their parts, received {found}", "Send fewer.")


def convert_fields(fields: Mapping[str, Any], kind: type[T]) -> T:
    """Returns decoded fields as a structure.

    Raises:
        BadRequest: a field is missing, unknown or out of range; the error names it.
    """
    try:
        return msgspec.convert(fields, kind, strict=False)
    except msgspec.ValidationError as error:
        raise _invalid(error, lambda _: _CORRECT) from None


def check_uint64(fields: Mapping[str, int | None]) -> None:
    """Checks the size of integers: 64 bits. msgspec accepts integers of any size, and limits up to 2^63 only.

    Raises:
        BadRequest: a value is out of range.
    """
    for field, value in fields.items():
        if value is not None and not 0 <= value < 1 << 64:
            raise invalid(field, "out of range", "Send an integer from 0 to 2^64 - 1.")


def invalid(place: Place, message: str, advice: str = _CORRECT) -> BadRequest:
    """Returns the error of a field of a body."""
    field = _path(place)
    return BadRequest(f"{field}: {message}", field=field, advice=advice)


def _path(place: Place) -> str:
    return place if isinstance(place, str) else f"{_path(place[0])}.{place[1]}"


def _invalid(error: msgspec.ValidationError, advice: Callable[[str], str]) -> BadRequest:
    field, message = _explained(str(error))
    remedy = "Add it." if message == _IS_MISSING else advice(field)
    return BadRequest(f"{field or 'body'}: {message}"[:_MAX_TEXT], field=field, advice=remedy)


def _explained(text: str) -> tuple[str, str]:
    """Returns field path and message of a msgspec validation error, which has the path at the end of its text."""
    found = _AT.search(text)
    # A value of an object of any keys has no name: "metadata[...]".
    path = re.sub(r"\[(\d+)\]", r".\1", found["path"].replace("[...]", "")).strip(".") if found else ""
    message = text[: found.start()] if found else text
    named = _MISSING.search(message) or _UNKNOWN.search(message)
    if named:
        path = f"{path}.{named['name']}".strip(".")
        message = _IS_MISSING if named.re is _MISSING else "unknown field"
    return path, message
