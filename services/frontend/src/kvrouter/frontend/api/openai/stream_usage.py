"""Requests the usage of a forwarded stream, and removes it again from what the client gets.

The usage has the cached tokens, which are compared with the prediction. Engines send it as an event of its own, without
choices, before the end of the stream.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

_EVENT_END = re.compile(rb"\r\n\r\n|\n\n")
_MAX_EVENT_BYTES = 1 << 20
_REQUESTED = b'"stream_options":{"include_usage":true},'


class _Body(msgspec.Struct):
    stream: bool | None = None
    stream_options: Any = msgspec.UNSET


class _Event(msgspec.Struct):
    choices: list[msgspec.Raw] | None = None
    usage: dict[str, Any] | None = None


_BODY = msgspec.json.Decoder(_Body, strict=False)
_EVENT = msgspec.json.Decoder(_Event)


def with_usage(body: bytes) -> bytes | None:
    """Returns a body that requests the usage of its stream; None if it is no stream, or has options for it itself."""
    try:
        fields = _BODY.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not fields.stream or fields.stream_options is not msgspec.UNSET:
        return None
    start = body.index(b"{") + 1
    return body[:start] + _REQUESTED + body[start:]


class UsageRemover:
    """Removes the event with the usage from a stream. All other bytes stay as they are."""

    def __init__(self) -> None:
        self._begun = bytearray()
        """Begin of an event whose end has not arrived."""

    def remove(self, chunk: bytes) -> bytes:
        """Returns the bytes to pass on after a further chunk has arrived: those of complete events."""
        self._begun += chunk
        kept = bytearray()
        at = 0
        for end in _EVENT_END.finditer(self._begun):
            event = bytes(self._begun[at : end.end()])
            if not _is_usage(event):
                kept += event
            at = end.end()
        del self._begun[:at]
        if len(self._begun) > _MAX_EVENT_BYTES:
            kept += self.rest()
        return bytes(kept)

    def rest(self) -> bytes:
        """Returns the begin of an event that has not ended."""
        begun = bytes(self._begun)
        self._begun.clear()
        return begun


def _is_usage(event: bytes) -> bool:
    if b'"usage"' not in event or not event.startswith(b"data:"):
        return False
    try:
        parsed = _EVENT.decode(event[len(b"data:") :])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return parsed.choices == [] and parsed.usage is not None
