"""Decodes the JSON bodies of the HTTP API into typed structures; stops at the first thing that is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

import msgspec
from kvrouter.runtime.errors import BadRequest

T = TypeVar("T")

MAX_FIELDS_BYTES = 256 << 10
"""Longest body without its prompt: what is decoded into Python objects may take many times its size."""

_MAX_TEXT = 512
_AT = re.compile(r" - at `\$(?P<path>[^`]*)`$")
_MISSING = re.compile(r"missing required field `(?P<name>.*)`$", re.DOTALL)
_UNKNOWN = re.compile(r"contains unknown field `(?P<name>.*)`$", re.DOTALL)
_CORRECT = "Correct the field, or leave it out."


def decode_json(
    decoder: msgspec.json.Decoder[T], body: bytes | bytearray, advice: Callable[[str], str] = lambda _: _CORRECT
) -> T:
    """Decodes a body.

    Args:
        decoder: Of the structure that the body must have.
        body: UTF-8.
        advice: Tells what to do about a field that is wrong; the field is empty where the whole body is.

    Raises:
        BadRequest: it is not JSON, or a field is missing, unknown or out of range; the error names it.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        field, message = _explained(str(error))
        raise BadRequest(f"{field or 'body'}: {message}"[:_MAX_TEXT], field=field, advice=advice(field)) from None
    except msgspec.DecodeError as error:
        raise BadRequest(f"body: {error}"[:_MAX_TEXT], advice="Send one JSON object.") from None
    except UnicodeDecodeError:
        raise BadRequest("body: a text is not UTF-8", advice="Encode the body as UTF-8.") from None
    except RecursionError:
        raise BadRequest("body: nested too deeply", advice="Send one JSON object; it needs no deep nesting.") from None


def check_uint64(value: int | None, field: str) -> None:
    """Accepts what fits into 64 bits: msgspec takes integers of any size, and bounds up to 63 bits only.

    Raises:
        BadRequest: the value does not fit.
    """
    if value is not None and not 0 <= value < 1 << 64:
        raise BadRequest(f"{field}: out of range", field=field, advice="Send an integer from 0 to 2^64 - 1.")


def _explained(text: str) -> tuple[str, str]:
    """Field and message of a validation error of msgspec, which has the path at its end."""
    found = _AT.search(text)
    path = re.sub(r"\[(\d+)\]", r".\1", found["path"]).strip(".") if found else ""
    message = text[: found.start()] if found else text
    named = _MISSING.search(message) or _UNKNOWN.search(message)
    if named:
        path = f"{path}.{named['name']}".strip(".")
        message = "missing" if named.re is _MISSING else "unknown field"
    return path, message
